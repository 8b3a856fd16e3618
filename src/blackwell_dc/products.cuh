// The role mma, one warp: S = Q K^T and O += P V. The table in pipeline.cuh says what it waits for
// and hands over.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/next_tile.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/matrix_descriptor.h"
#include "common/device/tile_walk.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// A shared-memory address as descriptor_at() takes it, in units of ADDRESS_UNIT bytes: what a
// descriptor's address field holds, or with the switch off the address itself.
template <class C>
__device__ __forceinline__ uint32_t operand_address(uint32_t smem) {
  return C::SWITCHES.precomputed_descriptors ? device::matrix_descriptor_address(smem) : smem;
}
template <class C>
constexpr int ADDRESS_UNIT = C::SWITCHES.precomputed_descriptors ? 16 : 1;
// The descriptor of what one product reads of an operand: `fields` and `step` are from
// matrix_descriptor.h, `address` is where the operand starts. Only the lower half of the descriptor
// is computed at run time.
template <class C>
__device__ __forceinline__ uint64_t descriptor_at(uint64_t fields, uint32_t address,
                                                  uint64_t step) {
  if constexpr (C::SWITCHES.precomputed_descriptors) {
    constexpr uint64_t LOWER = 0xFFFFFFFF;
    return (fields & ~LOWER) |
           (static_cast<uint32_t>(fields) + address + static_cast<uint32_t>(step));
  } else {
    return fields | device::matrix_descriptor_address(address + static_cast<uint32_t>(step << 4));
  }
}

// S = Q K^T. Q and K are K-major in shared memory.
template <class C>
__device__ __forceinline__ void multiply_qk(uint32_t s_tmem, uint32_t q_address,
                                            uint32_t k_address) {
  using QTile = typename C::QTile;
  using KTile = typename C::KTile;
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, C::CTAS * C::TILE_ROWS, C::BLOCK_K, false);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / C::PRODUCT_DEPTH; ++i) {
    multiply<C>(
        s_tmem,
        descriptor_at<C>(device::K_MAJOR_FIELDS<QTile>, q_address, device::k_major_step<QTile>(i)),
        descriptor_at<C>(device::K_MAJOR_FIELDS<KTile>, k_address, device::k_major_step<KTile>(i)),
        ptx::mov_instruction_descriptor<C::DTYPE, INSTRUCTION>(), i > 0);
  }
}

// The products [FIRST, LAST) of O += P V, PRODUCT_DEPTH keys each. P is in tensor memory, V is
// MN-major in shared memory. Unless `accumulate`, product 0 overwrites O.
template <class C, int FIRST, int LAST>
__device__ __forceinline__ void multiply_pv(uint32_t o_tmem, uint32_t p_tmem, uint32_t v_address,
                                            bool accumulate) {
  using VTile = typename C::VTile;
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, C::CTAS * C::TILE_ROWS, C::HEAD_DIM_V, true);
#pragma unroll
  for (int i = FIRST; i < LAST; ++i) {
    multiply<C>(o_tmem, p_tmem + 8 * i,
                descriptor_at<C>(device::MN_MAJOR_FIELDS<VTile>, v_address,
                                 device::mn_major_step<VTile, C::PRODUCT_DEPTH>(i)),
                ptx::mov_instruction_descriptor<C::DTYPE, INSTRUCTION>(), i > 0 || accumulate);
  }
}

// A step is one tile with one block of keys: the tiles of a CTA take turns at each block. mma
// starts S of steps 0 and 1, then in turn O of step j and S of step j + 2, so that the softmax of
// one step runs under the products of the other. Steps use the two buffers of S in turn.
//
// S of step j + 2 overwrites P of step j, which the products for O of step j read. No wait is
// between them: products of one thread run in the order in which they are issued (NOTES.md).
//
// One lane starts the products. All lanes wait and count, so that the counts are in uniform
// registers.
template <class C>
struct Products {
  static constexpr int PV_PRODUCTS = C::BLOCK_K / C::PRODUCT_DEPTH;
  // The products that read the part of P which p_ready hands over; p_last hands over the rest.
  static constexpr int EARLY_PRODUCTS = C::SWITCHES.split_p ? PV_PRODUCTS / 4 * 3 : PV_PRODUCTS;

  Barriers<C> barriers;
  uint32_t shared_address;  // operand_address() of the CTA's shared memory
  uint32_t tmem;            // address of the CTA's tensor memory
  bool leader;              // this lane starts the products
  Ring<C> ring{};
  uint32_t k_address = 0, v_address = 0;  // of the block at hand
  int k_slot = 0, v_slot = 0;
  uint32_t clean_parities = 0;      // bit i: the parity of v_clean for slot i's next ragged block
  uint32_t block_parity = 0;        // two tiles: the parity of p_ready for the next block's O
  uint32_t s_step = 0, o_step = 0;  // one tile: how many S and O were started

  __device__ __forceinline__ uint32_t kv_address(const Slot& slot) const {
    return shared_address + C::RING_SMEM / ADDRESS_UNIT<C> +
           Ring<C>::template offset<ADDRESS_UNIT<C>>(slot.index);
  }

