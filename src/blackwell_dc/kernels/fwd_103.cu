// images: fwd_103_f16 fwd_103_bf16
// targets: 100f:100f
// one text
// fp16 and bf16 inputs on 10.3. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d64_mufu), attention_fwd,
                 WithoutPolynomials<D64>)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d96_mufu), attention_fwd,
                 WithoutPolynomials<D96>)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128_mufu), attention_fwd,
                 WithoutPolynomials<D128>)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128_mufu_pair), attention_fwd,
                 WithoutPolynomials<D128Pair>)
