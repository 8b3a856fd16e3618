// images: fwd_f16 fwd_bf16
// one text
// fp16 and bf16 inputs. Tiles: config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/forward/before_and_behind.cuh"
#include "hopper/forward/order_packed.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_large), attention_fwd, D64Large)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_medium), attention_fwd, D64Medium)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_turns), attention_fwd, D64Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_few), attention_fwd, D64Few)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_large), attention_fwd, D96Large)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_medium), attention_fwd, D96Medium)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_few), attention_fwd, D96Few)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_large), attention_fwd, D128Large)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_medium), attention_fwd, D128Medium)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_turns), attention_fwd, D128Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_few), attention_fwd, D128Few)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_large), attention_fwd, D192Large)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_medium), attention_fwd, D192Medium)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d192_few), attention_fwd, D192Few)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_large), attention_fwd, D256Large)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_few), attention_fwd, D256Few)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_f32_out), attention_fwd, D64F32Out)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_f32_out), attention_fwd, D128F32Out)
ARCHFLASH_ENTRY(KERNEL(hopper_clear_counter), (1), clear_counter)
ARCHFLASH_ENTRY(KERNEL(hopper_order_packed), (ORDER_PACKED_THREADS), order_packed)
ARCHFLASH_ENTRY(KERNEL(hopper_combine), (32 * COMBINE_WARPS), combine<DTYPE>)
