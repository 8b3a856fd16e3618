// The kernels that copy tensors which kernels of attention cannot read or write as they are, and
// the one that gives a log-sum-exp to PyTorch.
#include <cmath>

#include "copy/copy.cuh"

extern "C" __global__ void __launch_bounds__(archflash::copy::THREADS)
    copy_gather(const __grid_constant__ archflash::copy::Params params) {
  archflash::copy::copy_rows<true>(params);
}

extern "C" __global__ void __launch_bounds__(archflash::copy::THREADS)
    copy_scatter(const __grid_constant__ archflash::copy::Params params) {
  archflash::copy::copy_rows<false>(params);
}

// PyTorch's flash kernel gives +infinity to rows that see no key, where ours give -infinity.
extern "C" __global__ void __launch_bounds__(archflash::copy::THREADS)
    copy_lse_for_pytorch(const __grid_constant__ archflash::copy::LseParams params) {
  const int64_t i = int64_t{blockIdx.x} * archflash::copy::THREADS + threadIdx.x;
  if (i < params.count && params.lse_gmem[i] == -INFINITY) params.lse_gmem[i] = INFINITY;
}
