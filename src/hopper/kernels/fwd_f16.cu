// fp16 inputs. Tiles: config.cuh.
#include "common/math/combine_splits.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d64_large, D64Large<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d64_medium, D64Medium<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d64_few, D64Few<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d96_large, D96Large<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d96_medium, D96Medium<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d96_few, D96Few<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_large, D128Large<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_medium, D128Medium<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_few, D128Few<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d192_large, D192Large<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d192_medium, D192Medium<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d192_few, D192Few<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d256_large, D256Large<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d256_few, D256Few<DType::F16>)
ARCHFLASH_COMBINE_KERNEL(hopper_combine_f16, DType::F16)
