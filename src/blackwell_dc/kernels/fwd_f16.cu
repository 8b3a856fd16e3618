// fp16 inputs. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d64, D64<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d96, D96<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d128, D128<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d192, D192<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d256, D256<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d64_few, D64Few<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d96_few, D96Few<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d128_few, D128Few<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d192_few, D192Few<DType::F16>)
ARCHFLASH_COMBINE_KERNEL(blackwell_dc_combine_f16, DType::F16)
