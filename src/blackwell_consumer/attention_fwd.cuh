// Attention forward on TMA, mbarriers and mma.sync, for compute capability 12.x (and 9.0): fp16,
// bf16 or e4m3 inputs, fp32 scores, sums and output accumulators.
//
// The CTAs share out row tiles (BLOCK_Q query rows of a head, the longest first). For each tile a
// CTA visits the visible blocks of keys from the last one, which may be ragged, back to the first,
// with an online softmax.
//
// clang-format off
//                      each block of K        each block of V             Q of each tile
//
//   producer, 1 warp   wait k_empty           wait v_empty                wait q_empty
//                      load K                 load V                      load Q
//                        | k_full               | v_full                    | q_full
//                        v                      v                           v
//   consumers,         wait k_full            wait v_full                 wait q_full
//   WARPS warps        S = Q K^T              P = 2^(S * scale - base)    Q_IN_REGISTERS: read Q
//                      mask S, raise bases    O += P V                    last: output rows through
//                        | k_empty              | v_empty                   | q_empty   Q's part
//                        v                      v                           v
//   producer           next K of the stage    next V of the stage         Q of the next tile
// clang-format on
//
// A consumer warp owns WARP_ROWS rows: their scores, P and outputs never leave its registers, and
// no consumer warp waits for another one. Blocks that need no care have a loop of their own
// (visit_plain_blocks).
//
// The tiles, stages and the memory plan are in config.cuh, the barriers and the hazards that they
// close in tile.cuh, the choice among the kernels in plan.cpp, budgets and measurements in
// NOTES.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/params.h"
#include "blackwell_consumer/tile.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/descales.cuh"
#include "common/device/equal_tiles.cuh"
#include "common/device/f32_out.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/fp8_softmax.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/ring.cuh"
#include "common/device/slab_load.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_consumer {

using device::release;

// The rules by which a row's base follows its maximum.
template <class C>
using Weights = std::conditional_t<C::FP8, device::WeightsE4m3, device::Weights16>;

// The row tile of an index, or in kernels that can split a tile's share of the keys.
template <class C>
__device__ __forceinline__ device::Work find_tile(const Params& params,
                                                  const device::TileIndex& index) {
  if constexpr (C::CAN_SPLIT) {
    return device::find_tile(params.attention, params.tiles, index, params.partials.splits,
                             params.packed_heads.rows(), params.packed_heads.count);
  } else {
    if (params.attention.cu_seqlens_q_gmem != nullptr)
      return device::find_tile<C::BLOCK_Q>(params.attention, params.tiles, index);
    device::Work none{};
    none.first_row = -1;
    if (index.value() >= static_cast<unsigned>(params.tiles)) return none;  // as in find_tile()
    return device::find_equal_work(params.attention, params.divisors,
                                   static_cast<int>(index.value()), C::BLOCK_Q);
  }
}
template <class C>
__device__ __forceinline__ device::Blocks find_blocks(const Params& params,
                                                      const device::TileIndex& index,
                                                      const device::Work& work,
                                                      const device::VisibleKeys& visible) {
  if constexpr (C::CAN_SPLIT) {
    const device::Blocks blocks =
        device::find_blocks<C::BLOCK_K>(work, visible, params.packed_heads.rows());
    return device::blocks_of_share<C::BLOCK_K>(
        blocks, params.partials, static_cast<int>(index.value()) % params.partials.splits);
  } else {
    return device::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, visible);
  }
}

// --- producer, one warp: K, V and Q -> shared memory ---

