// Which keys a CTA of fused_bwd.cuh has, and how CTAs share out tiles.
//
// A CTA has a tile of keys. Where that would leave SMs idle, in the last round of CTAs or behind
// the shorter tiles of a causal call, a tile has several (CutTiles): each takes some of the blocks
// of queries and leaves its part of dK and dV in the workspace, in fp32. The kernel that makes dQ
// of its sums adds the parts up, in their order, so that the bits never vary.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/backward_sums.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/dq_turns.cuh"
#include "common/masked_backward_params.h"
#include "common/mma_sync/params.h"
#include "common/ptx/grid_dependency.cuh"

namespace archflash::mma_sync {

// Where tile `index` of `rows` keys lies, without cu_seqlens. Tiles come from the first one on,
// because under a causal mask the first keys are seen by the most queries: those of a group of
// heads, then those of the next one. Heads whose tiles are computed at the same time, or soon after
// one another, share L2.
struct KeyTile {
  int batch, head, first_row;
};
__device__ __forceinline__ KeyTile place_key_tile(const AttentionParams& params, int rows,
                                                  uint32_t index) {
  // Unsigned: a division takes fewer instructions.
  const uint32_t tiles = (static_cast<uint32_t>(params.nk) + rows - 1) / rows;
  const uint32_t heads_kv = static_cast<uint32_t>(params.heads_q) / params.heads_per_kv;
  const uint32_t heads_per_group = params.order.heads_per_group;
  const uint32_t group = index / (heads_per_group * tiles);
  const uint32_t first_head = group * heads_per_group;
  const uint32_t heads = min(heads_per_group, params.batch * heads_kv - first_head);
  const uint32_t place = index - first_head * tiles;
  const uint32_t tile = place / heads;
  const uint32_t batch_head = first_head + place - tile * heads;
  const uint32_t batch = batch_head / heads_kv;
  return {static_cast<int>(batch), static_cast<int>(batch_head - batch * heads_kv),
          static_cast<int>(tile) * rows};
}

// Whether no tile is cut and the grid is (heads of K, batch, tiles of a head), so that a CTA finds
// its tile without a division.
template <class Params>
__device__ __forceinline__ bool tiles_by_grid(const Params& params) {
  if constexpr (requires { params.cut; }) return params.cut.runs[0].tiles == 0;
  return false;
}

// What a CTA works on by its place in the grid (heads of K, sequences, tiles of ROWS keys of the
// longest sequence). A negative first_row: its sequence has no such tile.
template <int ROWS>
__device__ __forceinline__ BackwardWork find_packed_key_tile(const AttentionParams& params) {
  const int sequence = blockIdx.y;
  const auto start = [&](const int* cu_seqlens, int of, int rows) {
    return device::sequence_start(cu_seqlens, of, rows);
  };
  BackwardWork found{};
  found.batch = sequence, found.head = blockIdx.x, found.heads = params.heads_per_kv;
  found.passing_start = start(params.cu_seqlens_q_gmem, sequence, params.nq);
  found.own_start = start(params.cu_seqlens_k_gmem, sequence, params.nk);
  device::Work work{};
  work.batch_head = sequence * params.heads_q;
  work.nq = max(start(params.cu_seqlens_q_gmem, sequence + 1, params.nq) - found.passing_start, 0);
  work.nk = max(start(params.cu_seqlens_k_gmem, sequence + 1, params.nk) - found.own_start, 0);
  const int first = blockIdx.z * ROWS;
  found.first_row = first < work.nk ? first : -1;
  found.visible = device::queries_that_see(device::find_visible_keys(params, work), work.nq);
  found.own_rows = work.nk, found.passing_rows = work.nq;
  return found;
}

// What a CTA with tile `index` works on.
template <class C>
__device__ __forceinline__ BackwardWork find_key_tile(const typename C::Params& all_params,
                                                      uint32_t index) {
  const AttentionParams& params = call_of<C>(all_params).attention;
  if constexpr (C::PACKED) return find_packed_key_tile<C::ROWS>(params);
  if (!C::PLAIN && params.cu_seqlens_k_gmem != nullptr)
    return device::find_backward_work<Owns::Keys, C::ROWS>(params, static_cast<int>(index));
  KeyTile tile;
  if (tiles_by_grid(all_params)) {
    tile = {static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x),
            static_cast<int>(blockIdx.z) * C::ROWS};
  } else {
    tile = place_key_tile(params, C::ROWS, index);
  }
  BackwardWork found{};
  found.first_row = tile.first_row;
  found.batch = tile.batch;
  found.head = tile.head;
  found.heads = params.heads_per_kv;
  device::Work work{};
  work.batch_head = found.batch * params.heads_q;
  work.nq = params.nq, work.nk = params.nk;
  found.visible = device::queries_that_see(device::find_visible_keys(params, work), work.nq);
  found.own_rows = work.nk, found.passing_rows = work.nq;
  return found;
}

// The number of a block of queries among those of all heads.
template <class C>
__device__ __forceinline__ int64_t dq_block_number(const BackwardParams& params,
                                                   const device::BackwardWork& work,
                                                   const device::Passing& block) {
  if constexpr (!C::PLAIN || C::PACKED)
    return device::dq_block_number(params, work, block, C::BLOCK);
  const AttentionParams& attention = params.attention;
  const int64_t head = static_cast<int64_t>(work.batch) * attention.heads_q +
                       work.head * attention.heads_per_kv + block.head;
  return head * params.dq_sums.blocks + block.row / C::BLOCK;
}

