// Rung 4: the warpgroups take turns. In its turn a warpgroup multiplies: P V of the block before
// and Q K^T of this one. Then it computes its softmax while the other one multiplies.
#include "turns.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(Rung::THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params, [&](Rows<Rung::KEYS>& rows, uint32_t q_smem, Ring<Rung>& k_ring,
                           Ring<Rung>& v_ring, int group) {
    const Turns turns{group};
    turns.begin();
#pragma unroll 1
    for (int key = 0; key < params.n; key += Rung::KEYS) {
      k_ring.wait();
      if (key > 0) v_ring.wait();
      turns.wait();
      rows.start_qk<Rung::BLOCK_Q>(q_smem, k_ring.tile());
      if (key > 0) rows.start_pv(v_ring.tile());
      rows.wait<0>();
      turns.hand_over();
      k_ring.release();
      if (key > 0) v_ring.release();
      rows.softmax(params.exp2_scale);
    }
    turns.end();
    v_ring.wait();
    rows.start_pv(v_ring.tile());
    rows.wait<0>();
    v_ring.release();
  });
}
