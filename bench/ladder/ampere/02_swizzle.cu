// Rung 2: XOR swizzle and 128 keys at a time. Eight neighbouring rows keep the same chunk in
// different banks, so that ldmatrix has no conflicts, and the softmax runs a quarter as often.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {
  using Rows = SwizzledRows;  // this rung's idea
  static constexpr int BLOCK_K = 128;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
