// Attention backward on mma.sync tensor cores in one kernel: 5 products of queries and keys.
//
// A CTA owns keys; blocks of queries pass by. SPLIT warps share the same keys:
//
//   wait block | barrier | dQ of the block before | S^T = K Q^T | start next block | dP^T = V dO^T
//   | P, dS | dV += P^T dO   dK += dS^T Q of the warp's own queries | barrier of the SPLIT warps |
//   the same of the other queries
//
//   scores   a warp has its keys and a share of the block's queries
//   dV, dK   a warp has its keys and a share of the columns. Its own P and dS are the first operand
//            as they lie in registers; those of the other queries come through shared memory
//   dQ       dS K of all keys of the CTA: a warp has a share of the block's rows and columns. It is
//            one block late, so that one barrier of the CTA serves a block
//
// dQ is added to sums in fp32 (DqSums), which another kernel scales and converts;
// device/dq_turns.cuh says in which order.
//
// An SM may have one of these CTAs at a time, so nothing hides its start: each thread finds out by
// itself where its copies lie, and S of the first block needs no V and dO.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_sums.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/dq_turns.cuh"
#include "common/device/kept_weights.cuh"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/dropout_bwd.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"
#include "common/mma_sync/key_tiles.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/bulk_order.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::mma_sync {

// The scores of a warp, as the functions of attention_bwd.cuh take them.
template <class C>
struct ScoresOfWarp {
  static constexpr DType DTYPE = C::DTYPE;
  static constexpr Owns OWNS = C::OWNS;
  static constexpr int GRADIENTS = C::GRADIENTS;
  static constexpr int M_TILES = C::M_TILES;
  static constexpr int BLOCK = C::PART;
  static constexpr bool NEEDS_DP = true;
};

// A tile of which every STEP-th pair of chunks (16 columns) counts, from one of the first STEP on.
template <class Tile, int STEP>
struct PairsOfTile : Tile {
  template <typename Address>
  static __device__ __forceinline__ constexpr Address advance(Address offset, int chunks) {
    return Tile::advance(offset, chunks * STEP);
  }
};

template <class C, class Tile, int OUT_COLUMNS>
struct FusedProduct : BackwardProduct<C, Tile, C::PART, OUT_COLUMNS> {
  using VTile = PairsOfTile<Tile, C::PAIR_STEP>;
};

// The first chunk of the columns of share `part` of a gradient of keys.
template <class C, int COLUMNS>
__device__ __forceinline__ int first_chunk(int part) {
  return part * (C::PAIR_STEP > 1 ? 2 : COLUMNS / 8);
}

struct FusedWork : BackwardWork {
  // The sequence's first row of Q, dO and the terms of the first query head.
  const uint16_t* q_gmem;
  const uint16_t* dout_gmem;
  const device::RowTerms* terms_gmem;
  device::DqWalk walk;
};

