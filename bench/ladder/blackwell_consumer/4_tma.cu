// Rung 4: the copy engine. One thread asks for whole tiles; an mbarrier counts their bytes. Rows
// lie behind rows without padding, and eight rows at one chunk meet in the same banks.
#include "tma.cuh"

using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_by_tma<PlainRows>(params);
}
