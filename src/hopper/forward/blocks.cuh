// What a consumer warpgroup does with a block of keys beside its softmax: it hands K and V back,
// skips a block, or multiplies 8-bit V; and the rows of Q that no head fills.
#pragma once

#include <cstdint>

#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/products.cuh"

namespace archflash::hopper {

// Hands K back, whose product is done: the scores are there.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void release_k(device::Scores<C>& s_rmem, const Barriers<C>& barriers,
                                          RingPosition<C::STAGES>& k_ring) {
  ptx::registers_change<KEYS / 2>(&s_rmem[0][0][0]);
  release(barriers.k_empty(k_ring.stage));
  k_ring.advance();
}

// Hands V back, whose product is done: P may be overwritten.
template <class C>
__device__ __forceinline__ void release_v(Probabilities<C>& p_rmem, const Barriers<C>& barriers,
                                          RingPosition<C::STAGES>& v_ring) {
  ptx::registers_change<C::BLOCK_K / (4 * C::PACK)>(&p_rmem[0][0][0]);
  release(barriers.v_empty(v_ring.stage));
  v_ring.advance();
}

// A block that is masked for this warpgroup; others may see it. The warps still wait for it:
// otherwise they could lap the ring and hand back a stage a phase too early.
template <class C>
__device__ __forceinline__ void skip_block(const Barriers<C>& barriers, const Turns<C>& turns,
                                           RingPosition<C::STAGES>& k_ring,
                                           RingPosition<C::STAGES>& v_ring) {
  // mutants: few-skipped-blocks (tests/sim/tags.py)
  ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);
  release(barriers.k_empty(k_ring.stage));
  k_ring.advance();
  turns.wait();  // each warpgroup takes one turn for a block
  turns.hand_over();
  // mutants: few-skipped-blocks
  ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);
  release(barriers.v_empty(v_ring.stage));
  v_ring.advance();
}

// With 8 bits, without OVERLAPS: O += P V of the first KEYS keys of the V in a stage from beginning
// to end, PASS_COLUMNS columns at a time, of which PARTS are multiplied at the same time. Calls
// meanwhile() while the first ones are.
template <class C, int KEYS, class Meanwhile>
__device__ __forceinline__ void multiply_passes(device::Outputs<C>& o_rmem,
                                                Probabilities<C>& p_rmem, uint32_t shared_smem,
                                                int stage, const Meanwhile& meanwhile) {
  constexpr int PASSES = C::HEAD_DIM_V / C::PASS_COLUMNS;
  PassOutputs<C> parts_rmem[C::PARTS];
  const auto begin = [&](int pass) {
    start_pv<C, KEYS>(parts_rmem[pass % C::PARTS], p_rmem, shared_smem, stage, false,
                      pass * C::PASS_COLUMNS);
  };
  if constexpr (C::PARTS == 2) begin(0);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    PassOutputs<C>& part_rmem = parts_rmem[pass % C::PARTS];
    const int next = pass + C::PARTS - 1;
    if (next < PASSES) begin(next);
    if (pass == 0) meanwhile();
    if (C::PARTS == 2 && next < PASSES) {
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
    ptx::registers_change<C::PASS_COLUMNS / 2>(&part_rmem[0][0][0]);
    add_pass<C>(o_rmem, part_rmem, pass);
  }
}

// With PACKS: clears the rows of a warpgroup in Q's part that no head fills. Their products count
// for nothing, but they are read.
template <class C>
__device__ __forceinline__ void clear_rows_of_no_head(const GroupHeads& groups,
                                                      unsigned char* shared, int group) {
  using QTile = typename C::QTile;
  constexpr int CHUNKS = QTile::COLUMNS / 8;
  const int rows = C::GROUP_ROWS - groups.filled();
  if (rows == 0) return;
  for (int i = static_cast<int>(threadIdx.x) % C::WARPGROUP; i < C::Q_STAGES * rows * CHUNKS;
       i += C::WARPGROUP) {
    const int row = group * C::GROUP_ROWS + groups.filled() + i / CHUNKS % rows;
    unsigned char* const q = shared + C::Q_SMEM + i / CHUNKS / rows * QTile::BYTES;
    *reinterpret_cast<uint4*>(q + QTile::offset(row, i % CHUNKS)) = {};
  }
  ptx::fence_proxy_async_shared();  // the zeros come before the products read them
  sync_group<C>(group);             // those of all warps do
}

}  // namespace archflash::hopper
