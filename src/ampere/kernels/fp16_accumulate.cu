// images: fp16_accumulate_f16 fp16_accumulate_bf16
// targets: 80:80,90,120,ptx
// The kernels of approximate="fp16_accumulate". approximate_config.cuh has their tiles.
#include "ampere/approximate_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_approximate, fp16_d64), approximate_fwd, Fp16SumsD64)
ARCHFLASH_KERNEL(KERNEL(ampere_approximate, fp16_d128), approximate_fwd, Fp16SumsD128)
ARCHFLASH_KERNEL(KERNEL(ampere_approximate, fp16_d256), approximate_fwd, Fp16SumsD256)
ARCHFLASH_KERNEL(KERNEL(ampere_approximate, fp16_d128_masked), approximate_masked_fwd,
                 Fp16SumsD128Masked)
ARCHFLASH_KERNEL(KERNEL(ampere_approximate, fp16_d256_masked), approximate_masked_fwd,
                 Fp16SumsD256Masked)
