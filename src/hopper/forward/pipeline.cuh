// How the roles of a CTA hand tiles and blocks over to one another: the barriers and the hazards
// that they close, the messages about tiles, and the turns of the consumers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/attention_work.cuh"
#include "common/device/masks.cuh"
#include "common/device/ring.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "hopper/config.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

using device::clear_rows;
using device::release;
using device::RingPosition;
using device::uniform;

// The barriers, as addresses in shared memory. "Bytes": the producer arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed.
//
// clang-format off
//   barrier                 arrives             waits      so that
//   q_full of each stage    producer, bytes     consumers  the tile's message and Q are there before
//                                                          they are read
//   q_empty of each stage   each consumer warp  producer   the message was read, the products have
//                                                          read Q, and output rows that pass
//                                                          through Q's part of shared memory have
//                                                          left it, before the next message and the
//                                                          next Q come (with STORES_BY_TMA during
//                                                          the next tile)
//   k_full, v_full          producer, bytes     consumers  the block has landed before wgmma reads it
//     of each stage
//   k_empty, v_empty        each consumer warp  producer   every warp's products have read the block
//     of each stage                                        before TMA overwrites it
//   v_ragged                producer, bytes     producer   a block of which some rows do not count
//                                                          has landed before the producer clears
//                                                          them; then it arrives at v_full. With
//                                                          CLEARS_BESIDE the warps beside it wait,
//                                                          clear and arrive,
//   v_cleared               one of them         producer   and have read its message before the
//                                                          next one comes
//   v_free                  each consumer warp  producer   with STORES_THROUGH_V: output rows have
//                                                          left the ring of V before the next tile's
//                                                          V comes
//   v_tile_full             producer            V's        the message for V's producer is there
//                                               producer   before it is read,
//   v_tile_empty            V's producer        producer   and was read before the next one comes
//   Where transposes_v():
//   v_full of each stage    each transposing    consumers  the block has been transposed before
//                           warp                           wgmma reads it; v_empty then holds back
//                                                          the transposing warps, not TMA
//   raw_full of each stage  producer, bytes     transpo-   the block has landed before it is
//                                               sing warps transposed
//   raw_empty               each transposing    producer   every warp has read its part of the block
//     of each stage         warp                           before TMA overwrites it
// clang-format on
template <class C>
struct Barriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t q_full(int stage) const { return first_smem + 8 * stage; }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return q_full(stage) + 8 * C::Q_STAGES;
  }
  __device__ __forceinline__ uint32_t k_full(int stage) const {
    return first_smem + 16 * C::Q_STAGES + 8 * stage;
  }
  __device__ __forceinline__ uint32_t k_empty(int stage) const {
    return k_full(stage) + 8 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_full(int stage) const {
    return k_full(stage) + 16 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_empty(int stage) const {
    return k_full(stage) + 24 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_ragged() const {
    return first_smem + 16 * C::Q_STAGES + 32 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_cleared() const { return v_ragged() + 8; }
  __device__ __forceinline__ uint32_t v_free() const { return v_ragged() + 8; }
  __device__ __forceinline__ uint32_t v_tile_full() const { return v_ragged() + 8; }
  __device__ __forceinline__ uint32_t v_tile_empty() const { return v_ragged() + 16; }
  __device__ __forceinline__ uint32_t raw_full(int stage) const {
    return v_ragged() + 8 + 16 * (C::PRODUCERS - 1) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t raw_empty(int stage) const {
    return raw_full(stage) + 8 * C::RAW_STAGES;
  }

  // Called by one thread. The producer arrives once at a full barrier and says how many bytes will
  // come, or `v_arrivals` transposing warps do at v_full. Each consumer warp arrives once at the
  // empty barriers of Q, K and V, each transposing warp at raw_empty, V's producer at v_tile_empty.
  __device__ __forceinline__ void initialise(int v_arrivals = 1) const {
    for (int stage = 0; stage < C::Q_STAGES; ++stage) {
      if constexpr (C::PREPARES_TILES)  // the message is of all lanes of the producer
        ptx::mbarrier_init_for_warps(q_full(stage), 1);
      else
        ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init_for_warps(q_empty(stage), C::WARPS);
    }
    for (int stage = 0; stage < C::STAGES; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init_for_warps(k_empty(stage), C::WARPS);
      ptx::mbarrier_init(v_full(stage), v_arrivals);
      ptx::mbarrier_init_for_warps(v_empty(stage), C::WARPS);
    }
    ptx::mbarrier_init(v_ragged(), 1);
    if constexpr (requires { C::CLEARS_BESIDE; }) {
      if constexpr (C::CLEARS_BESIDE) ptx::mbarrier_init(v_cleared(), 1);
    }
    if constexpr (requires { C::STORES_THROUGH_V; }) {
      if constexpr (C::STORES_THROUGH_V) ptx::mbarrier_init_for_warps(v_free(), C::WARPS);
    }
    for (int stage = 0; stage < C::RAW_STAGES; ++stage) {
      ptx::mbarrier_init(raw_full(stage), 1);
      ptx::mbarrier_init_for_warps(raw_empty(stage), C::TRANSPOSING_WARPS);
    }
    if constexpr (C::PRODUCERS > 1) {
      ptx::mbarrier_init(v_tile_full(), 1);
      ptx::mbarrier_init_for_warps(v_tile_empty(), 1);
    }
    ptx::fence_mbarrier_init();
  }
};

// A row tile and the number of a share of it: of its keys, or of the columns of V. first_row is
// negative behind the last tile.
struct Tile : device::Work {
  int split;
  int end_row;  // one behind its last row

  // The tile as if its sequence ended with it.
  __device__ __forceinline__ device::Work rows() const {
    return {batch_head, first_row, end_row, nk};
  }
};

// A tile of a call of mixed lengths (TileEntry): `split` is the number of a share, and `slot` the
// first slot of all shares of the tile.
struct MixedTile : Tile {
  int shares, slot;

  __device__ __forceinline__ bool is_packed() const { return shares > 0; }
};

// Whether a kernel serves such calls.
template <class C>
consteval bool is_mixed() {
  if constexpr (requires { C::MIXED; }) return C::MIXED;
  return false;
}
template <class C>
using TileOf = std::conditional_t<is_mixed<C>(), MixedTile, Tile>;

// The heads of a tile of a call of mixed lengths.
__device__ __forceinline__ device::PackedHeads heads_of(const Params& params,
                                                        const MixedTile& tile) {
  constexpr int MORE_THAN_ALL = 30;  // bits
  return tile.is_packed() ? params.packed_heads : device::PackedHeads{1, MORE_THAN_ALL};
}

// The message about the tile in a stage of Q: a Tile, or what a kernel makes of it.
template <class C, class Message = Tile>
__device__ __forceinline__ Message& tile_message(unsigned char* shared, int stage) {
  static_assert(sizeof(Message) <= TILE_MESSAGE_BYTES);
  return *reinterpret_cast<Message*>(shared + C::MESSAGE_SMEM + stage * TILE_MESSAGE_BYTES);
}

// The message for a producer of V: the tile, and the row of the cache that is its first key.
struct CachedTile : Tile {
  int first_of_cache;
};
// In a call of mixed lengths that row is the first one: its caches have no padding.
template <class C>
using VTileMessage = std::conditional_t<is_mixed<C>(), MixedTile, CachedTile>;
template <class C>
__device__ __forceinline__ VTileMessage<C>& v_tile_message(unsigned char* shared) {
  return tile_message<C, VTileMessage<C>>(shared, C::Q_STAGES);
}

// With TRANSPOSES_V: which rows of the block in a stage of V to transpose count; the others
// are cleared. end = 0: no block follows.
struct RowsToTranspose {
  int begin, end;
};
template <class C>
__device__ __forceinline__ RowsToTranspose& rows_to_transpose(unsigned char* shared, int stage) {
  return *reinterpret_cast<RowsToTranspose*>(shared + C::RAW_MESSAGE_SMEM + 8 * stage);
}

// With CLEARS_BESIDE: which rows of V in a stage count; the others are cleared. stage < 0: no block
// follows.
struct RowsToClear {
  int begin, end, stage;
};
template <class C>
__device__ __forceinline__ RowsToClear& rows_to_clear(unsigned char* shared) {
  return *reinterpret_cast<RowsToClear*>(shared + C::CLEAR_MESSAGE_SMEM);
}

// The parity of the phase of q_empty in which the next tile's stage of Q is free.
template <class C>
__device__ __forceinline__ uint32_t free_parity(const RingPosition<C::Q_STAGES>& q_ring) {
  // With STORES_BY_TMA a tile hands back the stage of the tile before. The first tile does so, too:
  // that is a phase more of the second stage.
  if constexpr (requires { C::STORES_BY_TMA; }) {
    if constexpr (C::STORES_BY_TMA) return q_ring.parity ^ q_ring.stage ^ 1;
  }
  return q_ring.parity ^ 1;
}

// Tells the consumers that no tile follows. Called by the producer's warp, one lane of which is the
// leader, with the stage that the next tile would have.
template <class C, class Message = Tile>
__device__ __forceinline__ void send_no_tile(const Barriers<C>& barriers, unsigned char* shared,
                                             const RingPosition<C::Q_STAGES>& q_ring, bool leader) {
  // mutants: last-tile-came-by-the-rings (tests/sim/tags.py)
  ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), free_parity<C>(q_ring));
  if (leader) {
    Message none{};
    none.first_row = -1;
    tile_message<C, Message>(shared, q_ring.stage) = none;
    ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));
  }
  if constexpr (C::PREPARES_TILES) device::arrive_beside(leader, barriers.q_full(q_ring.stage));
}

