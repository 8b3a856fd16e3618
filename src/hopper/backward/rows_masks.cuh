// A dense attn_mask in the backward pass for few query rows: each lane reads the elements of its
// own scores a step ahead, so that they come while products run, and adds its dS to their gradient.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/lowest_rows.cuh"
#include "common/device/masks.cuh"
#include "common/masked_backward_params.h"
#include "common/ptx/ex2.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/min.cuh"
#include "hopper/backward/backward_products.cuh"
#include "hopper/backward/kept_scores.cuh"
#include "hopper/backward/rows_params.h"
#include "hopper/backward/rows_pipeline.cuh"

namespace archflash::hopper {

// The elements of a lane's scores in a step: of two rows, of each 8 keys a pair of neighbours,
// which lies in one word, or of fp32 in two.
template <class C>
struct MaskWords {
  static constexpr int GROUPS = C::BLOCK / 8;
  static constexpr int WORDS = C::MASKED ? C::MASK_WORDS : 1;
  uint32_t words[2][GROUPS][WORDS];

  __device__ __forceinline__ uint8_t kept(int r, int n, int i) const {
    return static_cast<uint8_t>(words[r][n][0] >> (8 * i));
  }
  __device__ __forceinline__ uint32_t of_16_bits(int r, int n) const { return words[r][n][0]; }
  __device__ __forceinline__ float of_f32(int r, int n, int i) const {
    return __uint_as_float(words[r][n][WORDS == 1 ? 0 : i]);
  }
};

// The lane's first row in a tile of rows, and its first key in a block.
template <class C>
__device__ __forceinline__ int lane_row_of_tile(int tile) {
  const int thread = ptx::mov_tid_x_volatile();
  return tile * C::TILE_ROWS + thread / 32 * C::WARP_ROWS + thread % 32 / 4;
}
template <class C>
__device__ __forceinline__ int lane_key_of_block(int block) {
  return block * C::BLOCK + ptx::mov_tid_x_volatile() % 4 * 2;
}

// Starts the loads of a step's elements. Those behind the ends are 0. any: whether there is a step.
template <class C>
__device__ __forceinline__ void read_elements(MaskWords<C>& read, const MaskParams& masks,
                                              const RowsWork& work, int tile, int block, bool any) {
  const int row = lane_row_of_tile<C>(tile), key = lane_key_of_block<C>(block);
  const int rows = any ? work.nq - row : 0, keys = work.nk - key;
  const int64_t first = work.batch * masks.mask_batch + work.head * masks.mask_head +
                        row * masks.mask_row + key * masks.mask_key;
  const bool in_pairs = masks.mask_step != 0;
  const auto read_as = [&]<class Element, class Pair>(Pair) {
    constexpr int BITS = 8 * sizeof(Element);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Element* gmem =
          static_cast<const Element*>(masks.mask_gmem) + first + 8 * r * masks.mask_row;
#pragma unroll
      for (int n = 0; n < MaskWords<C>::GROUPS; ++n) {
        uint32_t (&words)[MaskWords<C>::WORDS] = read.words[r][n];
        const bool exists = 8 * r < rows && 8 * n < keys;
        if (in_pairs) {
          Pair pair{};
          if (exists) pair = *reinterpret_cast<const Pair*>(gmem);
          if constexpr (sizeof(Element) == 4) {
            words[0] = pair.x, words[MaskWords<C>::WORDS - 1] = pair.y;
          } else {
            words[0] = pair;
          }
        } else {
          const uint32_t own = exists ? gmem[0] : Element{};
          const uint32_t next = exists && 8 * n + 1 < keys ? gmem[masks.mask_key] : Element{};
          if constexpr (sizeof(Element) == 4) {
            words[0] = own, words[MaskWords<C>::WORDS - 1] = next;
          } else {
            words[0] = own | next << BITS;
          }
        }
        gmem += 8 * masks.mask_key;
      }
    }
  };
  if (masks.mask_element == MaskElement::Bool) {
    read_as.template operator()<uint8_t>(uint16_t{});
  } else if (C::MASK_WORDS == 1 || masks.mask_element == MaskElement::SixteenBits) {
    read_as.template operator()<uint16_t>(uint32_t{});
  } else {
    read_as.template operator()<uint32_t>(uint2{});
  }
}