template <class C>
__device__ __forceinline__ void produce(const Params& params, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  RingPosition<C> ring;  // only the elected lane's advances
  uint32_t q_parity = 0;
  for (device::TileIndex index; index.more(params.tiles); ++index.round) {
    const device::Work work = find_tile<C>(params, index);
    if (work.first_row < 0) continue;
    const device::Blocks blocks =
        find_blocks<C>(params, index, work, device::find_visible_keys(attention, work));
    if (ptx::elect_sync()) {
      const int batch = params.divisors.heads_of_sequence.quotient(work.batch_head);
      const int head = work.batch_head - batch * attention.heads_q;
      const int kv_head = params.divisors.heads_of_kv.quotient(head);
      const int keys_start =
          device::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk);
      const auto load_k = [&](int block) {
        // Every consumer warp has read the K that the stage held, before TMA overwrites it.
        ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage()), ring.parity() ^ 1);
        device::start_load<typename C::KTile, C::QK_PACK>(
            shared_smem + C::K_SMEM + ring.stage() * C::KTile::BYTES, params.k_map,
            keys_start + block, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : batch, barriers.k_full(ring.stage()));
      };
      const auto load_v = [&](int block) {
        // Every consumer warp has read the V that the stage held, before TMA overwrites it.
        ptx::mbarrier_wait_parity(barriers.v_empty(ring.stage()), ring.parity() ^ 1);
        device::start_load<typename C::VTile, C::V_PACK>(
            shared_smem + C::V_SMEM + ring.stage() * C::VTile::BYTES, params.v_map,
            keys_start + block, attention.v_head == 0 ? 0 : kv_head,
            attention.v_batch == 0 ? 0 : batch, barriers.v_full(ring.stage()));
        ++ring.count;
      };
      // The first K comes before Q: the rings are free while the previous tile's output still
      // passes through Q's part. The first V, which is needed last, comes after Q.
      if (blocks.first <= blocks.last) load_k(blocks.last);
      // Every consumer warp's output rows have left Q's part, before TMA overwrites it.
      ptx::mbarrier_wait_parity(barriers.q_empty(), q_parity ^ 1);
      if (blocks.first <= blocks.last) {
        const int q_start =
            device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
        device::start_load<typename C::QTile, C::QK_PACK>(
            shared_smem + C::Q_SMEM, params.q_map, q_start + work.first_row,
            attention.q_head == 0 ? 0 : head, attention.q_batch == 0 ? 0 : batch,
            barriers.q_full());
        // mutants: v-came-back-before-q (tests/sim/tags.py)
        load_v(blocks.last);
      } else {
        // A tile without keys needs no Q. The consumers wait for q_full in every tile.
        ptx::mbarrier_arrive(barriers.q_full());
      }
      for (int block = blocks.last - C::BLOCK_K; block >= blocks.first; block -= C::BLOCK_K) {
        load_k(block);
        load_v(block);
      }
    }
    // mutants: search-waits-for-warp
    __syncwarp();  // the elected lane is here before the whole warp searches the next tile
    q_parity ^= 1;
  }
}

// --- consumers, WARPS warps: S, P, O and the output rows ---

// What a warp needs to know of its tile. Outputs and scores leave few registers, so most kernels
// keep it in shared memory and read it where it is needed. A block is named by its first key. Where
// a range of blocks is empty, its last block is before its first.
struct WarpContext {
  unsigned round;               // of the walk over the tiles
  uint32_t q_parity;            // of the phase of q_full that brings this tile's Q
  uint32_t large_bases;         // the value of RowState::large, if that is a WarpFlag
  device::Blocks blocks;        // the CTA visits these
  int seen_first, seen_last;    // some row of the warp sees some key of these blocks
  int clear_first, clear_last;  // every row of the warp sees every key of these blocks
  device::Work work;
  device::VisibleKeys visible;  // its nk is the end of what any row of the sequence sees
};

struct Fp8WarpContext : WarpContext {
  device::KeyDescales key_descales;
  device::WarpDescale warp_descale;
};
struct ScaledWarpContext : WarpContext {
  KeyScales key_scales;
};
template <class C>
using WarpContextOf = std::conditional_t<C::BLOCK_SCALES, ScaledWarpContext,
                                         std::conditional_t<C::FP8, Fp8WarpContext, WarpContext>>;
__device__ __forceinline__ float unit_of_outputs(const ScaledWarpContext&) { return 1.0f; }
__device__ __forceinline__ const float& unit_of_outputs(const Fp8WarpContext& context) {
  return context.warp_descale.v;
}
template <class C>
constexpr bool HAS_DESCALES = C::FP8 && !C::BLOCK_SCALES;

