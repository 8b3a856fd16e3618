// The backward kernels for bf16 inputs. backward_config.cuh has their tiles.
#include "blackwell_dc/attention_bwd.cuh"
#include "common/math/backward_rows.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_BLACKWELL_DC_PREPARE_KERNEL(blackwell_dc_backward_rows_bf16, DType::BF16)
ARCHFLASH_BACKWARD_SINKS_KERNEL(blackwell_dc_backward_sinks_bf16)
ARCHFLASH_BLACKWELL_DC_BACKWARD_KERNEL(blackwell_dc_attention_bwd_bf16_d64,
                                       BackwardD64<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_DQ_KERNEL(blackwell_dc_backward_dq_bf16_d64, BackwardD64<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_BACKWARD_KERNEL(blackwell_dc_attention_bwd_bf16_d128,
                                       BackwardD128<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_DQ_KERNEL(blackwell_dc_backward_dq_bf16_d128, BackwardD128<DType::BF16>)
