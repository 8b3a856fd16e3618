// e4m3 inputs. Tiles: config.cuh.
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_TRANSPOSE_KERNEL(hopper_transpose_v)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d64, Fp8D64<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d64_small, Fp8D64Small<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d64_blocks, Fp8D64Blocks<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d128, Fp8D128<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d128_small, Fp8D128Small<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d128_blocks, Fp8D128Blocks<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d192, Fp8D192<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d192_blocks, Fp8D192Blocks<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d256, Fp8D256<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d256_small, Fp8D256Small<DType::E4M3>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_e4m3_d256_blocks, Fp8D256Blocks<DType::E4M3>)
