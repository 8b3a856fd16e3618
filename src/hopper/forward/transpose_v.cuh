// Transposes 8-bit V, so that the keys of a column lie side by side, as wgmma takes 8-bit tiles
// only: in a kernel of its own, or block by block in the attention kernel (the second half of this
// file).
//
// The kernel transposes for attention kernels that do not: one CTA for V_COLUMN_KEYS keys and
// TRANSPOSED_COLUMNS columns of each head. It also
//   - gives each sequence columns of its own, filled up with zeros: keys behind its end, and those
//     that none of its rows sees, then never matter, whatever memory holds there;
//   - writes zeros for a block whose descale is 0;
//   - clears the attention kernel's counter of tiles;
//   - orders 16 keys as pack() orders P, and 16 columns as device::store_fp8_out takes outputs.
#pragma once

#include <cstdint>

#include "common/device/descales.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/stmatrix.cuh"
#include "hopper/config.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// Where the keys of a sequence start in a column.
__device__ __forceinline__ int find_v_columns_start(const AttentionParams& params, int sequence) {
  if (params.cu_seqlens_k_gmem == nullptr) return 0;
  return V_COLUMN_KEYS *
         device::varlen_tile_start(params.cu_seqlens_k_gmem, sequence, V_COLUMN_KEYS);
}

// Four keys of one column of V, in the order in which pack() has those of P. `first` and `second`
// are of matrices that ldmatrix has transposed, with keys 0 to 7 of 16 and with the others; each
// has two neighbouring columns, of which `odd` takes the second.
__device__ __forceinline__ uint32_t keys_of_column(uint32_t first, uint32_t second, bool odd) {
  return __byte_perm(first, second, odd ? 0x7531 : 0x6420);
}

