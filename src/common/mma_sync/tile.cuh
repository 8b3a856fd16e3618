// The parts of the kernels on mma.sync: loads into swizzled shared memory, the lane maps of
// ldmatrix and mma.sync, and the two products. Everything here counts columns in units of 16 bits.
// A unit is one 16-bit element or a pair of 8-bit elements, so a fragment of 16 units is the k16
// fragment of 16-bit inputs or the k32 fragment of 8-bit inputs.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Which 16-byte chunks of a tile a thread copies: one chunk of each swizzle group, in every
// ROWS_PER_STEP-th row. All of these rows have the same swizzle, so one offset serves them.
template <class C, class Tile>
struct CopyLane {
  static constexpr int ROWS_PER_STEP = C::THREADS / Tile::GROUP;
  static constexpr int GROUPS = Tile::CHUNKS / Tile::GROUP;
  static constexpr int GROUP_COLUMNS = Tile::GROUP * 8;
  static_assert(ROWS_PER_STEP % 8 == 0, "the swizzle must be the same in every step");

  int row, column;  // the thread's first chunk
  uint32_t offset;  // of that chunk in the tile, in bytes

  __device__ __forceinline__ CopyLane() {
    const unsigned thread = ptx::mov_tid_x_volatile();
    const int chunk = thread % Tile::GROUP;
    row = thread / Tile::GROUP;
    // mutants: own-copy-follows (tests/sim/tags.py)
    column = chunk * 8;
    offset = Tile::offset(row, chunk);
  }
};

// Starts the copy of ROWS rows of `rows_gmem` from first_row on, `columns` columns of each. Rows
// are row_bytes apart. Row numbers are added before they are multiplied by row_bytes, because each
// operation on 64-bit addresses takes several instructions.
template <class C, class Tile, int ROWS>
__device__ __forceinline__ void start_load(uint32_t tile_smem, const uint16_t* rows_gmem,
                                           uint32_t first_row, uint64_t row_bytes, int columns) {
  using Lane = CopyLane<C, Tile>;
  static_assert(ROWS % Lane::ROWS_PER_STEP == 0, "threads must tile the rows");
  const Lane lane;
  const char* source =
      reinterpret_cast<const char*>(rows_gmem + lane.column) + (first_row + lane.row) * row_bytes;
  const uint32_t target = tile_smem + lane.offset;
#pragma unroll
  for (int row = 0; row < ROWS; row += Lane::ROWS_PER_STEP) {
#pragma unroll
    for (int group = 0; group < Lane::GROUPS; ++group) {
      if (lane.column + group * Lane::GROUP_COLUMNS < columns) {
        ptx::cp_async_cg_16(target + row * Tile::ROW_BYTES + group * Tile::GROUP * 16,
                            source + group * Lane::GROUP_COLUMNS * 2);
      }
    }
    source += Lane::ROWS_PER_STEP * row_bytes;
  }
}

// Starts the copy of a tile of which only the rows from `begin` to `end` count: the others become
// zeros, so that memory beyond the end of a sequence never matters. row_stride is in units of 16
// bits.
template <class C, class Tile, int ROWS>
__device__ __forceinline__ void start_ragged_load(uint32_t tile_smem, const uint16_t* rows_gmem,
                                                  int64_t row_stride, int begin, int end,
                                                  int columns) {
  using Lane = CopyLane<C, Tile>;
  const Lane lane;
  const uint16_t* source = rows_gmem + lane.row * row_stride + lane.column;
  const uint32_t target = tile_smem + lane.offset;
#pragma unroll 1
  for (int row = 0; row < ROWS; row += Lane::ROWS_PER_STEP) {
    const bool valid = lane.row + row >= begin && lane.row + row < end;
#pragma unroll
    for (int group = 0; group < Lane::GROUPS; ++group) {
      if (lane.column + group * Lane::GROUP_COLUMNS < columns) {
        ptx::cp_async_cg_16(target + row * Tile::ROW_BYTES + group * Tile::GROUP * 16,
                            valid ? source + group * Lane::GROUP_COLUMNS : rows_gmem,
                            valid ? 16 : 0);
      }
    }
    source += Lane::ROWS_PER_STEP * row_stride;
  }
}