// P = 2^(S + what is added - LSE), 0 of what is hidden. lse: of the lane's two rows.
template <class C>
__device__ __forceinline__ void exponentiate_with_elements(KeysByQueries<C>& p_rmem,
                                                           const KeysByQueries<C>& s_rmem,
                                                           const MaskWords<C>& read,
                                                           const MaskParams& masks, float scale,
                                                           float lse_0, float lse_1) {
  const auto weigh = [&](const auto& added_of) {
    const float most_0 = ptx::lg2_approx_ftz(device::most_weight(lse_0));
    const float most_1 = ptx::lg2_approx_ftz(device::most_weight(lse_1));
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float added = added_of(e / 2, n, e % 2);
        float score = fmaf(added, device::LOG2_E, s_rmem[n][e] * scale);
        if (score < device::LOWEST_LOG2) score = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
        const float exponent = score - (e / 2 == 0 ? lse_0 : lse_1);
        const float p = ptx::ex2_approx_ftz(ptx::min_nan(exponent, e / 2 == 0 ? most_0 : most_1));
        p_rmem[n][e] = added == device::MINUS_INFINITY ? 0.0f : p;
      }
    }
  };
  if (masks.mask_element == MaskElement::Bool) {
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float exponent = fmaf(s_rmem[n][e], scale, -(e / 2 == 0 ? lse_0 : lse_1));
        const float p = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
        p_rmem[n][e] = read.kept(e / 2, n, e % 2) == 0 ? 0.0f : p;
      }
    }
  } else if (C::MASK_WORDS == 1 || masks.mask_element == MaskElement::SixteenBits) {
    weigh([&](int r, int n, int i) {
      return device::added_of_half<C::DTYPE>(read.of_16_bits(r, n), i);
    });
  } else {
    weigh([&](int r, int n, int i) { return read.of_f32(r, n, i); });
  }
}

// Adds dS of a step of a head to the gradient of attn_mask. work: of any head with as many rows and
// keys.
template <class C>
__device__ __forceinline__ void add_element_gradients(const KeysByQueries<C>& ds_rmem,
                                                      const MaskGradientParams& dmask,
                                                      const RowsWork& work, int head, int tile,
                                                      int block) {
  const int row = lane_row_of_tile<C>(tile), key = lane_key_of_block<C>(block);
  const int rows = work.nq - row, keys = work.nk - key;
  float* gmem =
      dmask.gmem + work.batch * dmask.batch + head * dmask.head + row * dmask.row + key * dmask.key;
#pragma unroll
  for (int r = 0; r < 2; ++r, gmem += 8 * dmask.row) {
    if (8 * r >= rows) break;
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < keys)
          ptx::red_add_f32(gmem + (8 * n + i) * dmask.key, ds_rmem[n][2 * r + i]);
      }
    }
  }
}

// With SUMS_ELEMENTS, dS of the steps of one head and block of keys, where the gradient is the same
// for all sequences: it is added when a step of another one comes.
template <class C>
struct ElementSums {
  KeysByQueries<C> sums_rmem;
  int head = -1, block = 0;

  __device__ __forceinline__ void add(const KeysByQueries<C>& ds_rmem,
                                      const MaskGradientParams& dmask, const RowsWork& work,
                                      int of_block) {
    const int of_head = uniform(work.head);
    if (of_head != head || of_block != block) {
      flush(dmask, work);
      head = of_head, block = of_block;
#pragma unroll
      for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_rmem[n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_rmem[n][i] += ds_rmem[n][i];
    }
  }
  __device__ __forceinline__ void flush(const MaskGradientParams& dmask,
                                        const RowsWork& work) const {
    if (head >= 0) add_element_gradients<C>(sums_rmem, dmask, work, head, 0, block);
  }
};
struct NoElementSums {};
template <class C>
using ElementSumsOf = std::conditional_t<C::SUMS_ELEMENTS, ElementSums<C>, NoElementSums>;

// Adds dS of a step to the gradient of attn_mask, or keeps it for that, if it is wanted.
template <class C>
__device__ __forceinline__ void take_mask_gradient(const KeysByQueries<C>& ds_rmem,
                                                   const MaskedRowsParams& params,
                                                   const RowsWork& work, ElementSumsOf<C>& elements,
                                                   int tile, int block) {
  const MaskGradientParams& dmask = params.dmask;
  if (params.kept.gmem != nullptr) {
    const int head = work.batch * params.call.backward.attention.heads_q + work.head;
    const int group = ptx::mov_tid_x_volatile() / C::WARPGROUP;
    keep_scores<C>(ds_rmem, params.kept, head, tile * C::WARPGROUPS + group, block);
  } else if (dmask.gmem != nullptr) {
    if constexpr (C::SUMS_ELEMENTS) {
      if (dmask.batch == 0) return elements.add(ds_rmem, dmask, work, block);
    }
    add_element_gradients<C>(ds_rmem, dmask, work, work.head, tile, block);
  }
}

}  // namespace archflash::hopper
