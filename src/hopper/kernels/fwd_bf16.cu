// bf16 inputs. Tiles: config.cuh.
#include "common/math/combine_splits.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d64_large, D64Large<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d64_medium, D64Medium<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d64_few, D64Few<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d96_large, D96Large<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d96_medium, D96Medium<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d96_few, D96Few<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_large, D128Large<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_medium, D128Medium<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_few, D128Few<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d192_large, D192Large<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d192_medium, D192Medium<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d192_few, D192Few<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d256_large, D256Large<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d256_few, D256Few<DType::BF16>)
ARCHFLASH_COMBINE_KERNEL(hopper_combine_bf16, DType::BF16)