// Starts the copy of a tile whose rows lie anywhere: row_of(row) is the address of a row of the
// tile, null for one that becomes zeros. valid_gmem is any address that may be read.
template <class C, class Tile, int ROWS, class RowOf>
__device__ __forceinline__ void start_rows_load(uint32_t tile_smem, int columns,
                                                const uint16_t* valid_gmem, const RowOf& row_of) {
  using Lane = CopyLane<C, Tile>;
  static_assert(ROWS % Lane::ROWS_PER_STEP == 0, "threads must tile the rows");
  const Lane lane;
  const uint32_t target = tile_smem + lane.offset;
#pragma unroll 1
  for (int row = 0; row < ROWS; row += Lane::ROWS_PER_STEP) {
    const uint16_t* row_gmem = row_of(lane.row + row);
    const bool valid = row_gmem != nullptr;
    const uint16_t* source = (valid ? row_gmem + lane.column : valid_gmem);
#pragma unroll
    for (int group = 0; group < Lane::GROUPS; ++group) {
      if (lane.column + group * Lane::GROUP_COLUMNS < columns) {
        ptx::cp_async_cg_16(target + row * Tile::ROW_BYTES + group * Tile::GROUP * 16,
                            source + (valid ? group * Lane::GROUP_COLUMNS : 0), valid ? 16 : 0);
      }
    }
  }
}

// Writes zeros to the columns from `columns` on, which no load writes, because the products run
// over all of HEAD_DIM.
template <class C, class Tile>
__device__ __forceinline__ void clear_columns(unsigned char* tile_smem, int rows, int columns) {
  if (columns >= Tile::COLUMNS) return;
  using Lane = CopyLane<C, Tile>;
  const Lane lane;
  for (int row = 0; lane.row + row < rows; row += Lane::ROWS_PER_STEP) {
#pragma unroll
    // mutants: own-copy-follows
    for (int group = 0; group < Lane::GROUPS; ++group) {
      // mutants: own-copy-follows
      if (lane.column + group * Lane::GROUP_COLUMNS >= columns) {
        // mutants: loop-before-own-copy
        *reinterpret_cast<uint4*>(tile_smem + lane.offset + row * Tile::ROW_BYTES +
                                  group * Tile::GROUP * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  }
}

// Clears the columns beyond d and dv in Q's part of shared memory, and in every stage of K and V.
template <class C>
__device__ __forceinline__ void clear_columns_of_tiles(unsigned char* shared,
                                                       const AttentionParams& params) {
  clear_columns<C, typename C::QKTile>(shared + C::Q_SMEM, C::BLOCK_Q, params.d / C::QK_PACK);
#pragma unroll
  for (int stage = 0; stage < C::STAGES; ++stage) {
    unsigned char* start = shared + stage * C::STAGE_BYTES;
    clear_columns<C, typename C::QKTile>(start + C::K_SMEM, C::BLOCK_K, params.d / C::QK_PACK);
    clear_columns<C, typename C::VTile>(start + C::V_SMEM, C::BLOCK_K, params.dv / C::V_PACK);
  }
}

// Byte offset, in a tile, of the 16-byte row that a lane names to ldmatrix.x4. The four matrices
// that ldmatrix loads are the quarters of a 16x16 square, in one of two orders:
//   rows first:    columns 0-7 of rows 0-7 and of rows 8-15, then columns 8-15 of both. Loaded from
//                  Q, this is fragment a of mma.sync. Loaded from V with .trans, it is fragment b
//                  of two neighbouring column tiles.
//   columns first: rows 0-7 of columns 0-7 and of columns 8-15, then rows 8-15 of both. Loaded from
//                  K, whose rows are keys, it is fragment b of two neighbouring key tiles.
template <class Tile>
__device__ __forceinline__ uint32_t rows_first_offset(unsigned lane) {
  return Tile::offset(lane % 8, lane / 16) + lane / 8 % 2 * 8 * Tile::ROW_BYTES;
}
template <class Tile>
__device__ __forceinline__ uint32_t columns_first_offset(unsigned lane) {
  return Tile::offset(lane % 8, lane / 8 % 2) + lane / 16 * 8 * Tile::ROW_BYTES;
}

// Byte offset of the row that a lane names to ldmatrix.x4.trans when it reads V. For 8-bit V the
// four matrices are 32 keys of eight units, that is 16 columns.
template <class C>
__device__ __forceinline__ uint32_t v_first_offset(unsigned lane) {
  if constexpr (C::V_PACK == 2) {
    return C::VTile::offset(lane, 0);
  } else {
    return rows_first_offset<typename C::VTile>(lane);
  }
}

template <class C>
using QFragments = uint32_t[C::Q_IN_REGISTERS ? C::QTile::COLUMNS / 16 : 1][C::M_TILES][4];
template <class C>
using Probabilities = uint32_t[C::M_TILES][C::STEP_KEYS / (16 * C::V_PACK)][4];

// Loads the fragments a of Q for 16 units of columns from `column` on.
template <class C>
__device__ __forceinline__ void load_q(uint32_t (&q_rmem)[C::M_TILES][4],
                                       uint32_t q_smem /* this lane's row */, int column) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
    ptx::ldmatrix_x4(q_rmem[m],
                     C::QTile::advance(q_smem, column / 8) + m * 16 * C::QTile::ROW_BYTES);
  }
}

// All of them, where they stay in registers.
template <class C>
__device__ __forceinline__ void load_all_q(QFragments<C>& q_rmem, uint32_t q_smem) {
  if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
    for (int column = 0; column < C::QTile::COLUMNS; column += 16)
      load_q<C>(q_rmem[column / 16], q_smem, column);
  }
}

