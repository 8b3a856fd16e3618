// images: convert_cache_f16 convert_cache_bf16
// A cache of 8-bit numbers becomes one of 16 bits before the kernels of cache.cu, whose text for
// both types is one.
#include "common/instantiate.cuh"
#include "hopper/cache/convert_cache.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_ENTRY(KERNEL(hopper_convert_cache), (32 * CONVERT_WARPS), convert_cache<DTYPE>)