// A flag in shared memory that all lanes of a warp set and read together.
struct WarpFlag {
  uint32_t* flag_smem;

  __device__ __forceinline__ operator bool() const { return *flag_smem != 0; }
  __device__ __forceinline__ void operator=(bool value) {
    // mutants: flag-was-read
    __syncwarp();  // every lane has read the old value before it is overwritten
    if (threadIdx.x % 32 == 0) *flag_smem = value;
    __syncwarp();  // the new value is written before any lane reads it
  }
};

template <class C>
__device__ __forceinline__ WarpContext make_warp_context(const Params& params,
                                                         const device::TileIndex& index,
                                                         const device::Work& work,
                                                         const device::VisibleKeys& visible,
                                                         int warp) {
  const int warp_row = warp * C::WARP_ROWS;
  int first_row = work.first_row + warp_row, rows = C::WARP_ROWS;
  if constexpr (C::CAN_SPLIT) {  // the same rows of each of the warp's heads
    const device::PackedHeads& packed = params.packed_heads;
    first_row = work.first_row + packed.row(warp_row);
    rows = packed.head(warp_row) < packed.count ? min(C::WARP_ROWS, packed.rows()) : 0;
  }
  const int last_row = min(first_row + rows, work.nq) - 1;
  WarpContext context;
  context.blocks = find_blocks<C>(params, index, work, visible);
  context.seen_first =
      max(device::block_start<C::BLOCK_K>(visible.first(first_row)), context.blocks.first);
  context.seen_last = last_row < first_row ? -1 : visible.last(last_row);
  if (context.seen_last < context.seen_first) context.seen_first = INT32_MAX;
  context.clear_first = max(visible.first(last_row), context.seen_first);
  context.clear_last = visible.last(first_row) - (C::BLOCK_K - 1);
  context.work = work;
  context.visible = visible;
  context.visible.nk = visible.end(work.nq);
  return context;
}

// Writes the rows of no sequence, unless the combining kernel does.
template <class C, int ELEMENT_BYTES>
__device__ __forceinline__ void write_rows_of_no_sequence_as(const Params& params, int index) {
  if constexpr (C::CAN_SPLIT) {
    const device::PackedHeads& packed = params.packed_heads;
    for (int head = 0; !params.partials.wanted() && head < packed.count; ++head) {
      device::write_rows_of_no_sequence<ELEMENT_BYTES>(params.attention, index, threadIdx.x,
                                                       C::CONSUMER_THREADS, packed.rows(),
                                                       packed.count, head);
    }
  } else {
    device::write_rows_of_no_sequence<C::BLOCK_Q, ELEMENT_BYTES>(params.attention, index,
                                                                 threadIdx.x, C::CONSUMER_THREADS);
  }
}
template <class C>
__device__ __forceinline__ void write_rows_of_no_sequence(const Params& params, int index) {
  if (!C::FP8 && params.out_dtype == DType::F32)
    return write_rows_of_no_sequence_as<C, 4>(params, index);
  write_rows_of_no_sequence_as<C, 2>(params, index);
}

// Hands a stage back that the warp has read by ldmatrix. The fence makes the reads come before
// TMA's next write: without it ptxas puts the arrival before the products that use what was read,
// and so before the last reads are known to be done.
__device__ __forceinline__ void release_after_reads(uint32_t barrier_smem) {
  ptx::fence_proxy_async_shared();
  release(barrier_smem);
}

// The thread's number. Kernels with few registers read it anew at each use instead of keeping it.
template <class C>
__device__ __forceinline__ unsigned thread_index() {
  if constexpr (C::CONTEXT_IN_REGISTERS) return threadIdx.x;
  return ptx::mov_tid_x_volatile();
}

// The shared-memory addresses of the rows that this lane names to ldmatrix, in Q and in a stage of
// K or V.
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

