// Rung 3: copies by cp.async run while the warps compute: V arrives during Q K^T and the softmax,
// the next K during P V.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {
  using Rows = SwizzledRows;
  static constexpr int BLOCK_K = 128;
  static constexpr bool COPIES_ASYNC = true;  // this rung's idea
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
