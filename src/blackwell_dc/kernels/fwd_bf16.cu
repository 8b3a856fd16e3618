// bf16 inputs. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d64, D64<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d96, D96<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d128, D128<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d192, D192<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d256, D256<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d64_few, D64Few<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d96_few, D96Few<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d128_few, D128Few<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d192_few, D192Few<DType::BF16>)
ARCHFLASH_COMBINE_KERNEL(blackwell_dc_combine_bf16, DType::BF16)
