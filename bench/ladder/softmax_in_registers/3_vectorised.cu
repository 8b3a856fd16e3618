// Rung 3: Q, K and V are copied 16 bytes at a time, into padded rows, where the rows of a fragment
// lie in different banks.
#include "fragments.cuh"

using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_by_fragments<PaddedRows>(params, copy_chunks<PaddedRows>);
}
