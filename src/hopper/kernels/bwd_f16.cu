// The backward kernels for f16 inputs. backward_config.cuh has their tiles.
#include "common/math/backward_rows.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/wide_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

using D64Softcap = BackwardD64<DType::F16, true>;
using D128Softcap = BackwardD128<DType::F16, true>;

ARCHFLASH_HOPPER_PREPARE_KERNEL(hopper_backward_rows_f16, DType::F16)
ARCHFLASH_BACKWARD_SINKS_KERNEL(hopper_backward_sinks_f16)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d64, BackwardD64<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d64_softcap, D64Softcap)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_f16_d64, BackwardD64<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d64_exact, BackwardD64Exact<DType::F16>)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_f16_d64_exact, BackwardD64Exact<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d128, BackwardD128<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d128_softcap, D128Softcap)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_f16_d128, BackwardD128<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d128_exact, BackwardD128Exact<DType::F16>)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_f16_d128_exact, BackwardD128Exact<DType::F16>)
ARCHFLASH_HOPPER_WIDE_BACKWARD_KERNEL(hopper_attention_bwd_f16_d256, BackwardD256<DType::F16>)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_f16_d256, BackwardD256<DType::F16>)