// Passes by a block that is masked for all rows of this warp; other warps may see it. The warp
// still waits for the block: otherwise it could lap the ring and hand back a stage a phase too
// early.
template <class C>
__device__ __forceinline__ void skip_block(const Barriers<C>& barriers, RingPosition<C>& ring) {
  // mutants: few-skipped-blocks
  ptx::mbarrier_wait_parity(barriers.k_full(ring.stage()), ring.parity());
  release(barriers.k_empty(ring.stage()));
  // mutants: few-skipped-blocks
  ptx::mbarrier_wait_parity(barriers.v_full(ring.stage()), ring.parity());
  release(barriers.v_empty(ring.stage()));
  ++ring.count;
}

// Masks a warp's scores of a block.
template <class C>
__device__ __forceinline__ void mask_block(device::Scores<C>& s_rmem, const Params& params,
                                           const WarpContextOf<C>& context, int block) {
  const unsigned thread = thread_index<C>();
  const int first_key = block + thread % 4 * 2;
  if constexpr (C::CAN_SPLIT) {
    const int row_of_tile = thread / 32 * C::WARP_ROWS + thread % 32 / 4;
    const device::PackedHeads& packed = params.packed_heads;
    const int first_row = context.work.first_row;
    const int lane_rows[2] = {first_row + packed.row(row_of_tile),
                              first_row + packed.row(row_of_tile + 8)};
    device::mask_rows<C>(s_rmem, context.visible, lane_rows, first_key);
  } else {
    const int first_row = context.work.first_row + thread / 32 * C::WARP_ROWS;
    device::mask_scores<C>(s_rmem, context.visible, first_row + thread % 32 / 4, first_key);
  }
}

// Waits until the next block's K has landed.
template <class C>
__device__ __forceinline__ void wait_for_k(const Barriers<C>& barriers,
                                           const RingPosition<C>& ring) {
  ptx::mbarrier_wait_parity(barriers.k_full(ring.stage()), ring.parity());
}

// S = Q K^T of a block whose K has landed. K goes back, unless it goes back behind the maxima.
template <class C>
__device__ __forceinline__ void multiply_qk(device::Scores<C>& s_rmem, const Barriers<C>& barriers,
                                            const RingPosition<C>& ring,
                                            const mma_sync::QFragments<C>& q_rmem,
                                            uint32_t shared_smem, const ScalesOf<C>& scales) {
  const uint32_t q_smem = lane_q_smem<C>(shared_smem);
  const uint32_t k_smem = lane_k_smem<C>(shared_smem, ring.stage());
  if constexpr (C::BLOCK_SCALES) {
    multiply_scaled_qk<C>(s_rmem, q_rmem, q_smem, k_smem, scales);
  } else {
    mma_sync::multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
  }
  if constexpr (!C::RELEASES_K_LATE) release_after_reads(barriers.k_empty(ring.stage()));
}

// What comes between the maxima of a block and the use of its V: K goes back, unless it has gone
// back, and V has landed.
template <class C>
__device__ __forceinline__ void wait_for_v(const Barriers<C>& barriers,
                                           const RingPosition<C>& ring) {
  if constexpr (C::RELEASES_K_LATE) release_after_reads(barriers.k_empty(ring.stage()));
  ptx::mbarrier_wait_parity(barriers.v_full(ring.stage()), ring.parity());
}

// In place of device::RaiseLimits where update_row_max() finds them itself.
struct NoLimits {
  template <class State>
  __device__ __forceinline__ explicit NoLimits(const State&) {}
};

