// Rung 5: scale and log2(e) are one factor, applied in the FMA that subtracts the base. That leaves
// an FMA and an ex2 for each score.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {
  using Rows = SwizzledRows;
  static constexpr int BLOCK_K = 128;
  static constexpr bool COPIES_ASYNC = true;
  static constexpr bool V_IN_PAIRS = true;
  static constexpr bool FOLDS_SCALE = true;  // this rung's idea
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
