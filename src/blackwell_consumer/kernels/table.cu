// images: table_f16 table_bf16
// one text
// fp16 and bf16 inputs with a table of blocks. Tiles: table_config.cuh.
#include "blackwell_consumer/table_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_table), table_fwd, D64Table)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_table), table_fwd, D128Table)