// Starts the copies of a block of queries into a stage: of Q and the terms, of dO, or of all. Those
// that see no key become zeros.
template <class C, bool QUERIES = true, bool DOUT = true>
__device__ __forceinline__ void start_queries(const BackwardParams& params, const FusedWork& cta,
                                              const Passing& block, uint32_t stage_smem,
                                              uint32_t terms_smem) {
  const AttentionParams& attention = params.attention;
  const uint32_t head = block.head, row = block.row;
  const uint16_t* q_gmem = cta.q_gmem + head * static_cast<uint64_t>(attention.q_head);
  const uint16_t* dout_gmem = cta.dout_gmem + head * static_cast<uint64_t>(params.dout_head);
  const device::RowTerms* terms_gmem =
      cta.terms_gmem + head * static_cast<uint64_t>(attention.lse_head) + row;
  const int begin = cta.passing_begin() - block.row, end = cta.passing_end() - block.row;
  const int thread = ptx::mov_tid_x_volatile();
  if (QUERIES && thread < C::BLOCK) {
    const bool exists = thread < end;
    ptx::cp_async_ca_8(terms_smem + thread * static_cast<int>(sizeof(device::RowTerms)),
                       exists ? terms_gmem + thread : terms_gmem, exists ? 8 : 0);
  }
  const uint32_t second_smem = stage_smem + C::SECOND_OF_STAGE;
  if (begin <= 0 && end >= C::BLOCK) {
    if constexpr (QUERIES) {
      start_load<C, typename C::FirstTile, C::BLOCK>(stage_smem, q_gmem, row, 2 * attention.q_row,
                                                     attention.d);
    }
    if constexpr (DOUT) {
      start_load<C, typename C::SecondTile, C::BLOCK>(second_smem, dout_gmem, row,
                                                      2 * params.dout_row, attention.dv);
    }
  } else {
    if constexpr (QUERIES) {
      start_ragged_load<C, typename C::FirstTile, C::BLOCK>(
          stage_smem, q_gmem + row * attention.q_row, attention.q_row, begin, end, attention.d);
    }
    if constexpr (DOUT) {
      start_ragged_load<C, typename C::SecondTile, C::BLOCK>(
          second_smem, dout_gmem + row * params.dout_row, params.dout_row, begin, end,
          attention.dv);
    }
  }
}

// Writes a warp's P or dS into the tile of the CTA, whose rows are keys.
template <class C>
__device__ __forceinline__ void store_scores(uint32_t tile_smem,
                                             const BlockFragments<ScoresOfWarp<C>>& scores_rmem,
                                             int warp_row, int part, int lane) {
  using Tile = typename C::ScoreTile;
  const uint32_t lane_smem =
      Tile::advance(tile_smem + warp_row * Tile::ROW_BYTES + Tile::offset(lane / 4, 0),
                    part * (C::PART / 8)) +
      lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::PART / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::st_shared_b32(Tile::advance(lane_smem, n) + (16 * m + 8 * r) * Tile::ROW_BYTES,
                           scores_rmem[m][n / 2][n % 2 * 2 + r]);
      }
    }
  }
}

// Adds to a warp's dV or dK the product of its own P or dS, of share `part` of the queries, with
// dO or Q.
template <class C, class Tile, int COLUMNS>
__device__ __forceinline__ void multiply_own(float (&x_rmem)[C::M_TILES][COLUMNS / 8][4],
                                             const BlockFragments<ScoresOfWarp<C>>& scores_rmem,
                                             uint32_t passing_smem, int part, int lane) {
  const uint32_t first_smem =
      Tile::advance(passing_smem + rows_first_offset<Tile>(lane), first_chunk<C, COLUMNS>(part)) +
      part * C::PART * Tile::ROW_BYTES;
  multiply_pv<FusedProduct<C, Tile, COLUMNS>>(x_rmem, scores_rmem, first_smem);
}

// Adds to a warp's dV or dK the products of P or dS of the queries that other warps have, which
// share its keys, with dO or Q. scores_smem: P or dS of the warp's first key.
template <class C, class Tile, int COLUMNS>
__device__ __forceinline__ void multiply_others(float (&x_rmem)[C::M_TILES][COLUMNS / 8][4],
                                                uint32_t scores_smem, uint32_t passing_smem,
                                                int part, int lane) {
  using Scores = typename C::ScoreTile;
  const uint32_t first_smem =
      Tile::advance(passing_smem + rows_first_offset<Tile>(lane), first_chunk<C, COLUMNS>(part));
#pragma unroll
  for (int step = 1; step < C::SPLIT; ++step) {
    const int other = (part + step) % C::SPLIT;
    const uint32_t lane_smem =
        Scores::advance(scores_smem + rows_first_offset<Scores>(lane), other * (C::PART / 8));
#pragma unroll
    for (int query = 0; query < C::PART; query += 16) {
      uint32_t a_rmem[C::M_TILES][4];
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::ldmatrix_x4(a_rmem[m],
                         Scores::advance(lane_smem, query / 8) + m * 16 * Scores::ROW_BYTES);
      }
      multiply_pv_group<FusedProduct<C, Tile, COLUMNS>>(
          x_rmem, [&](int m) -> const uint32_t (&)[4] { return a_rmem[m]; },
          first_smem + other * C::PART * Tile::ROW_BYTES, query, [](uint32_t (&)[4]) {});
    }
  }
}

