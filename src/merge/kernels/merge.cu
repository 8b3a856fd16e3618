// The kernel of merge_attention, for all dtypes.
#include "merge/merge.cuh"

extern "C" __global__ void __launch_bounds__(archflash::merge::THREADS)
    merge_attention(const __grid_constant__ archflash::merge::Params params) {
  archflash::merge::merge_rows(params);
}
