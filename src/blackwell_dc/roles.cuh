// The roles of a blackwell_dc CTA, one function each. What they hand over and when: the table in
// pipeline.cuh. All walk over the same tiles and blocks: last tile first, last (ragged) block
// first.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/softmax.cuh"
#include "common/math/attention_work.cuh"
#include "common/math/matrix_descriptor.h"
#include "common/math/slab_load.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

template <class C>
__device__ __forceinline__ math::Work find_tile(const Params& params,
                                                const math::TileIndex& index) {
  return math::find_tile<C::BLOCK_Q>(params.attention, params.tiles, index);
}
template <class C>
__device__ __forceinline__ math::Blocks find_blocks(const Params& params, const math::Work& work) {
  return math::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work,
                                                   math::find_visible_keys(params.attention, work));
}
template <class C>
__device__ __forceinline__ int count_blocks(const math::Blocks& blocks) {
  return blocks.last < blocks.first ? 0 : (blocks.last - blocks.first) / C::BLOCK_K + 1;
}
// Whether the last block of a sequence has rows of the next one: beyond the tensor TMA reads zeros.
template <class C>
__device__ __forceinline__ bool is_ragged(const AttentionParams& params, const math::Work& work,
                                          const math::Blocks& blocks) {
  return params.cu_seqlens_k_gmem != nullptr && blocks.last + C::BLOCK_K > work.nk;
}

// --- load, one warp: Q, K, V -> shared memory ---

template <class C>
__device__ __forceinline__ void load(const Params& params, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // it issues; the whole warp waits and counts
  Ring<C> ring;
  uint32_t q_parity = 1;  // nothing is in Q's part yet
  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const math::Blocks blocks = find_blocks<C>(params, work);
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int kv_head = head / attention.heads_per_kv;
    // Kept in registers: not made anew for every block.
    const int keys_start = math::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk);
    const int k_head = ptx::mov_b32_volatile(attention.k_head == 0 ? 0 : kv_head);
    const int k_batch = ptx::mov_b32_volatile(attention.k_batch == 0 ? 0 : batch);
    const int v_head = ptx::mov_b32_volatile(attention.v_head == 0 ? 0 : kv_head);
    const int v_batch = ptx::mov_b32_volatile(attention.v_batch == 0 ? 0 : batch);
    const auto load_k = [&](int block) {
      const Slot slot = ring.next_k();
      ptx::mbarrier_wait_parity(barriers.kv_empty(slot.index), slot.parity ^ 1);
      if (leader) {
        math::start_load<typename C::KTile>(shared_smem + ring.offset(slot.index), params.k_map,
                                            keys_start + block, k_head, k_batch,
                                            barriers.kv_full(slot.index));
      }
      __syncwarp();
    };
    const auto load_v = [&](int block, bool ragged) {
      const Slot slot = ring.next_v();
      ptx::mbarrier_wait_parity(barriers.kv_empty(slot.index), slot.parity ^ 1);
      if (leader) {
        math::start_load<typename C::VTile>(shared_smem + ring.offset(slot.index), params.v_map,
                                            keys_start + block, v_head, v_batch,
                                            barriers.kv_full(slot.index));
        if (ragged) ptx::mbarrier_arrive(barriers.v_ragged(slot.index));
      }
      __syncwarp();
    };
    const bool any = blocks.first <= blocks.last;
    if (any) load_k(blocks.last);
    const int q_start = math::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
    for (int t = 0; t < C::TILES; ++t) {
      ptx::mbarrier_wait_parity(barriers.q_empty(t), q_parity);
      if (any && leader) {
        math::start_load<typename C::QTile>(
            shared_smem + C::Q_SMEM + t * C::QTile::BYTES, params.q_map,
            q_start + work.first_row + t * C::TILE_ROWS, attention.q_head == 0 ? 0 : head,
            attention.q_batch == 0 ? 0 : batch, barriers.q_full(t));
      }
      if (!any && leader) ptx::mbarrier_arrive(barriers.q_full(t));  // no key, no Q
      __syncwarp();
    }
    if (any) load_v(blocks.last, is_ragged<C>(attention, work, blocks));
