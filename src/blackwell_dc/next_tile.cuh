// How a CTA, or a pair of CTAs, comes to its tiles one after another. All roles see the same tiles.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/device/tile_walk.cuh"
#include "common/ptx/launch_control.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

namespace archflash::blackwell_dc {

// The walk of one warp over the tiles of its CTA or pair.
//
// dynamic_walk: the grid has a CTA, or a pair, for each tile, in the order in which they are to be
// computed, and the GPU starts as many as there is room for. The first tile is that of the CTA
// itself. For each further one load asks the GPU for a CTA that has not started (ask()). That CTA
// then never starts, and the response names it to all warps (next()), until one says that none is
// left. So a CTA that is done early takes more tiles. Responses have RESPONSES buffers in turn.
//
// Otherwise the grid has at most as many CTAs as there is room for. They take the tiles in rounds.
template <class C>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const Params& params, uint32_t shared_smem)
      : shared_smem_(shared_smem), tiles_(params.tiles) {
    tile_ = C::SWITCHES.dynamic_walk ? blockIdx.x / C::CTAS : index_.value();
  }

  __device__ __forceinline__ bool more() const {
    return C::SWITCHES.dynamic_walk ? tile_ >= 0 : index_.more(tiles_);
  }
  // The index of the tile at hand. In the last round it may be beyond the last tile.
  __device__ __forceinline__ int tile() const { return tile_; }

  // Goes on to the next tile. Called by whole warps.
  __device__ __forceinline__ void next() {
    if constexpr (C::SWITCHES.dynamic_walk) {
      const Barriers<C> barriers = own_barriers();
      const uint32_t buffer = taken_ % C::RESPONSES;
      ptx::mbarrier_wait_parity(barriers.response_full(buffer), taken_ / C::RESPONSES & 1);
      const int cta = uniform(ptx::canceled_cta(response(buffer)));
      ptx::fence_proxy_async_shared();  // this read comes before the next response is written
      arrive_at_mma_as_warp<C>(barriers_of_mma<C>(barriers).response_empty(buffer));
      tile_ = cta < 0 ? cta : cta / C::CTAS;
      ++taken_;
    } else {
      ++index_.round;
      tile_ = index_.value();
    }
  }

  // Asks for the next tile. Called by load once for each tile; `leader` in one lane.
  __device__ __forceinline__ void ask(bool leader) const {
    if constexpr (C::SWITCHES.dynamic_walk) {
      const Barriers<C> barriers = own_barriers();
      const uint32_t buffer = taken_ % C::RESPONSES;
      const bool asks = rank_in_pair<C>() == 0;
      if (asks) {  // all warps have read the response that lay here
        ptx::mbarrier_wait_parity(barriers.response_empty(buffer), (taken_ / C::RESPONSES & 1) ^ 1);
      }
      if (!leader) return;
      ptx::mbarrier_arrive_expect_tx(barriers.response_full(buffer), ptx::LAUNCH_RESPONSE_BYTES);
      if (asks && C::CTAS == 1)
        ptx::try_cancel_launch(response(buffer), barriers.response_full(buffer));
      if (asks && C::CTAS > 1)
        ptx::try_cancel_launch_for_cluster(response(buffer), barriers.response_full(buffer));
    }
  }

 private:
  uint32_t shared_smem_;
  int tiles_;
  int tile_;
  uint32_t taken_ = 0;  // tiles before the one at hand
  device::SharedTileIndex<C::CTAS> index_;

  __device__ __forceinline__ Barriers<C> own_barriers() const {
    return Barriers<C>{shared_smem_ + C::BARRIER_SMEM};
  }
  __device__ __forceinline__ uint32_t response(uint32_t buffer) const {
    return shared_smem_ + C::RESPONSE_SMEM + buffer * ptx::LAUNCH_RESPONSE_BYTES;
  }
};

}  // namespace archflash::blackwell_dc
