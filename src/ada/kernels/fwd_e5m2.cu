// The kernels for e5m2 inputs. config.cuh has their tiles.
#include "ada/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e5m2_d64, Fp8D64<DType::E5M2>)
ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e5m2_d128, Fp8D128<DType::E5M2>)
ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e5m2_d192, Fp8D192<DType::E5M2>)
ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e5m2_d256, Fp8D256<DType::E5M2>)