// Writes the fragments dq_rmem of dQ, from row `row` of a block and column `column` on. Pairs of
// fragments are PAIR_STEP pairs apart.
template <class C, int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void store_dq(const BackwardParams& params, const BackwardWork& cta,
                                         const Passing& block, int row, int column,
                                         const float (&dq_rmem)[ROW_TILES][COLUMN_TILES][4]) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int head = cta.head * params.attention.heads_per_kv + block.head;
  const int first = block.row + row + lane / 4;
  const int64_t start = cta.batch * params.dq.batch + head * params.dq.head +
                        (static_cast<int64_t>(cta.passing_start) + first) * params.dq.row;
  const auto for_each = [&](auto&& put) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (first + 16 * m + 8 * r >= cta.passing_rows) continue;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
          const int at = column + 8 * (n / 2 * 2 * C::DQ_PAIR_STEP + n % 2) + lane % 4 * 2;
          const float* x = &dq_rmem[m][n][2 * r];
          if (at < params.attention.d) {
            put(start + (16 * m + 8 * r) * params.dq.row + at,
                float2{x[0] * params.scale, x[1] * params.scale});
          }
        }
      }
    }
  };
  if (params.dq.dtype == DType::F32 || params.dq.accumulate) {
    for_each(
        [&](int64_t at, float2 x) { device::store_gradient_pair<C::DTYPE>(params.dq, at, x); });
  } else {
    uint16_t* dq_gmem = static_cast<uint16_t*>(params.dq.gmem);
    for_each([&](int64_t at, float2 x) {
      *reinterpret_cast<uint32_t*>(dq_gmem + at) = ptx::cvt_rn_x2_f32<C::DTYPE>(x.x, x.y);
    });
  }
}

// Clears dQ of the rows that see no key, for which no block comes by. By whole CTAs.
template <class C>
__device__ __forceinline__ void clear_unseeing(const BackwardParams& params,
                                               const FusedWork& work) {
  const int blocks = work.walk.template blocks<C::BLOCK>();
  const int begin = blocks > 0 ? work.walk.begin : 0;
  const int end = blocks > 0 ? work.walk.last + C::BLOCK : 0;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < work.passing_rows; row += C::WARPS) {
    if (row >= begin && row < end) {
      row += (end - 1 - row) / C::WARPS * C::WARPS;
      continue;
    }
    for (int head = 0; head < work.heads; ++head) {
      device::clear_gradient_row(params.dq, work.batch, work.head * work.heads + head,
                                 static_cast<int64_t>(work.passing_start) + row, params.attention.d,
                                 lane, 32);
    }
  }
}