#pragma unroll 1
    for (int block = blocks.last - C::BLOCK_K; block >= blocks.first; block -= C::BLOCK_K) {
      load_k(block);
      load_v(block, false);
    }
    q_parity ^= 1;
  }
}

// --- clean, one warp: zeros to the rows of V that are another sequence's ---

// Their P is 0, and 0 * NaN would be NaN.
template <class C>
__device__ __forceinline__ void clean(const Params& params, unsigned char* shared,
                                      uint32_t shared_smem) {
  using VTile = typename C::VTile;
  if (params.attention.cu_seqlens_k_gmem == nullptr) return;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  Ring<C> ring;
  uint32_t parities = 0;  // of each slot's next ragged block
  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const math::Blocks blocks = find_blocks<C>(params, work);
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
      ring.next_k();
      const Slot slot = ring.next_v();
      if (block != blocks.last || !is_ragged<C>(params.attention, work, blocks)) continue;
      // Now the slot's phase is that of this use: kv_full's parity says when it has landed.
      ptx::mbarrier_wait_parity(barriers.v_ragged(slot.index), parities >> slot.index & 1);
      ptx::mbarrier_wait_parity(barriers.kv_full(slot.index), slot.parity);
      const int first = (work.nk - block) * VTile::ROW_BYTES;  // of a slab: rows stay in order
      for (int slab = 0; slab < VTile::SLABS; ++slab) {
        unsigned char* slab_smem = shared + ring.offset(slot.index) + slab * VTile::SLAB_BYTES;
        for (int byte = first + threadIdx.x % 32 * 16; byte < VTile::SLAB_BYTES; byte += 32 * 16)
          *reinterpret_cast<uint4*>(slab_smem + byte) = uint4{};
      }
      ptx::fence_proxy_async_shared();  // the tensor cores read what was stored
      arrive_as_warp(barriers.v_clean(slot.index));
      parities ^= 1u << slot.index;
    }
  }
}

// --- mma, one warp: S = Q K^T and O += P V ---

// Where a tile lies, as products take it: the address field of its descriptor, or its address.
template <class C>
__device__ __forceinline__ uint32_t place_of(uint32_t smem) {
  return C::SWITCHES.precomputed_descriptors ? math::matrix_descriptor_address(smem) : smem;
}
// Places as far apart as addresses that are `bytes` apart.
template <class C>
__device__ __forceinline__ constexpr uint32_t place_offset(int bytes) {
  return C::SWITCHES.precomputed_descriptors ? bytes >> 4 : bytes;
}
// The descriptor of a product's 16 columns or rows of K; `step` from matrix_descriptor.h. Only its
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
      math::instruction_descriptor(C::DTYPE, C::TILE_ROWS, C::BLOCK_K, false);
#pragma unroll
  for (int step = 0; step < C::HEAD_DIM / 16; ++step) {
    ptx::tcgen05_mma_f16(
        s_tmem,
        descriptor_at<C>(math::K_MAJOR_FIELDS<QTile>, q_place, math::k_major_step<QTile>(step)),
        descriptor_at<C>(math::K_MAJOR_FIELDS<KTile>, k_place, math::k_major_step<KTile>(step)),
        INSTRUCTION, step > 0);
  }
}

