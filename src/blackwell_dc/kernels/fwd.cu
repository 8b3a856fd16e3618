// images: fwd_f16 fwd_bf16
// fp16 and bf16 inputs. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/instantiate.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d64), D64<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d96), D96<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128), D128<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d192), D192<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d256), D256<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d64_few), D64Few<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d96_few), D96Few<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128_few), D128Few<DTYPE>)
ARCHFLASH_BLACKWELL_DC_KERNEL(KERNEL(blackwell_dc_attention_fwd, d192_few), D192Few<DTYPE>)
ARCHFLASH_COMBINE_KERNEL(KERNEL(blackwell_dc_combine), DTYPE)