// s += q k^T of one tile of 16 rows and 8 keys over 16 units of columns.
template <class C>
__device__ __forceinline__ void multiply_qk_tile(float (&s_rmem)[4], const uint32_t (&q_rmem)[4],
                                                 uint32_t k0, uint32_t k1) {
  if constexpr (C::QK_PACK == 2) {
    ptx::mma_m16n8k32<C::DTYPE, C::DTYPE>(s_rmem, q_rmem, k0, k1);
  } else {
    ptx::mma_m16n8k16<C::DTYPE>(s_rmem, q_rmem, k0, k1);
  }
}

// s += q k^T as above for Q and K in int8. The sums are exact.
template <class C>
__device__ __forceinline__ void multiply_qk_tile(int32_t (&s_rmem)[4], const uint32_t (&q_rmem)[4],
                                                 uint32_t k0, uint32_t k1) {
  static_assert(C::QK_PACK == 2);
  ptx::mma_m16n8k32_s8(s_rmem, q_rmem, k0, k1);
}

// S = start + Q K^T for STEP_KEYS keys. In s_rmem[m][n], lane l holds rows l/4 and l/4 + 8 of row
// tile m, and of each row the keys 8n + 2*(l%4) and the next one.
template <class C, class Number = float>
__device__ __forceinline__ void multiply_qk(Number (&s_rmem)[C::M_TILES][C::STEP_KEYS / 8][4],
                                            const QFragments<C>& all_q_rmem,
                                            uint32_t q_smem /* this lane's row */,
                                            uint32_t k_smem /* this lane's row */,
                                            Number start = 0) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = start;
    }
  }
#pragma unroll
  for (int column = 0; column < C::QTile::COLUMNS; column += 16) {
    uint32_t q_rmem[C::M_TILES][4];
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q_rmem[m][i] = all_q_rmem[column / 16][m][i];
      }
    } else {
      load_q<C>(q_rmem, q_smem, column);
    }
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; n += 2) {
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem, C::KTile::advance(k_smem, column / 8) + n * 8 * C::KTile::ROW_BYTES);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        multiply_qk_tile<C>(s_rmem[m][n], q_rmem[m], k_rmem[0], k_rmem[1]);
        multiply_qk_tile<C>(s_rmem[m][n + 1], q_rmem[m], k_rmem[2], k_rmem[3]);
      }
    }
  }
}

