// Reads attn_mask once, before the attention kernel, however many heads share it: a CTA for each
// block of MASK_BLOCK rows and keys. It writes whether any row sees any key, whether any is hidden
// and whether anything is added (masked_config.cuh), and for each thread of a consumer warpgroup
// which of its scores count, as bits; and a copy of elements that are added, where TMA cannot read
// them as they lie. Or it looks at key_ranges, a CTA for MASK_BLOCK rows.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/lane_masks.cuh"
#include "common/device/masks.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_params.h"

namespace archflash::hopper {

constexpr int LOW_SUMMARY_CTAS = 8;  // on an SM: registers without spills

// What device::load_words() is told.
template <DType DTYPE_>
struct SummaryConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int STEP_KEYS = MASK_BLOCK;
  static constexpr bool LOADS_ADDED_LATE = false;
};

// WIDE: elements of 32 bits. TELLS_HIGH: high_rows_gmem may be written. Either costs the kernel
// that most masks need registers, of which its speed depends.
template <DType DTYPE, bool WIDE, bool TELLS_HIGH>
__device__ __forceinline__ void summarize_mask(const SummarizedParams& params) {
  using C = SummaryConfig<DTYPE>;
  __shared__ uint32_t state_of_warp[SUMMARY_THREADS / 32];
  ptx::griddepcontrol_wait();               // what comes before this call is done
  ptx::griddepcontrol_launch_dependents();  // the attention kernel waits for the end of this one
  const MaskParams& masks = params.masks;
  const AttentionParams& attention = params.call.attention;
  const unsigned block = blockIdx.x;
  const int key_block = static_cast<int>(block % params.key_blocks);
  const int row_block = static_cast<int>(block / params.key_blocks % params.row_blocks);
  const int slice = static_cast<int>(block / params.key_blocks / params.row_blocks);
  const int batch = slice / params.mask_heads, head = slice % params.mask_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_first = key_block * MASK_BLOCK, lane_key = key_first + lane % 4 * 2;

  device::LaneMasks<C> found;
  uint32_t valid[2];  // the lane's elements that exist
  int64_t elements[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_block * MASK_BLOCK + warp * 16 + lane / 4 + 8 * r;
    valid[r] = row < attention.nq ? device::lane_bits<C>(0, attention.nk - lane_key) : 0;
    found.seen[r] = valid[r];
    elements[r] = batch * masks.mask_batch + head * masks.mask_head +
                  min(row, attention.nq - 1) * masks.mask_row + lane_key * masks.mask_key;
  }
  device::load_words<C>(found, masks, elements, attention.nk - key_first);
  bool added = false, huge = false, all_lowest = true;
  bool high[2] = {};
  const bool tells_high = TELLS_HIGH && params.high_rows_gmem != nullptr;
  const auto look_at = [&](int r, int bit, float x) {
    if ((valid[r] >> bit & 1) == 0) return;
    if (x == device::MINUS_INFINITY) {
      found.seen[r] &= ~(1u << bit);
    } else {
      added |= x != 0.0f;
      huge |= !(fabsf(x) < LARGEST_ADDED);
    }
  };
  const auto compare = [&](int r, int bit, float x) {
    if ((valid[r] >> bit & 1) == 0) return;
    all_lowest &= x <= LOWEST_ADDED;
    high[r] |= x > LOWEST_ADDED / 2;
  };
  if constexpr (WIDE) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row[16];
      device::load_row<C>(row, found, masks, r);
#pragma unroll
      for (int bit = 0; bit < 16; ++bit) {
        look_at(r, bit, row[bit]);
        compare(r, bit, row[bit]);
      }
    }
  } else if (found.loaded == MaskElement::Bool) {
#pragma unroll
    for (int r = 0; r < 2; ++r) found.seen[r] &= device::kept_bits<C>(found.words[r]);
  } else if (found.loaded == MaskElement::SixteenBits) {
    const auto element = [&](int r, int bit) {
      return device::added_of_half<DTYPE>(found.words[r][bit / 2], bit % 2);
    };
#pragma unroll
    for (int i = 0; i < 32; ++i) look_at(i / 16, i % 16, element(i / 16, i % 16));
    all_lowest = (found.seen[0] | found.seen[1]) == 0;
    high[0] = found.seen[0] != 0, high[1] = found.seen[1] != 0;
    // Most warps have no element that is nearly as low as the lowest one, and those of fp16 cannot
    // be. Compared as numbers, the elements would stay in registers from above.
    if (DTYPE == DType::BF16 && tells_high && __any_sync(device::FULL_WARP, huge)) {
      constexpr uint32_t LOWEST = 0xFE80, MINUS_INFINITY_BITS = 0xFF80;
      static_assert(LOWEST_ADDED == -0x1p126f, "as LOWEST");
      all_lowest = true, high[0] = high[1] = false;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const uint32_t bits = found.words[i / 16][i % 16 / 2] >> (i % 2 * 16) & 0xFFFF;
        if ((valid[i / 16] >> (i % 16) & 1) == 0) continue;
        all_lowest &= bits >= LOWEST && bits <= MINUS_INFINITY_BITS;
        high[i / 16] |= bits < LOWEST - 0x80;
      }
    }
  }
  if (tells_high) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_block * MASK_BLOCK + warp * 16 + lane / 4 + 8 * r;
      // A bit for each of the warp's eight rows, from those of four lanes.
      uint32_t rows = __ballot_sync(device::FULL_WARP, high[r] || row >= attention.nq);
      rows |= rows >> 2;
      rows = (rows | rows >> 1) & 0x11111111;
      rows = (rows | rows >> 3) & 0x03030303;
      rows = (rows | rows >> 6) & 0x000F000F;
      if (lane == 0)
        params.high_rows_gmem[static_cast<int64_t>(block) * HIGH_BYTES + 2 * warp + r] =
            static_cast<uint8_t>(rows | rows >> 12);
    }
  }
  if (params.copied_gmem != nullptr) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_block * MASK_BLOCK + warp * 16 + lane / 4 + 8 * r;
      uint32_t* row_gmem =
          params.copied_gmem +
          (static_cast<int64_t>(slice) * params.copied_rows + row) * params.copied_row;
