// Rung 1: FlashAttention on mma.sync and nothing more. 64 query rows visit 32 keys at a time. K and
// V pass through registers into plain rows of shared memory, where ldmatrix finds the rows of a
// matrix in the same banks.
#include "steps.cuh"

using namespace archflash::ladder;

struct Rung : Base {};

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params);
}
