// The kernels of approximate="int8_qk" for bf16 inputs. config.cuh has their tiles.
#include "ada/int8_attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ADA_INT8_PREPARE(bf16, DType::BF16)
ARCHFLASH_ADA_INT8_KERNEL(ada_attention_fwd_bf16_int8_d64, Int8D64<DType::BF16>)
ARCHFLASH_ADA_INT8_KERNEL(ada_attention_fwd_bf16_int8_d128_large, Int8D128Large<DType::BF16>)
ARCHFLASH_ADA_INT8_KERNEL(ada_attention_fwd_bf16_int8_d128, Int8D128<DType::BF16>)
ARCHFLASH_ADA_INT8_KERNEL(ada_attention_fwd_bf16_int8_d256, Int8D256<DType::BF16>)