  // Starts S of tile t's next step. first: the first with this row tile's Q, so that Q may not have
  // landed yet.
  __device__ __forceinline__ void start_s(int t, bool first, uint32_t q_parity) {
    const uint32_t buffer = C::TILES == 2 ? t : s_step++ % 2;
    if (t == 0) {  // the first step of a block
      const Slot slot = ring.next_k();
      k_slot = slot.index;
      k_address = kv_address(slot);
      ptx::mbarrier_wait_parity(barriers.kv_full(slot.index), slot.parity);
    }
    if (first) ptx::mbarrier_wait_parity(barriers.q_full(t), q_parity);
    // No fence is needed: add_o() has waited for the warps that read this buffer of S, and Q and K
    // come from TMA.
    if (leader) {
      // Opaque to the compiler, which would otherwise keep all descriptors of Q during the loop:
      // more than there are uniform registers.
      const uint32_t q_address = ptx::mov_b32_volatile(shared_address) +
                                 (C::Q_SMEM + t * C::QTile::BYTES) / ADDRESS_UNIT<C>;
      // findings: s-overwrites-p (tests/sim/tags.py)
      multiply_qk<C>(tmem + buffer * C::S_COLUMNS, q_address, k_address);
      commit<C>(barriers.s_ready(buffer));
      if (t == C::TILES - 1) commit<C>(barriers.kv_empty(k_slot));
    }
  }

  // Hands Q back to load. Called after the last S of a row tile.
  __device__ __forceinline__ void release_q() const {
    if (leader) {
      for (int t = 0; t < C::TILES; ++t) commit<C>(barriers.q_empty(t));
    }
  }

  // Waits until the rows of the next V that do not count are zeros.
  __device__ __forceinline__ void wait_until_clean() {
    const Slot slot = Ring<C>(ring).next_v();
    wait_for_stores<C>(barriers.v_clean(slot.index), clean_parities >> slot.index & 1);
    clean_parities ^= 1u << slot.index;
  }

  // Starts the products for O of tile t's next step. first: they overwrite O; last: of the row
  // tile.
  __device__ __forceinline__ void add_o(int t, bool first, bool last) {
    const uint32_t buffer = C::TILES == 2 ? t : o_step % 2;
    const uint32_t parity = C::TILES == 2 ? block_parity : o_step / 2 % 2;
    if (t == 0) {  // the first step of a block
      const Slot slot = ring.next_v();
      v_slot = slot.index;
      v_address = kv_address(slot);
      ptx::mbarrier_wait_parity(barriers.kv_full(slot.index), slot.parity);
    }
    const uint32_t o_tmem = tmem + C::O_COLUMN + t * C::HEAD_DIM_V;
    const uint32_t p_tmem = tmem + buffer * C::S_COLUMNS + C::P_COLUMN;
    // The first 3/4 of P are written, and O is rescaled; then the rest of P is written.
    ptx::mbarrier_wait_parity(barriers.p_ready(buffer), parity);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) multiply_pv<C, 0, EARLY_PRODUCTS>(o_tmem, p_tmem, v_address, !first);
    if constexpr (EARLY_PRODUCTS < PV_PRODUCTS) {
      ptx::mbarrier_wait_parity(barriers.p_last(buffer), parity);
      ptx::tcgen05_fence_after_thread_sync();
    }
    if (leader) {
      multiply_pv<C, EARLY_PRODUCTS, PV_PRODUCTS>(o_tmem, p_tmem, v_address, true);
      if (EVERY_O_READY<C> || last) commit<C>(barriers.o_ready(t));
      if (t == C::TILES - 1) commit<C>(barriers.kv_empty(v_slot));
    }
    if constexpr (!C::SWITCHES.trust_issue_order) {
      // The products have read P before the next S overwrites it.
      ptx::mbarrier_wait_parity(barriers.o_ready(t), C::TILES == 2 ? block_parity : o_step % 2);
      ptx::tcgen05_fence_after_thread_sync();
    }
    if (C::TILES == 1) ++o_step;
    if (C::TILES == 2 && t == 1) block_parity ^= 1;
  }
};

template <class C>
__device__ __forceinline__ void mma(const Params& params, uint32_t shared_smem, uint32_t tmem) {
  Products<C> products{Barriers<C>{shared_smem + C::BARRIER_SMEM}, operand_address<C>(shared_smem),
                       tmem, ptx::elect_sync()};
  uint32_t q_parity = 0;
  for (TileWalk<C> walk(params, shared_smem); walk.more(); walk.next()) {
    const Tile work = find_tile<C>(params, walk.tile());
    if (work.first_row < 0) continue;
    const device::VisibleKeys visible = device::find_visible_keys(params.attention, work);
    const device::Blocks blocks = find_blocks<C>(params, work, visible);
    const CountedKeys counted(params.attention, work, visible);
    const int count = count_blocks<C>(blocks);
    if (count == 0) continue;
    const bool last_ragged = counted.lack_some(blocks.last, C::BLOCK_K);
    const bool first_ragged = count > 1 && counted.lack_some(blocks.first, C::BLOCK_K);
    if constexpr (C::TILES == 2) {
      products.start_s(0, true, q_parity);
      products.start_s(1, true, q_parity);
      if (last_ragged) products.wait_until_clean();
#pragma unroll 1
      for (int block = 1; block < count; ++block) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          products.add_o(t, block == 1, false);
          products.start_s(t, false, q_parity);
        }
      }
      products.release_q();
      if (first_ragged) products.wait_until_clean();
      products.add_o(0, count == 1, true);
      products.add_o(1, count == 1, true);
    } else {
      products.start_s(0, true, q_parity);
      if (count > 1) products.start_s(0, false, q_parity);
      if (last_ragged) products.wait_until_clean();
#pragma unroll 1
      for (int block = 2; block < count; ++block) {
        products.add_o(0, block == 2, false);
        products.start_s(0, false, q_parity);
      }
      products.release_q();
      if (count > 1) products.add_o(0, count == 2, false);
      if (first_ragged) products.wait_until_clean();
      products.add_o(0, count == 1, true);
    }
    q_parity ^= 1;
  }
}

}  // namespace archflash::blackwell_dc