// O += P V for the steps [FIRST, LAST) of 16 keys: P in tensor memory, V MN-major.
template <class C, int FIRST, int LAST>
__device__ __forceinline__ void multiply_pv(uint32_t o_tmem, uint32_t p_tmem, uint32_t v_place,
                                            bool accumulate) {
  using VTile = typename C::VTile;
  constexpr uint32_t INSTRUCTION =
      math::instruction_descriptor(C::DTYPE, C::TILE_ROWS, C::HEAD_DIM_V, true);
#pragma unroll
  for (int step = FIRST; step < LAST; ++step) {
    ptx::tcgen05_mma_f16(
        o_tmem, p_tmem + 8 * step,
        descriptor_at<C>(math::MN_MAJOR_FIELDS<VTile>, v_place, math::mn_major_step<VTile>(step)),
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
  static constexpr int STEPS = C::BLOCK_K / 16;  // of the k dimension of P V
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

  // S of a step: the `half`-th of two tiles, or the one tile's next.
  __device__ __forceinline__ void start_s(int half, bool first, bool last, uint32_t q_parity) {
    const int t = C::TILES == 2 ? half : 0;
    const uint32_t buffer = C::TILES == 2 ? half : s_step++ % 2;
    if (t == 0) {
      const Slot slot = ring.next_k();
      k_slot = slot.index;
      k_place = shared_place + place_offset<C>(ring.offset(slot.index));
      ptx::mbarrier_wait_parity(barriers.kv_full(slot.index), slot.parity);
    }
    if (first) ptx::mbarrier_wait_parity(barriers.q_full(t), q_parity);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) {
      // Read anew: descriptors of Q kept over the loop are more than there are uniform registers.
      const uint32_t q_place = ptx::mov_b32_volatile(shared_place) + place_offset<C>(C::Q_SMEM);
      multiply_qk<C>(tmem + buffer * C::S_COLUMNS, q_place + place_offset<C>(t * C::QTile::BYTES),
                     k_place);
      ptx::tcgen05_commit(barriers.s_ready(buffer));
      if (t == C::TILES - 1) ptx::tcgen05_commit(barriers.kv_empty(k_slot));
      if (last) ptx::tcgen05_commit(barriers.q_empty(t));
    }
  }

  // The next V has rows of another sequence: they are zeros now.
  __device__ __forceinline__ void wait_until_clean() {
    const Slot slot = Ring<C>(ring).next_v();
    ptx::mbarrier_wait_parity(barriers.v_clean(slot.index), clean_parities >> slot.index & 1);
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
      v_place = shared_place + place_offset<C>(ring.offset(slot.index));
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
      ptx::tcgen05_commit(barriers.o_ready(t));
      if (t == C::TILES - 1) ptx::tcgen05_commit(barriers.kv_empty(v_slot));
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
  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const math::Blocks blocks = find_blocks<C>(params, work);
    const bool ragged = is_ragged<C>(params.attention, work, blocks);
    const int count = count_blocks<C>(blocks);
    if (count == 0) {  // no product reads this tile's Q
      for (int t = 0; t < C::TILES; ++t) {
        ptx::mbarrier_wait_parity(products.barriers.q_full(t), q_parity);
        arrive_as_warp(products.barriers.q_empty(t));
      }
      q_parity ^= 1;
      continue;
    }
    if constexpr (C::TILES == 2) {
      products.start_s(0, true, count == 1, q_parity);
      products.start_s(1, true, count == 1, q_parity);
      if (ragged) products.wait_until_clean();
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          products.add_o(half, block == 0);
          if (block + 1 < count) products.start_s(half, false, block + 2 == count, q_parity);
        }
      }
    } else {
      products.start_s(0, true, count == 1, q_parity);
      if (count > 1) products.start_s(0, false, count == 2, q_parity);
      if (ragged) products.wait_until_clean();
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
        products.add_o(0, block == 0);
        if (block + 2 < count) products.start_s(0, false, block + 3 == count, q_parity);
      }
    }
    q_parity ^= 1;
  }
}

// --- softmax, four warps for each tile: S -> P, one thread for each row ---

