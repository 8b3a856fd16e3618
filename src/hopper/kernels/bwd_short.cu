// images: bwd_short_f16 bwd_short_bf16
// one text
// The backward kernels for few keys. backward_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/backward/backward_chains.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_short), attention_bwd, BackwardD32Short)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d32_short), (BACKWARD_DQ_THREADS),
                write_dq<BackwardD32Short>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_short), attention_bwd, BackwardD64Short)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d64_short), (BACKWARD_DQ_THREADS),
                write_dq<BackwardD64Short>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d32_short_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD32Short>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d64_short_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD64Short>)
// A head has one tile of keys, whose CTA writes dQ.
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_short_one), attention_bwd, BackwardD32ShortOne)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_short_one), attention_bwd, BackwardD64ShortOne)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_one), attention_bwd, BackwardD32One)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_one), attention_bwd, BackwardD64One)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d96_one), attention_bwd, BackwardD96One)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_one), attention_bwd, BackwardD128One)
// CTAs take turns, and the last one writes dQ.
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_turns), attention_bwd, BackwardD64Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d96_turns), attention_bwd, BackwardD96Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_turns), attention_bwd, BackwardD128Turns)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_causal_turns), attention_bwd,
                 BackwardD128CausalTurns)
// CTAs stay.
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_stays), attention_bwd, BackwardD128Stays)
