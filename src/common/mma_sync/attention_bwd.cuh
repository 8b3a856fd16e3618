// Attention backward on mma.sync tensor cores, for every GPU from compute capability 8.0 on. Inputs
// are fp16 or bf16; products are summed in fp32.
//
// One kernel template serves both sides. A CTA owns rows of one side, which lie in shared memory as
// the first operand of all products; blocks of the other side pass by:
//
//                 owns        passing by    for each block
//   Owns::Keys    K, V        Q, dO         S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T
//   Q Owns::Queries Q, dO       K, V          S = Q K^T     dP = dO V^T     dQ += dS K
//
//   wait block | barrier | start next block | S | dP | P, dS | products into the gradients
//
// P and dS never leave the registers: the accumulators of two neighbouring column tiles, packed to
// 16 bits, are the first operand of the next product, as in the forward kernel. S and dP are
// computed by both kernels, 7 products in place of 5, and in return every gradient belongs to one
// warp: there are no atomics, no buffer in fp32, and the same inputs always give the same bits.
// A CTA that owns keys goes over all query heads that share its head of K, so their gradients are
// added in registers.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_masks.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/device/visible_keys.cuh"
#include "common/masked_backward_params.h"
#include "common/mma_sync/backward_config.cuh"
#include "common/mma_sync/masked_bwd.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::mma_sync {

// A product as the functions of tile.cuh and online_softmax.cuh take it: the owned rows of a warp
// by PASSING passing rows over the columns of Tile, or by COLUMNS columns of a gradient.
template <class C, class Tile, int PASSING = C::BLOCK, int COLUMNS = Tile::COLUMNS>
struct BackwardProduct {
  static constexpr DType DTYPE = C::DTYPE;
  static constexpr int QK_PACK = 1, V_PACK = 1;
  static constexpr int M_TILES = C::M_TILES;
  static constexpr int STEP_KEYS = PASSING;
  static constexpr int HEAD_DIM_V = COLUMNS;
  static constexpr bool Q_IN_REGISTERS = false;
  using QTile = Tile;
  using KTile = Tile;
  using VTile = Tile;
};

// What the CTA works on lives in shared memory and is read when it is needed.
using device::BackwardWork;
using device::Passing;

// Starts the copies of a block of the passing side into a stage. Rows that no owned row of the
// sequence has to do with become zeros.
template <class C>
__device__ __forceinline__ void start_passing(const BackwardParams& params, const BackwardWork& cta,
                                              const Passing& block, uint32_t stage_smem,
                                              uint32_t terms_smem) {
  const AttentionParams& attention = params.attention;
  const int64_t row = static_cast<int64_t>(cta.passing_start) + block.row;
  const int begin = cta.passing_begin() - block.row, end = cta.passing_end() - block.row;
  const int head = device::passing_head<C::OWNS>(attention, cta, block);
  device::BackwardRows<uint16_t> rows;
  if constexpr (C::OWNS == Owns::Queries) {
    rows = device::key_rows<uint16_t>(params, cta.batch, head, row);
  } else {
    rows = device::query_rows<uint16_t>(params, cta.batch, head, row);
    const int thread = ptx::mov_tid_x_volatile();
    if (thread < C::BLOCK) {
      const device::RowTerms* terms_gmem = device::terms_of(params, cta.batch, head, row);
      const bool exists = thread < end;
      ptx::cp_async_ca_8(terms_smem + thread * static_cast<int>(sizeof(device::RowTerms)),
                         exists ? terms_gmem + thread : params.terms_gmem, exists ? 8 : 0);
    }
  }
  start_ragged_load<C, typename C::FirstTile, C::BLOCK>(stage_smem, rows.first_gmem, rows.first_row,
                                                        begin, end, attention.d);
  start_ragged_load<C, typename C::SecondTile, C::BLOCK>(
      stage_smem + C::SECOND_OF_STAGE, rows.second_gmem, rows.second_row, begin, end, attention.dv);
}