// Hands a stage of Q back to the producer, when a consumer warp needs this Q no longer.
template <class C>
__device__ __forceinline__ void hand_back_q(const Barriers<C>& barriers, int stage) {
  // This thread's reads and writes of output rows in Q's part come before TMA's next write there.
  // mutants: needless-with-one-tile
  ptx::fence_proxy_async_shared();
  release(barriers.q_empty(stage));
}

// The turns of the warpgroups to issue products: named barriers from 1 on, one for each of them.
// A warpgroup hands the turn to the next one, and the last one to the first.
template <class C>
struct Turns {
  static constexpr int THREADS = 2 * C::WARPGROUP;  // of who hands over and who waits
  int group;

  __device__ __forceinline__ void wait() const {
    if constexpr (C::IN_TURNS) ptx::bar_sync(1 + group, THREADS);
  }
  __device__ __forceinline__ void hand_over() const {
    const int next = group + 1 == C::WARPGROUPS ? 0 : group + 1;
    if constexpr (C::IN_TURNS) ptx::bar_arrive(1 + next, THREADS);
  }
};

// With PACKS: the warps of a warpgroup wait for one another.
template <class C>
__device__ __forceinline__ void sync_group(int group) {
  ptx::bar_sync(C::GROUP_BARRIER + (C::WARPGROUPS == 1 ? 0 : group), C::WARPGROUP);
}

}  // namespace archflash::hopper
