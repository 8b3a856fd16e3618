// images: heads_f16 heads_bf16
// one text
// fp16 and bf16 inputs, packed sequences whose tiles have rows of several heads. Tiles:
// heads_config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/forward/heads_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d80_heads), attention_fwd, D80Heads)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_heads), attention_fwd, D96Heads)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_heads), attention_fwd, D128Heads)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_heads), attention_fwd, D192Heads)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_square_heads), attention_fwd, D192SquareHeads)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_heads), attention_fwd, D256Heads)
