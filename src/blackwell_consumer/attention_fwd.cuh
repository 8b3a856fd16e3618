// Attention forward on TMA, mbarriers and mma.sync, for compute capability 12.x (and 9.0): fp16 or
// bf16 inputs, fp32 scores, sums and output accumulators. The CTAs share out row tiles (BLOCK_Q
// query rows of a head, the longest first) and visit the visible key blocks of each from the last
// (ragged) one back to the first with an online softmax.
//   producer, one warp      K, V -> rings of STAGES     Q -> its part, once the last tile's output
//   left consumers, WARPS warps  wait K | S = Q K^T | free K | maxima | wait V | P, O += P V | free
//   V
// A consumer warp owns WARP_ROWS rows: scores, P and outputs never leave its registers, no warp
// waits for another. Lane maps, products, rings: tile.cuh. Tiles: config.cuh. Choice: plan.cpp.
// Numbers: NOTES.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/params.h"
#include "blackwell_consumer/tile.cuh"
#include "common/math/attention_work.cuh"
#include "common/math/descales.cuh"
#include "common/math/fp8_softmax.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/slab_load.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_consumer {

// How P lies below its row's maximum.
template <class C>
using Weights = std::conditional_t<C::FP8, math::WeightsE4m3, math::Weights16>;

// --- producer ---

template <class C>
__device__ __forceinline__ void produce(const Params& params, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  RingPosition<C> ring;
  uint32_t q_parity = 0;
  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    const math::Work work = math::find_tile<C::BLOCK_Q>(attention, params.tiles, index);
    if (work.first_row < 0) continue;
    const math::Blocks blocks =
        math::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, math::find_visible_keys(attention, work));
    if (ptx::elect_sync()) {
      const int batch = work.batch_head / attention.heads_q;
      const int head = work.batch_head % attention.heads_q;
      const int kv_head = head / attention.heads_per_kv;
      const int keys_start = math::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk);
      const auto load_block = [&](int block) {
        // The consumers of what the stage held are done with it.
        ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage()), ring.parity() ^ 1);
        math::start_load<typename C::KTile, C::QK_PACK>(
            shared_smem + C::K_SMEM + ring.stage() * C::KTile::BYTES, params.k_map,
            keys_start + block, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : batch, barriers.k_full(ring.stage()));
        ptx::mbarrier_wait_parity(barriers.v_empty(ring.stage()), ring.parity() ^ 1);
        math::start_load<typename C::VTile, C::V_PACK>(
            shared_smem + C::V_SMEM + ring.stage() * C::VTile::BYTES, params.v_map,
            keys_start + block, attention.v_head == 0 ? 0 : kv_head,
            attention.v_batch == 0 ? 0 : batch, barriers.v_full(ring.stage()));
        ++ring.count;
      };
      // The rings are free before Q's part is, which the last tile's output passes through.
      if (blocks.first <= blocks.last) load_block(blocks.last);
      ptx::mbarrier_wait_parity(barriers.q_empty(), q_parity ^ 1);
      if (blocks.first <= blocks.last) {
        const int q_start = math::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
        math::start_load<typename C::QTile, C::QK_PACK>(
            shared_smem + C::Q_SMEM, params.q_map, q_start + work.first_row,
            attention.q_head == 0 ? 0 : head, attention.q_batch == 0 ? 0 : batch,
            barriers.q_full());
      } else {
        ptx::mbarrier_arrive(barriers.q_full());  // no key, no Q: the rows are written as zeros
      }
      for (int block = blocks.last - C::BLOCK_K; block >= blocks.first; block -= C::BLOCK_K)
        load_block(block);
    }
    // mutants: search-waits-for-warp
    __syncwarp();  // the next tile is searched by the whole warp; `ring` is the elected lane's
    q_parity ^= 1;
  }
}

// --- consumers ---

