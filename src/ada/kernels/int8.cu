// images: int8_f16 int8_bf16
// The kernels of approximate="int8_qk" for fp16 and bf16 inputs. config.cuh has their tiles.
#include "ada/int8_attention_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ADA_INT8_MEAN_KERNEL(KERNEL(ada_int8_mean), DTYPE)
ARCHFLASH_ADA_INT8_VALUES_KERNEL(KERNEL(ada_int8_values, d128), DTYPE, 4, 4)
ARCHFLASH_ADA_INT8_VALUES_KERNEL(KERNEL(ada_int8_values, d256), DTYPE, 8, 2)
ARCHFLASH_ADA_INT8_KERNEL(KERNEL(ada_attention_fwd, int8_d64), Int8D64<DTYPE>)
ARCHFLASH_ADA_INT8_KERNEL(KERNEL(ada_attention_fwd, int8_d128_large), Int8D128Large<DTYPE>)
ARCHFLASH_ADA_INT8_KERNEL(KERNEL(ada_attention_fwd, int8_d128), Int8D128<DTYPE>)
ARCHFLASH_ADA_INT8_KERNEL(KERNEL(ada_attention_fwd, int8_d256), Int8D256<DTYPE>)
