// Rung 2: TMA fills two stages of K and V, started by a warp of its own. The consumers no longer
// copy, and wait for data only.
#include "ring.cuh"

using namespace archflash::ladder;
using Rung = Shape<1, 64>;

extern "C" __global__ void __launch_bounds__(Rung::THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_block_by_block<Rung>(params);
}
