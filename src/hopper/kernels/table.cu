// images: table_f16 table_bf16
// one text
// The kernels for fp16 and bf16 inputs with a table of blocks. table_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/masks/table_config.cuh"
#include "hopper/masks/table_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_table), table_fwd, D64Table)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_table), table_fwd, D128Table)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_table_keys), table_fwd, D64TableKeys)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_table_keys), table_fwd, D128TableKeys)
