// targets: 80:80,90,120,ptx
// The kernels of approximate="int8_pv" for fp16 and bf16 inputs, which those of int8.cu convert.
// approximate_config.cuh has their tiles.
#include "ampere/approximate_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(ampere_approximate_int8_pv_d64, approximate_fwd, Int8PvD64)
ARCHFLASH_KERNEL(ampere_approximate_int8_pv_d128, approximate_fwd, Int8PvD128)
ARCHFLASH_KERNEL(ampere_approximate_int8_pv_d256, approximate_fwd, Int8PvD256)
ARCHFLASH_KERNEL(ampere_approximate_int8_pv_d64_masked, approximate_masked_fwd, Int8PvD64Masked)
ARCHFLASH_KERNEL(ampere_approximate_int8_pv_d128_masked, approximate_masked_fwd, Int8PvD128Masked)
ARCHFLASH_KERNEL(ampere_approximate_int8_pv_d256_masked, approximate_masked_fwd, Int8PvD256Masked)
