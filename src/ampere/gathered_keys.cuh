// What the kernels for lists of keys share: the list of a CTA, and where the keys of its blocks
// lie. A block is BLOCK_K entries of the list. Threads look up the keys of a block two rounds
// before they are multiplied, and leave in shared memory where they lie: loading an entry, and then
// an entry of the page table, takes as long as a round.
#pragma once

#include <cstdint>

#include "ampere/gather_config.cuh"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/key_lists.cuh"
#include "common/device/tile_walk.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ampere {

// What a CTA knows; it is in shared memory. Of the KV cache only the descales are used: places of
// keys say where rows lie, from the head's first row of K and V on.
struct GatherContext : mma_sync::CacheContext {
  device::KeyList list;
  device::Blocks share;  // the first entries of its first and last block
};
static_assert(sizeof(GatherContext) <= GATHER_CONTEXT_BYTES);

// One thread calls this and writes the result to shared memory for all. ELEMENT_BYTES: that strides
// of K and V count.
template <class C, int ELEMENT_BYTES>
__device__ __forceinline__ GatherContext make_gather_context(const mma_sync::CacheParams& params,
                                                             const KeyLists& lists,
                                                             device::Work work) {
  const AttentionParams& attention = params.attention;
  const int sequence = work.batch_head / attention.heads_q;
  const int kv_head = work.batch_head % attention.heads_q / attention.heads_per_kv;
  const device::CacheRows rows = device::find_listed_rows(params.cache, sequence);
  work.nk = rows.count;
  GatherContext cta;
  cta.work = work;
  cta.visible = device::find_visible_keys(attention, work);
  cta.packed_heads = params.packed_heads;
  cta.k_descale = cta.v_descale = 1.0f;
  const auto head_of = [&](const void* gmem, int64_t stride) {
    return reinterpret_cast<const uint16_t*>(static_cast<const char*>(gmem) +
                                             kv_head * stride * ELEMENT_BYTES);
  };
  cta.k_gmem = head_of(attention.k_gmem, attention.k_head);
  cta.v_gmem = head_of(attention.v_gmem, attention.v_head);
  const int last_row = min(work.first_row + params.packed_heads.rows(), work.nq) - 1;
  cta.list = device::find_key_list(attention, lists, work, rows, cta.visible, last_row);
  cta.share =
      device::split_blocks<C::BLOCK_K>({0, (cta.list.count - 1) & -C::BLOCK_K},
                                       blockIdx.x % params.partials.splits, params.partials.splits);
  return cta;
}

// The number of a block, of its first entry. Unsigned, because a signed quotient takes three more
// instructions.
template <class C>
__device__ __forceinline__ unsigned number_of(int block) {
  return static_cast<unsigned>(block) / C::BLOCK_K;
}

// The places of the keys of PLACE_BLOCKS blocks, in shared memory.
template <class C>
struct Places {
  int* smem;

  __device__ __forceinline__ int* of_block(int block) const {
    return smem + number_of<C>(block) % PLACE_BLOCKS * 3 * C::BLOCK_K;
  }
  __device__ __forceinline__ void store(int block, int number, const device::KeyPlace& key) const {
    int* const places = of_block(block) + number;
    places[0] = key.position;
    places[C::BLOCK_K] = key.row;
    places[2 * C::BLOCK_K] = key.block;
  }
  __device__ __forceinline__ device::KeyPlace load(int block, int number) const {
    const int* const places = of_block(block) + number;
    return {places[2 * C::BLOCK_K], places[C::BLOCK_K], places[0]};
  }
  // The positions of key `number` of a block and the next one.
  __device__ __forceinline__ int2 two_positions(int block, int number) const {
    return *reinterpret_cast<const int2*>(of_block(block) + number);
  }
};

// Looks keys up, one a thread: the entry of a block one round before its place.
template <class C>
struct Lookup {
  const GatherContext& cta;
  const KvCache& cache;
  Places<C> places;
  int next_entry;  // of the block that is looked up next

  // Leaves the places of the first two blocks. A barrier follows.
  __device__ __forceinline__ Lookup(const GatherContext& cta, const KvCache& cache,
                                    const Places<C>& places)
      : cta(cta), cache(cache), places(places) {
    const int first = cta.share.first;
    if (threadIdx.x >= C::BLOCK_K) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) store(first + i * C::BLOCK_K, find(load(first + i * C::BLOCK_K)));
    next_entry = load(first + 2 * C::BLOCK_K);
  }

  // The entry of this thread's key of a block; a list has none behind the share's last block.
  __device__ __forceinline__ int load(int block) const {
    const int place = block + ptx::mov_tid_x_volatile();
    return block <= cta.share.last ? cta.list.entry(place) : device::NO_KEY;
  }
  __device__ __forceinline__ device::KeyPlace find(int entry) const {
    return cta.list.find(cache, entry);
  }
  __device__ __forceinline__ void store(int block, const device::KeyPlace& key) const {
    places.store(block, ptx::mov_tid_x_volatile(), key);
  }
};

// Sets the scores of keys that a row does not see to -inf, of STEP_KEYS keys from number `key` of a
// block on. rows: the two of this lane.
template <class C, class Warp>
__device__ __forceinline__ void mask_gathered(device::Scores<Warp>& s_rmem, const Places<C>& places,
                                              const device::VisibleKeys& visible,
                                              const int (&rows)[2], int block, int key) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int n = 0; n < Warp::STEP_KEYS / 8; ++n) {
    const int2 position = places.two_positions(block, key + 8 * n + lane % 4 * 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = visible.first(rows[r]), last = visible.last(rows[r]);
      float* s = &s_rmem[0][n][2 * r];
      if (position.x < first || position.x > last) s[0] = device::MINUS_INFINITY;
      if (position.y < first || position.y > last) s[1] = device::MINUS_INFINITY;
    }
  }
}

}  // namespace archflash::ampere
