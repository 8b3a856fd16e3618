// targets: 90a:90a 100f:100f 110f:110f 120f:120f
// Registers that warps of one role hand to those of another.
#include "common/ptx/warp_roles.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

// The first warpgroup keeps more numbers than the others leave it to begin with.
__device__ __forceinline__ void registers(const Params& params) {
  constexpr int KEPT = 128;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_inc<208>();
    float kept[KEPT];
    for (int i = 0; i < KEPT; ++i)
      kept[i] = static_cast<float>(number(static_cast<int>(threadIdx.x) * KEPT + i));
    float sum = 0;
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
      for (int i = 0; i < KEPT; ++i) {
        kept[i] += kept[(i + 1) % KEPT];
        sum += kept[i] * static_cast<float>(i % 5);
      }
    }
    params.out[threadIdx.x] = __float_as_uint(sum);
  } else {
    ptx::setmaxnreg_dec<40>();
    params.out[threadIdx.x] = static_cast<uint32_t>(number(static_cast<int>(threadIdx.x)));
  }
}

}  // namespace archflash::probes

PROBE(registers, 384)