template <class C>
__device__ __forceinline__ void softmax(const Params& params, unsigned char* shared,
                                        uint32_t shared_smem, int t) {
  constexpr int KEYS = C::BLOCK_K / 4;  // of a quarter
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int row_of_tile = threadIdx.x % C::TILE_ROWS;
  const uint32_t lanes_tmem = ptx::tmem_lanes_of_warp(threadIdx.x / 32);
  float* stats = reinterpret_cast<float*>(shared + C::STATS_SMEM + t * C::STATS_BYTES);
  // Steps of this warpgroup, and what it told correction, counted from the CTA's start.
  uint32_t step = 0, message = 0;
  const auto tell = [&](float first, float second, bool both) {
    ptx::mbarrier_wait_parity(barriers.stats_empty(t), (message & 1) ^ 1);
    stats[row_of_tile] = first;
    if (both) stats[C::TILE_ROWS + row_of_tile] = second;
    arrive_as_warp(barriers.stats_full(t));
    ++message;
  };

  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const math::VisibleKeys visible = math::find_visible_keys(attention, work);
    const math::Blocks blocks = math::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, visible);
    const int row = work.first_row + t * C::TILE_ROWS + row_of_tile;
    const int first_seen = visible.first(row), last_seen = visible.last(row);
    // Blocks between these have no edge in this warp's rows.
    const int warp_row = row - threadIdx.x % 32;
    const int clear_first = visible.first(warp_row + 31);
    const int clear_last = visible.last(warp_row) - (C::BLOCK_K - 1);
    RowState state{LOWEST, 0.0f, false};  // finite: no inf - inf in a row that has seen no key
#pragma unroll 1
    for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K, ++step) {
      const uint32_t buffer = C::TILES == 2 ? t : step % 2;
      const uint32_t parity = C::TILES == 2 ? step % 2 : step / 2 % 2;
      const uint32_t s_tmem = lanes_tmem + buffer * C::S_COLUMNS;
      Scores<C> s_rmem;
      ptx::mbarrier_wait_parity(barriers.s_ready(buffer), parity);
      ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter)
        ptx::tcgen05_ld(s_rmem[quarter], s_tmem + quarter * KEYS);
      ptx::tcgen05_wait_ld(s_rmem);
      if (attention.transform_scores) transform_scores<C>(s_rmem, attention);
      if (block < clear_first || block > clear_last)
        mask_scores<C>(s_rmem, first_seen - block, last_seen - block);
      float exp2_scale = attention.exp2_scale;
      const float factor = follow_maximum<C>(state, find_maximum<C>(s_rmem), exp2_scale);
      if (block != blocks.last) tell(factor, 0.0f, false);

      // base is a rounded product. Scores beyond LARGE_BASE are rounded the same way before base is
      // subtracted: the largest of a row meets its own base and gives 1.
      if (state.large) {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
          for (int i = 0; i < KEYS; ++i)
            s_rmem[quarter][i] = __fmul_rn(s_rmem[quarter][i], exp2_scale);
        }
        exp2_scale = 1.0f;
      }
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        uint32_t p_rmem[KEYS / 2];
        weigh_scores<C>(s_rmem[quarter], p_rmem, state.base, exp2_scale);
        ptx::tcgen05_st(s_tmem + C::P_COLUMN + quarter * (KEYS / 2), p_rmem);
        if (quarter == (C::SWITCHES.split_p ? 2 : 3)) {
          ptx::tcgen05_wait_st();
          ptx::tcgen05_fence_before_thread_sync();
          arrive_as_warp(barriers.p_ready(buffer));
        }
      }
      if constexpr (C::SWITCHES.split_p) {
        ptx::tcgen05_wait_st();
        ptx::tcgen05_fence_before_thread_sync();
        arrive_as_warp(barriers.p_last(buffer));
      }
      state.sum += sum_of<C>(s_rmem);
    }
    tell(state.sum, state.base, true);
  }
}

// --- correction, four warps: O follows the bases; at the end it becomes output rows ---