__device__ __forceinline__ void transpose_v(const Params& params) {
  constexpr int CHUNK = 16;                           // bytes that a thread copies at once
  constexpr int CHUNKS = TRANSPOSED_COLUMNS / CHUNK;  // of a row
  constexpr int KEYS_AT_ONCE = TRANSPOSE_THREADS / CHUNKS;
  // The rows of a matrix for ldmatrix are two keys of each of four groups of 16: as chunk c of a
  // key is in place c ^ swizzle(key), they lie in different banks.
  const auto swizzle = [](int key) { return key / 16 % 4 * 2 + key % 2; };
  __shared__ __align__(128) unsigned char tile[V_COLUMN_KEYS * TRANSPOSED_COLUMNS];
  ptx::griddepcontrol_wait();               // V, and Q and K for the attention kernel, are there
  ptx::griddepcontrol_launch_dependents();  // its first scores need no V
  if (params.taken_gmem != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.taken_gmem = 0;
  const AttentionParams& attention = params.attention;
  // Unsigned: a division takes fewer instructions.
  const uint32_t blocks = static_cast<uint32_t>(params.v_columns) / V_COLUMN_KEYS;
  const uint32_t heads = static_cast<uint32_t>(attention.heads_q) / attention.heads_per_kv;
  const uint32_t parts = (attention.dv + TRANSPOSED_COLUMNS - 1u) / TRANSPOSED_COLUMNS;
  const uint32_t number = blockIdx.x / parts, slice = number / blocks;
  const int first_column = (blockIdx.x - number * parts) * TRANSPOSED_COLUMNS;
  const int block = number - slice * blocks;
  const bool packed = attention.cu_seqlens_k_gmem != nullptr;
  int sequence = slice / heads;
  const int head = slice - sequence * heads;
  if (packed) {
    sequence = device::find_varlen_sequence(attention.cu_seqlens_k_gmem, attention.batch,
                                            V_COLUMN_KEYS, block);
    if (sequence < 0) return;
  }
  const int start = device::sequence_start(attention.cu_seqlens_k_gmem, sequence, attention.nk);
  const int length =
      packed
          ? device::sequence_start(attention.cu_seqlens_k_gmem, sequence + 1, attention.nk) - start
          : attention.nk;
  const int first_key =
      block * V_COLUMN_KEYS - find_v_columns_start(attention, sequence);  // of the sequence
  const device::Work work{
      .batch_head = sequence * attention.heads_q + head * attention.heads_per_kv,
      .nq = packed
                ? device::sequence_start(attention.cu_seqlens_q_gmem, sequence + 1, attention.nq) -
                      device::sequence_start(attention.cu_seqlens_q_gmem, sequence, attention.nq)
                : attention.nq,
      .nk = length};
  const device::VisibleKeys visible = device::find_visible_keys(attention, work);
  const Descale& descale = params.descales.v;
  const float* descales_gmem =
      device::is_by_block(descale) ? device::descale_of_head(descale, sequence, head) : nullptr;

  const int chunks = min(attention.dv - first_column, TRANSPOSED_COLUMNS) / CHUNK;
  const int chunk = threadIdx.x % CHUNKS;
  const uint8_t* v_gmem = static_cast<const uint8_t*>(attention.v_gmem) +
                          sequence * attention.v_batch + head * attention.v_head;
  if (chunk < chunks) {
#pragma unroll
    for (int i = 0; i < V_COLUMN_KEYS; i += KEYS_AT_ONCE) {
      const int in_block = threadIdx.x / CHUNKS + i, key = first_key + in_block;
      const bool counts =
          key >= visible.begin() && key < visible.end(work.nq) &&
          (descales_gmem == nullptr || descales_gmem[key / SCALE_ROWS * descale.block] != 0.0f);
      ptx::copy_16_bytes_async(
          tile + in_block * TRANSPOSED_COLUMNS + (chunk ^ swizzle(in_block)) * CHUNK,
          v_gmem + (counts ? (start + key) * attention.v_row + first_column + chunk * CHUNK : 0),
          counts);
    }
  }
  ptx::copies_wait_all();
  __syncthreads();  // the keys are there before any thread reads columns

  // A warp takes 16 columns. Lane l gets two of them: of each four words that two ldmatrix give
  // it, 16 keys, because rows 2t and 2t + 1 of a matrix are keys of group t (of 64, l % 4 = t).
  const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
  const int key = row / 2 * 16 + row % 2 + matrix % 2 * 8 + matrix / 2 * 2;
  const uint32_t key_smem =
      static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + key * TRANSPOSED_COLUMNS;
  // Column 2c of 16 goes to row c, and 2c + 1 to row 8 + c.
  const int64_t columns_before =
      static_cast<int64_t>(slice) * attention.dv + first_column + lane / 4;
  uint8_t* out_gmem = params.v_columns_gmem + columns_before * params.v_columns +
                      block * V_COLUMN_KEYS + lane % 4 * 16;
  for (int turn = threadIdx.x / 32; turn < chunks; turn += TRANSPOSE_THREADS / 32) {
    const uint32_t chunk_smem = key_smem + (turn ^ swizzle(key)) * CHUNK;
#pragma unroll
    for (int keys = 0; keys < V_COLUMN_KEYS; keys += 64) {
      uint32_t x[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ptx::ldmatrix_x4_trans(x[i], chunk_smem + (keys + 4 * i) * TRANSPOSED_COLUMNS);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint4 out;
        out.x = keys_of_column(x[0][0], x[0][1], odd),
        out.y = keys_of_column(x[0][2], x[0][3], odd);
        out.z = keys_of_column(x[1][0], x[1][1], odd),
        out.w = keys_of_column(x[1][2], x[1][3], odd);
        *reinterpret_cast<uint4*>(
            out_gmem + static_cast<int64_t>(turn * 16 + odd * 8) * params.v_columns + keys) = out;
      }
    }
  }
}

// --- where transposes_v(), the other warps of the producer's warpgroup: V -> keys side by side ---

// Whether the CTAs transpose 8-bit V. Else it has been transposed before.
template <class C>
__device__ __forceinline__ bool transposes_v(const Params& params) {
  return C::TRANSPOSES_V && (!C::TAKES_TRANSPOSED_V || params.v_columns == 0);
}

// Transposes the part of a block that warp `part` of TRANSPOSING_WARPS has. 32 keys of 16 columns
// at a time are four matrices of ldmatrix, whose transposition gives a lane the keys 2t and 2t + 1
// (t = lane % 4) of two neighbouring columns: bytes of two such matrices are four keys of a column
// in the order in which pack() has those of P. Column 2c of 16 goes to row c, and 2c + 1 to row 8 +
// c, so that a lane ends with four neighbouring outputs.
template <class C>
__device__ __forceinline__ void transpose_block(uint32_t raw_smem, uint32_t transposed_smem,
                                                int part) {
  using Raw = typename C::RawVTile;
  using Transposed = typename C::VTile;
  static_assert(Transposed::SLABS == 1, "the keys of a block are one slab's");
  constexpr int GROUPS = C::BLOCK_K / 32;  // of keys
  // So many groups of keys at a time, whose loads are under way together: beside products a load
  // takes long. With four warpgroups there are registers for two.
  constexpr int AT_ONCE = C::WARPGROUPS < 4 ? GROUPS : 2;
  constexpr int PIECES = C::HEAD_DIM_V / 16 * GROUPS / AT_ONCE;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t from_smem = raw_smem + Raw::offset(lane, 0);
  const uint32_t to_smem = transposed_smem + Transposed::offset(lane % 16, lane / 16);
#pragma unroll 1
  for (int piece = part; piece < PIECES; piece += C::TRANSPOSING_WARPS) {
    const int group = piece % (GROUPS / AT_ONCE) * AT_ONCE, chunk = piece / (GROUPS / AT_ONCE);
    const uint32_t group_smem = Raw::advance(from_smem, chunk) + group * 32 * Raw::ROW_BYTES;
    uint32_t x[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      ptx::ldmatrix_x4_trans(x[i], group_smem + i * 32 * Raw::ROW_BYTES);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      uint32_t transposed[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 16 keys
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
          transposed[2 * half + odd] = keys_of_column(x[i][2 * half], x[i][2 * half + 1], odd);
      }
      ptx::stmatrix_x4((to_smem ^ (group + i) * 32) + chunk * 16 * Transposed::ROW_BYTES,
                       transposed);
    }
  }
}

// Called by these warps: transposes block after block, in the order in which the producer loads.
template <class C>
__device__ __forceinline__ void transpose_blocks_of_v(unsigned char* shared, uint32_t shared_smem) {
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int part = uniform(static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32 - 1);
  RingPosition<C::RAW_STAGES> raw_ring;
  RingPosition<C::STAGES> v_ring;
  while (true) {
    ptx::mbarrier_wait_parity(barriers.raw_full(raw_ring.stage), raw_ring.parity);  // it has landed
    const RowsToTranspose message = rows_to_transpose<C>(shared, raw_ring.stage);
    const int begin = uniform(message.begin), end = uniform(message.end);
    if (end == 0) break;
    if (begin > 0 || end < C::BLOCK_K) {
      // The others may be of the next sequence. With NaN there, 0 * NaN would be NaN.
      if (part == 0) {
        clear_rows<typename C::RawVTile>(shared + C::RAW_SMEM + raw_ring.stage * C::RawVTile::BYTES,
                                         begin, end);
      }
      // The rows are cleared before any warp transposes them.
      ptx::bar_sync(1 + C::WARPGROUPS, 32 * C::TRANSPOSING_WARPS);
    }
    // The products of every consumer warp have read the V that the stage held.
    ptx::mbarrier_wait_parity(barriers.v_empty(v_ring.stage), v_ring.parity ^ 1);
    transpose_block<C>(shared_smem + C::RAW_SMEM + raw_ring.stage * C::RawVTile::BYTES,
                       shared_smem + C::V_SMEM + v_ring.stage * C::VTile::BYTES, part);
    ptx::fence_proxy_async_shared();  // this thread's rows come before wgmma reads them
    release(barriers.v_full(v_ring.stage));
    release(barriers.raw_empty(raw_ring.stage));
    raw_ring.advance();
    v_ring.advance();
  }
}

}  // namespace archflash::hopper