// The part of a tile that a CTA has.
struct TilePart {
  uint32_t tile;
  int index, parts;  // of the tile; 1: this CTA has all of it
  int number;        // among all parts
};

template <class Params>
__device__ __forceinline__ TilePart part_of_cta(const Params& params) {
  if constexpr (requires { params.cut; }) {
    uint32_t cta = blockIdx.x, tile = 0;
    int number = 0;
    for (int i = 0; !tiles_by_grid(params); ++i) {
      const TileRun run = params.cut.runs[i];
      const uint32_t parts = run.parts, ctas = run.tiles * parts;
      if (cta < ctas) {
        const uint32_t of_run = cta / parts;
        return {tile + of_run, static_cast<int>(cta - of_run * parts), run.parts,
                number + static_cast<int>(cta)};
      }
      cta -= ctas, tile += run.tiles;
      if (run.parts > 1) number += static_cast<int>(ctas);
    }
  }
  return {blockIdx.x, 0, 1, 0};
}

// Leaves a walk the blocks of a part: none, where a q_offset on the device leaves a tile fewer
// blocks than parts.
template <int BLOCK>
__device__ __forceinline__ void keep_part(device::DqWalk& walk, const TilePart& part) {
  if (part.parts == 1) return;
  const int blocks = walk.template blocks<BLOCK>();
  walk.last = walk.begin + (blocks * (part.index + 1) / part.parts - 1) * BLOCK;
  walk.begin += blocks * part.index / part.parts * BLOCK;
}

// Where a CTA's rows of a gradient of keys go: into the gradient, or of a part into the workspace,
// where `before` columns come in front of them.
template <int ROWS, class Params>
__device__ __forceinline__ GradientParams gradient_of_part(const GradientParams& gradient,
                                                           const Params& params, int first_row,
                                                           int before) {
  const TilePart part = part_of_cta(params);
  if constexpr (requires { params.cut; }) {
    if (part.parts > 1) {
      const CutTiles& cut = params.cut;
      const int64_t row = static_cast<int64_t>(part.number) * ROWS - first_row;
      return {cut.parts_gmem + row * cut.columns + before, 0, 0, cut.columns, DType::F32, 0};
    }
  }
  return gradient;
}

// Adds up the parts of 8 columns of a row of dK or dV of a tile that was cut, by thread `number` of
// all.
template <DType DTYPE>
__device__ __forceinline__ void add_parts(const CuttingBackwardParams& params, int number) {
  const CutTiles& cut = params.cut;
  const AttentionParams& attention = params.call.attention;
  const int chunks = cut.columns / 8, d_chunks = attention.d / 8;
  const int row_of_all = number / chunks, chunk = number - row_of_all * chunks;
  int left = row_of_all / cut.rows;  // tiles that have parts, before the thread's
  const int row = row_of_all - left * cut.rows;
  int index = 0, first_part = 0, parts = 0;
  for (int i = 0; parts == 0; ++i) {
    if (i == CutTiles::MOST_RUNS || cut.runs[i].tiles == 0) return;
    const TileRun run = cut.runs[i];
    const bool has_parts = run.parts > 1;
    if (has_parts && left < run.tiles) {
      index += left, first_part += left * run.parts, parts = run.parts;
    } else {
      index += run.tiles;
      if (has_parts) left -= run.tiles, first_part += run.tiles * run.parts;
    }
  }
  const KeyTile tile = place_key_tile(attention, cut.rows, index);
  if (tile.first_row + row >= attention.nk) return;
  const int64_t part_floats = static_cast<int64_t>(cut.rows) * cut.columns;
  const float* part_gmem =
      cut.parts_gmem + first_part * part_floats + row * cut.columns + 8 * chunk;
  float x[8] = {};
  for (int part = 0; part < parts; ++part, part_gmem += part_floats) {
    const float4* chunk_gmem = reinterpret_cast<const float4*>(part_gmem);
    const float4 low = chunk_gmem[0], high = chunk_gmem[1];
    x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
    x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
  }
  const bool of_dk = chunk < d_chunks;
  const GradientParams& gradient = of_dk ? params.call.dk : params.call.dv;
  const int64_t start = tile.batch * gradient.batch + tile.head * gradient.head +
                        (tile.first_row + row) * gradient.row +
                        8 * (of_dk ? chunk : chunk - d_chunks);
  device::store_gradient_chunk<DTYPE>(gradient, start, x);
}

// The kernel behind one that cuts tiles: dQ of its sums, by the first CTAs, and dK and dV of the
// tiles that were cut.
template <DType DTYPE>
__device__ __forceinline__ void dq_and_parts(const CuttingBackwardParams& params) {
  const AttentionParams& attention = params.call.attention;
  const int blocks = attention.batch * attention.heads_q * params.call.dq_sums.blocks;
  const int cta = static_cast<int>(blockIdx.x) - blocks;
  if (cta < 0) return device::backward_dq<DTYPE>(params.call);
  ptx::griddepcontrol_wait();  // all parts are written
  add_parts<DTYPE>(params, cta * BACKWARD_DQ_THREADS + static_cast<int>(threadIdx.x));
}

}  // namespace archflash::mma_sync