// The fragments b of 32 keys and 16 columns of 8-bit V. ldmatrix.trans moves units of two bytes, so
// it gives lane l, with g = l/4 and t = l%4, the columns 2g and 2g+1 of keys 2t and 2t+1 of each of
// four key tiles. One byte permutation per register sorts these bytes by column. V needs no
// transposed copy, but mma.sync then sees keys and columns in another order:
//   keys     4t to 4t+3 of mma.sync are keys 2t, 2t+1, 2t+8, 2t+9, and 4t+16 to 4t+19 are these
//            plus 16. The lane holds the scores of just these keys, so its P is fragment a as it is
//   columns  `even` gives mma.sync the even columns of the 16, `odd` the odd ones
struct Fp8VFragments {
  uint32_t even[2], odd[2];

  __device__ __forceinline__ explicit Fp8VFragments(const uint32_t (&v_rmem)[4]) {
    constexpr uint32_t EVEN_BYTES = 0x6420, ODD_BYTES = 0x7531;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      even[i] = __byte_perm(v_rmem[2 * i], v_rmem[2 * i + 1], EVEN_BYTES);
      odd[i] = __byte_perm(v_rmem[2 * i], v_rmem[2 * i + 1], ODD_BYTES);
    }
  }
};

// O += P V for the 16 keys (32 for 8-bit V) from `key` on.
//   p_of(m)          fragment a of P for row tile m and these keys. In 16 bits it is the fragment d
//                    of Q K^T of two neighbouring key tiles, packed in pairs
//   correct(v_rmem)  may change what was read from V. Register i of lane l holds keys 2*(l%4) and
//                    the next one of key tile i % 2, or of key tile i for 8-bit V
// For 8-bit V, with t = l%4, a lane holds columns 4t to 4t+3 of every 16: the even ones in
// o_rmem[m][n] with even n, the odd ones in o_rmem[m][n + 1].
template <class C, class PFragments, class Correct>
__device__ __forceinline__ void multiply_pv_group(float (&o_rmem)[C::M_TILES][C::HEAD_DIM_V / 8][4],
                                                  const PFragments& p_of,
                                                  uint32_t v_smem /* this lane's row */, int key,
                                                  const Correct& correct) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    uint32_t v_rmem[4];
    ptx::ldmatrix_x4_trans(v_rmem,
                           C::VTile::advance(v_smem, n / C::V_PACK) + key * C::VTile::ROW_BYTES);
    correct(v_rmem);
    if constexpr (C::V_PACK == 2) {
      const Fp8VFragments v(v_rmem);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k32<DType::E4M3, C::DTYPE>(o_rmem[m][n], p_of(m), v.even[0], v.even[1]);
        ptx::mma_m16n8k32<DType::E4M3, C::DTYPE>(o_rmem[m][n + 1], p_of(m), v.odd[0], v.odd[1]);
      }
    } else {
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k16<C::DTYPE>(o_rmem[m][n], p_of(m), v_rmem[0], v_rmem[1]);
        ptx::mma_m16n8k16<C::DTYPE>(o_rmem[m][n + 1], p_of(m), v_rmem[2], v_rmem[3]);
      }
    }
  }
}

// O += P V for STEP_KEYS keys.
template <class C>
__device__ __forceinline__ void multiply_pv(float (&o_rmem)[C::M_TILES][C::HEAD_DIM_V / 8][4],
                                            const Probabilities<C>& p_rmem,
                                            uint32_t v_smem /* this lane's row */) {
  constexpr int GROUP = 16 * C::V_PACK;
#pragma unroll
  for (int key = 0; key < C::STEP_KEYS; key += GROUP) {
    multiply_pv_group<C>(
        o_rmem, [&](int m) -> const uint32_t (&)[4] { return p_rmem[m][key / GROUP]; }, v_smem, key,
        [](uint32_t (&)[4]) {});
  }
}

}  // namespace archflash::mma_sync
