// How the roles of a blackwell_dc CTA hand over: every mbarrier, and the ring of K and V.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// t: tile of the CTA; b: buffer of S; slot: of the ring. "Bytes": completed by TMA after the one
// arrival that says how many; "commit": the one arrival of tcgen05.commit; "w": of each warp. Where
// a tile has no keys, load and mma pass it by; but where O is staged over Q load arrives at q_empty
// in mma's place, and correction waits for the last tile's, so that store's arrivals are one for
// each tile. The bytes of a ragged V go to v_ragged; load arrives at its kv_full itself.
//
//   barrier         arrives               waits        so that
//   q_full t        load, bytes           mma          Q has landed before it is multiplied
//   q_empty t       mma, commit; O over   load         the last product with Q (and the copy of the
//                   Q: and store                       output) is done before the next Q is written
//   kv_full slot    load, bytes           mma          K or V has landed before it is multiplied
//   kv_empty slot   mma, commit           load         the products with it are done before TMA
//                                                      writes there again
//   v_ragged slot   load, bytes           clean        a V with rows of another sequence has landed
//   v_clean slot    clean                 mma          rows of another sequence in it are zeros
//   s_ready b       mma, commit           softmax      S is complete; so are the products before
//   p_ready b       4 w softmax, 4 w      mma          S is read, 3/4 of P are written; O is
//                   correction                         rescaled (first block: has been read)
//   p_last b        4 w softmax           mma          the last quarter of P is written
//   stats_full t    4 w softmax           correction   factors of O (at the end sums and bases) are
//                                                      written
//   stats_empty t   4 w correction        softmax      they are read before the next are written
//   o_ready t       mma, commit           correction   O has the block's product before it is
//                                                      rescaled or read
//   o_staged t      4 w correction        store        output rows are in shared memory
//   o_free t        store                 correction   the copy engine has read them
template <class C>
struct Barriers {
  uint32_t smem;  // of the first

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

  // By one thread, before anyone uses them.
  __device__ __forceinline__ void init() const {
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
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int S = 7 * C::TILES;
  static constexpr int KV = S + 3 * C::S_BUFFERS;
  static_assert(KV + 4 * C::SLOTS == C::BARRIERS);

  __device__ __forceinline__ uint32_t at(int index) const { return smem + 8 * index; }
};

// Where a role stands in a ring of LENGTH slots that are used in turn.
template <int LENGTH>
struct Turn {
  int index = 0;
  uint32_t parity = 0;  // who reads waits for this phase of "full", who writes for it of "empty"

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

// The slots of K and V as a role passes them: in one ring, where it asks for K and V in the order
// in which they are loaded (K, V, K, V, ...), or each in its own. Who reads begins with parity 0,
// who writes with 1: nothing is in the slots yet.
template <class C>
struct Ring {
  Turn<C::K_STAGES> k;
  Turn<C::SHARED_RING ? 1 : C::V_STAGES> v;

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
  // From the ring's start to a slot, in units of so many bytes.
  template <int UNIT = 1>
  __device__ __forceinline__ static uint32_t offset(int slot) {
    constexpr int K_SLOT = C::K_SLOT_BYTES / UNIT, V_SLOT = C::VTile::BYTES / UNIT;
    if (C::SHARED_RING || slot < C::K_STAGES) return slot * K_SLOT;
    return C::K_STAGES * K_SLOT + (slot - C::K_STAGES) * V_SLOT;
  }
};

// What the lanes of a warp have done before is done before its one arrival.
__device__ __forceinline__ void arrive_as_warp(uint32_t barrier_smem) {
  __syncwarp();
  if (ptx::elect_sync()) ptx::mbarrier_arrive(barrier_smem);
}

}  // namespace archflash::blackwell_dc
