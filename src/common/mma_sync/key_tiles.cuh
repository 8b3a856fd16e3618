// Which keys a CTA of fused_bwd.cuh has.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_work.cuh"

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

// What a CTA with tile `index` works on; a negative first_row says: none.
template <int ROWS>
__device__ __forceinline__ device::BackwardWork find_key_tile(const AttentionParams& params,
                                                              uint32_t index) {
  if (params.cu_seqlens_k_gmem != nullptr)
    return device::find_backward_work<Owns::Keys, ROWS>(params, static_cast<int>(index));
  const KeyTile tile = place_key_tile(params, ROWS, index);
  device::BackwardWork found{};
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

}  // namespace archflash::mma_sync
