// The kernels for fp32 inputs. config.cuh has their tiles; plan.cpp chooses among them.
#include "common/kernel_entry.cuh"
#include "simt/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_fwd_f32_d32, attention_fwd, F32D32)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_large, attention_fwd, F32D64Large)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_medium, attention_fwd, F32D64Medium)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_small, attention_fwd, F32D64Small)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_large, attention_fwd, F32D128Large)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_medium, attention_fwd, F32D128Medium)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_small, attention_fwd, F32D128Small)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d256_large, attention_fwd, F32D256Large)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d256_small, attention_fwd, F32D256Small)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d512_large, attention_fwd, F32D512Large)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d512_small, attention_fwd, F32D512Small)
