// Rung 5: the 128-byte swizzle. TMA permutes the chunks of each row by the row's number, and
// ldmatrix reads them from there, so that eight rows use different banks. The rest is rung 4.
#include "tma.cuh"

using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_by_tma<SwizzledRows>(params);
}
