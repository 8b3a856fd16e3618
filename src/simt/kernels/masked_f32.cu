// The kernels for fp32 inputs with masks as data. config.cuh has their tiles.
#include "simt/masked_fwd.cuh"

using namespace archflash::simt;

ARCHFLASH_SIMT_MASKED_KERNEL(simt_attention_fwd_f32_d64_masked, F32D64Masked)
ARCHFLASH_SIMT_MASKED_KERNEL(simt_attention_fwd_f32_d128_masked, F32D128Masked)
ARCHFLASH_SIMT_MASKED_KERNEL(simt_attention_fwd_f32_d256_masked, F32D256Masked)
