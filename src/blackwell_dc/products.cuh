// mma, one warp: S = Q K^T and O += P V. What it waits for and hands over: the table in
// pipeline.cuh.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/math/attention_work.cuh"
#include "common/math/matrix_descriptor.h"
#include "common/math/tile_walk.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// Where a tile lies, as products take it: the address field of its descriptor, or its address.
template <class C>
__device__ __forceinline__ uint32_t place_of(uint32_t smem) {
  return C::SWITCHES.precomputed_descriptors ? math::matrix_descriptor_address(smem) : smem;
}
template <class C>
constexpr int PLACE_BYTES = C::SWITCHES.precomputed_descriptors ? 16 : 1;  // from place to place
// The descriptor of a product's 32 bytes of K; `step` from matrix_descriptor.h. Only its
// lower half is not constant.
template <class C>
__device__ __forceinline__ uint64_t descriptor_at(uint64_t fields, uint32_t place, uint64_t step) {
  if constexpr (C::SWITCHES.precomputed_descriptors) {
    constexpr uint64_t LOWER = 0xFFFFFFFF;
    return (fields & ~LOWER) |
           (static_cast<uint32_t>(fields) + place + static_cast<uint32_t>(step));
  } else {
    return fields | math::matrix_descriptor_address(place + static_cast<uint32_t>(step << 4));
  }
}

// S = Q K^T: both K-major in shared memory.
template <class C>
__device__ __forceinline__ void multiply_qk(uint32_t s_tmem, uint32_t q_place, uint32_t k_place) {
  using QTile = typename C::QTile;
  using KTile = typename C::KTile;
  constexpr uint32_t INSTRUCTION =
      math::instruction_descriptor(C::DTYPE, C::CTAS * C::TILE_ROWS, C::BLOCK_K, false);
#pragma unroll
  for (int step = 0; step < C::HEAD_DIM / C::PRODUCT_DEPTH; ++step) {
    multiply<C>(
        s_tmem,
        descriptor_at<C>(math::K_MAJOR_FIELDS<QTile>, q_place, math::k_major_step<QTile>(step)),
        descriptor_at<C>(math::K_MAJOR_FIELDS<KTile>, k_place, math::k_major_step<KTile>(step)),
        INSTRUCTION, step > 0);
  }
}

// O += P V for the steps [FIRST, LAST) of PRODUCT_DEPTH keys: P in tensor memory, V MN-major.
template <class C, int FIRST, int LAST>
__device__ __forceinline__ void multiply_pv(uint32_t o_tmem, uint32_t p_tmem, uint32_t v_place,
                                            bool accumulate) {
  using VTile = typename C::VTile;
  constexpr uint32_t INSTRUCTION =
      math::instruction_descriptor(C::DTYPE, C::CTAS * C::TILE_ROWS, C::HEAD_DIM_V, true);
#pragma unroll
  for (int step = FIRST; step < LAST; ++step) {
    multiply<C>(o_tmem, p_tmem + 8 * step,
                descriptor_at<C>(math::MN_MAJOR_FIELDS<VTile>, v_place,
                                 math::mn_major_step<VTile, C::PRODUCT_DEPTH>(step)),
                INSTRUCTION, step > 0 || accumulate);
  }
}

// A step is one tile's share of one block: S of steps 0 and 1, then O of step j and S of step j + 2
// in turn, so that the softmax of one step runs under the products of the other. Buffers of S are
// used in turn. Products of one thread run in the order in which they are issued: S of step j + 2
// overwrites P of step j, which O of step j reads. One lane issues; the whole warp waits and
// counts, in registers that all lanes share.
template <class C>
struct Products {
  static constexpr int STEPS = C::BLOCK_K / C::PRODUCT_DEPTH;  // of P V
  static constexpr int FIRST_STEPS = C::SWITCHES.split_p ? STEPS / 4 * 3 : STEPS;

  Barriers<C> barriers;
  uint32_t shared_place, tmem;
  bool leader;
  Ring<C> ring{};
  uint32_t k_place = 0, v_place = 0;  // of the block at hand
  int k_slot = 0, v_slot = 0;
  uint32_t clean_parities = 0;      // of each slot's next ragged block
  uint32_t block_parity = 0;        // two tiles: of the block whose O comes next
  uint32_t s_step = 0, o_step = 0;  // one tile: steps so far of S and of O

  __device__ __forceinline__ uint32_t kv_place(const Slot& slot) const {
    return shared_place + C::RING_SMEM / PLACE_BYTES<C> +
           Ring<C>::template offset<PLACE_BYTES<C>>(slot.index);
  }

