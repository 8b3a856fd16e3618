// targets: 100f:100f
// e4m3 inputs on 10.3. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d64_mufu, attention_fwd,
                 WithoutPolynomials<Fp8D64>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d128_mufu, attention_fwd,
                 WithoutPolynomials<Fp8D128>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d192_mufu, attention_fwd,
                 WithoutPolynomials<Fp8D192>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_e4m3_d256_mufu, attention_fwd,
                 WithoutPolynomials<Fp8D256>)
