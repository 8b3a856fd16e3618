// Rung 4: the copy engine (TMA). One thread starts the copies of whole tiles; an mbarrier counts
// their bytes. Rows have no padding, so reads of the same chunk of eight rows conflict in the
// banks.
#include "tma.cuh"

using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend_by_tma<PlainRows>(params);
}