// One block of keys, of which this warp sees some: S = Q K^T, masks, P and O += P V.
template <class C, class State>
__device__ __forceinline__ void visit_block(const Params& params, const Barriers<C>& barriers,
                                            RingPosition<C>& ring, WarpContextOf<C>& context,
                                            State& state, device::Outputs<C>& o_rmem,
                                            const mma_sync::QFragments<C>& q_rmem,
                                            ScalesOf<C>& scales, int block, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  device::Scores<C> s_rmem;
  if constexpr (C::BLOCK_SCALES) {
    scales.read_v(context.key_scales, attention, block, context.visible.begin(),
                  context.visible.nk);
  }
  wait_for_k<C>(barriers, ring);
  const std::conditional_t<C::HAS_PLAIN_LOOP, device::RaiseLimits<C>, NoLimits> limits(state);
  multiply_qk<C>(s_rmem, barriers, ring, q_rmem, shared_smem, scales);
  if constexpr (C::BLOCK_SCALES)  // of the next block, so that they are there in time
    scales.read_k(context.key_scales, attention, max(block - C::BLOCK_K, 0));
  float exp2_scale = attention.exp2_scale;
  if constexpr (HAS_DESCALES<C>) {
    exp2_scale = device::descale_scores<C>(s_rmem, attention, context.key_descales,
                                           context.warp_descale, block);
  } else if (attention.transform_scores) {
    device::transform_scores<C>(s_rmem, attention.rule);
  }
  if (block < context.clear_first || block > context.clear_last)
    mask_block<C>(s_rmem, params, context, block);
  bool v_is_zero = false;
  if constexpr (HAS_DESCALES<C>) {
    if (context.key_descales.v_gmem != nullptr) {
      device::change_unit<C>(o_rmem, context.key_descales, context.warp_descale, block,
                             context.blocks.last);
      v_is_zero = context.key_descales.v(block) == 0.0f;
    }
  }
  const device::RaiseLimits<C>* known_limits = nullptr;
  if constexpr (C::HAS_PLAIN_LOOP) known_limits = &limits;
  exp2_scale =
      device::update_row_max<C, Weights<C>>(s_rmem, state, o_rmem, exp2_scale, known_limits);
  wait_for_v<C>(barriers, ring);
  const uint32_t v_smem = lane_v_smem<C>(shared_smem, ring.stage());
  const bool lacks_rows =  // of V
      block < context.visible.begin() || block + C::BLOCK_K > context.visible.nk;
  if (lacks_rows || v_is_zero) {
    const int begin = context.visible.begin();
    exponentiate_and_multiply_pv<C, true>(
        o_rmem, s_rmem, state, exp2_scale, v_smem,
        static_cast<int>(ptx::mov_tid_x_volatile() % 4 * 2) + block - begin,
        v_is_zero ? 0 : context.visible.nk - begin, scales);
  } else {
    exponentiate_and_multiply_pv<C, false>(o_rmem, s_rmem, state, exp2_scale, v_smem, 0, 0, scales);
  }
  release_after_reads(barriers.v_empty(ring.stage()));
  ++ring.count;
}

// --- plain blocks: every row of the warp sees every key, every row of V counts,
// and neither scores nor bases need care. Such a block has one branch. ---

// Copies the bases and sums of a state whose flag is of another kind.
template <class C, class To, class From>
__device__ __forceinline__ void copy_rows(To& to, const From& from) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to.base[m][r] = from.base[m][r];
      to.sum[m][r] = from.sum[m][r];
    }
  }
}

// Raises the bases of a warp's rows if the scores of a plain block require it. Returns the scale
// for exponentiate_and_multiply_pv(). `limits` are those of `state`. If a base becomes large,
// `first` becomes INT32_MAX: no block behind this one is plain.
template <class C, class State>
__device__ __forceinline__ float follow_plain_maxima(device::Scores<C>& s_rmem, State& state,
                                                     device::Outputs<C>& o_rmem, float exp2_scale,
                                                     const device::RaiseLimits<C>& limits,
                                                     int& first) {
  float lane_max[C::M_TILES][2];
  device::find_lane_maxima<C, Weights<C>>(s_rmem, lane_max);
  if (!device::any_exceeds<C>(lane_max, exp2_scale, 0.0f, limits.rmem)) return exp2_scale;
  device::RowState<C> raised;  // its flag is in a register; that of `state` may be in shared memory
  copy_rows<C>(raised, state);
  device::raise_bases<C, Weights<C>>(lane_max, raised, o_rmem, exp2_scale,
                                     [](int, int) { return true; });
  copy_rows<C>(state, raised);
  if (!raised.large) return exp2_scale;
  // mutants: flag-is-read-later
  state.large = true;
  first = INT32_MAX;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)  // the reason is in device::update_row_max()
        s_rmem[m][n][i] = __fmul_rn(s_rmem[m][n][i], exp2_scale);
    }
  }
  return 1.0f;
}

