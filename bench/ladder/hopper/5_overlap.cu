// Rung 5: overlap inside a warpgroup as well. The softmax of a block begins when its scores are
// there, while P V of the block before still runs; only rescaling and packing wait for that
// product. The turn is handed over as soon as the products are issued.
#include "turns.cuh"

using namespace archflash;
using namespace archflash::ladder;

extern "C" __global__ void __launch_bounds__(Rung::THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  attend<Rung>(params, [&](Rows<Rung::KEYS>& rows, uint32_t q_smem, Ring<Rung>& k_ring,
                           Ring<Rung>& v_ring, int group) {
    const Turns turns{group};
    turns.begin();
    // The first block, which no product runs beside.
    k_ring.wait();
    turns.wait();
    rows.start_qk<Rung::BLOCK_Q>(q_smem, k_ring.tile());
    turns.hand_over();
    rows.wait<0>();
    k_ring.release();
    rows.softmax(params.exp2_scale);
#pragma unroll 1
    for (int key = Rung::KEYS; key < params.n; key += Rung::KEYS) {
      k_ring.wait();
      v_ring.wait();
      turns.wait();
      rows.start_qk<Rung::BLOCK_Q>(q_smem, k_ring.tile());
      rows.start_pv(v_ring.tile());
      turns.hand_over();
      rows.wait<1>();  // the scores are there
      k_ring.release();
      float corrections[2];
      rows.exponentiate(params.exp2_scale, corrections);
      rows.wait<0>();  // P V of the block before is there
      v_ring.release();
      rows.rescale(corrections);
      rows.pack();
    }
    turns.end();
    v_ring.wait();
    rows.start_pv(v_ring.tile());
    rows.wait<0>();
    v_ring.release();
  });
}
