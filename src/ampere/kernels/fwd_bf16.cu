// The kernels for bf16 inputs. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/math/combine_splits.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d64_large, D64Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d64_medium, D64Medium<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d64_short, D64Short<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d64_groups, D64Groups<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d64_few, D64Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d96_large, D96Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d96_medium, D96Medium<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d96_few, D96Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d128_large, D128Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d128_medium, D128Medium<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d128_small, D128Small<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d128_few, D128Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d192_large, D192Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d192_medium, D192Medium<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d192_few, D192Few<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d256_large, D256Large<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d256_medium, D256Medium<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d256_small, D256Small<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d256_few, D256Few<DType::BF16>)
ARCHFLASH_COMBINE_KERNEL(ampere_combine_bf16, DType::BF16)
