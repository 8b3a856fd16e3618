// Rung 6: a warp owns two row tiles of 16, which share each fragment of K and V: half as many
// ldmatrix for a product. The scores of 64 keys then take the registers that those of 128 keys
// took.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {
  using Rows = SwizzledRows;
  static constexpr bool COPIES_ASYNC = true;
  static constexpr bool V_IN_PAIRS = true;
  static constexpr bool FOLDS_SCALE = true;
  static constexpr int ROW_TILES = 2;  // this rung's idea
  static constexpr int BLOCK_K = 64;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