// visit_block() for the blocks from `block` down to `first`, all of them plain. It stops early if a
// base becomes large. `block` is then the next one to visit.
template <class C, class State>
__device__ __forceinline__ void visit_plain_blocks(const Params& params,
                                                   const Barriers<C>& barriers,
                                                   RingPosition<C>& ring, State& state,
                                                   device::Outputs<C>& o_rmem,
                                                   const mma_sync::QFragments<C>& q_rmem,
                                                   int& block, int first, uint32_t shared_smem) {
  if constexpr (C::WAITS_AHEAD) wait_for_k<C>(barriers, ring);
#pragma unroll 1
  do {
    device::Scores<C> s_rmem;
    if constexpr (!C::WAITS_AHEAD) wait_for_k<C>(barriers, ring);
    const device::RaiseLimits<C> limits(state);
    multiply_qk<C>(s_rmem, barriers, ring, q_rmem, shared_smem, {});
    const float scale =
        follow_plain_maxima<C>(s_rmem, state, o_rmem, params.attention.exp2_scale, limits, first);
    wait_for_v<C>(barriers, ring);
    exponentiate_and_multiply_pv<C, false>(o_rmem, s_rmem, state, scale,
                                           lane_v_smem<C>(shared_smem, ring.stage()), 0, 0, {});
    const uint32_t stage = ring.stage();
    ++ring.count;
    block -= C::BLOCK_K;
    if constexpr (C::WAITS_AHEAD) {
      // The producer starts K of a block before it waits for the stage of V that this warp holds.
      if (block >= first) wait_for_k<C>(barriers, ring);
    }
    release_after_reads(barriers.v_empty(stage));
  } while (block >= first);
}

