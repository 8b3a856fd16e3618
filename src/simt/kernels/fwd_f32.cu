// The kernels for fp32 inputs. config.cuh has their tiles; plan.cpp chooses among them.
#include "simt/attention_fwd.cuh"

using namespace archflash::simt;

ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d32, F32D32)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d64_large, F32D64Large)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d64_medium, F32D64Medium)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d64_small, F32D64Small)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d128_large, F32D128Large)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d128_medium, F32D128Medium)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d128_small, F32D128Small)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d256_large, F32D256Large)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f32_d256_small, F32D256Small)