// What a warp needs to know of its rows. In shared memory, read when it is needed, where outputs
// and scores leave few registers. Blocks are named by their first keys.
struct Place {
  unsigned round;               // of the tiles
  uint32_t q_parity;            // of the phase that brings this tile's Q
  uint32_t large_bases;         // RowState::large
  math::Blocks blocks;          // of the CTA
  int seen_first, seen_last;    // some row sees some key of these blocks; none: last before first
  int clear_first, clear_last;  // every row sees every key of these
  int ragged_after;             // V of later blocks has rows of another sequence
  math::Work work;
  math::VisibleKeys visible;
};

// Of 8-bit inputs.
struct ScaledPlace : Place {
  math::KeyDescales of_keys;
  math::WarpDescale of_warp;
};
template <class C>
using PlaceOf = std::conditional_t<C::FP8, ScaledPlace, Place>;

// A flag in shared memory, the same for the whole warp.
struct WarpFlag {
  uint32_t* flag_smem;

  __device__ __forceinline__ operator bool() const { return *flag_smem != 0; }
  __device__ __forceinline__ void operator=(bool value) {
    // mutants: flag-was-read
    __syncwarp();  // nobody reads the value before any more
    if (threadIdx.x % 32 == 0) *flag_smem = value;
    __syncwarp();  // it is written before any lane reads it
  }
};

template <class C>
__device__ __forceinline__ Place find_place(const AttentionParams& params, const math::Work& work,
                                            const math::VisibleKeys& visible, int warp) {
  const int first_row = work.first_row + warp * C::WARP_ROWS;
  const int last_row = min(first_row + C::WARP_ROWS, work.nq) - 1;
  Place place;
  place.blocks = math::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, visible);
  place.seen_first = max(visible.first(first_row) & -C::BLOCK_K, place.blocks.first);
  place.seen_last = last_row < first_row ? -1 : visible.last(last_row);
  if (place.seen_last < place.seen_first) place.seen_first = INT32_MAX;
  place.clear_first = visible.first(last_row);
  place.clear_last = visible.last(first_row) - (C::BLOCK_K - 1);
  // Beyond the tensor TMA reads zeros.
  place.ragged_after = params.cu_seqlens_k_gmem == nullptr ? INT32_MAX : work.nk - C::BLOCK_K;
  place.work = work;
  place.visible = visible;
  return place;
}

__device__ __forceinline__ void release(uint32_t barrier_smem) {
  // mutants: elect-waits-for-warp
  __syncwarp();  // all lanes of the warp have read what the barrier guards
  if (ptx::elect_sync()) ptx::mbarrier_arrive(barrier_smem);
}

// Read anew where it is used, but where registers hold the place: else they are few.
template <class C>
__device__ __forceinline__ unsigned thread_index() {
  if constexpr (C::PLACE_IN_REGISTERS) return threadIdx.x;
  return ptx::mov_tid_x_volatile();
}

// Byte offsets of this lane's rows in the tiles.
template <class C>
__device__ __forceinline__ uint32_t lane_q_smem(uint32_t shared_smem) {
  const unsigned thread = thread_index<C>();
  return shared_smem + C::Q_SMEM + thread / 32 * C::WARP_ROWS * C::QTile::ROW_BYTES +
         mma_sync::rows_first_offset<typename C::QTile>(thread % 32);
}
template <class C>
__device__ __forceinline__ uint32_t lane_k_smem(uint32_t shared_smem, int stage) {
  const unsigned thread = thread_index<C>();
  return shared_smem + C::K_SMEM + stage * C::KTile::BYTES +
         mma_sync::columns_first_offset<typename C::KTile>(thread % 32);
}
template <class C>
__device__ __forceinline__ uint32_t lane_v_smem(uint32_t shared_smem, int stage) {
  const unsigned thread = thread_index<C>();
  return shared_smem + C::V_SMEM + stage * C::VTile::BYTES +
         mma_sync::v_first_offset<C>(thread % 32);
}