template <class C>
__device__ __forceinline__ void rescale(uint32_t o_tmem, float factor) {
#pragma unroll
  for (int column = 0; column < C::HEAD_DIM_V; column += 16) {
    float o_rmem[16];
    ptx::tcgen05_ld(o_rmem, o_tmem + column);
    ptx::tcgen05_wait_ld(o_rmem);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const float2 pair = ptx::mul_rn_f32x2({o_rmem[i], o_rmem[i + 1]}, {factor, factor});
      o_rmem[i] = pair.x;
      o_rmem[i + 1] = pair.y;
    }
    ptx::tcgen05_st(o_tmem + column, o_rmem);
  }
  ptx::tcgen05_wait_st();
  ptx::tcgen05_fence_before_thread_sync();
}

// One row of O, or zeros where no product was made, to its place in the tile of output rows.
template <class C>
__device__ __forceinline__ void stage_row(uint32_t o_tmem, bool any, float factor,
                                          unsigned char* tile_smem, int row) {
#pragma unroll
  for (int column = 0; column < C::HEAD_DIM_V; column += 16) {
    float o_rmem[16] = {};
    if (any) {
      ptx::tcgen05_ld(o_rmem, o_tmem + column);
      ptx::tcgen05_wait_ld(o_rmem);
    }
    uint32_t x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(o_rmem[2 * i] * factor, o_rmem[2 * i + 1] * factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int offset = C::OTile::offset(row, column / 8 + half);
      *reinterpret_cast<uint4*>(tile_smem + offset) =
          uint4{x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
    }
  }
}

template <class C>
__device__ __forceinline__ void correction(const Params& params, unsigned char* shared,
                                           uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int row_of_tile = threadIdx.x % C::TILE_ROWS;
  const uint32_t lanes_tmem = ptx::tmem_lanes_of_warp(threadIdx.x / 32);
  const float* stats = reinterpret_cast<const float*>(shared + C::STATS_SMEM) + row_of_tile;
  constexpr int STATS = C::STATS_BYTES / 4;  // floats from tile to tile
  // Counted from the CTA's start: messages of each tile, products of each tile, steps, tiles.
  uint32_t message = 0, product = 0, first_step = 0, tile_parity = 1;

  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const int count = count_blocks<C>(find_blocks<C>(params, work));
#pragma unroll 1
    for (int block = 0; block < count; ++block) {
#pragma unroll
      for (int t = 0; t < C::TILES; ++t) {
        if (block > 0) {  // the first product overwrites O, which this warp has read
          ptx::mbarrier_wait_parity(barriers.stats_full(t), message & 1);
          const float factor = stats[t * STATS];
          arrive_as_warp(barriers.stats_empty(t));
          ptx::mbarrier_wait_parity(barriers.o_ready(t), (product + block - 1) & 1);
          if (!C::SWITCHES.lazy_rescale || __any_sync(FULL_WARP, factor != 1.0f)) {
            ptx::tcgen05_fence_after_thread_sync();
            rescale<C>(lanes_tmem + C::O_COLUMN + t * C::HEAD_DIM_V, factor);
          }
        }
        arrive_as_warp(barriers.p_ready((first_step + block * C::TILES + t) % 2));
      }
      if (block > 0) ++message;
    }

    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int64_t lse_row = batch * attention.lse_batch + head * attention.lse_head +
                            math::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
    const float sink = math::load_sink(attention, head);
#pragma unroll 1
    for (int t = 0; t < C::TILES; ++t) {
      ptx::mbarrier_wait_parity(barriers.stats_full(t), message & 1);
      const float sum = stats[t * STATS];
      const float base = stats[t * STATS + C::TILE_ROWS];
      arrive_as_warp(barriers.stats_empty(t));
      const float keys_max = sum == 0.0f ? math::MINUS_INFINITY : base * math::LN_2;
      const math::RowEnd end = math::finish_row(keys_max, sum, sink);
      if (count > 0) {
        ptx::mbarrier_wait_parity(barriers.o_ready(t), (product + count - 1) & 1);
        ptx::tcgen05_fence_after_thread_sync();
      } else if (C::O_OVER_Q) {  // no product says that load has seen the last tile's q_empty
        ptx::mbarrier_wait_parity(barriers.q_full(t), tile_parity ^ 1);
      }
      ptx::mbarrier_wait_parity(barriers.o_free(t), tile_parity);
      stage_row<C>(lanes_tmem + C::O_COLUMN + t * C::HEAD_DIM_V, count > 0, end.factor,
                   shared + C::O_SMEM + t * C::O_STRIDE, row_of_tile);
      ptx::tcgen05_fence_before_thread_sync();  // O is read before the next tile's p_ready
      ptx::fence_proxy_async_shared();          // the copy engine reads what was stored
      arrive_as_warp(barriers.o_staged(t));
      const int row = work.first_row + t * C::TILE_ROWS + row_of_tile;
      if (attention.lse_gmem != nullptr && row < work.nq)
        attention.lse_gmem[lse_row + row] = end.lse;
    }
    ++message;
    product += count;
    first_step += C::TILES * count;
    tile_parity ^= 1;
  }
}

