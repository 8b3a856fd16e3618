// What the consumers of a summarized mask do to their scores: select, add elements of 16 bits,
// which ldmatrix brings from where TMA left them, or of 32, and add distances.
#pragma once

#include <cstdint>

#include "common/device/lane_masks.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/ptx/ld_shared.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "hopper/masks/masked_config.cuh"

namespace archflash::hopper::summarized {

// Selects the scores of a lane whose bits are set; the others become -inf, even if they were NaN.
// seen: a word for each block of the summary.
template <class C>
__device__ __forceinline__ void select_scores(device::Scores<C>& s_rmem,
                                              const uint32_t (&seen)[C::SUMMARY_BLOCKS]) {
  constexpr int GROUPS = MASK_BLOCK / 8;
#pragma unroll
  for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((seen[part] & 1u << (16 * r + 2 * n + i)) == 0)
            s_rmem[0][part * GROUPS + n][2 * r + i] = device::MINUS_INFINITY;
        }
      }
    }
  }
}

// What is kept of the elements that are added to a lane's scores, two in a word: four words for 16
// keys.
template <class C>
using Elements = uint32_t[C::KEEPS_ELEMENTS ? C::BLOCK_K / 16 : 1][4];

// row_smem: where the tile of elements has the row and chunk that this lane addresses for ldmatrix.
// n: a number of 16 keys.
template <class C>
__device__ __forceinline__ void load_elements(uint32_t (&words)[4], uint32_t row_smem, int n) {
  ptx::ldmatrix_x4(words, C::MaskTile::advance(row_smem, 2 * n));
}
// Does what load_elements() does, from the registers where elements are kept.
template <class C>
__device__ __forceinline__ void take_elements(uint32_t (&words)[4], const Elements<C>& kept,
                                              uint32_t row_smem, int n) {
  if constexpr (C::KEEPS_ELEMENTS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = kept[n][i];
  } else {
    load_elements<C>(words, row_smem, n);
  }
}

// Calls add(s, x) with each score of a lane and the element that is added to it.
template <class C, class Add>
__device__ __forceinline__ void add_elements(device::Scores<C>& s_rmem, const Elements<C>& kept,
                                             uint32_t row_smem, const Add& add) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 16; ++n) {
    uint32_t words[4];
    take_elements<C>(words, kept, row_smem, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* s = &s_rmem[0][2 * n + i / 2][2 * (i % 2)];
      add(s[0], device::added_of_half<C::DTYPE>(words[i], 0));
      add(s[1], device::added_of_half<C::DTYPE>(words[i], 1));
    }
  }
}

// Calls add(s, x) with each score of a lane and the element of 32 bits that is added to it. Half of
// a block's keys are in each of two stages. row_smem: where the lane's first elements are in both.
template <class C, class Add>
__device__ __forceinline__ void add_wide_elements(device::Scores<C>& s_rmem,
                                                  const uint32_t (&row_smem)[2], int row_bytes,
                                                  const Add& add) {
  constexpr int GROUPS = C::BLOCK_K / 8;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      float x[2];
      const uint32_t half_smem = row_smem[n / (GROUPS / 2)] + r * row_bytes;
      ptx::ld_shared_v2_f32(x, C::MaskTile::advance(half_smem, 2 * (n % (GROUPS / 2))));
      add(s_rmem[0][n][2 * r], x[0]);
      add(s_rmem[0][n][2 * r + 1], x[1]);
    }
  }
}

// Whether an element of the warp's rows may be not below LARGEST_ADDED, for a whole warp.
template <class C>
__device__ __forceinline__ bool any_huge(const Elements<C>& kept, uint32_t row_smem) {
  static_assert(NEXT_EXPONENT << 1 == HIGH_EXPONENT);
  uint32_t exponents = 0;
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 16; ++n) {
    uint32_t words[4];
    take_elements<C>(words, kept, row_smem, n);
#pragma unroll
    for (const uint32_t word : words) exponents |= word & word << 1;
  }
  return __any_sync(device::FULL_WARP, (exponents & (HIGH_EXPONENT << 16 | HIGH_EXPONENT)) != 0);
}

// Calls add(s, d) with each score of a lane and the distance of its key before its row. distance:
// that of the lane's first key and row.
template <class C, class Add>
__device__ __forceinline__ void add_distances(device::Scores<C>& s_rmem, float distance,
                                              const Add& add) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add(s_rmem[0][n][i], distance + static_cast<float>(8 * (i / 2) - 8 * n - i % 2));
  }
}

}  // namespace archflash::hopper::summarized