// A block of which this warp sees nothing: others may.
template <class C>
__device__ __forceinline__ void skip_block(const Barriers<C>& barriers, RingPosition<C>& ring) {
  // Waits, or it would get round the ring before the others.
  // mutants: few-skipped-blocks
  ptx::mbarrier_wait_parity(barriers.k_full(ring.stage()), ring.parity());  // of a skipped block
  release(barriers.k_empty(ring.stage()));
  // mutants: few-skipped-blocks
  ptx::mbarrier_wait_parity(barriers.v_full(ring.stage()), ring.parity());  // of a skipped block
  release(barriers.v_empty(ring.stage()));
  ++ring.count;
}

template <class C>
__device__ __forceinline__ void consume(const Params& params, unsigned char* shared,
                                        uint32_t shared_smem) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  static_assert(C::PLACE_IN_REGISTERS || sizeof(PlaceOf<C>) <= C::PLACE_BYTES);
  PlaceOf<C> own_place;
  PlaceOf<C>& place = C::PLACE_IN_REGISTERS
                          ? own_place
                          : *reinterpret_cast<PlaceOf<C>*>(shared + C::PLACE_SMEM +
                                                           threadIdx.x / 32 * C::PLACE_BYTES);
  RingPosition<C> ring;
  uint32_t q_parity = 0;

  for (math::TileIndex index; index.more(params.tiles); ++index.round) {
    {
      math::write_rows_of_no_sequence<C::BLOCK_Q>(attention, static_cast<int>(index.value()),
                                                  threadIdx.x, C::CONSUMER_THREADS);
      const math::Work work = math::find_tile<C::BLOCK_Q>(attention, params.tiles, index);
      if (work.first_row < 0) continue;
      const math::VisibleKeys visible = math::find_visible_keys(attention, work);
      // In shared memory one lane writes it for all: since release() none reads the last tile's.
      if (C::PLACE_IN_REGISTERS || threadIdx.x % 32 == 0) {
        static_cast<Place&>(place) = find_place<C>(attention, work, visible, threadIdx.x / 32);
        if constexpr (C::FP8) {
          place.of_keys = math::find_key_descales(params.descales, attention, work);
          place.of_warp = math::find_warp_descale(
              params.descales, attention, work,
              work.first_row + static_cast<int>(threadIdx.x / 32) * C::WARP_ROWS);
        }
        place.round = index.round;
        place.q_parity = q_parity;
        place.large_bases = 0;
      }
      if constexpr (!C::PLACE_IN_REGISTERS) __syncwarp();  // it is written before any lane reads it
    }
    mma_sync::QFragments<C> q_rmem;
    math::Outputs<C> o_rmem = {};
    math::RowState<C, std::conditional_t<C::PLACE_IN_REGISTERS, bool, WarpFlag>> state;
    if constexpr (C::PLACE_IN_REGISTERS) {
      state.large = false;
    } else {
      state.large.flag_smem = &place.large_bases;
    }
    math::clear(state);
    ptx::mbarrier_wait_parity(barriers.q_full(), q_parity);              // Q has landed
    if (C::Q_IN_REGISTERS && place.blocks.first <= place.blocks.last) {  // else there is no Q
      const uint32_t q_smem = lane_q_smem<C>(shared_smem);
#pragma unroll
      for (int column = 0; column < QTile::COLUMNS; column += 16)
        mma_sync::load_q<C>(q_rmem[column / 16], q_smem, column);
    }

    int block = place.blocks.last;
#pragma unroll 1
    for (; block >= place.blocks.first && block > place.seen_last; block -= C::BLOCK_K)
      skip_block<C>(barriers, ring);
#pragma unroll 1
    for (; block >= place.seen_first; block -= C::BLOCK_K) {
      math::Scores<C> s_rmem;
      ptx::mbarrier_wait_parity(barriers.k_full(ring.stage()), ring.parity());  // K has landed
      mma_sync::multiply_qk<C>(s_rmem, q_rmem, lane_q_smem<C>(shared_smem),
                               lane_k_smem<C>(shared_smem, ring.stage()));
      release(barriers.k_empty(ring.stage()));
      float exp2_scale = attention.exp2_scale;
      if constexpr (C::FP8) {
        exp2_scale =
            math::descale_scores<C>(s_rmem, attention, place.of_keys, place.of_warp, block);
      } else if (attention.transform_scores) {
        math::transform_scores<C>(s_rmem, attention.tanh_scale, attention.softcap);
      }
      if (block < place.clear_first || block > place.clear_last) {
        const unsigned thread = thread_index<C>();
        const int first_row = place.work.first_row + thread / 32 * C::WARP_ROWS;
        math::mask_scores<C>(s_rmem, place.visible, first_row + thread % 32 / 4,
                             block + thread % 4 * 2);
      }
      bool v_is_zero = false;
      if constexpr (C::FP8) {
        if (place.of_keys.v_gmem != nullptr) {
          math::change_unit<C>(o_rmem, place.of_keys, place.of_warp, block, place.blocks.last);
          v_is_zero = place.of_keys.v(block) == 0.0f;
        }
      }
      exp2_scale = math::follow_maxima<C, Weights<C>>(s_rmem, state, o_rmem, exp2_scale, nullptr);
      ptx::mbarrier_wait_parity(barriers.v_full(ring.stage()), ring.parity());  // V has landed
      const uint32_t v_smem = lane_v_smem<C>(shared_smem, ring.stage());
      if (block > place.ragged_after || v_is_zero) {
        weigh_and_multiply_pv<C, true>(o_rmem, s_rmem, state, exp2_scale, v_smem,
                                       ptx::mov_tid_x_volatile() % 4 * 2,
                                       v_is_zero ? 0 : place.work.nk - block);
      } else {
        weigh_and_multiply_pv<C, false>(o_rmem, s_rmem, state, exp2_scale, v_smem, 0, 0);
      }
      release(barriers.v_empty(ring.stage()));
      ++ring.count;
    }
#pragma unroll 1
    for (; block >= place.blocks.first; block -= C::BLOCK_K) skip_block<C>(barriers, ring);

    const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
    if constexpr (C::FP8) {
      __syncwarp();  // a lane wrote the last unit
      math::store_fp8_out<C>(o_rmem, state, attention, params.out_dtype, place.work, warp_row,
                             place.of_warp.v);
    } else {
      math::store_out<C, QTile>(o_rmem, state, attention, place.work, warp_row,
                                shared + C::Q_SMEM + warp_row * QTile::ROW_BYTES);
    }
    // This thread's rows in Q's part are written and read: the copy engine may write there next.
    ptx::fence_proxy_async_shared();
    index.round = place.round;  // read again: no register holds them during the loops above
    q_parity = place.q_parity ^ 1;
    release(barriers.q_empty());
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared[];  // where a swizzle pattern starts
  const uint32_t shared_smem =
      ptx::mov_b32_volatile(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  if (threadIdx.x == 0) {
    const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
    // Full: one arrival, of the producer, which says how many bytes come. Empty: each consumer
    // warp.
    ptx::mbarrier_init(barriers.q_full(), 1);
    ptx::mbarrier_init(barriers.q_empty(), C::WARPS);
    for (int stage = 0; stage < C::STAGES; ++stage) {
      ptx::mbarrier_init(barriers.k_full(stage), 1);
      ptx::mbarrier_init(barriers.k_empty(stage), C::WARPS);
      ptx::mbarrier_init(barriers.v_full(stage), 1);
      ptx::mbarrier_init(barriers.v_empty(stage), C::WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are ready before anyone uses them

  if (threadIdx.x < C::CONSUMER_THREADS) {
    if constexpr (C::REGISTERS == Registers::Roles) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume<C>(params, shared, shared_smem);
  } else {
    if constexpr (C::REGISTERS == Registers::Roles) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) produce<C>(params, shared_smem);
  }
}

}  // namespace archflash::blackwell_consumer

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory,
// where the copy engine reads the tensor maps.
#define ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(NAME, CONFIG)                            \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::blackwell_consumer::Params params) {   \
    archflash::blackwell_consumer::attention_fwd<CONFIG>(params);                    \
  }
