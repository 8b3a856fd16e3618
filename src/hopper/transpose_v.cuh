// Transposes 8-bit V, so that the keys of a column lie side by side, as wgmma takes 8-bit tiles
// only: in a kernel of its own, or block by block in the attention kernel (the second half of this
// file).
//
// The kernel transposes for attention kernels that do not: one CTA for V_COLUMN_KEYS keys of each
// head. It also
//   - gives each sequence columns of its own, filled up with zeros: keys behind its end, and those
//     that none of its rows sees, then never matter, whatever memory holds there;
//   - writes zeros for a block whose descale is 0;
//   - orders 16 keys as pack() orders P, and 16 columns as device::store_fp8_out takes outputs.
#pragma once

#include <cstdint>

#include "common/device/descales.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/stmatrix.cuh"
#include "hopper/config.cuh"
#include "hopper/params.h"
#include "hopper/pipeline.cuh"

namespace archflash::hopper {

// Where the keys of a sequence start in a column.
__device__ __forceinline__ int find_v_columns_start(const AttentionParams& params, int sequence) {
  if (params.cu_seqlens_k_gmem == nullptr) return 0;
  return V_COLUMN_KEYS *
         device::varlen_tile_start(params.cu_seqlens_k_gmem, sequence, V_COLUMN_KEYS);
}

// Bytes of four words as a 4 x 4 matrix, transposed: word i of the result has byte i of each.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low_01 = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t high_01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t low_23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high_23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low_01, low_23, 0x5410);
  words[1] = __byte_perm(low_01, low_23, 0x7632);
  words[2] = __byte_perm(high_01, high_23, 0x5410);
  words[3] = __byte_perm(high_01, high_23, 0x7632);
}

__device__ __forceinline__ void transpose_v(const Params& params) {
  constexpr int CHUNK = 16;                          // bytes that a thread reads at once
  constexpr int PITCH = TRANSPOSED_COLUMNS / 4 + 1;  // words: odd, against bank conflicts
  __shared__ uint32_t tile[V_COLUMN_KEYS * PITCH];   // (keys, columns)
  ptx::griddepcontrol_launch_dependents();           // its first scores need no V
  const AttentionParams& attention = params.attention;
  const int blocks = params.v_columns / V_COLUMN_KEYS;
  const int heads = attention.heads_q / attention.heads_per_kv;
  const int block = blockIdx.x % blocks, slice = blockIdx.x / blocks;
  const int head = slice % heads;
  const bool packed = attention.cu_seqlens_k_gmem != nullptr;
  int sequence = slice / heads;
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
  const device::KeyDescales descales = device::find_key_descales(params.descales, attention, work);

  const int chunks = attention.dv / CHUNK;  // of a row
  const uint8_t* v_gmem = static_cast<const uint8_t*>(attention.v_gmem) +
                          sequence * attention.v_batch + head * attention.v_head;
#pragma unroll 4
  for (int i = threadIdx.x; i < V_COLUMN_KEYS * chunks; i += TRANSPOSE_THREADS) {
    const int key = i / chunks, chunk = i % chunks;
    uint4 data{};
    if (first_key + key >= visible.begin() && first_key + key < visible.end(work.nq) &&
        (descales.v_gmem == nullptr || descales.v(first_key + key) != 0.0f)) {
      data = *reinterpret_cast<const uint4*>(v_gmem + (start + first_key + key) * attention.v_row +
                                             chunk * CHUNK);
    }
    uint32_t* row = tile + key * PITCH + chunk * (CHUNK / 4);
    row[0] = data.x, row[1] = data.y, row[2] = data.z, row[3] = data.w;
  }
  __syncthreads();  // the keys are there before any thread reads columns

  // Lane l of a warp writes the four keys at positions 4l to 4l + 3 of a column.
  const int lane = threadIdx.x % 32;
  const int key = lane / 4 * 16 + lane % 4 * 2;  // they are key, + 1, + 8 and + 9
  uint8_t* out_gmem = params.v_columns_gmem +
                      static_cast<int64_t>(slice) * attention.dv * params.v_columns +
                      block * V_COLUMN_KEYS + lane * 4;
  for (int column = threadIdx.x / 32 * 4; column < attention.dv; column += TRANSPOSE_THREADS / 8) {
    const uint32_t* first = tile + key * PITCH + column / 4;
    uint32_t words[4] = {first[0], first[PITCH], first[8 * PITCH], first[9 * PITCH]};
    transpose_bytes(words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Column 4t + 2j + h of 16 goes to 8h + 2t + j.
      const int row = column / 16 * 16 + i % 2 * 8 + column % 16 / 4 * 2 + i / 2;
      *reinterpret_cast<uint32_t*>(out_gmem + static_cast<int64_t>(row) * params.v_columns) =
          words[i];
    }
  }
}

// --- where transposes_v(), the other warps of the producer's warpgroup: V -> keys side by side ---

// Whether the CTAs transpose 8-bit V. Else it has been transposed before.
template <class C>
__device__ __forceinline__ bool transposes_v(const Params& params) {
  return C::TRANSPOSES_V && (!C::TAKES_TRANSPOSED_V || params.v_columns == 0);
}

// Transposes the part of a block that warp `part` of TURNING_WARPS has. 32 keys of 16 columns at a
// time are four matrices of ldmatrix, whose transposition gives a lane the keys 2t and 2t + 1 (t =
// lane % 4) of two neighbouring columns: bytes of two such matrices are four keys of a column in
// the order in which pack() has those of P. Column 2c of 16 goes to row c, and 2c + 1 to row 8 + c,
// so that a lane ends with four neighbouring outputs.
template <class C>
__device__ __forceinline__ void transpose_block(uint32_t raw_smem, uint32_t turned_smem, int part) {
  using Raw = typename C::RawVTile;
  using Turned = typename C::VTile;
  static_assert(Turned::SLABS == 1, "the keys of a block are one slab's");
  constexpr int GROUPS = C::BLOCK_K / 32;  // of keys
  constexpr int AT_ONCE = 2;               // groups of keys: more loads are under way then
  constexpr int TURNS = C::HEAD_DIM_V / 16 * GROUPS / AT_ONCE;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t from_smem = raw_smem + Raw::offset(lane, 0);
  const uint32_t to_smem = turned_smem + Turned::offset(lane % 16, lane / 16);
#pragma unroll 1
  for (int turn = part; turn < TURNS; turn += C::TURNING_WARPS) {
    const int group = turn % (GROUPS / AT_ONCE) * AT_ONCE, chunk = turn / (GROUPS / AT_ONCE);
    const uint32_t group_smem = Raw::advance(from_smem, chunk) + group * 32 * Raw::ROW_BYTES;
    uint32_t x[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      ptx::ldmatrix_x4_trans(x[i], group_smem + i * 32 * Raw::ROW_BYTES);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      uint32_t turned[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 16 keys
        turned[2 * half] = __byte_perm(x[i][2 * half], x[i][2 * half + 1], 0x6420);
        turned[2 * half + 1] = __byte_perm(x[i][2 * half], x[i][2 * half + 1], 0x7531);
      }
      ptx::stmatrix_x4((to_smem ^ (group + i) * 32) + chunk * 16 * Turned::ROW_BYTES, turned);
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
      ptx::bar_sync(1 + C::WARPGROUPS, 32 * C::TURNING_WARPS);
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
