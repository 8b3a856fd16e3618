// The kernels for fp16 inputs. config.cuh has their tiles.
#include "ada/config.cuh"
#include "common/math/combine_splits.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d64_large, D64Large<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d64, D64<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d64_few_large, D64FewLarge<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d64_few, D64Few<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d96, D96<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d96_few, D96Few<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d128_large, D128Large<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d128_tall, D128Tall<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d128, D128<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d192, D192<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d192_few, D192Few<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d256, D256<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_f16_d256_few, D256Few<DType::F16>)
ARCHFLASH_COMBINE_KERNEL(ada_combine_f16, DType::F16)