// Clears the columns that no copy writes, because the tensors have fewer: of the CTA's own rows, of
// one tensor or of both, and of all stages.
template <class C, bool BOTH>
__device__ __forceinline__ void clear_unwritten_columns(const AttentionParams& attention,
                                                        unsigned char* shared) {
  using FirstTile = typename C::FirstTile;
  using SecondTile = typename C::SecondTile;
  clear_columns<C, FirstTile>(shared + C::OWN_FIRST_SMEM, C::ROWS, attention.d);
  if constexpr (BOTH)
    clear_columns<C, SecondTile>(shared + C::OWN_SECOND_SMEM, C::ROWS, attention.dv);
#pragma unroll
  for (int stage = 0; stage < C::STAGES; ++stage) {
    unsigned char* stage_start = shared + C::STAGES_SMEM + stage * C::STAGE_BYTES;
    clear_columns<C, FirstTile>(stage_start, C::BLOCK, attention.d);
    clear_columns<C, SecondTile>(stage_start + C::SECOND_OF_STAGE, C::BLOCK, attention.dv);
  }
}

// Starts the copies of the CTA's own rows of the first tensor, or of the second one; those that
// have to do with no passing row become zeros.
template <class C>
__device__ __forceinline__ void start_own_first(const AttentionParams& attention,
                                                const device::BackwardRows<uint16_t>& own,
                                                const BackwardWork& cta, uint32_t shared_smem) {
  start_ragged_load<C, typename C::FirstTile, C::ROWS>(
      shared_smem + C::OWN_FIRST_SMEM, own.first_gmem, own.first_row,
      cta.own_begin() - cta.first_row, cta.own_end() - cta.first_row, attention.d);
}
template <class C>
__device__ __forceinline__ void start_own_second(const AttentionParams& attention,
                                                 const device::BackwardRows<uint16_t>& own,
                                                 const BackwardWork& cta, uint32_t shared_smem) {
  start_ragged_load<C, typename C::SecondTile, C::ROWS>(
      shared_smem + C::OWN_SECOND_SMEM, own.second_gmem, own.second_row,
      cta.own_begin() - cta.first_row, cta.own_end() - cta.first_row, attention.dv);
}

template <class C>
using BlockScores = float[C::M_TILES][C::BLOCK / 8][4];

template <class C, bool CAPPED, class TermsOf>
__device__ __forceinline__ void exponentiate_scores(BlockScores<C>& s_rmem, BlockScores<C>& dp_rmem,
                                                    const AttentionParams& params,
                                                    const TermsOf& terms_of) {
  const float uncap = CAPPED ? 1.0f / params.rule.softcap : 0.0f;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& s = s_rmem[m][n][2 * r + i];
          const device::RowTerms terms = terms_of(m, n, r, i);
          const float p = device::probability(fmaf(s, params.exp2_scale, -terms.lse_log2));
          if constexpr (C::NEEDS_DP) {
            float& dp = dp_rmem[m][n][2 * r + i];
            dp = p * (dp - terms.delta);
            // The derivative of c * tanh(x / c) is 1 - tanh(x / c)^2.
            if constexpr (CAPPED) {
              const float tanh = s * uncap;
              dp *= fmaf(-tanh, tanh, 1.0f);
            }
          }
          s = p;
        }
      }
    }
  }
}

// Turns the scores into P = 2^(score - LSE), and dP into dS = P * (dP - delta), the gradient of the
// score before its scale. scores: of rows lane/4 + 8r of row tile m, columns 8n + 2*(lane%4) + i.
//   terms_of(m, n, r, i)  the RowTerms of the query of that element
template <class C, class TermsOf>
__device__ __forceinline__ void exponentiate_backward(BlockScores<C>& s_rmem,
                                                      BlockScores<C>& dp_rmem,
                                                      const AttentionParams& params,
                                                      const TermsOf& terms_of) {
  if (C::NEEDS_DP && params.transform_scores && params.rule.softcap != 0.0f) {
    exponentiate_scores<C, true>(s_rmem, dp_rmem, params, terms_of);
  } else {
    exponentiate_scores<C, false>(s_rmem, dp_rmem, params, terms_of);
  }
}

// Sets to 0 what belongs to a query and a key that it does not see, and to owned rows behind the
// end. Selecting (not multiplying) makes the old value irrelevant, even if it was NaN.
template <class C>
__device__ __forceinline__ void clear_unseen(BlockScores<C>& x_rmem,
                                             const device::BackwardWork& cta, int first_row,
                                             int first_column) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 16 * m + 8 * r;
      const int first = cta.visible.first(row) - first_column;
      const int last = (row < cta.own_rows ? cta.visible.last(row) : -1) - first_column;
