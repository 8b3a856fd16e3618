// The kernels for fp32 inputs with masks as data. config.cuh has their tiles.
#include "common/kernel_entry.cuh"
#include "simt/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_masked, masked_fwd, F32D64Masked)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_masked, masked_fwd, F32D128Masked)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d256_masked, masked_fwd, F32D256Masked)
