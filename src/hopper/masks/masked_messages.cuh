// What the producer of a kernel with mask tensors tells the consumers: of each tile, and with the K
// of each block of the next one.
#pragma once

#include <cstdint>

#include "common/device/masks.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/masks/masked_config.cuh"

namespace archflash::hopper {

// The tile, and the message that comes with the block in a stage of K.
struct SeekingTile : Tile {
  int any_block;  // whether its rows see any block
};
template <class C>
__device__ __forceinline__ BlockMessage& block_message(unsigned char* shared, int stage) {
  return *reinterpret_cast<BlockMessage*>(shared + C::BLOCK_MESSAGE_SMEM +
                                          stage * BLOCK_MESSAGE_BYTES);
}

// Which keys of the tile count. The producer clears the other rows of V, and
// keeps this in shared memory, because it has few registers.
template <class C>
__device__ __forceinline__ device::KeyRange& counted_keys(unsigned char* shared) {
  return *reinterpret_cast<device::KeyRange*>(shared + C::COUNTED_SMEM);
}
template <class C>
__device__ __forceinline__ void set_counted_keys(unsigned char* shared,
                                                 const device::KeyRange& counted) {
  __syncwarp();  // every lane has read the last ones
  if (threadIdx.x % 32 == 0) counted_keys<C>(shared) = counted;
  __syncwarp();  // the new ones are there before every lane reads them
}

// Where the message about the tile in a stage of Q is. Kernels that have more messages than stages
// of Q have one stage, whose parity tells them apart.
template <class C>
__device__ __forceinline__ int message_of(const RingPosition<C::Q_STAGES>& q_ring) {
  return C::TILE_MESSAGES > C::Q_STAGES ? static_cast<int>(q_ring.parity) : q_ring.stage;
}

// What consumers read of a tile besides its message.
template <class C, class Context>
__device__ __forceinline__ Context& masked_context(unsigned char* shared, int message) {
  static_assert(sizeof(Context) <= C::CONTEXT_BYTES);
  return *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM + message * C::CONTEXT_BYTES);
}

// Elements of attn_mask that are added: their ring, in which only blocks that have some take a
// stage, and the barrier at which each consumer warp hands a stage back when it has read them.
template <class C>
__device__ __forceinline__ uint32_t mask_smem(uint32_t shared_smem, int stage) {
  return shared_smem + C::MASK_SMEM + stage * C::MASK_STEP;
}
template <class C>
__device__ __forceinline__ uint32_t mask_empty(uint32_t shared_smem, int stage) {
  return shared_smem + C::MASK_BARRIER_SMEM + 8 * stage;
}
constexpr uint32_t ADDED_FOR_ANY = 0x01010101 * STATE_ADDED;  // for any warpgroup

// Goes on to the next stage of Q. Elements that are added may need the second one themselves.
template <class C>
__device__ __forceinline__ void advance_q(RingPosition<C::Q_STAGES>& q_ring,
                                          const MaskParams& masks) {
  const bool adds =
      masks.mask_element == MaskElement::SixteenBits || masks.mask_element == MaskElement::F32;
  if (C::SHARES_Q && adds) {
    q_ring.parity ^= 1;
  } else {
    q_ring.advance();
  }
}

}  // namespace archflash::hopper
