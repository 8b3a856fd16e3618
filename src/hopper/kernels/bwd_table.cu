// images: bwd_table_f16 bwd_table_bf16
// one text
// The main backward kernels for fp16 and bf16 inputs with a table of blocks. backward_config.cuh
// has their tiles; the launches before and behind are those of bwd.cu.
#include "common/instantiate.cuh"
#include "common/kernel_entry.cuh"
#include "hopper/attention_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_table), attention_bwd, BackwardD64Table<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_table), attention_bwd, BackwardD128Table<DTYPE>)
