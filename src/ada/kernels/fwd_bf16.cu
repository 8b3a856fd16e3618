// The kernels for bf16 inputs. config.cuh has their tiles.
#include "ada/config.cuh"
#include "common/math/combine_splits.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d64_large, D64Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d64, D64<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d64_few_large, D64FewLarge<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d64_few, D64Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d96, D96<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d96_few, D96Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d128_large, D128Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d128_tall, D128Tall<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d128, D128<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d192, D192<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d192_few, D192Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d256, D256<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ada_attention_fwd_bf16_d256_few, D256Few<DType::BF16>)
ARCHFLASH_COMBINE_KERNEL(ada_combine_bf16, DType::BF16)
