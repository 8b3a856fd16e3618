// images: bwd_f16 bwd_bf16
// The backward kernels for fp16 and bf16 inputs. backward_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "common/math/backward_rows.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/wide_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

using D64Softcap = BackwardD64<DTYPE, true>;
using D128Softcap = BackwardD128<DTYPE, true>;

ARCHFLASH_HOPPER_PREPARE_KERNEL(KERNEL(hopper_backward_rows), DTYPE)
ARCHFLASH_BACKWARD_SINKS_KERNEL(KERNEL(hopper_backward_sinks))
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d64), BackwardD64<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d64_softcap), D64Softcap)
ARCHFLASH_HOPPER_DQ_KERNEL(KERNEL(hopper_backward_dq, d64), BackwardD64<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d64_exact), BackwardD64Exact<DTYPE>)
ARCHFLASH_HOPPER_DQ_KERNEL(KERNEL(hopper_backward_dq, d64_exact), BackwardD64Exact<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d128), BackwardD128<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d128_softcap), D128Softcap)
ARCHFLASH_HOPPER_DQ_KERNEL(KERNEL(hopper_backward_dq, d128), BackwardD128<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d128_exact), BackwardD128Exact<DTYPE>)
ARCHFLASH_HOPPER_DQ_KERNEL(KERNEL(hopper_backward_dq, d128_exact), BackwardD128Exact<DTYPE>)
ARCHFLASH_HOPPER_WIDE_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d256), BackwardD256<DTYPE>)
ARCHFLASH_HOPPER_DQ_KERNEL(KERNEL(hopper_backward_dq, d256), BackwardD256<DTYPE>)