// Adds dS K of a block of queries, in fp32, to the sums. Where CTAs take turns, `waits` says
// whether the CTA of the keys before adds to this block, too, and therefore first. The first CTA of
// a block writes the sums.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardParams& params, const BackwardWork& cta,
                                       const Passing& block, uint32_t ds_smem, uint32_t k_smem,
                                       [[maybe_unused]] uint32_t sums_smem, bool waits) {
  using Scores = typename C::ScoreTile;
  using Tile = typename C::FirstTile;
  const int thread = ptx::mov_tid_x_volatile();
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp / C::DQ_COLUMN_WARPS * C::DQ_ROWS;
  const int column = warp % C::DQ_COLUMN_WARPS * (C::DQ_ALTERNATES ? 16 : C::DQ_COLUMNS);
  const int64_t number = dq_block_number<C>(params, cta, block);
  const int turn = cta.first_row / C::ROWS;
  const bool writes = !C::IN_BULK && params.dq_sums.turns_gmem != nullptr && !waits;
  // Read before the products, which hide how long this takes.
  int turns_taken = turn;
  if (!C::IN_BULK && waits) turns_taken = ptx::ld_relaxed_s32(params.dq_sums.turns_gmem + number);
  const uint32_t a_smem = Scores::advance(ds_smem + columns_first_offset<Scores>(lane), row / 8);
  const uint32_t b_smem = Tile::advance(k_smem + rows_first_offset<Tile>(lane), column / 8);
  float* sums_gmem = params.dq_sums.gmem + number * (C::BLOCK * C::HEAD_DIM) +
                     device::dq_fragment<C::HEAD_DIM>(row / 16, column / 8) + lane;
#pragma unroll 1
  for (int step = 0; step < C::DQ_COLUMNS; step += C::DQ_STEP) {
    float dq_rmem[C::DQ_ROWS / 16][C::DQ_STEP / 8][4] = {};
#pragma unroll
    for (int key = 0; key < C::ROWS; key += 16) {
      uint32_t a_rmem[C::DQ_ROWS / 16][4];
#pragma unroll
      for (int m = 0; m < C::DQ_ROWS / 16; ++m) {
        ptx::ldmatrix_x4_trans(a_rmem[m], Scores::advance(a_smem, m * 2) + key * Scores::ROW_BYTES);
      }
#pragma unroll
      for (int n = 0; n < C::DQ_STEP / 8; n += 2) {
        uint32_t b_rmem[4];
        ptx::ldmatrix_x4_trans(
            b_rmem, Tile::advance(b_smem, step / 8 + n * C::DQ_PAIR_STEP) + key * Tile::ROW_BYTES);
#pragma unroll
        for (int m = 0; m < C::DQ_ROWS / 16; ++m) {
          ptx::mma_m16n8k16<C::DTYPE>(dq_rmem[m][n], a_rmem[m], b_rmem[0], b_rmem[1]);
          ptx::mma_m16n8k16<C::DTYPE>(dq_rmem[m][n + 1], a_rmem[m], b_rmem[2], b_rmem[3]);
        }
      }
    }
    // What is added below depends on the value that was read, so it is added after it was read.
    while (!C::IN_BULK && turns_taken < turn) {
      turns_taken = ptx::ld_acquire_s32(params.dq_sums.turns_gmem + number);
    }
    const auto for_each = [&](auto&& put) {
#pragma unroll
      for (int m = 0; m < C::DQ_ROWS / 16; ++m) {
#pragma unroll
        for (int n = 0; n < C::DQ_STEP / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) put(m, n, 32 * i, dq_rmem[m][n][i]);
        }
      }
    };
    // Neighbouring fragments of a warp lie side by side in the sums, too.
    constexpr int NEIGHBOURS = C::DQ_ALTERNATES ? 2 : C::DQ_STEP / 8;
    const auto place = [&](int m, int n) {
      const int tile = step / 8 + n / 2 * 2 * C::DQ_PAIR_STEP + n % 2;
      return sums_gmem + device::dq_fragment<C::HEAD_DIM>(m, tile);
    };
    if constexpr (C::WRITES_DQ) {
      store_dq<C>(params, cta, block, row, column + step, dq_rmem);
    } else if constexpr (C::IN_BULK) {
      constexpr int WARP_FRAGMENTS = C::DQ_ROWS / 16 * (C::DQ_STEP / 8);
      const uint32_t warp_smem = sums_smem + warp * (512 * WARP_FRAGMENTS);
      ptx::cp_async_bulk_wait_group_read_0();  // of the block before
      __syncwarp();
      for_each([&](int m, int n, int i, float x) {
        ptx::st_shared_b32(warp_smem + 512 * (m * (C::DQ_STEP / 8) + n) + 4 * (i + lane),
                           __float_as_uint(x));
      });
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (ptx::elect_sync()) {
#pragma unroll
        for (int n = 0; n < WARP_FRAGMENTS; n += NEIGHBOURS) {
          float* const to_gmem = place(n / (C::DQ_STEP / 8), n % (C::DQ_STEP / 8)) - lane;
          ptx::cp_reduce_async_bulk_add_f32(to_gmem, warp_smem + 512 * n, 512 * NEIGHBOURS);
        }
        ptx::cp_async_bulk_commit_group();
      }
    } else if (writes) {
      for_each([&](int m, int n, int i, float x) { place(m, n)[i] = x; });
    } else {
      for_each([&](int m, int n, int i, float x) { ptx::red_add_f32(place(m, n) + i, x); });
    }
  }
}

