// e4m3 inputs. Tiles: config.cuh.
#include "common/kernel_entry.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_ENTRY(hopper_transpose_v, (TRANSPOSE_THREADS), transpose_v)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d64, attention_fwd, Fp8D64)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d64_small, attention_fwd, Fp8D64Small)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d64_blocks, attention_fwd, Fp8D64Blocks)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d128, attention_fwd, Fp8D128)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d128_small, attention_fwd, Fp8D128Small)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d128_blocks, attention_fwd, Fp8D128Blocks)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d192, attention_fwd, Fp8D192)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d192_blocks, attention_fwd, Fp8D192Blocks)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d256, attention_fwd, Fp8D256)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d256_small, attention_fwd, Fp8D256Small)
ARCHFLASH_KERNEL(hopper_attention_fwd_e4m3_d256_blocks, attention_fwd, Fp8D256Blocks)
