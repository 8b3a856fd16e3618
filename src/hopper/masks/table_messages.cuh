// The barriers of a stream of a kernel for tables of blocks, and what its producer tells its
// consumers.
#pragma once

#include <cstdint>

#include "common/device/table_blocks.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/masks/table_config.cuh"

namespace archflash::hopper {

// Called by one thread. Barriers has what each one protects; those of K are those of V, too.
template <class C>
__device__ __forceinline__ void initialise_barriers(const Barriers<C>& barriers) {
  ptx::mbarrier_init(barriers.q_full(0), 1);
  ptx::mbarrier_init_for_warps(barriers.q_empty(0), C::WARPS);
  for (int stage = 0; stage < C::STAGES; ++stage) {
    ptx::mbarrier_init(barriers.k_full(stage), 1);
    ptx::mbarrier_init_for_warps(barriers.k_empty(stage), C::WARPS);
  }
  ptx::mbarrier_init(barriers.v_ragged(), 1);
  ptx::fence_mbarrier_init();
}

// A place in the ring of a stream.
template <class C>
struct TableRing {
  int stages;  // of the stream
  int stage = 0;
  uint32_t parity = 0;  // of the phases that a full barrier is in

  __device__ __forceinline__ explicit TableRing(int stream)
      : stages(stream < C::STREAMS - 1 ? C::STAGES : C::LAST_STAGES) {}
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The message about the block whose K is in a stage.
template <class C>
__device__ __forceinline__ device::TableBlock& table_block(unsigned char* shared, int stage) {
  static_assert(sizeof(device::TableBlock) <= C::BLOCK_BYTES);
  return *reinterpret_cast<device::TableBlock*>(shared + C::BLOCK_SMEM + stage * C::BLOCK_BYTES);
}

// The tile that comes with Q in a phase of q_full. first_row is negative behind the last tile.
struct TableTile : Tile {
  TileHead head;
  int any_block;  // whether any block of keys comes
};
template <class C>
__device__ __forceinline__ TableTile& table_message(unsigned char* shared, uint32_t parity) {
  static_assert(sizeof(TableTile) <= C::TABLE_MESSAGE_BYTES);
  return *reinterpret_cast<TableTile*>(shared + C::TABLE_MESSAGE_SMEM +
                                       static_cast<int>(parity) * C::TABLE_MESSAGE_BYTES);
}

}  // namespace archflash::hopper
