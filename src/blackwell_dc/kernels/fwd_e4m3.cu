// e4m3 inputs. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d64, attention_fwd, Fp8D64)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d128, attention_fwd, Fp8D128)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d192, attention_fwd, Fp8D192)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d256, attention_fwd, Fp8D256)
