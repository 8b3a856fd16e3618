// images: bwd_table_f16 bwd_table_bf16
// one text
// The backward kernels for fp16 and bf16 inputs with a table of blocks. backward_config.cuh has
// their tiles; the launches behind the main ones, and before them where tiles have no order, are
// those of bwd.cu.
#include "common/backward_params.h"
#include "common/instantiate.cuh"
#include "hopper/attention_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_ENTRY(KERNEL(hopper_backward_rows, table), (BACKWARD_ROWS_THREADS), prepare_table<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_table), attention_bwd, BackwardD64Table)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_table), attention_bwd, BackwardD128Table)