  // S of a step: the `half`-th of two tiles, or the one tile's next.
  __device__ __forceinline__ void start_s(int half, bool first, uint32_t q_parity) {
    const int t = C::TILES == 2 ? half : 0;
    const uint32_t buffer = C::TILES == 2 ? half : s_step++ % 2;
    if (t == 0) {
      const Slot slot = ring.next_k();
      k_slot = slot.index;
      k_place = kv_place(slot);
      ptx::mbarrier_wait_parity(barriers.kv_full(slot.index), slot.parity);
    }
    if (first) ptx::mbarrier_wait_parity(barriers.q_full(t), q_parity);
    // No fence: who read this buffer, add_o has waited for; Q and K come from the copy engine.
    if (leader) {
      // Read anew: descriptors of Q kept over the loop are more than there are uniform registers.
      const uint32_t q_place =
          ptx::mov_b32_volatile(shared_place) + (C::Q_SMEM + t * C::QTile::BYTES) / PLACE_BYTES<C>;
      // findings: s-overwrites-p
      multiply_qk<C>(tmem + buffer * C::S_COLUMNS, q_place, k_place);
      commit<C>(barriers.s_ready(buffer));
      if (t == C::TILES - 1) commit<C>(barriers.kv_empty(k_slot));
    }
  }

  // After the last S of a row tile.
  __device__ __forceinline__ void release_q() const {
    if (leader) {
      for (int t = 0; t < C::TILES; ++t) commit<C>(barriers.q_empty(t));
    }
  }

  // The next V has rows of another sequence: they are zeros now.
  __device__ __forceinline__ void wait_until_clean() {
    const Slot slot = Ring<C>(ring).next_v();
    wait_for_stores<C>(barriers.v_clean(slot.index), clean_parities >> slot.index & 1);
    clean_parities ^= 1u << slot.index;
  }

  // O of a step.
  __device__ __forceinline__ void add_o(int half, bool first) {
    const int t = C::TILES == 2 ? half : 0;
    const uint32_t buffer = C::TILES == 2 ? half : o_step % 2;
    const uint32_t parity = C::TILES == 2 ? block_parity : o_step / 2 % 2;
    if (t == 0) {
      const Slot slot = ring.next_v();
      v_slot = slot.index;
      v_place = kv_place(slot);
      ptx::mbarrier_wait_parity(barriers.kv_full(slot.index), slot.parity);
    }
    const uint32_t o_tmem = tmem + C::O_COLUMN + t * C::HEAD_DIM_V;
    const uint32_t p_tmem = tmem + buffer * C::S_COLUMNS + C::P_COLUMN;
    ptx::mbarrier_wait_parity(barriers.p_ready(buffer), parity);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) multiply_pv<C, 0, FIRST_STEPS>(o_tmem, p_tmem, v_place, !first);
    if constexpr (FIRST_STEPS < STEPS) {
      ptx::mbarrier_wait_parity(barriers.p_last(buffer), parity);
      ptx::tcgen05_fence_after_thread_sync();
    }
    if (leader) {
      multiply_pv<C, FIRST_STEPS, STEPS>(o_tmem, p_tmem, v_place, true);
      commit<C>(barriers.o_ready(t));
      if (t == C::TILES - 1) commit<C>(barriers.kv_empty(v_slot));
    }
    if constexpr (!C::SWITCHES.trust_issue_order) {
      ptx::mbarrier_wait_parity(barriers.o_ready(t), C::TILES == 2 ? block_parity : o_step % 2);
      ptx::tcgen05_fence_after_thread_sync();
    }
    if (C::TILES == 1) ++o_step;
    if (C::TILES == 2 && half == 1) block_parity ^= 1;
  }
};

template <class C>
__device__ __forceinline__ void mma(const Params& params, uint32_t shared_smem, uint32_t tmem) {
  Products<C> products{Barriers<C>{shared_smem + C::BARRIER_SMEM}, place_of<C>(shared_smem), tmem,
                       ptx::elect_sync()};
  uint32_t q_parity = 0;
  for (TileIndex<C> index; index.more(params.tiles); ++index.round) {
    const Tile work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const math::Blocks blocks = find_blocks<C>(params, work);
    const bool ragged = is_ragged<C>(params.attention, work, blocks);
    const int count = count_blocks<C>(blocks);
    if (count == 0) continue;
    if constexpr (C::TILES == 2) {
      products.start_s(0, true, q_parity);
      products.start_s(1, true, q_parity);
      if (ragged) products.wait_until_clean();
#pragma unroll 1
      for (int block = 1; block < count; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          products.add_o(half, block == 1);
          products.start_s(half, false, q_parity);
        }
      }
      products.release_q();
      products.add_o(0, count == 1);
      products.add_o(1, count == 1);
    } else {
      products.start_s(0, true, q_parity);
      if (count > 1) products.start_s(0, false, q_parity);
      if (ragged) products.wait_until_clean();
#pragma unroll 1
      for (int block = 2; block < count; ++block) {
        products.add_o(0, block == 2);
        products.start_s(0, false, q_parity);
      }
      products.release_q();
      if (count > 1) products.add_o(0, count == 2);
      products.add_o(0, count == 1);
    }
    q_parity ^= 1;
  }
}

}  // namespace archflash::blackwell_dc
