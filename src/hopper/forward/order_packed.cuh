// Lists the row tiles of packed sequences before the attention kernel: those of the sequence with
// the most keys come first. CTAs take tiles one by one, so that a call ends when the last tiles do,
// and these are short then. Sequences of few rows may have a list of their own, for another kernel.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/params.h"
#include "hopper/plan/packed_lists.h"

namespace archflash::hopper {

// A warp finds the place of a sequence: behind all tiles of those in its list that have more keys,
// or as many and a smaller number.
__device__ __forceinline__ void order_packed(const PackedListsParams& params) {
  ptx::griddepcontrol_launch_dependents();  // the CTAs of the attention kernel wait
  ptx::griddepcontrol_wait();               // what comes before may have written cu_seqlens
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int own = static_cast<int>(blockIdx.x * ORDER_PACKED_WARPS + threadIdx.x / 32);
  if (own >= params.batch) return;
  const auto length = [](const int* cu_seqlens, int sequence, int rows) {
    return max(device::sequence_start(cu_seqlens, sequence + 1, rows) -
                   device::sequence_start(cu_seqlens, sequence, rows),
               0);
  };
  const auto tiles_of = [&](int nq, bool few) {
    const int rows = few ? params.few.tile_rows : params.many.tile_rows;
    return (static_cast<unsigned>(nq) + rows - 1) / rows;
  };
  const int nq = length(params.cu_seqlens_q_gmem, own, params.nq);
  const int nk = length(params.cu_seqlens_k_gmem, own, params.nk);
  const bool few = nq <= params.few_rows;
  unsigned before = 0, all_few = 0, all_many = 0;  // tiles
#pragma unroll 2
  for (int other = lane; other < params.batch; other += 32) {
    const int rows = length(params.cu_seqlens_q_gmem, other, params.nq);
    const int keys = length(params.cu_seqlens_k_gmem, other, params.nk);
    const bool other_few = rows <= params.few_rows;
    const unsigned tiles = tiles_of(rows, other_few);
    (other_few ? all_few : all_many) += tiles;
    if (other_few == few && (keys > nk || (keys == nk && other < own))) before += tiles;
  }
  before = __reduce_add_sync(device::FULL_WARP, before);
  all_few = __reduce_add_sync(device::FULL_WARP, all_few);
  all_many = __reduce_add_sync(device::FULL_WARP, all_many);
  const PackedList& list = few ? params.few : params.many;
  const auto own_tiles = static_cast<int>(tiles_of(nq, few));
  // There is room for the tiles of sequences that do not overlap, as those of right cu_seqlens.
  for (int i = lane; i < own_tiles && before + i < list.room; i += 32)
    list.gmem->tiles[before + i] = {own, (own_tiles - 1 - i) * list.tile_rows, nq, nk};
  // CTAs that take a number behind the last tile find that there is none.
  const auto end_list = [&](const PackedList& ended, unsigned all) {
    for (unsigned i = all + own; i < ended.room; i += params.batch)
      ended.gmem->tiles[i] = {0, -1, 0, 0};
    if (own == 0 && ended.room > 0) ended.gmem->taken = 0;  // the attention kernel counts there
  };
  if (lane == 0) end_list(params.many, all_many);
  if (lane == 1) end_list(params.few, all_few);
}

}  // namespace archflash::hopper
