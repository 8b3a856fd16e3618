// The order in which the CTAs of a main kernel of hopper take the tiles of keys. The tiles of a
// head add to the same sums of dQ and read the same Q and dO, so it decides what L2 holds, and in
// turns how long CTAs wait for one another (NOTES.md). plan_backward.cpp chooses among what is
// here.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/uniform.cuh"
#include "common/device/varlen_tiles.cuh"
#include "hopper/backward/backward_params.h"

namespace archflash::hopper {

// A CTA's tile of keys: its index as find_backward_work() counts them, which is the first tiles of
// all heads, then the second ones, where each share of a head counts as a head; and whether the
// tiles of its head come from the last one to the first, and go over rounds upwards.
struct TileOfCta {
  int index;
  bool upwards;
};

// A tile among those of `heads` heads, which are gone over in groups.
struct TileInGroups {
  int head, tile;
  int heads_behind;  // that come behind its group

  // index: of the tile, among all. in_a_row: tiles of a head that follow one another.
  __device__ __forceinline__ TileInGroups(int index, int heads, int tiles, int group_heads,
                                          int in_a_row) {
    const int first_head = index / (tiles * group_heads) * group_heads;
    const int of_group = min(group_heads, heads - first_head);
    const int in_group = index - first_head * tiles;
    const int first_tile = in_group / (of_group * in_a_row) * in_a_row;
    const int of_row = min(in_a_row, tiles - first_tile);
    const int in_rows = in_group - first_tile * of_group;
    head = first_head + in_rows / of_row;
    tile = first_tile + in_rows % of_row;
    heads_behind = heads - first_head - of_group;
  }
};

// Whether the tiles of a group may go upwards, although the longest one of each head then comes
// last: whether what comes behind the group, of its sequence and of the next 32, keeps the SMs busy
// until that one ends. heads_behind: of its sequence. Called by whole warps.
template <class C>
__device__ __forceinline__ bool much_work_follows(const BackwardKernelParams& params, int batch,
                                                  int tiles, int heads_behind) {
  const AttentionParams& attention = params.backward.attention;
  // Under a causal mask tile i of a head computes i + 1 blocks of as many rows as a tile has: n
  // tiles have n (n + 1) / 2 blocks.
  const auto work_of_head = [](int rows) {
    const auto n = static_cast<float>((rows + C::ROWS - 1) / C::ROWS);
    return 0.5f * n * (n + 1.0f);
  };
  const int sequence = batch + 1 + static_cast<int>(threadIdx.x) % 32;
  float work = 0.0f;
  if (sequence < attention.batch) {
    const int* const cu_k = attention.cu_seqlens_k_gmem;
    const int rows = device::sequence_start(cu_k, sequence + 1, attention.nk) -
                     device::sequence_start(cu_k, sequence, attention.nk);
    work = work_of_head(max(rows, 0)) * (attention.heads_q / attention.heads_per_kv);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    work += __shfl_xor_sync(device::FULL_WARP, work, lanes);
  work += work_of_head(tiles * C::ROWS) * heads_behind;
  return work >= static_cast<float>(params.upward_work) * tiles;
}

// The tile of a CTA where packed sequences come in groups, the first tiles of all of their heads,
// then the second ones, and so on: in turns a tile then comes when the one before it of its head is
// far ahead. Called by whole warps.
template <class C>
__device__ __forceinline__ TileOfCta find_tile_of_sequences(const BackwardKernelParams& params,
                                                            int index) {
  const AttentionParams& attention = params.backward.attention;
  const int* const cu_k = attention.cu_seqlens_k_gmem;
  const int heads = attention.heads_q / attention.heads_per_kv;
  const int number = index / heads;
  const int batch = device::find_varlen_sequence(cu_k, attention.batch, C::ROWS, number);
  if (batch < 0) return {index, false};
  // Each lane has a sequence of the group.
  const int lane = threadIdx.x % 32;
  const int first = batch / params.packed_sequences * params.packed_sequences;
  const int sequence = first + lane;
  int start = INT32_MAX, tiles = 0, end = 0;
  if (lane < params.packed_sequences && sequence < attention.batch) {
    const int rows = device::sequence_start(cu_k, sequence + 1, attention.nk) -
                     device::sequence_start(cu_k, sequence, attention.nk);
    tiles = (max(rows, 0) + C::ROWS - 1) / C::ROWS;
    start = device::varlen_tile_start(cu_k, sequence, C::ROWS);
    end = device::varlen_tile_start(cu_k, sequence + 1, C::ROWS);
  }
  int behind = number - __shfl_sync(device::FULL_WARP, start, 0);  // tiles of the group
  for (int tile = 0;; ++tile) {
    const uint32_t having = __ballot_sync(device::FULL_WARP, tiles > tile);
    if (having == 0) break;
    const int sequences = __popc(having);
    if (behind < sequences) {
      const bool found = tiles > tile && __popc(having & ((1u << lane) - 1)) == behind;
      const int found_lane = __ffs(__ballot_sync(device::FULL_WARP, found)) - 1;
      const int found_tile = __shfl_sync(device::FULL_WARP, start, found_lane) + tile;
      return {found_tile * heads + index % heads, false};
    }
    behind -= sequences;
  }
  // Fewer tiles than the group's share of the grid: one that its sequence does not have.
  const uint32_t lacking = __ballot_sync(device::FULL_WARP, start + tiles < end);
  if (lacking == 0) return {index, false};
  const int none = __shfl_sync(device::FULL_WARP, start + tiles, __ffs(lacking) - 1);
  return {none * heads, false};
}

// The tile of a CTA in packed sequences. Called by whole warps.
template <class C>
__device__ __forceinline__ TileOfCta find_packed_tile(const BackwardKernelParams& params,
                                                      int index) {
  const AttentionParams& attention = params.backward.attention;
  if (params.packed_sequences > 1) return find_tile_of_sequences<C>(params, index);
  // To find the order takes a while, for which small calls have to wait.
  if (params.packed_rows == INT32_MAX && params.tiles_in_a_row == 1) return {index, false};
  const int* const cu_k = attention.cu_seqlens_k_gmem;
  const int heads = attention.heads_q / attention.heads_per_kv;
  const int batch = device::find_varlen_sequence(cu_k, attention.batch, C::ROWS, index / heads);
  if (batch < 0) return {index, false};
  const auto length = [&](const int* cu_seqlens, int rows) {
    return max(device::sequence_start(cu_seqlens, batch + 1, rows) -
                   device::sequence_start(cu_seqlens, batch, rows),
               0);
  };
  const int tiles = (length(cu_k, attention.nk) + C::ROWS - 1) / C::ROWS;
  const int first_index = device::varlen_tile_start(cu_k, batch, C::ROWS) * heads;
  // Fewer tiles than the sequence's share of the grid.
  if (index - first_index >= tiles * heads) return {index, false};
  const int rows = max(length(attention.cu_seqlens_q_gmem, attention.nq), 1);
  const int most = min(max(max(params.packed_rows / rows, params.packed_tiles / tiles), 1), heads);
  const int groups = (heads + most - 1) / most;
  const TileInGroups found(index - first_index, heads, tiles, (heads + groups - 1) / groups,
                           params.tiles_in_a_row);
  const bool upwards =
      params.upward_work > 0 && much_work_follows<C>(params, batch, tiles, found.heads_behind);
  const int tile = upwards ? tiles - 1 - found.tile : found.tile;
  return {first_index + tile * heads + found.head, upwards};
}

// CTAs go over the heads in groups, whose queries and sums of dQ stay in L2.
template <class C>
__device__ __forceinline__ TileOfCta find_tile(const BackwardKernelParams& params, int index) {
  const AttentionParams& attention = params.backward.attention;
  if (attention.cu_seqlens_k_gmem != nullptr) return find_packed_tile<C>(params, index);
  const int heads =
      attention.batch * device::heads_of_ctas<C::UNEVEN_SHARES>(attention) * params.shares;
  if (params.group_heads >= heads && params.tiles_in_a_row == 1) return {index, false};
  const int tiles = (attention.nk + C::ROWS - 1) / C::ROWS;
  const TileInGroups found(index, heads, tiles, params.group_heads, params.tiles_in_a_row);
  const bool upwards = found.head < params.upward_heads;
  const int tile = upwards ? tiles - 1 - found.tile : found.tile;
  return {tile * heads + found.head, upwards};
}

}  // namespace archflash::hopper
