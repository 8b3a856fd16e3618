// Rung 2: tensor cores by WMMA, whose fragments are loaded and stored as a whole.
#include "fragments.cuh"

using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_by_fragments<PlainRows>(params, copy_elements<PlainRows>);
}
