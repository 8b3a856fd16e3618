// images: bwd_f16 bwd_bf16
// The backward kernels for fp16 and bf16 inputs. backward_config.cuh has their tiles.
#include "blackwell_dc/attention_bwd.cuh"
#include "common/instantiate.cuh"
#include "common/math/backward_rows.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_BLACKWELL_DC_PREPARE_KERNEL(KERNEL(blackwell_dc_backward_rows), DTYPE)
ARCHFLASH_BACKWARD_SINKS_KERNEL(KERNEL(blackwell_dc_backward_sinks))
ARCHFLASH_BLACKWELL_DC_BACKWARD_KERNEL(KERNEL(blackwell_dc_attention_bwd, d64), BackwardD64<DTYPE>)
ARCHFLASH_BLACKWELL_DC_DQ_KERNEL(KERNEL(blackwell_dc_backward_dq, d64), BackwardD64<DTYPE>)
ARCHFLASH_BLACKWELL_DC_BACKWARD_KERNEL(KERNEL(blackwell_dc_attention_bwd, d128),
                                       BackwardD128<DTYPE>)
ARCHFLASH_BLACKWELL_DC_DQ_KERNEL(KERNEL(blackwell_dc_backward_dq, d128), BackwardD128<DTYPE>)
