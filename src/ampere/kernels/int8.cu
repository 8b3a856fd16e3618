// targets: 80:80,90,120,ptx
// The kernels of approximate="int8" for fp16 and bf16 inputs, and those that convert the inputs of
// "fp16_accumulate", too. approximate_config.cuh has their tiles.
#include "ampere/approximate_fwd.cuh"
#include "ampere/approximate_inputs.cuh"
#include "ampere/approximate_stats.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ENTRY(ampere_approximate_stats, (CONVERT_THREADS), find_stats)
ARCHFLASH_ENTRY(ampere_approximate_convert, (CONVERT_THREADS), convert)
ARCHFLASH_KERNEL(ampere_approximate_int8_d64, approximate_fwd, Int8D64)
ARCHFLASH_KERNEL(ampere_approximate_int8_d128, approximate_fwd, Int8D128)
ARCHFLASH_KERNEL(ampere_approximate_int8_d256, approximate_fwd, Int8D256)
ARCHFLASH_KERNEL(ampere_approximate_int8_d64_masked, approximate_masked_fwd, Int8D64Masked)
ARCHFLASH_KERNEL(ampere_approximate_int8_d128_masked, approximate_masked_fwd, Int8D128Masked)
ARCHFLASH_KERNEL(ampere_approximate_int8_d256_masked, approximate_masked_fwd, Int8D256Masked)
