// The kernels for fp16 inputs with masks as data. masked_config.cuh has their tiles.
#include "hopper/dense_config.cuh"
#include "hopper/dense_fwd.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_fwd.cuh"
#include "hopper/order_tiles.cuh"
#include "hopper/summarize_mask.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_f16_d64_masked, D64Masked<DType::F16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_f16_d128_masked, D128Masked<DType::F16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_f16_d256_masked, D256Masked<DType::F16>)
ARCHFLASH_HOPPER_ORDER_KERNEL(hopper_order_tiles_f16)

// For a dense attn_mask, or key_ranges of many rows. dense_config.cuh has their tiles.
ARCHFLASH_HOPPER_DENSE_KERNEL(hopper_attention_fwd_f16_d64_dense, D64Dense<DType::F16>)
ARCHFLASH_HOPPER_DENSE_KERNEL(hopper_attention_fwd_f16_d128_dense, D128Dense<DType::F16>)
ARCHFLASH_HOPPER_SUMMARY_KERNEL(hopper_summarize_mask_f16, DType::F16)
ARCHFLASH_HOPPER_RANGES_KERNEL(hopper_summarize_ranges_f16)
