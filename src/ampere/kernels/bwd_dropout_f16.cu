// The backward kernels for fp16 inputs with dropout and without masks as data.
// dropout_backward_config.cuh has their tiles.
#include "ampere/dropout_backward_config.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d64_dropout,
                                BackwardD64Dropout<DType::F16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d128_dropout,
                                BackwardD128Dropout<DType::F16>)
