// The kernels for e4m3 inputs. config.cuh has their tiles.
#include "ada/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e4m3_d64, Fp8D64<DType::E4M3>)
ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e4m3_d128, Fp8D128<DType::E4M3>)
ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e4m3_d192, Fp8D192<DType::E4M3>)
ARCHFLASH_ADA_FP8_KERNEL(ada_attention_fwd_e4m3_d256, Fp8D256<DType::E4M3>)
