// images: bwd_cut_f16 bwd_cut_bf16
// targets: 90:90,100,ptx
// The backward kernels for fp16 and bf16 inputs whose CTAs share out the tiles of their last round,
// and the kernel behind them. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/kernel_entry.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ENTRY(KERNEL(ampere_backward_dq, cut), (BACKWARD_DQ_THREADS),
                mma_sync::dq_and_parts<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_cut), mma_sync::fused_bwd,
                 CuttingBackwardConfig<D64Wide<DTYPE>>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_cut), mma_sync::fused_bwd,
                 CuttingBackwardConfig<D96<DTYPE>>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_cut), mma_sync::fused_bwd,
                 CuttingBackwardConfig<D128Wide<DTYPE>>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_wide_cut), mma_sync::fused_bwd,
                 CuttingBackwardConfig<D192Wide<DTYPE>>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_wide_cut), mma_sync::fused_bwd,
                 CuttingBackwardConfig<D256Wide<DTYPE>>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d32_cut), mma_sync::fused_bwd,
                 CuttingBackwardConfig<D32<DTYPE>>)
