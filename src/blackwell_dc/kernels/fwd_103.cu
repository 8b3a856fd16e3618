// targets: 100f:100f
// fp16 and bf16 inputs on 10.3. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_f16_d64_mufu, attention_fwd,
                 WithoutPolynomials<D64<DType::F16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_f16_d96_mufu, attention_fwd,
                 WithoutPolynomials<D96<DType::F16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_f16_d128_mufu, attention_fwd,
                 WithoutPolynomials<D128<DType::F16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_f16_d128_mufu_pair, attention_fwd,
                 WithoutPolynomials<D128Pair<DType::F16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_bf16_d64_mufu, attention_fwd,
                 WithoutPolynomials<D64<DType::BF16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_bf16_d96_mufu, attention_fwd,
                 WithoutPolynomials<D96<DType::BF16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_bf16_d128_mufu, attention_fwd,
                 WithoutPolynomials<D128<DType::BF16>>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_bf16_d128_mufu_pair, attention_fwd,
                 WithoutPolynomials<D128Pair<DType::BF16>>)
