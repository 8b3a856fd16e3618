// An attn_mask in 16 bits that is added to the scores, in the backward pass: TMA brings its
// elements of a block of queries and of the tile's keys, and consumers read them transposed, as the
// scores of keys by queries lie.
#pragma once

#include <cstdint>

#include "common/device/masks.cuh"
#include "common/device/slab_load.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/min.cuh"
#include "hopper/backward/backward_dense.cuh"
#include "hopper/backward/backward_pipeline.cuh"
#include "hopper/backward/backward_products.cuh"

namespace archflash::hopper {

// What comes behind a block's note.
struct AddedNote {
  int head;     // of those that share a head of K
  bool lowest;  // some row of the block sees lowest scores only
};

struct AddedNotes {
  using Note = AddedNote;
  template <class Terms>
  __device__ __forceinline__ AddedNote operator()(int head, int, const Terms& terms) const {
    return {head, any_lowest(terms)};
  }
};

template <class C>
__device__ __forceinline__ const AddedNote& added_note(const unsigned char* shared, int q_stage) {
  return *reinterpret_cast<const AddedNote*>(shared + C::TERMS_SMEM + q_stage * C::TERMS_BYTES +
                                             8 * C::BLOCK + sizeof(BlockNote));
}
// Loader: asks for the elements of a block, which is the CTA's number `number`. head: of q.
template <class C>
__device__ __forceinline__ void load_elements(const AddingBackwardParams& params,
                                              const CtaWork& work, uint32_t shared_smem,
                                              uint32_t number, int head, int row) {
  using Tile = typename C::MaskTile;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int stage = static_cast<int>(number % C::MASK_STAGES);
  ptx::mbarrier_wait_parity(barriers.mask_empty(stage), number / C::MASK_STAGES % 2 ^ 1);
  if (ptx::elect_sync()) {
    device::start_load<Tile>(shared_smem + C::MASK_SMEM + stage * Tile::BYTES, params.mask_map, row,
                             head * params.mask_head, work.batch * params.mask_batch,
                             barriers.mask_full(stage), work.first_row);
  }
}

// P = 2^(S + what is added - LSE) of the CTA's block number `number`, when its elements are there;
// then hands these back. What -inf hides is 0. lowest: whether some row sees lowest scores only.
// Returns whether -inf hides anything from the warp.
template <class C>
__device__ __forceinline__ bool exponentiate_with_elements(KeysByQueries<C>& p_rmem,
                                                           const KeysByQueries<C>& s_rmem,
                                                           const float2* terms, float scale,
                                                           uint32_t shared_smem, uint32_t number,
                                                           bool lowest) {
  using Tile = typename C::MaskTile;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int stage = static_cast<int>(number % C::MASK_STAGES);
  const int thread = threadIdx.x, lane = thread % 32;
  // As store_ds() has them: lanes 8j to 8j + 7 name the rows of matrix j.
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = thread / 32 * 2 + lane / 8 % 2;
  const uint32_t first_smem =
      shared_smem + C::MASK_SMEM + stage * Tile::BYTES + Tile::offset(row, chunk);
  bool hides = false;
  ptx::mbarrier_wait_parity(barriers.mask_full(stage), number / C::MASK_STAGES % 2);
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; n += 2) {
    uint32_t words[4];
    ptx::ldmatrix_x4_trans(words, first_smem + 8 * n * Tile::ROW_BYTES);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int of_queries = n + j / 2, r = j % 2;
      const float2 lse = terms[4 * of_queries];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float bias = device::added_of_half<C::DTYPE>(words[j], i);
        const float exponent =
            fmaf(bias, device::LOG2_E,
                 fmaf(s_rmem[of_queries][2 * r + i], scale, -(i == 0 ? lse.x : lse.y)));
        const float p = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
        const bool hidden = bias == device::MINUS_INFINITY;
        hides |= hidden;
        p_rmem[of_queries][2 * r + i] = hidden ? 0.0f : p;
      }
    }
  }
  if (lowest) {  // above, the scores of rows whose LSE is so low were -inf
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; n += 2) {
      uint32_t words[4];
      ptx::ldmatrix_x4_trans(words, first_smem + 8 * n * Tile::ROW_BYTES);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float2 lse = terms[4 * (n + e / 4)];
        const float of_row = e % 2 == 0 ? lse.x : lse.y;
        if (of_row < device::LOWEST_LOG2) {
          const float bias = device::added_of_half<C::DTYPE>(words[e / 2], e % 2);
          const bool hidden = bias == device::MINUS_INFINITY;
          p_rmem[n + e / 4][e % 4] = hidden ? 0.0f : device::most_weight(of_row);
        }
      }
    }
  }
  ptx::fence_proxy_async_shared();  // the reads come before TMA writes the next elements
  release(barriers.mask_empty(stage));
  return __any_sync(device::FULL_WARP, hides);
}

}  // namespace archflash::hopper
