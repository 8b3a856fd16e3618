// How the roles of a blackwell_dc CTA hand over their data: every mbarrier, and the rings of K and
// V.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// Every mbarrier: who arrives, who waits, and what is then certain. t is a tile of the CTA, b a
// buffer of S, slot a stage of K or V.
//   bytes      the role arrives once and says how many bytes TMA will bring; the phase ends when
//              they have landed
//   commit     tcgen05.commit arrives once, when all products that were started before it are done
//   4 warps    each of the role's four warps arrives
//
// clang-format off
//   barrier         arrives               waits        so that
//   q_full t        load, bytes           mma          Q has landed before it is multiplied
//   q_empty t       mma, commit           load         all products have read Q before TMA writes
//                   O_OVER_Q: and store                the next one; O_OVER_Q: and the output rows
//                                                      that lay over Q have left
//   kv_full slot    load, bytes           mma          K or V has landed before it is multiplied
//   kv_empty slot   mma, commit           load         all products have read the slot before TMA
//                                                      writes there again
//   v_ragged slot   load, bytes           clean        a V with rows that do not count has landed
//                                                      before these rows are overwritten
//   v_clean slot    clean                 mma          these rows are zeros before V is multiplied
//   s_ready b       mma, commit           softmax      S is complete, and so are all products that
//                                                      were started before
//   p_ready b       softmax, 4 warps      mma          softmax has read S and written 3/4 of P;
//                   correction, 4 warps                correction has rescaled O (in a tile's first
//                                                      block: has read the previous tile's O)
//   p_last b        softmax, 4 warps      mma          the last quarter of P is written
//   stats_full t    softmax, 4 warps      correction   the rows' factors for O are written, or at a
//                                                      tile's end their sums and bases
//   stats_empty t   correction, 4 warps   softmax      these are read before they are overwritten
//   o_ready t       mma, commit           correction   O has the block's product before correction
//                                                      rescales or reads it
//   o_staged t      correction, 4 warps   store        the output rows are in shared memory
//   o_free t        store                 correction   the output rows have left shared memory
//                                                      before they are overwritten
//   response_full   load, bytes           all walks    the response that names the next tile is there
//     buffer
//   response_empty  every warp that       load         all have read a response before the next one
//     buffer        walks                              comes to its place
// clang-format on
//
// o_ready, with two tiles: correction needs O of a block before the next block's rescale, which
// softmax tells of once it has seen S of that next block. Since mma commits that S behind the
// products for O, stats_full says what o_ready would. So mma arrives at o_ready in the last block
// only, and in the others where EVERY_O_READY says so.
//
// A V with rows that do not count lands at v_ragged; load itself arrives at its kv_full. load and
// mma pass by a tile without keys. But where O is staged over Q, store arrives at q_empty once for
// each tile: there load arrives in mma's place, and correction, before it writes the rows, waits
// until both arrivals for the previous tile are complete.
template <class C>
struct Barriers {
  uint32_t smem;  // address of the first barrier

  __device__ __forceinline__ uint32_t q_full(int t) const { return at(0 * C::TILES + t); }
  __device__ __forceinline__ uint32_t q_empty(int t) const { return at(1 * C::TILES + t); }
  __device__ __forceinline__ uint32_t stats_full(int t) const { return at(2 * C::TILES + t); }
  __device__ __forceinline__ uint32_t stats_empty(int t) const { return at(3 * C::TILES + t); }
  __device__ __forceinline__ uint32_t o_ready(int t) const { return at(4 * C::TILES + t); }
  __device__ __forceinline__ uint32_t o_staged(int t) const { return at(5 * C::TILES + t); }
  __device__ __forceinline__ uint32_t o_free(int t) const { return at(6 * C::TILES + t); }
  __device__ __forceinline__ uint32_t s_ready(int b) const { return at(S + b); }
  __device__ __forceinline__ uint32_t p_ready(int b) const { return at(S + C::S_BUFFERS + b); }
  __device__ __forceinline__ uint32_t p_last(int b) const { return at(S + 2 * C::S_BUFFERS + b); }
  __device__ __forceinline__ uint32_t kv_full(int slot) const { return at(KV + slot); }
  __device__ __forceinline__ uint32_t kv_empty(int slot) const { return at(KV + C::SLOTS + slot); }
  __device__ __forceinline__ uint32_t v_ragged(int slot) const {
    return at(KV + 2 * C::SLOTS + slot);
  }
  __device__ __forceinline__ uint32_t v_clean(int slot) const {
    return at(KV + 3 * C::SLOTS + slot);
  }
  __device__ __forceinline__ uint32_t response_full(int buffer) const {
    return at(RESPONSE + buffer);
  }
  __device__ __forceinline__ uint32_t response_empty(int buffer) const {
    return at(RESPONSE + C::RESPONSES + buffer);
  }

