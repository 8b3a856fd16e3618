// images: short_f16 short_bf16
// one text
// fp16 and bf16 inputs, short sequences. Tile: short_config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/forward/short_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_short), attention_fwd, D64Short)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_short), attention_fwd, D96Short)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_short), attention_fwd, D128Short)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_short), attention_fwd, D256Short)
