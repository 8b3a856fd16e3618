// Rung 6: P is made with the maximum of this block and all earlier ones, so that only the earlier
// outputs are rescaled, and the products of the block add to them directly.
#include "registers.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  const float exp2_scale = params.exp2_scale;
  attend_in_registers(
      params, [&](RowsInRegisters& state, Sums& o, const Sums& s, const uint16_t* v_tile) {
        Fragments p;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float raised = fmaxf(state.base[r], RowsInRegisters::largest(s, r) * exp2_scale);
          const float correction = ptx::ex2_approx_ftz(state.base[r] - raised);
          state.base[r] = raised;
          state.sum[r] = state.sum[r] * correction +
                         RowsInRegisters::exponentiate(p, s, r, raised, exp2_scale);
#pragma unroll
          for (auto& tile : o) tile[2 * r] *= correction, tile[2 * r + 1] *= correction;
        }
        multiply_p_v(o, p, v_tile);
      });
}