#pragma unroll
      for (int n = 0; n < MASK_BLOCK / 8; ++n) {
        const int word = lane_key / 2 + 4 * n;
        if (row < params.copied_rows && word < params.copied_row)
          row_gmem[word] = found.words[r][n];
      }
    }
  }
  const uint32_t seen = found.seen[0] | found.seen[1] << 16;
  const uint32_t exists = valid[0] | valid[1] << 16;
  params.bits_gmem[static_cast<int64_t>(block) * SUMMARY_WORDS + threadIdx.x] = seen;

  const uint32_t state = (__any_sync(device::FULL_WARP, seen != 0) ? STATE_SEEN : 0) |
                         (__any_sync(device::FULL_WARP, seen != exists) ? STATE_HIDDEN : 0) |
                         (__any_sync(device::FULL_WARP, added) ? STATE_ADDED : 0) |
                         (__any_sync(device::FULL_WARP, huge) ? STATE_HUGE : 0);
  const bool lowest = tells_high && __all_sync(device::FULL_WARP, all_lowest);
  if (lane == 0) state_of_warp[warp] = state | (lowest ? SUMMARY_LOWEST : 0);
  __syncthreads();  // each warp's state is there before they are put together
  if (threadIdx.x == 0) {
    uint32_t whole = 0, of_all = SUMMARY_LOWEST;
#pragma unroll
    for (const uint32_t part : state_of_warp) whole |= part, of_all &= part;
    whole = (whole & ~SUMMARY_LOWEST) | of_all;
    params.states_gmem[block] = static_cast<uint8_t>((whole & STATE_SEEN) != 0 ? whole : 0);
    if (block == 0) *params.call.taken_gmem = 0;  // the attention kernel counts its tiles there
  }
}

// For key_ranges: what the rows of a row block see of each block of keys, and between which keys
// all of it lies.
__device__ __forceinline__ void summarize_ranges(const SummarizedParams& params) {
  constexpr int LANE_ROWS = MASK_BLOCK / 32;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const MaskParams& masks = params.masks;
  const AttentionParams& attention = params.call.attention;
  const int row_block = static_cast<int>(blockIdx.x % params.row_blocks);
  const int slice = static_cast<int>(blockIdx.x / params.row_blocks);
  const int batch = slice / params.mask_heads, head = slice % params.mask_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t* ranges_gmem =
      masks.ranges_gmem + batch * masks.ranges_batch + head * masks.ranges_head;
  uint8_t* states_gmem = params.states_gmem + static_cast<int64_t>(blockIdx.x) * params.key_blocks;

  SeenKeys ranges[LANE_ROWS][MOST_RANGES];  // of the lane's rows; empty where there is none
  SeenKeys all_keys{INT32_MAX, -1};
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    const int row = row_block * MASK_BLOCK + 32 * r + lane;
#pragma unroll
    for (int number = 0; number < MOST_RANGES; ++number) {
      SeenKeys& keys = ranges[r][number];
      keys = {INT32_MAX, -1};
      if (row >= attention.nq || number >= masks.ranges) continue;
      const int32_t* range = ranges_gmem + row * masks.ranges_row + 2 * number;
      const int begin = max(range[0], 0), end = min(range[1], attention.nk);
      if (begin >= end) continue;
      keys = {begin, end - 1};
      all_keys = {min(all_keys.first, begin), max(all_keys.last, end - 1)};
    }
  }
  all_keys = {__reduce_min_sync(device::FULL_WARP, all_keys.first),
              __reduce_max_sync(device::FULL_WARP, all_keys.last)};
  const int first_block = all_keys.first / MASK_BLOCK;
  const int end_block = all_keys.last < 0 ? first_block : all_keys.last / MASK_BLOCK + 1;
  for (int block = threadIdx.x; block < params.key_blocks; block += SUMMARY_THREADS) {
    if (block < first_block || block >= end_block) states_gmem[block] = 0;
  }
#pragma unroll 1
  for (int block = first_block + warp; block < end_block; block += SUMMARY_THREADS / 32) {
    const int first = block * MASK_BLOCK, last = min(first + MASK_BLOCK, attention.nk) - 1;
    bool any = false, all = true;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      bool whole = row_block * MASK_BLOCK + 32 * r + lane >= attention.nq;
#pragma unroll
      for (const SeenKeys& keys : ranges[r]) {
        any |= max(keys.first, first) <= min(keys.last, last);
        whole |= keys.first <= first && keys.last >= last;
      }
      all &= whole;
    }
    const bool any_row = __any_sync(device::FULL_WARP, any);
    const bool all_rows = __all_sync(device::FULL_WARP, all);
    if (lane == 0) states_gmem[block] = any_row ? STATE_SEEN | (all_rows ? 0 : STATE_RANGED) : 0;
  }
  if (threadIdx.x == 0) {
    params.seen_keys_gmem[blockIdx.x] = all_keys;
    if (blockIdx.x == 0)
      *params.call.taken_gmem = 0;  // the attention kernel counts its tiles there
  }
}

}  // namespace archflash::hopper