#pragma unroll
      for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * n + i;
          if (column < first || column > last) x_rmem[m][n][2 * r + i] = 0.0f;
        }
      }
    }
  }
}

template <class C>
using BlockFragments = uint32_t[C::M_TILES][C::BLOCK / 16][4];

// Packs a block to 16 bits, as fragment a of the next product.
template <class C>
__device__ __forceinline__ void pack_block(BlockFragments<C>& packed_rmem,
                                           const BlockScores<C>& x_rmem) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        packed_rmem[m][n / 2][n % 2 * 2 + r] =
            ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[m][n][2 * r], x_rmem[m][n][2 * r + 1]);
      }
    }
  }
}

// Writes, or adds, a warp's part of a gradient times `factor`: from row `warp_row` of the CTA's
// rows and from column `warp_column` on, every PAIR_STEP-th 16 columns. `columns`: how many the
// gradient has. Two neighbouring columns of a lane make one store; with CHUNKS the lanes of a quad
// exchange theirs, where 16 bits are written, and eight make one.
template <class C, bool CHUNKS, int PAIR_STEP = 1, int COLUMN_TILES>
__device__ __forceinline__ void store_gradient(const float (&x_rmem)[C::M_TILES][COLUMN_TILES][4],
                                               const GradientParams& gradient,
                                               const BackwardWork& cta, int warp_row,
                                               int warp_column, int columns, float factor) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int first = cta.first_row + warp_row + lane / 4;
  const int64_t start = cta.batch * gradient.batch + cta.head * gradient.head +
                        (static_cast<int64_t>(cta.own_start) + first) * gradient.row;
  // Each lane of a quad gets one of four column tiles of a row, or, where these are no neighbours,
  // one of two tiles of two rows.
  if constexpr (CHUNKS && PAIR_STEP > 1) {
    if (gradient.dtype != DType::F32 && !gradient.accumulate) {
      const int row_of_lane = lane % 4 / 2 * 8, column = warp_column + lane % 2 * 8;
      uint16_t* lane_gmem =
          static_cast<uint16_t*>(gradient.gmem) + start + row_of_lane * gradient.row + column;
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n += 2) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* x = &x_rmem[m][n + i % 2][i / 2 * 2];
            words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(x[0] * factor, x[1] * factor);
          }
          device::transpose_in_quad(words);
          if (first + 16 * m + row_of_lane >= cta.own_rows || column + 8 * n * PAIR_STEP >= columns)
            continue;
          ptx::st_global_v4_b32(lane_gmem + 16 * m * gradient.row + 8 * n * PAIR_STEP, words[0],
                                words[1], words[2], words[3]);
        }
      }
      return;
    }
  } else if constexpr (CHUNKS) {
    if (gradient.dtype != DType::F32 && !gradient.accumulate) {
      const int column = warp_column + lane % 4 * 8;
      uint16_t* lane_gmem = static_cast<uint16_t*>(gradient.gmem) + start + column;
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 16 * m + 8 * r;
#pragma unroll
          for (int n = 0; n < COLUMN_TILES; n += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[m][n + i][2 * r] * factor,
                                                      x_rmem[m][n + i][2 * r + 1] * factor);
            }
            device::transpose_in_quad(words);
            if (first + row >= cta.own_rows || column + 8 * n >= columns) continue;
            ptx::st_global_v4_b32(lane_gmem + row * gradient.row + 8 * n, words[0], words[1],
                                  words[2], words[3]);
          }
        }
      }
      return;
    }
  }
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + 16 * m + 8 * r >= cta.own_rows) continue;
      const int64_t row = start + (16 * m + 8 * r) * gradient.row;
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n) {
        const int column = warp_column + n / 2 * 16 * PAIR_STEP + n % 2 * 8 + lane % 4 * 2;
        if (column >= columns) continue;
        const float2 x = {x_rmem[m][n][2 * r] * factor, x_rmem[m][n][2 * r + 1] * factor};
        device::store_gradient_pair<C::DTYPE>(gradient, row + column, x);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void attention_bwd(const typename C::Params& all_params) {
  using FirstTile = typename C::FirstTile;
  using SecondTile = typename C::SecondTile;
  using FirstProduct = BackwardProduct<C, FirstTile>;
  using SecondProduct = BackwardProduct<C, SecondTile>;
  constexpr bool OWNS_KEYS = C::OWNS == Owns::Keys;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(BackwardWork) <= C::CONTEXT_BYTES);
  BackwardWork& cta = *reinterpret_cast<BackwardWork*>(shared + C::CONTEXT_SMEM);
  const BackwardParams& params = call_of<C>(all_params);
  const AttentionParams& attention = params.attention;
  if constexpr (OWNS_KEYS)
    device::clear_keys_of_no_sequence<C::ROWS, C::GRADIENTS>(params, blockIdx.x, C::WARPS);
  {
    const BackwardWork found = device::find_backward_work<C::OWNS, C::ROWS>(attention, blockIdx.x);
    if (found.first_row < 0) return;
    if (threadIdx.x == 0) cta = found;
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  // Passing rows that any owned row has to do with; begin > last if there is none.
  int begin = cta.visible.first(cta.first_row) & -C::BLOCK;
  const int last = cta.visible.last(min(cta.first_row + C::ROWS, cta.own_rows) - 1) & -C::BLOCK;

  // The next block of rows from one on, in which some score may count; beyond `last` if there is
  // none.
  [[maybe_unused]] const int first_block = begin;
  const auto row_of = [&](int number) { return first_block + number * C::BLOCK; };
  auto seen_blocks = [&] {
    if constexpr (C::MASKED) {
      const MaskParams& masks = all_params.masks;
      return device::SeenBlocks<C>{masks, cta, attention.heads_per_kv,
                                   begin <= last ? (last - begin) / C::BLOCK + 1 : 0,
                                   masks.ranges_gmem == nullptr && masks.blocks_gmem == nullptr};
    } else {
      return 0;
    }
  }();
  const auto next_seen = [&](int row) {
    if constexpr (C::MASKED) {
      return row_of(seen_blocks.next((row - first_block) / C::BLOCK, row_of));
    } else {
      return row;
    }
  };
  begin = next_seen(begin);

  float first_rmem[C::M_TILES][FirstTile::COLUMNS / 8][4] = {};    // dQ or dK
  float second_rmem[C::M_TILES][SecondTile::COLUMNS / 8][4] = {};  // dV
  if (begin <= last) {
    const int64_t row = static_cast<int64_t>(cta.own_start) + cta.first_row;
    const auto own = OWNS_KEYS ? device::key_rows<uint16_t>(params, cta.batch, cta.head, row)
                               : device::query_rows<uint16_t>(params, cta.batch, cta.head, row);
    start_own_first<C>(attention, own, cta, shared_smem);
    if constexpr (C::NEEDS_DP) start_own_second<C>(attention, own, cta, shared_smem);
    clear_unwritten_columns<C, C::NEEDS_DP>(attention, shared);
    start_passing<C>(params, cta, {0, begin}, shared_smem + C::STAGES_SMEM,
                     shared_smem + C::TERMS_SMEM);
  }

  // The RowTerms of this lane's own queries.
  device::RowTerms own_terms[OWNS_KEYS ? 1 : C::M_TILES][2] = {};
  if constexpr (!OWNS_KEYS) {
    const int own_first = cta.first_row + threadIdx.x / 32 * C::WARP_ROWS + threadIdx.x % 32 / 4;
    const device::RowTerms* terms_gmem =
        device::terms_of(params, cta.batch, cta.head, cta.own_start);
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = own_first + 16 * m + 8 * r;
        if (row < cta.own_rows) own_terms[m][r] = terms_gmem[row];
      }
    }
  }

  int stage = 0;
  Passing block{0, begin};
