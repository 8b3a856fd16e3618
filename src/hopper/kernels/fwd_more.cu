// images: fwd_more_f16 fwd_more_bf16
// one text
// fp16 and bf16 inputs, more tiles. Tiles: more_config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/forward/more_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_turns), attention_fwd, D96Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d80_large), attention_fwd, D80Large)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d80_turns), attention_fwd, D80Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_square), attention_fwd, D192Square)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_square_few), attention_fwd, D192SquareFew)
