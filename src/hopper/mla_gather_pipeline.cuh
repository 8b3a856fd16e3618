// How the roles of mla_gather_fwd.cuh hand tiles and blocks over to one another.
#pragma once

#include <cstdint>

#include "common/device/key_lists.cuh"
#include "hopper/mla_gather_config.cuh"
#include "hopper/mla_pipeline.cuh"

namespace archflash::hopper {

// The barriers, as addresses in shared memory.
//
// clang-format off
//   barrier                 arrives                     waits         so that
//   full of a half of V     each lane that gathers      consumers     the part has landed before wgmma reads it, and the
//     of each stage         it, and its warp                          bits of the block are there before they are read
//   empty of a half         the 4 warps that            producers     their product has read it, and scores of the block
//     of each stage         multiply it                               are there, before cp.async overwrites it
//   p_full of a warpgroup   its 4 warps                 the other     as in mla_pipeline.cuh
//                                                       warpgroup
//   q_full                  likewise                    consumers     Q has landed before wgmma reads it
//   q_empty                 each consumer warp          producers     the last scores of the tile have read Q
//   tile_full, tile_empty   a producer warp; each       consumers;    the message about a tile is there before it is read,
//   of each message         consumer warp               that warp     and was read before it is overwritten
// clang-format on
template <class C>
struct MlaGatherBarriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t full(int stage, int part) const {
    return first_smem + 8 * (2 * stage + part - MLA_LEFT);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int part) const {
    return full(C::STAGES + stage, part);
  }
  __device__ __forceinline__ uint32_t p_full(int group) const {
    return full(2 * C::STAGES, MLA_LEFT) + 8 * group;
  }
  __device__ __forceinline__ uint32_t q_full() const { return p_full(C::WARPGROUPS); }
  __device__ __forceinline__ uint32_t q_empty() const { return q_full() + 8; }
  __device__ __forceinline__ uint32_t tile_full(int message) const {
    return q_full() + 16 + 8 * message;
  }
  __device__ __forceinline__ uint32_t tile_empty(int message) const {
    return tile_full(C::TILE_MESSAGES + message);
  }

  // Called by one thread.
  __device__ __forceinline__ void initialise() const {
    constexpr uint32_t PRODUCER_LANES = 32 * C::PRODUCER_WARPS;
    for (int half = 0; half < C::STAGES * 2; ++half) {
      ptx::mbarrier_init_for_warps(full(0, MLA_LEFT + half), C::PRODUCER_WARPS, PRODUCER_LANES);
      ptx::mbarrier_init_for_warps(empty(0, MLA_LEFT + half), C::WARPGROUP / 32);
    }
    for (int group = 0; group < C::WARPGROUPS; ++group)
      ptx::mbarrier_init_for_warps(p_full(group), C::WARPGROUP / 32);
    ptx::mbarrier_init_for_warps(q_full(), C::PRODUCER_WARPS, PRODUCER_LANES);
    ptx::mbarrier_init_for_warps(q_empty(), C::WARPS);
    for (int message = 0; message < C::TILE_MESSAGES; ++message) {
      ptx::mbarrier_init_for_warps(tile_full(message), 1);
      ptx::mbarrier_init_for_warps(tile_empty(message), C::WARPS);
    }
    ptx::fence_mbarrier_init();
  }
};

// A tile, whose blocks are counted in places of its list, and the number of its share of the list.
// first_row is negative behind the last tile.
struct MlaGatherTile : MlaTile {
  int split;
};

template <class C>
__device__ __forceinline__ MlaGatherTile& tile_message_of(unsigned char* shared, int number) {
  static_assert(sizeof(MlaGatherTile) <= C::TILE_BYTES && C::TILE_MESSAGES == 2);
  return *reinterpret_cast<MlaGatherTile*>(shared + C::TILE_SMEM + number % 2 * C::TILE_BYTES);
}

}  // namespace archflash::hopper
