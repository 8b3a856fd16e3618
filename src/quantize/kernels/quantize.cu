// The kernels of quantize_fp8 for each input type.
#include "quantize/quantize.cuh"

using archflash::DType;

ARCHFLASH_QUANTIZE_KERNELS(f32, DType::F32, 2)
ARCHFLASH_QUANTIZE_KERNELS(f16, DType::F16, 4)
ARCHFLASH_QUANTIZE_KERNELS(bf16, DType::BF16, 4)

extern "C" __global__ void __launch_bounds__(archflash::quantize::THREADS)
    quantize_descale(const __grid_constant__ archflash::quantize::Params params) {
  archflash::quantize::write_descale(params);
}
