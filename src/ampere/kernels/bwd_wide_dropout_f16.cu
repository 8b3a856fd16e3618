// The backward kernels for fp16 inputs with dropout and without masks as data that need 227 KB of
// shared memory. dropout_backward_config.cuh has their tiles.
#include "ampere/dropout_backward_config.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d128_wide_dropout,
                                BackwardD128WideDropout<DType::F16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_wide_dropout,
                                BackwardD256WideDropout<DType::F16>)
