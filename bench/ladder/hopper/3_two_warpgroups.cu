// Rung 3: two warpgroups share each block of K and V, which now has 128 keys. While one waits or
// computes its softmax, the other may multiply, if chance has it so.
#include "ring.cuh"

using namespace archflash::ladder;
using Rung = Shape<2, 128>;

extern "C" __global__ void __launch_bounds__(Rung::THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_block_by_block<Rung>(params);
}
