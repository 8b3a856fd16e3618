// What a consumer warp of attention_fwd.cuh knows of its tile, and the rows that no sequence has.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/load.cuh"
#include "blackwell_consumer/params.h"
#include "blackwell_consumer/tile.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/descales.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"

namespace archflash::blackwell_consumer {

// What a warp needs to know of its tile. Outputs and scores leave few registers, so most kernels
// keep it in shared memory and read it where it is needed. A block is named by its first key. Where
// a range of blocks is empty, its last block is before its first.
struct WarpContext {
  unsigned round;               // of the walk over the tiles
  uint32_t q_parity;            // of the phase of q_full that brings this tile's Q
  uint32_t large_bases;         // the value of RowState::large, if that is a WarpFlag
  device::Blocks blocks;        // the CTA visits these
  int seen_first, seen_last;    // some row of the warp sees some key of these blocks
  int clear_first, clear_last;  // every row of the warp sees every key of these blocks
  device::Work work;
  device::VisibleKeys visible;  // its nk is the end of what any row of the sequence sees
};

struct Fp8WarpContext : WarpContext {
  device::KeyDescales key_descales;
  device::WarpDescale warp_descale;
};
struct ScaledWarpContext : WarpContext {
  KeyScales key_scales;
};
template <class C>
using WarpContextOf = std::conditional_t<C::BLOCK_SCALES, ScaledWarpContext,
                                         std::conditional_t<C::FP8, Fp8WarpContext, WarpContext>>;
__device__ __forceinline__ float unit_of_outputs(const ScaledWarpContext&) { return 1.0f; }
__device__ __forceinline__ const float& unit_of_outputs(const Fp8WarpContext& context) {
  return context.warp_descale.v;
}
template <class C>
constexpr bool HAS_DESCALES = C::FP8 && !C::BLOCK_SCALES;

// A flag in shared memory that all lanes of a warp set and read together.
struct WarpFlag {
  uint32_t* flag_smem;

  __device__ __forceinline__ operator bool() const { return *flag_smem != 0; }
  __device__ __forceinline__ void operator=(bool value) {
    // mutants: flag-was-read (tests/sim/tags.py)
    __syncwarp();  // every lane has read the old value before it is overwritten
    if (threadIdx.x % 32 == 0) *flag_smem = value;
    __syncwarp();  // the new value is written before any lane reads it
  }
};

template <class C>
__device__ __forceinline__ WarpContext make_warp_context(const Params& params,
                                                         const device::TileIndex& index,
                                                         const device::Work& work,
                                                         const device::VisibleKeys& visible,
                                                         int warp) {
  const int warp_row = warp * C::WARP_ROWS;
  int first_row = work.first_row + warp_row, rows = C::WARP_ROWS;
  if constexpr (C::CAN_SPLIT) {  // the same rows of each of the warp's heads
    const device::PackedHeads& packed = params.packed_heads;
    first_row = work.first_row + packed.row(warp_row);
    rows = packed.head(warp_row) < packed.count ? min(C::WARP_ROWS, packed.rows()) : 0;
  }
  const int last_row = min(first_row + rows, work.nq) - 1;
  WarpContext context;
  context.blocks = find_blocks<C>(params, index, work, visible);
  context.seen_first =
      max(device::block_start<C::BLOCK_K>(visible.first(first_row)), context.blocks.first);
  context.seen_last = last_row < first_row ? -1 : visible.last(last_row);
  if (context.seen_last < context.seen_first) context.seen_first = INT32_MAX;
  context.clear_first = max(visible.first(last_row), context.seen_first);
  context.clear_last = visible.last(first_row) - (C::BLOCK_K - 1);
  context.work = work;
  context.visible = visible;
  context.visible.nk = visible.end(work.nq);
  return context;
}

// Writes the rows of no sequence, unless the combining kernel does.
template <class C, int ELEMENT_BYTES>
__device__ __forceinline__ void write_rows_of_no_sequence_as(const Params& params, int index) {
  if constexpr (C::CAN_SPLIT) {
    const device::PackedHeads& packed = params.packed_heads;
    for (int head = 0; !params.partials.wanted() && head < packed.count; ++head) {
      device::write_rows_of_no_sequence<ELEMENT_BYTES>(params.attention, index, threadIdx.x,
                                                       C::CONSUMER_THREADS, packed.rows(),
                                                       packed.count, head);
    }
  } else {
    device::write_rows_of_no_sequence<C::BLOCK_Q, ELEMENT_BYTES>(params.attention, index,
                                                                 threadIdx.x, C::CONSUMER_THREADS);
  }
}
template <class C>
__device__ __forceinline__ void write_rows_of_no_sequence(const Params& params, int index) {
  if (!C::FP8 && params.out_dtype == DType::F32)
    return write_rows_of_no_sequence_as<C, 4>(params, index);
  write_rows_of_no_sequence_as<C, 2>(params, index);
}

}  // namespace archflash::blackwell_consumer
