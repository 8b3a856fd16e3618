// The backward kernels for bf16 inputs. backward_config.cuh has their tiles.
#include "common/math/backward_rows.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/wide_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

using D64Softcap = BackwardD64<DType::BF16, true>;
using D128Softcap = BackwardD128<DType::BF16, true>;

ARCHFLASH_HOPPER_PREPARE_KERNEL(hopper_backward_rows_bf16, DType::BF16)
ARCHFLASH_BACKWARD_SINKS_KERNEL(hopper_backward_sinks_bf16)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d64, BackwardD64<DType::BF16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d64_softcap, D64Softcap)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_bf16_d64, BackwardD64<DType::BF16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d64_exact, BackwardD64Exact<DType::BF16>)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_bf16_d64_exact, BackwardD64Exact<DType::BF16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d128, BackwardD128<DType::BF16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d128_softcap, D128Softcap)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_bf16_d128, BackwardD128<DType::BF16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d128_exact,
                                 BackwardD128Exact<DType::BF16>)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_bf16_d128_exact, BackwardD128Exact<DType::BF16>)
ARCHFLASH_HOPPER_WIDE_BACKWARD_KERNEL(hopper_attention_bwd_bf16_d256, BackwardD256<DType::BF16>)
ARCHFLASH_HOPPER_DQ_KERNEL(hopper_backward_dq_bf16_d256, BackwardD256<DType::BF16>)