template <class C>
__device__ __forceinline__ void consume(const Params& params, unsigned char* shared,
                                        uint32_t shared_smem) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  using Context = WarpContextOf<C>;
  static_assert(C::CONTEXT_IN_REGISTERS || sizeof(Context) <= C::CONTEXT_BYTES);
  Context in_registers;
  Context& context = C::CONTEXT_IN_REGISTERS
                         ? in_registers
                         : *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM +
                                                       threadIdx.x / 32 * C::CONTEXT_BYTES);
  RingPosition<C> ring;
  uint32_t q_parity = 0;

  for (device::TileIndex index; index.more(params.tiles); ++index.round) {
    {  // The tile's context.
      write_rows_of_no_sequence<C>(params, static_cast<int>(index.value()));
      const device::Work work = find_tile<C>(params, index);
      if (work.first_row < 0) continue;
      const device::VisibleKeys visible = device::find_visible_keys(attention, work);
      // In shared memory one lane writes the context for its warp. All lanes have read the previous
      // tile's context: release(), at the end of that tile, has synchronised them.
      if (C::CONTEXT_IN_REGISTERS || threadIdx.x % 32 == 0) {
        static_cast<WarpContext&>(context) =
            make_warp_context<C>(params, index, work, visible, threadIdx.x / 32);
        if constexpr (C::BLOCK_SCALES)
          context.key_scales = find_key_scales(params.descales, attention, work);
        if constexpr (HAS_DESCALES<C>) {
          context.key_descales = device::find_key_descales(params.descales, attention, work);
          context.warp_descale = device::find_warp_descale(
              params.descales, attention, work,
              work.first_row + static_cast<int>(threadIdx.x / 32) * C::WARP_ROWS);
        }
        context.round = index.round;
        context.q_parity = q_parity;
        context.large_bases = 0;
      }
      // The context is written before any lane reads it.
      if constexpr (!C::CONTEXT_IN_REGISTERS) __syncwarp();
    }
    mma_sync::QFragments<C> q_rmem;
    device::Outputs<C> o_rmem = {};
    device::RowState<C, std::conditional_t<C::CONTEXT_IN_REGISTERS, bool, WarpFlag>> state;
    if constexpr (C::CONTEXT_IN_REGISTERS) {
      state.large = false;
    } else {
      state.large.flag_smem = &context.large_bases;
    }
    device::clear(state);
    ptx::mbarrier_wait_parity(barriers.q_full(), q_parity);  // Q has landed
    const bool any_block = context.blocks.first <= context.blocks.last;
    if (C::Q_IN_REGISTERS && any_block) {
      const uint32_t q_smem = lane_q_smem<C>(shared_smem);
#pragma unroll
      for (int column = 0; column < QTile::COLUMNS; column += 16)
        mma_sync::load_q<C>(q_rmem[column / 16], q_smem, column);
    }

    ScalesOf<C> scales;
    if constexpr (C::BLOCK_SCALES) {
      scales.read_q(params.descales, attention, context.work,
                    static_cast<int>(threadIdx.x / 32) * C::WARP_ROWS);
      if (context.seen_last >= context.seen_first) {
        scales.read_k(context.key_scales, attention,
                      min(device::block_start<C::BLOCK_K>(context.seen_last), context.blocks.last));
      }
    }

    // The blocks, from the last to the first: those after the last one that this warp sees, those
    // that it sees, and those before.
    int block = context.blocks.last;
#pragma unroll 1
    for (; block >= context.blocks.first && block > context.seen_last; block -= C::BLOCK_K)
      skip_block<C>(barriers, ring);
#pragma unroll 1
    while (block >= context.seen_first) {
      if constexpr (C::HAS_PLAIN_LOOP) {
        if (block >= context.clear_first && block <= context.clear_last &&
            !attention.transform_scores && !state.large) {
          const int first = context.clear_first;
          visit_plain_blocks<C>(params, barriers, ring, state, o_rmem, q_rmem, block, first,
                                shared_smem);
          continue;
        }
      }
      visit_block<C>(params, barriers, ring, context, state, o_rmem, q_rmem, scales, block,
                     shared_smem);
      block -= C::BLOCK_K;
    }
#pragma unroll 1
    for (; block >= context.blocks.first; block -= C::BLOCK_K) skip_block<C>(barriers, ring);

    const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
    bool stored = false;
    if constexpr (C::CAN_SPLIT) {
      const Partials& partials = params.partials;
      index.round = context.round;
      if (partials.wanted()) {
        device::store_partials<C>(o_rmem, state, attention, partials, params.packed_heads,
                                  context.work, static_cast<int>(index.value()) % partials.splits,
                                  warp_row);
        stored = true;
      } else if (params.packed_heads.count > 1) {
        device::store_packed_out<C>(o_rmem, state, attention, params.packed_heads, context.work,
                                    warp_row);
        stored = true;
      }
    }
    if constexpr (C::FP8) {
      __syncwarp();  // lane 0 has written warp_descale.v (change_unit) before any lane reads it
      device::store_fp8_out<C>(o_rmem, state, attention, params.out_dtype, context.work, warp_row,
                               unit_of_outputs(context));
    } else if (!stored && params.out_dtype == DType::F32) {
      device::store_f32_out<C>(o_rmem, state, attention, context.work, warp_row);
    } else if (!stored) {
      device::store_out<C, QTile>(o_rmem, state, attention, context.work, warp_row,
                                  shared + C::Q_SMEM + warp_row * QTile::ROW_BYTES);
    }
    // This thread's reads and writes of output rows in Q's part come before TMA's next write there.
    ptx::fence_proxy_async_shared();
    // Both come from the context, so that no register holds them during the loops above.
    index.round = context.round;
    q_parity = context.q_parity ^ 1;
    release(barriers.q_empty());
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  // Opaque to the compiler, which otherwise computes the address anew at each use.
  const uint32_t shared_smem =
      ptx::mov_b32_volatile(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  if (threadIdx.x == 0) Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise();
  __syncthreads();  // the barriers are initialised before any warp uses them

  if (threadIdx.x < C::CONSUMER_THREADS) {
    if constexpr (C::REGISTERS == Registers::Roles) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume<C>(params, shared, shared_smem);
  } else {
    if constexpr (C::REGISTERS == Registers::Roles) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) produce<C>(params, shared_smem);
  }
}

}  // namespace archflash::blackwell_consumer
