// Rung 4: one ldmatrix.x4.trans loads the fragments of V for 16 columns, where two x2.trans did.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {
  using Rows = SwizzledRows;
  static constexpr int BLOCK_K = 128;
  static constexpr bool COPIES_ASYNC = true;
  static constexpr bool V_IN_PAIRS = true;  // this rung's idea
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