// Passes the turn at a block to which all warps of this CTA have added before a barrier that came
// since.
template <class C>
__device__ __forceinline__ void pass_turn(const BackwardParams& params, const BackwardWork& cta,
                                          const Passing& block) {
  if (C::IN_BULK || params.dq_sums.turns_gmem == nullptr) return;
  if (block.head < 0 || threadIdx.x != 0) return;
  device::pass_turn(params.dq_sums, dq_block_number<C>(params, cta, block),
                    cta.first_row / C::ROWS);
}

template <class C>
__device__ __forceinline__ void fused_bwd(const typename C::Params& all_params) {
  using FirstTile = typename C::FirstTile;
  using SecondTile = typename C::SecondTile;
  using ScoreTile = typename C::ScoreTile;
  using Scores = ScoresOfWarp<C>;
  constexpr int FIRST_COLUMNS = C::HEAD_DIM / C::SPLIT;
  constexpr int SECOND_COLUMNS = C::HEAD_DIM_V / C::SPLIT;
  using FirstProduct = FusedProduct<C, FirstTile, FIRST_COLUMNS>;
  using SecondProduct = FusedProduct<C, SecondTile, SECOND_COLUMNS>;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(FusedWork) <= C::CONTEXT_BYTES);
  FusedWork& cta = *reinterpret_cast<FusedWork*>(shared + C::CONTEXT_SMEM);
  const BackwardParams& params = call_of<C>(all_params);
  const AttentionParams& attention = params.attention;
  if constexpr (C::PACKED) {
    const int places = gridDim.y * gridDim.z;
    for (int place = blockIdx.z * gridDim.y + blockIdx.y; place * C::ROWS < attention.nk;
         place += places) {
      device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params, place * gridDim.x + blockIdx.x,
                                                          C::WARPS);
    }
  } else if constexpr (!C::PLAIN) {
    device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params, blockIdx.x, C::WARPS);
  }
  FusedWork own;  // what `cta` will be behind the first barrier of the loop
  const TilePart part_of_tile = part_of_cta(all_params);
  static_cast<BackwardWork&>(own) = find_key_tile<C>(all_params, part_of_tile.tile);
  if constexpr (!C::PLAIN || C::PACKED) {
    if (own.first_row < 0) {
      ptx::griddepcontrol_wait();  // for the launch behind
      if constexpr (C::PACKED && C::WRITES_DQ) {
        own.walk = {1, 0, 1, 0};  // no block
        if (blockIdx.z == 0) clear_unseeing<C>(params, own);
      }
      return;
    }
  }
  {
    const int head = own.head * attention.heads_per_kv;
    const auto rows = device::query_rows<uint16_t>(params, own.batch, head, own.passing_start);
    own.q_gmem = rows.first_gmem;
    own.dout_gmem = rows.second_gmem;
    own.terms_gmem = device::terms_of(params, own.batch, head, own.passing_start);
    own.walk = device::find_dq_walk<C::ROWS, C::BLOCK>(params.dq_sums, own);
    if constexpr (C::WRITES_DQ) {
      if (part_of_tile.index == 0) clear_unseeing<C>(params, own);
    }
    keep_part<C::BLOCK>(own.walk, part_of_tile);
  }
  if (threadIdx.x == 0) cta = own;

  int blocks_left = own.walk.template blocks<C::BLOCK>();
  // The loop has no barrier then.
  if (C::MASKED || blocks_left == 0) __syncthreads();

  // With masks as data: the blocks in the same order, but for those in which no score counts. CTAs
  // that take turns leave none out, because the next one waits for each of them.
  [[maybe_unused]] int number = 0;
  const auto row_of = [&](int of_block) { return own.walk.last - of_block * C::BLOCK; };
  [[maybe_unused]] auto seen_blocks = [&] {
    if constexpr (C::MASKED) {
      const MaskParams& masks = all_params.masks;
      return device::SeenBlocks<C>{masks, cta, attention.heads_per_kv, blocks_left,
                                   (masks.ranges_gmem == nullptr && masks.blocks_gmem == nullptr) ||
                                       params.dq_sums.turns_gmem != nullptr};
    } else {
      return 0;
    }
  }();
  if constexpr (C::MASKED) {
    number = seen_blocks.next(0, row_of);
    blocks_left -= number;
  }

  float dk_rmem[C::M_TILES][FIRST_COLUMNS / 8][4] = {};
  float dv_rmem[C::M_TILES][SECOND_COLUMNS / 8][4] = {};
  if (blocks_left > 0) {
    const int64_t row = static_cast<int64_t>(own.own_start) + own.first_row;
    const auto keys = device::key_rows<uint16_t>(params, own.batch, own.head, row);
    const Passing first{0, row_of(number)};
    start_own_first<C>(attention, keys, own, shared_smem);
    ptx::griddepcontrol_wait();  // the terms are written, and the sums or turns are zero
    start_queries<C, true, false>(params, own, first, shared_smem + C::STAGES_SMEM,
                                  shared_smem + C::TERMS_SMEM);
    ptx::cp_async_commit_group();
    start_own_second<C>(attention, keys, own, shared_smem);
    start_queries<C, false, true>(params, own, first, shared_smem + C::STAGES_SMEM, 0);
    ptx::cp_async_commit_group();
    if (attention.d < C::HEAD_DIM || attention.dv < C::HEAD_DIM_V)
      clear_unwritten_columns<C, true>(attention, shared);
  } else {
    ptx::griddepcontrol_wait();
  }

  [[maybe_unused]] const auto dropout = [&] {
    if constexpr (C::DROPS) {
      return device::find_dropout(all_params.dropout, 0);  // whose head is found for each block
    } else {
      return 0;
    }
  }();

  int stage = 0;
  // The block whose dQ comes next, and the one whose dQ was added last; a negative head: none.
  Passing multiplied{-1, 0}, added{-1, 0};
  Passing block{0, row_of(number)};
  // The block behind another one; sets blocks_left to 0 behind the last one.
  const auto next_of = [&](const FusedWork& work, const Passing& before) {
    if (before.head + 1 < work.heads) return Passing{before.head + 1, before.row};
    if constexpr (C::MASKED) {
      const int before_number = number;
      number = seen_blocks.next(number + 1, row_of);
      blocks_left -= number - before_number;
      return Passing{0, row_of(number)};
    } else {
      if (before.row == work.walk.begin) blocks_left = 0;
      return Passing{0, before.row - C::BLOCK};
    }
  };
  const auto add_multiplied = [&] {
    add_dq<C>(params, cta, multiplied, shared_smem + C::DS_SMEM + (1 - stage) * C::SCORE_BYTES,
              shared_smem + C::OWN_FIRST_SMEM, shared_smem + C::SUMS_SMEM,
              cta.walk.waits(multiplied));
  };
  bool has_block = blocks_left > 0;
  Passing next = has_block ? next_of(own, block) : block;
