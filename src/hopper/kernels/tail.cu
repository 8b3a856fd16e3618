// images: tail_f16 tail_bf16
// one text
// fp16 and bf16 inputs, a last block of few keys. Tiles: tail_config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/forward/tail_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_short_tail), attention_fwd, D64ShortTail)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_medium_tail), attention_fwd, D64MediumTail)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_turns_tail), attention_fwd, D64TurnsTail)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d80_turns_tail), attention_fwd, D80TurnsTail)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_large_tail), attention_fwd, D128LargeTail)
