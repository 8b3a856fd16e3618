// What a producer that seeks the blocks of a tile says of them, for kernels with masks as data.
#pragma once

#include <cstdint>

#include "common/math/masks.cuh"
#include "hopper/config.cuh"
#include "hopper/pipeline.cuh"

namespace archflash::hopper {

// With masks as data: the tile, and the message that comes with the block in a stage of K.
struct SeekingTile : Tile {
  int any_block;  // whether its rows see any block
};
template <class C>
__device__ __forceinline__ BlockMessage& block_message(unsigned char* shared, int stage) {
  return *reinterpret_cast<BlockMessage*>(shared + C::BLOCK_MESSAGE_SMEM +
                                          stage * BLOCK_MESSAGE_BYTES);
}

// With masks as data: which keys of the tile count. The producer clears the other rows of V, and
// keeps this in shared memory, because it has few registers.
template <class C>
__device__ __forceinline__ math::KeyRange& counted_keys(unsigned char* shared) {
  return *reinterpret_cast<math::KeyRange*>(shared + C::COUNTED_SMEM);
}
template <class C>
__device__ __forceinline__ void set_counted_keys(unsigned char* shared,
                                                 const math::KeyRange& counted) {
  __syncwarp();  // every lane has read the last ones
  if (threadIdx.x % 32 == 0) counted_keys<C>(shared) = counted;
  __syncwarp();  // the new ones are there before every lane reads them
}

}  // namespace archflash::hopper