#pragma unroll 1
  while (block.head < cta.heads && begin <= last) {
    Passing next{block.head, next_seen(block.row + C::BLOCK)};
    if (next.row > last) {
      next = {block.head + 1, begin};
      if constexpr (C::MASKED) seen_blocks.base = -1;
    }
    // Each thread waits for its own copies. The barrier makes those of all threads visible. After
    // it no warp still reads the other stage, which is overwritten next.
    ptx::copies_wait_all();
    __syncthreads();
    if (next.head < cta.heads) {
      start_passing<C>(params, cta, next,
                       shared_smem + C::STAGES_SMEM + (1 - stage) * C::STAGE_BYTES,
                       shared_smem + C::TERMS_SMEM + (1 - stage) * C::TERMS_BYTES);
    }
    const int thread = ptx::mov_tid_x_volatile();
    const int lane = thread % 32;
    const int warp_row = thread / 32 * C::WARP_ROWS;
    const int warp_first = cta.first_row + warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, cta.own_rows) - 1;
    const int block_last = block.row + C::BLOCK - 1;
    // A warp without rows, or whose rows have nothing to do with the block, skips the work, but not
    // the barriers.
    if (warp_last >= warp_first &&
        !cta.visible.hides(warp_first, warp_last, block.row, block_last)) {
      const uint32_t stage_smem = shared_smem + C::STAGES_SMEM + stage * C::STAGE_BYTES;
      const uint32_t second_smem = stage_smem + C::SECOND_OF_STAGE;
      const uint32_t unused[1][C::M_TILES][4] = {};  // owned rows are read from shared memory
      BlockScores<C> s_rmem, dp_rmem;
      multiply_qk<FirstProduct>(s_rmem, unused,
                                shared_smem + C::OWN_FIRST_SMEM + warp_row * FirstTile::ROW_BYTES +
                                    rows_first_offset<FirstTile>(lane),
                                stage_smem + columns_first_offset<FirstTile>(lane));
      if (attention.transform_scores) {
        device::transform_scores<FirstProduct>(s_rmem, attention.rule);
      }
      if constexpr (C::NEEDS_DP) {
        multiply_qk<SecondProduct>(dp_rmem, unused,
                                   shared_smem + C::OWN_SECOND_SMEM +
                                       warp_row * SecondTile::ROW_BYTES +
                                       rows_first_offset<SecondTile>(lane),
                                   second_smem + columns_first_offset<SecondTile>(lane));
      }
      const device::RowTerms* terms = reinterpret_cast<const device::RowTerms*>(
                                          shared + C::TERMS_SMEM + stage * C::TERMS_BYTES) +
                                      lane % 4 * 2;
      const auto terms_of = [&](int m, int n, int r, int i) {
        if constexpr (OWNS_KEYS) return terms[8 * n + i];
        return own_terms[m][r];
      };
      if constexpr (C::MASKED) {
        exponentiate_masked<C>(
            s_rmem, dp_rmem, all_params, cta,
            OWNS_KEYS ? device::passing_head<C::OWNS>(attention, cta, block) : cta.head, warp_first,
            block.row, lane, terms_of);
      } else {
        exponentiate_backward<C>(s_rmem, dp_rmem, attention, terms_of);
      }
      if (!C::MASKED && cta.visible.masks(warp_first, warp_last, block.row, block_last)) {
        const int row = warp_first + lane / 4, column = block.row + lane % 4 * 2;
        clear_unseen<C>(s_rmem, cta, row, column);
        if constexpr (C::NEEDS_DP) clear_unseen<C>(dp_rmem, cta, row, column);
      }
      BlockFragments<C> fragments;
      if constexpr ((C::GRADIENTS & DV) != 0) {
        pack_block<C>(fragments, s_rmem);
        multiply_pv<SecondProduct>(second_rmem, fragments,
                                   second_smem + rows_first_offset<SecondTile>(lane));
      }
      if constexpr (C::NEEDS_DP) {
        pack_block<C>(fragments, dp_rmem);
        multiply_pv<FirstProduct>(first_rmem, fragments,
                                  stage_smem + rows_first_offset<FirstTile>(lane));
      }
    }
    block = next;
    stage = 1 - stage;
  }

  const int warp_row = ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
  const auto store = [&](const auto& x_rmem, const GradientParams& gradient, int columns,
                         float factor) {
    store_gradient<C, false>(x_rmem, gradient, cta, warp_row, 0, columns, factor);
  };
  if constexpr ((C::GRADIENTS & DQ) != 0) store(first_rmem, params.dq, attention.d, params.scale);
  if constexpr ((C::GRADIENTS & DK) != 0) store(first_rmem, params.dk, attention.d, params.scale);
  if constexpr ((C::GRADIENTS & DV) != 0) {
    float factor = 1.0f;
    if constexpr (C::MASKED) factor = all_params.dropout.scale;
    store(second_rmem, params.dv, attention.dv, factor);
  }
}

}  // namespace archflash::mma_sync