#pragma unroll 1
  while (has_block) {
    // Each thread waits for its own copies, in the first round for those of K and Q. The barrier
    // makes those of all threads visible, and dS of the block before. After it no warp still reads
    // the other stage, or the other buffer of dS, which are overwritten next.
    const bool is_first = multiplied.head < 0;
    if (is_first) {
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();
    pass_turn<C>(params, cta, added);
    if (multiplied.head >= 0) add_multiplied();

    const auto start_next = [&] {
      if (is_first) {
        ptx::cp_async_wait_group<0>();
        __syncthreads();  // V and dO of all threads have landed
      }
      if (blocks_left > 0) {
        start_queries<C>(params, cta, next,
                         shared_smem + C::STAGES_SMEM + (1 - stage) * C::STAGE_BYTES,
                         shared_smem + C::TERMS_SMEM + (1 - stage) * C::TERMS_BYTES);
      }
      ptx::cp_async_commit_group();
    };
    const int thread = ptx::mov_tid_x_volatile();
    const int lane = thread % 32, warp = thread / 32;
    const int part = warp % C::SPLIT;
    const int warp_row = warp / C::SPLIT * C::WARP_ROWS;
    const int warp_first = cta.first_row + warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, cta.own_rows) - 1;
    const int block_last = block.row + C::BLOCK - 1;
    const uint32_t ds_smem = shared_smem + C::DS_SMEM + stage * C::SCORE_BYTES;
    BlockFragments<Scores> ds_fragments = {};
    // Warps without keys, or whose keys no query of the block sees, skip the work. All warps that
    // share keys do, and so none of them waits at their barrier.
    if (warp_last >= warp_first &&
        !cta.visible.hides(warp_first, warp_last, block.row, block_last)) {
      const uint32_t stage_smem = shared_smem + C::STAGES_SMEM + stage * C::STAGE_BYTES;
      const uint32_t second_smem = stage_smem + C::SECOND_OF_STAGE;
      const uint32_t unused[1][C::M_TILES][4] = {};  // owned rows are read from shared memory
      BlockScores<Scores> s_rmem, dp_rmem;
      multiply_qk<FirstProduct>(s_rmem, unused,
                                shared_smem + C::OWN_FIRST_SMEM + warp_row * FirstTile::ROW_BYTES +
                                    rows_first_offset<FirstTile>(lane),
                                stage_smem + part * C::PART * FirstTile::ROW_BYTES +
                                    columns_first_offset<FirstTile>(lane));
      start_next();
      if (!C::DROPS && !C::PLAIN && attention.transform_scores) {
        device::transform_scores<FirstProduct>(s_rmem, attention.rule);
      }
      multiply_qk<SecondProduct>(dp_rmem, unused,
                                 shared_smem + C::OWN_SECOND_SMEM +
                                     warp_row * SecondTile::ROW_BYTES +
                                     rows_first_offset<SecondTile>(lane),
                                 second_smem + part * C::PART * SecondTile::ROW_BYTES +
                                     columns_first_offset<SecondTile>(lane));
      const float4* terms =
          reinterpret_cast<const float4*>(shared + C::TERMS_SMEM + stage * C::TERMS_BYTES) +
          part * (C::PART / 2) + lane % 4;
      const auto terms_of = [&](int, int n, int, int i) {
        const float4 two = terms[4 * n];  // of the lane's two neighbouring queries
        return i == 0 ? device::RowTerms{two.x, two.y} : device::RowTerms{two.z, two.w};
      };
      if constexpr (C::MASKED) {
        exponentiate_masked<Scores>(s_rmem, dp_rmem, all_params, cta,
                                    device::passing_head<C::OWNS>(attention, cta, block),
                                    warp_first, block.row + part * C::PART, lane, terms_of);
      } else if constexpr (C::DROPS) {
        device::Dropout of_head = dropout;
        const DroppedHeads& heads = all_params.dropped_heads;
        of_head.batch_head = device::uniform(heads.first + cta.batch * heads.of_sequence +
                                             device::passing_head<C::OWNS>(attention, cta, block));
        exponentiate_dropping<Scores>(
            s_rmem, dp_rmem, attention.exp2_scale, of_head, all_params.dropout.scale,
            block.row + part * C::PART + lane % 4 * 2, warp_first + lane / 4, terms_of);
      } else if constexpr (C::PLAIN) {
        exponentiate_scores<Scores, false>(s_rmem, dp_rmem, attention, terms_of);
      } else {
        exponentiate_backward<Scores>(s_rmem, dp_rmem, attention, terms_of);
      }
      // P of a key behind the end must be 0, because its dS may be too large for 16 bits, and
      // infinity * 0 spoils dQ.
      if (!C::MASKED && (warp_first + C::WARP_ROWS > cta.own_rows ||
                         cta.visible.masks(warp_first, warp_last, block.row, block_last))) {
        const int row = warp_first + lane / 4;
        const int column = block.row + part * C::PART + lane % 4 * 2;
        clear_unseen<Scores>(s_rmem, cta, row, column);
        clear_unseen<Scores>(dp_rmem, cta, row, column);
      }
      BlockFragments<Scores> p_fragments;
      pack_block<Scores>(p_fragments, s_rmem);
      pack_block<Scores>(ds_fragments, dp_rmem);
      if constexpr (C::SPLIT > 1)
        store_scores<C>(shared_smem + C::P_SMEM, p_fragments, warp_row, part, lane);
      store_scores<C>(ds_smem, ds_fragments, warp_row, part, lane);
      multiply_own<C, SecondTile, SECOND_COLUMNS>(dv_rmem, p_fragments, second_smem, part, lane);
      multiply_own<C, FirstTile, FIRST_COLUMNS>(dk_rmem, ds_fragments, stage_smem, part, lane);
      if constexpr (C::SPLIT > 1) {
        // P and dS of all warps that share the keys must be written before they are read. Number 0
        // is the barrier of the CTA.
        ptx::bar_sync(1 + warp / C::SPLIT, 32 * C::SPLIT);
        const uint32_t scores = warp_row * ScoreTile::ROW_BYTES;
        multiply_others<C, SecondTile, SECOND_COLUMNS>(dv_rmem, shared_smem + C::P_SMEM + scores,
                                                       second_smem, part, lane);
        multiply_others<C, FirstTile, FIRST_COLUMNS>(dk_rmem, ds_smem + scores, stage_smem, part,
                                                     lane);
      }
    } else {
      start_next();
      store_scores<C>(ds_smem, ds_fragments, warp_row, part, lane);  // zeros, which dQ reads
    }
    added = multiplied;
    multiplied = block;
    has_block = blocks_left > 0;
    block = next;
    if (has_block) next = next_of(cta, block);
    stage = 1 - stage;
  }
  if (multiplied.head >= 0) {
    __syncthreads();  // dS of the last block is complete
    pass_turn<C>(params, cta, added);
    add_multiplied();
    __syncthreads();  // all warps have added, before the turn passes
    pass_turn<C>(params, cta, multiplied);
  }

  const int warp = ptx::mov_tid_x_volatile() / 32;
  const int warp_row = warp / C::SPLIT * C::WARP_ROWS;
  const GradientParams dk = gradient_of_part<C::ROWS>(params.dk, all_params, cta.first_row, 0);
  const GradientParams dv =
      gradient_of_part<C::ROWS>(params.dv, all_params, cta.first_row, attention.d);
  constexpr bool CHUNKS = C::CTAS_PER_SM == 1;  // else another CTA multiplies in the meantime
  store_gradient<C, CHUNKS, C::PAIR_STEP>(dk_rmem, dk, cta, warp_row,
                                          8 * first_chunk<C, FIRST_COLUMNS>(warp % C::SPLIT),
                                          attention.d, params.scale);
  float dv_factor = 1.0f;
  if constexpr (C::MASKED || C::DROPS) dv_factor = all_params.dropout.scale;
  store_gradient<C, CHUNKS, C::PAIR_STEP>(dv_rmem, dv, cta, warp_row,
                                          8 * first_chunk<C, SECOND_COLUMNS>(warp % C::SPLIT),
                                          attention.dv, dv_factor);
  if constexpr (C::IN_BULK) ptx::cp_async_bulk_wait_group_0();
}

}  // namespace archflash::mma_sync
