// images: summarize_f16 summarize_bf16
// The kernels before those with mask tensors: they order tiles, and read or copy masks once.
#include "common/instantiate.cuh"
#include "hopper/masks/copy_mask.cuh"
#include "hopper/masks/order_tiles.cuh"
#include "hopper/masks/summarize_mask.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_ENTRY(KERNEL(hopper_order_tiles), (ORDER_THREADS), order_tiles)
ARCHFLASH_ENTRY(KERNEL(hopper_copy_mask), (32 * COPY_WARPS), copy_mask)
ARCHFLASH_ENTRY(KERNEL(hopper_summarize_mask), (SUMMARY_THREADS),
                (summarize_mask<DTYPE, false, false>))
// The lowest elements of fp16 are no lower than what scores may be.
#define HAS_LOWEST_F16 0
#define HAS_LOWEST_BF16 1
#if ARCHFLASH_EXPAND(HAS_LOWEST, ARCHFLASH_DTYPE)
ARCHFLASH_ENTRY(KERNEL(hopper_summarize_low_mask), (SUMMARY_THREADS, LOW_SUMMARY_CTAS),
                (summarize_mask<DTYPE, false, true>))
#endif
ARCHFLASH_ENTRY(KERNEL(hopper_summarize_wide_mask), (SUMMARY_THREADS),
                (summarize_mask<DTYPE, true, true>))
ARCHFLASH_ENTRY(KERNEL(hopper_summarize_ranges), (SUMMARY_THREADS), summarize_ranges)
