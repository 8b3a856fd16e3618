// The kernels that copy tensors which kernels of attention cannot read or write as they are.
#include "copy/copy.cuh"

extern "C" __global__ void __launch_bounds__(archflash::copy::THREADS)
    copy_gather(const __grid_constant__ archflash::copy::Params params) {
  archflash::copy::copy_rows<true>(params);
}

extern "C" __global__ void __launch_bounds__(archflash::copy::THREADS)
    copy_scatter(const __grid_constant__ archflash::copy::Params params) {
  archflash::copy::copy_rows<false>(params);
}
