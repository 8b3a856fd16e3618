// Rung 5: scores and P stay in registers: four lanes share a row and agree on its maximum by
// shuffles. Each block takes its own maximum, so that its outputs are merged with the earlier ones,
// and both are rescaled.
#include "registers.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  const float exp2_scale = params.exp2_scale;
  attend_in_registers(
      params, [&](RowsInRegisters& state, Sums& o, const Sums& s, const uint16_t* v_tile) {
        Fragments p;
        float of_earlier[2], of_block[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float block_base = RowsInRegisters::largest(s, r) * exp2_scale;
          const float total = RowsInRegisters::exponentiate(p, s, r, block_base, exp2_scale);
          const float raised = fmaxf(state.base[r], block_base);
          of_earlier[r] = ptx::ex2_approx_ftz(state.base[r] - raised);
          of_block[r] = ptx::ex2_approx_ftz(block_base - raised);
          state.base[r] = raised;
          state.sum[r] = state.sum[r] * of_earlier[r] + total * of_block[r];
        }
        Sums block_o = {};
        multiply_p_v(block_o, p, v_tile);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            o[n][i] = o[n][i] * of_earlier[i / 2] + block_o[n][i] * of_block[i / 2];
        }
      });
}
