// Rung 7: the fragments of the next products are loaded before the current products are issued.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {
  using Rows = SwizzledRows;
  static constexpr bool COPIES_ASYNC = true;
  static constexpr bool V_IN_PAIRS = true;
  static constexpr bool FOLDS_SCALE = true;
  static constexpr int ROW_TILES = 2;
  static constexpr int BLOCK_K = 64;
  static constexpr bool FRAGMENTS_AHEAD = true;  // this rung's idea
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