// --- store, one warp: output rows -> global memory ---

// Where the tile ends inside a packed tensor, a box would write the next sequence's rows.
template <class C>
__device__ __forceinline__ void copy_rows(const unsigned char* tile_smem, uint16_t* out_gmem,
                                          int64_t row_stride, int rows, int columns) {
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
  for (int i = threadIdx.x % 32; i < C::TILE_ROWS * CHUNKS; i += 32) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (row >= rows || chunk * 8 >= columns) continue;
    const uint4 x = *reinterpret_cast<const uint4*>(tile_smem + C::OTile::offset(row, chunk));
    ptx::st_global_v4_b32(out_gmem + row * row_stride + chunk * 8, x.x, x.y, x.z, x.w);
  }
  ptx::fence_proxy_async_shared();  // the rows are read: the copy engine may write there next
}

template <class C>
__device__ __forceinline__ void store(const Params& params, const unsigned char* shared,
                                      uint32_t shared_smem) {
  using OTile = typename C::OTile;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  uint32_t tile_parity = 0;
  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int map_head = attention.out_head == 0 ? 0 : head;
    const int map_batch = attention.out_batch == 0 ? 0 : batch;
    const int q_start = math::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
    for (int t = 0; t < C::TILES; ++t) {
      ptx::mbarrier_wait_parity(barriers.o_staged(t), tile_parity);
      const int first_row = q_start + work.first_row + t * C::TILE_ROWS;
      const int rows = work.nq - work.first_row - t * C::TILE_ROWS;
      const int offset = C::O_SMEM + t * C::O_STRIDE;
      const bool whole = attention.cu_seqlens_q_gmem == nullptr || rows >= C::TILE_ROWS;
      if (rows > 0 && C::SWITCHES.tma_store && whole) {
        if (ptx::elect_sync()) {
          for (int slab = 0; slab < OTile::SLABS; ++slab) {
            if (slab * OTile::SLAB >= attention.dv) continue;
            ptx::cp_async_bulk_tensor_4d_store(params.out_map, slab * OTile::SLAB, first_row,
                                               map_head, map_batch,
                                               shared_smem + offset + slab * OTile::SLAB_BYTES);
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read_0();
        }
      } else if (rows > 0) {
        uint16_t* out_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                             batch * attention.out_batch + head * attention.out_head +
                             first_row * attention.out_row;
        copy_rows<C>(shared + offset, out_gmem, attention.out_row, rows, attention.dv);
      }
      arrive_as_warp(barriers.o_free(t));
      if (C::O_OVER_Q) arrive_as_warp(barriers.q_empty(t));
    }
    tile_parity ^= 1;
  }
  if (ptx::elect_sync()) ptx::cp_async_bulk_wait_group_0();  // before shared memory goes
}

}  // namespace archflash::blackwell_dc
