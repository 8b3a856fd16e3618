// The moving parts of the kernels on mma.sync: loads into swizzled shared memory, the lane maps of
// ldmatrix and mma.sync, and the two products. Two 8-bit elements take the place of one of 16 bits:
// rows are read in units of 16 bits, and a fragment of k16 units is one of k32 elements.
#pragma once

#include <cstdint>

#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Which chunks of a tile a thread copies: one chunk of each group, every ROWS_PER_STEP-th row. The
// swizzle of all its rows is the same.
template <class C, class Tile>
struct CopyLane {
  static constexpr int ROWS_PER_STEP = C::THREADS / Tile::GROUP;
  static constexpr int GROUPS = Tile::CHUNKS / Tile::GROUP;
  static constexpr int GROUP_COLUMNS = Tile::GROUP * 8;
  static_assert(ROWS_PER_STEP % 8 == 0, "the swizzle must be the same in every step");

  int row, column;  // of the first chunk
  uint32_t offset;  // its place in the tile, in bytes

  __device__ __forceinline__ CopyLane() {
    const int thread = ptx::mov_tid_x_volatile();
    const int chunk = thread % Tile::GROUP;
    row = thread / Tile::GROUP;
    // mutants: own-copy-follows
    column = chunk * 8;
    offset = Tile::offset(row, chunk);
  }
};

// Starts the copy of ROWS rows of `rows_gmem` from first_row on; columns from `columns` on are left
// alone. The distance of two rows is in bytes, and the rows are added up before they are multiplied
// by it: addresses of 64 bits cost several instructions for each operation.
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

// Starts the copy of the first rows of rows_gmem where the tile ends before ROWS: rows from
// valid_rows on become zeros, so that what lies beyond a sequence's end never matters.
template <class C, class Tile, int ROWS>
__device__ __forceinline__ void start_ragged_load(uint32_t tile_smem, const uint16_t* rows_gmem,
                                                  int64_t row_stride, int valid_rows, int columns) {
  using Lane = CopyLane<C, Tile>;
  const Lane lane;
  const uint16_t* source = rows_gmem + lane.row * row_stride + lane.column;
  const uint32_t target = tile_smem + lane.offset;
#pragma unroll 1
  for (int row = 0; row < ROWS; row += Lane::ROWS_PER_STEP) {
    const bool valid = lane.row + row < valid_rows;
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

// Zeros in the columns that no load writes: Q and K are multiplied over all of HEAD_DIM.
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

// Byte offsets, in a tile, of the 16-byte row that this lane names to ldmatrix.x4. Its four
// matrices are the quarters of a 16x16 square, in one of two orders.
//   rows first:    rows 0-7, rows 8-15 of columns 0-7, then of columns 8-15. Of Q this is the
//                  fragment a of mma.sync; transposed, of V, it is b of two neighbouring column
//                  tiles.
//   columns first: columns 0-7, 8-15 of rows 0-7, then of rows 8-15. Of K (a row is a key) this is
//                  b of two neighbouring key tiles.
template <class Tile>
__device__ __forceinline__ uint32_t rows_first_offset(int lane) {
  return Tile::offset(lane % 16, lane / 16);
}
template <class Tile>
__device__ __forceinline__ uint32_t columns_first_offset(int lane) {
  return Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Of V, transposed. A unit of 8-bit V is two columns, and 32 keys are read at once.
template <class C>
__device__ __forceinline__ uint32_t v_first_offset(int lane) {
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

// Q fragments of 16 units.
template <class C>
__device__ __forceinline__ void load_q(uint32_t (&q_rmem)[C::M_TILES][4],
                                       uint32_t q_smem /* this lane's row */, int column) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
    ptx::ldmatrix_x4(q_rmem[m],
                     C::QTile::advance(q_smem, column / 8) + m * 16 * C::QTile::ROW_BYTES);
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

// The same for Q and K in int8: exact.
template <class C>
__device__ __forceinline__ void multiply_qk_tile(int32_t (&s_rmem)[4], const uint32_t (&q_rmem)[4],
                                                 uint32_t k0, uint32_t k1) {
  static_assert(C::QK_PACK == 2);
  ptx::mma_m16n8k32_s8(s_rmem, q_rmem, k0, k1);
}

// S = start + Q K^T for STEP_KEYS keys. Lane l holds rows l/4 and l/4 + 8 of each row tile, of key
// tile n the keys 8n + 2*(l%4) and the next one.
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

// The fragments b of 32 keys of 8-bit V, without a transposed V in memory. ldmatrix.trans of units
// of two bytes gave lane (g, t) the columns 2g and 2g+1 of the keys 2t, 2t+1 of each of four key
// tiles; one byte permutation for each register sorts them by column.
//   keys     4t to 4t+3 (and 4t+16 to 4t+19) of mma.sync are 2t, 2t+1, 2t+8, 2t+9 (and 16 more):
//            just those of which this lane has the scores, so that P is its fragment a as it is
//   columns  0 to 7 of mma.sync are the even ones of 16, then the odd ones
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

// O += P V for the 16 keys (32 of 8-bit V) from `key` on.
//   p_of(m)         their fragment a, of row tile m. In 16 bits: the fragments d of Q K^T of two
//                   neighbouring key tiles, as pairs of 16-bit values
//   correct(v_rmem)  may change what was read of V; register i of lane (g, t) has the keys 2t and
//                   2t+1 of key tile i % 2, of 8-bit V those of key tile i
// Of 8-bit V, a row and 16 columns a lane holds 4t to 4t+3: in o_rmem[m][n], n even, the even ones,
// in [n + 1] the odd ones.
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
