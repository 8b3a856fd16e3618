// images: int8_f16 int8_bf16
// one text
// The kernels of approximate="int8_qk" for fp16 and bf16 inputs. config.cuh has their tiles.
#include "ada/int8_attention_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ENTRY(KERNEL(ada_int8_mean), (INT8_THREADS), find_mean<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(ada_int8_values, d128), (INT8_THREADS, 4), make_int8<DTYPE, 4>)
ARCHFLASH_ENTRY(KERNEL(ada_int8_values, d256), (INT8_THREADS, 2), make_int8<DTYPE, 8>)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, int8_d64), int8_attention_fwd, Int8D64)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, int8_d128_large), int8_attention_fwd, Int8D128Large)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, int8_d128), int8_attention_fwd, Int8D128)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, int8_d256), int8_attention_fwd, Int8D256)