  // Called by one thread, before any warp uses the barriers. cleans: the warp `clean` has work.
  __device__ __forceinline__ void init(bool cleans) const {
    for (int t = 0; t < C::TILES; ++t) {
      ptx::mbarrier_init(q_full(t), 1);
      ptx::mbarrier_init(q_empty(t), C::O_OVER_Q ? 2 : 1);
      ptx::mbarrier_init(stats_full(t), C::SOFTMAX_WARPS);
      ptx::mbarrier_init(stats_empty(t), C::CORRECTION_WARPS);
      ptx::mbarrier_init(o_ready(t), 1);
      ptx::mbarrier_init(o_staged(t), C::CORRECTION_WARPS);
      ptx::mbarrier_init(o_free(t), 1);
    }
    for (int b = 0; b < C::S_BUFFERS; ++b) {
      ptx::mbarrier_init(s_ready(b), 1);
      ptx::mbarrier_init(p_ready(b), C::CTAS * (C::SOFTMAX_WARPS + C::CORRECTION_WARPS));
      ptx::mbarrier_init(p_last(b), C::CTAS * C::SOFTMAX_WARPS);
    }
    for (int slot = 0; slot < C::SLOTS; ++slot) {
      ptx::mbarrier_init(kv_full(slot), 1);
      ptx::mbarrier_init(kv_empty(slot), 1);
      ptx::mbarrier_init(v_ragged(slot), 1);
      ptx::mbarrier_init(v_clean(slot), C::CTAS);
    }
    for (int buffer = 0; buffer < C::RESPONSES && C::SWITCHES.dynamic_walk; ++buffer) {
      ptx::mbarrier_init(response_full(buffer), 1);
      ptx::mbarrier_init(response_empty(buffer), C::WALKING_WARPS + (cleans ? C::CTAS : 0));
    }
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int S = 7 * C::TILES;
  static constexpr int KV = S + 3 * C::S_BUFFERS;
  static constexpr int RESPONSE = KV + 4 * C::SLOTS;
  static_assert(RESPONSE + 2 * C::RESPONSES == C::BARRIERS);

  __device__ __forceinline__ uint32_t at(int index) const { return smem + 8 * index; }
};

// Whether mma arrives at o_ready in every block, or in a row tile's last one only.
template <class C>
constexpr bool EVERY_O_READY =
    C::TILES == 1 || !C::SWITCHES.implied_o_ready || !C::SWITCHES.trust_issue_order;

// A role's position in a ring of LENGTH slots. A reader waits for the phase `parity` of a slot's
// "full" barrier, a writer for that of its "empty" barrier.
template <int LENGTH>
struct RingPosition {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    const bool last = index == LENGTH - 1;
    index = last ? 0 : index + 1;
    parity ^= last;
  }
};

struct Slot {
  int index;
  uint32_t parity;
};

// A role's walk over the slots of K and V, each in a ring of its own or both in one. In a shared
// ring a role must ask for K and V in the order in which they are loaded: K, V, K, V, ... A reader
// begins with parity 0. A writer begins with parity 1, so that its first waits end at once: nothing
// is in the slots yet.
template <class C>
struct Ring {
  RingPosition<C::K_STAGES> k;
  RingPosition<C::SHARED_RING ? 1 : C::V_STAGES> v;

  __device__ __forceinline__ static Ring of_writer() { return {{0, 1}, {0, 1}}; }

  __device__ __forceinline__ Slot next_k() {
    const Slot slot{k.index, k.parity};
    k.next();
    return slot;
  }
  __device__ __forceinline__ Slot next_v() {
    if constexpr (C::SHARED_RING) {
      return next_k();
    } else {
      const Slot slot{C::K_STAGES + v.index, v.parity};
      v.next();
      return slot;
    }
  }
  // The distance of a slot from the start of the rings, in units of UNIT bytes.
  template <int UNIT = 1>
  __device__ __forceinline__ static uint32_t offset(int slot) {
    constexpr int K_SLOT = C::K_SLOT_BYTES / UNIT, V_SLOT = C::VTile::BYTES / UNIT;
    if (C::SHARED_RING || slot < C::K_STAGES) return slot * K_SLOT;
    return C::K_STAGES * K_SLOT + (slot - C::K_STAGES) * V_SLOT;
  }
};

// One arrival for a warp, once all its lanes are here. What they did before comes before the
// arrival.
__device__ __forceinline__ void arrive_as_warp(uint32_t barrier_smem) {
  __syncwarp();
  if (ptx::elect_sync()) ptx::mbarrier_arrive(barrier_smem);
}

}  // namespace archflash::blackwell_dc
