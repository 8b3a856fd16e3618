// A dense attn_mask in the backward pass. A kernel before the main one reads it once, however many
// heads share it, and writes it in the order in which wgmma leaves the scores of keys by queries:
// for blocks of MASK_BLOCK rows and keys a state, a word of bits for each thread of a consumer
// warpgroup that says which of its scores count, and what is added to them. A CTA lists the rounds
// that see any of its keys by the states (backward_lists.cuh).
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/device/masks.cuh"
#include "common/masked_backward_params.h"
#include "common/ptx/global_order.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/min.cuh"
#include "hopper/backward/backward_pipeline.cuh"
#include "hopper/backward/backward_products.cuh"
#include "hopper/backward/backward_scores.cuh"
#include "hopper/backward/kept_scores.cuh"

namespace archflash::hopper {

// The state of a block; 0: no row sees any key.
constexpr uint32_t DENSE_SEEN = 1;
constexpr uint32_t DENSE_HIDDEN = 2;  // some key is hidden: the bits say which
constexpr uint32_t DENSE_ADDED = 4;   // something else than 0 is added
constexpr uint32_t DENSE_LOWEST = 8;  // some row may see lowest scores only; not of the mask alone
constexpr int DENSE_STATE_BITS = 8;
static_assert(BLOCK_UNSEEN == 0);

// --- the kernel before the main one: a CTA for each block ---

// Bytes from row to row of a block's elements of 16 bits in shared memory: ldmatrix reads 8 rows
// from different banks.
constexpr int PREPARED_ROW_BYTES = 2 * MASK_BLOCK + 16;
template <DType DTYPE>
constexpr uint32_t HALF_MINUS_INFINITY = DTYPE == DType::BF16 ? 0xFF80 : 0xFC00;

// Copies a block's elements of 16 bits from element `first` of the mask on to shared memory, a word
// of two in each lane and a row in each warp at a time; 0 behind the ends.
__device__ __forceinline__ void read_16_bits(const MaskParams& masks, int64_t first, int rows,
                                             int keys, float* shared) {
  constexpr int WARPS = DENSE_THREADS / 32, STEPS = MASK_BLOCK / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* mask_gmem = static_cast<const uint16_t*>(masks.mask_gmem) + first;
  uint32_t words[STEPS];
  const bool in_pairs = masks.mask_key == 1 && masks.mask_row % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(mask_gmem) % 4 == 0;
  if (in_pairs) {
    const uint16_t* own_gmem = mask_gmem + warp * masks.mask_row + 2 * lane;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      words[i] = 0;
      if (i * WARPS + warp < rows && 2 * lane + 1 < keys)
        words[i] = *reinterpret_cast<const uint32_t*>(own_gmem);
      if (i * WARPS + warp < rows && 2 * lane + 1 == keys) words[i] = *own_gmem;
      own_gmem += WARPS * masks.mask_row;
    }
  } else {
    const uint16_t* own_gmem = mask_gmem + warp * masks.mask_row + 2 * lane * masks.mask_key;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      uint32_t low = 0, high = 0;
      if (i * WARPS + warp < rows && 2 * lane < keys) low = own_gmem[0];
      if (i * WARPS + warp < rows && 2 * lane + 1 < keys) high = own_gmem[masks.mask_key];
      words[i] = low | high << 16;
      own_gmem += WARPS * masks.mask_row;
    }
  }
  char* const own = reinterpret_cast<char*>(shared) + warp * PREPARED_ROW_BYTES + 4 * lane;
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    *reinterpret_cast<uint32_t*>(own + i * WARPS * PREPARED_ROW_BYTES) = words[i];
}

template <DType DTYPE>
__device__ __forceinline__ void prepare_mask(const DenseBackwardParams& params) {
  // Lanes lie at 8 keys of 4 pairs of rows: with this step at different banks.
  constexpr int STEP = MASK_BLOCK + 4;
  __shared__ __align__(16) float added_smem[MASK_BLOCK * STEP];
  __shared__ uint32_t state_of_warp[DENSE_THREADS / 32];
  ptx::griddepcontrol_wait();               // what comes before this call is done
  ptx::griddepcontrol_launch_dependents();  // the next kernel waits for the end of this one
  device::clear_by_grid(params.kept.is_kept_gmem, params.kept.is_kept_bytes);
  const MaskParams& masks = params.masks;
  const AttentionParams& attention = params.call.backward.attention;
  const unsigned block = blockIdx.x;
  const int key_block = static_cast<int>(block % params.key_blocks);
  const int row_block = static_cast<int>(block / params.key_blocks % params.row_blocks);
  const int slice = static_cast<int>(block / params.key_blocks / params.row_blocks);
  const int batch = slice / params.mask_heads, head = slice - batch * params.mask_heads;
  const int first_row = row_block * MASK_BLOCK, first_key = key_block * MASK_BLOCK;
  const int rows = min(attention.nq - first_row, MASK_BLOCK);
  const int keys = min(attention.nk - first_key, MASK_BLOCK);

  const int64_t first = batch * masks.mask_batch + head * masks.mask_head +
                        first_row * masks.mask_row + first_key * masks.mask_key;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t seen = 0xFFFFFFFFu;
  bool any_seen = false, any_added = false;
  if (masks.mask_element == MaskElement::SixteenBits) {
    read_16_bits(masks, first, rows, keys, added_smem);
    __syncthreads();  // the elements are there before other threads read them
    uint4* const added_gmem = static_cast<uint4*>(params.added_gmem) +
                              static_cast<int64_t>(block) * (DENSE_16_BIT_CHUNKS * DENSE_THREADS) +
                              threadIdx.x;
    // Lanes 8j to 8j + 7 name the rows of matrix j, as in exponentiate_with_elements().
    const uint32_t lane_smem = static_cast<uint32_t>(__cvta_generic_to_shared(added_smem)) +
                               (lane / 16 * 8 + lane % 8) * PREPARED_ROW_BYTES +
                               (warp * 2 + lane / 8 % 2) * 16;
    uint32_t words[DENSE_16_BIT_CHUNKS][4], all = 0, hidden = 0;
#pragma unroll
    for (int c = 0; c < DENSE_16_BIT_CHUNKS; ++c) {
      ptx::ldmatrix_x4_trans(words[c], lane_smem + 16 * c * PREPARED_ROW_BYTES);
#pragma unroll
      for (const uint32_t word : words[c]) {
        const uint32_t x = word ^ 0x10001u * HALF_MINUS_INFINITY<DTYPE>;
        hidden |= (x - 0x10001u) & ~x & 0x80008000u;  // whether a half of x is 0
        all |= word;
      }
    }
    any_added = (all & 0x7FFF7FFFu) != 0;
    if (hidden != 0) {
      any_added = false;
#pragma unroll
      for (int e = 0; e < DENSE_SCORES; ++e) {
        uint32_t& word = words[e / 8][e / 2 % 4];
        const uint32_t half = e % 2 == 0 ? 0xFFFFu : 0xFFFF0000u;
        if ((word & half) == (half & 0x10001u * HALF_MINUS_INFINITY<DTYPE>))
          seen &= ~(1u << e), word &= ~half;
        any_added |= (word & half & 0x7FFF7FFFu) != 0;
      }
    }
#pragma unroll
    for (int c = 0; c < DENSE_16_BIT_CHUNKS; ++c)
      added_gmem[c * DENSE_THREADS] = uint4{words[c][0], words[c][1], words[c][2], words[c][3]};
  } else {
    // What is added to each score, -inf for a hidden key; 0 behind the ends.
    const int own_key = threadIdx.x % MASK_BLOCK, own_row = threadIdx.x / MASK_BLOCK;
    constexpr int ROWS_AT_A_TIME = DENSE_THREADS / MASK_BLOCK;
    const auto read = [&]<class Element>(const Element* mask_gmem, const auto& added_of) {
      const Element* const own_gmem = mask_gmem + first + own_key * masks.mask_key;
#pragma unroll 16
      for (int row = own_row; row < MASK_BLOCK; row += ROWS_AT_A_TIME) {
        float x = 0.0f;
        if (row < rows && own_key < keys) x = added_of(own_gmem[row * masks.mask_row]);
        added_smem[row * STEP + own_key] = x;
      }
    };
    if (masks.mask_element == MaskElement::Bool) {
      read(static_cast<const uint8_t*>(masks.mask_gmem),
           [](uint8_t x) { return x != 0 ? 0.0f : device::MINUS_INFINITY; });
    } else {
      read(static_cast<const float*>(masks.mask_gmem), [](float x) { return x; });
    }
    __syncthreads();  // the elements are there before other threads read them
    const float* const own_smem = added_smem + lane % 4 * 2 * STEP + warp * 16 + lane / 4;
    float added[DENSE_SCORES];
#pragma unroll
    for (int e = 0; e < DENSE_SCORES; ++e) {
      const int n = e / 4, r = e / 2 % 2, i = e % 2;
      float x = own_smem[(8 * n + i) * STEP + 8 * r];
      if (x == device::MINUS_INFINITY) seen &= ~(1u << e), x = 0.0f;
      any_added |= x != 0.0f;
      added[e] = x;
    }
    if (masks.mask_element == MaskElement::F32) {
      uint4* const added_gmem = static_cast<uint4*>(params.added_gmem) +
                                static_cast<int64_t>(block) * (DENSE_F32_CHUNKS * DENSE_THREADS) +
                                threadIdx.x;
#pragma unroll
      for (int c = 0; c < DENSE_F32_CHUNKS; ++c) {
        const auto bits = [&](int i) { return __float_as_uint(added[4 * c + i]); };
        added_gmem[c * DENSE_THREADS] = uint4{bits(0), bits(1), bits(2), bits(3)};
      }
    }
  }
#pragma unroll
  for (int e = 0; e < DENSE_SCORES; ++e) {
    const int n = e / 4, r = e / 2 % 2, i = e % 2;
    const bool exists = 8 * n + i + lane % 4 * 2 < rows && warp * 16 + lane / 4 + 8 * r < keys;
    any_seen |= exists && (seen >> e & 1) != 0;
  }
  const bool any_hidden = seen != 0xFFFFFFFFu;
  params.seen_gmem[static_cast<int64_t>(block) * DENSE_THREADS + threadIdx.x] = seen;
  const uint32_t state = (__any_sync(device::FULL_WARP, any_seen) ? DENSE_SEEN : 0) |
                         (__any_sync(device::FULL_WARP, any_hidden) ? DENSE_HIDDEN : 0) |
                         (__any_sync(device::FULL_WARP, any_added) ? DENSE_ADDED : 0);
  if (lane == 0) state_of_warp[warp] = state;
  __syncthreads();  // each warp's state is there before they are put together
  if (threadIdx.x == 0) {
    uint32_t whole = 0;
#pragma unroll
    for (const uint32_t part : state_of_warp) whole |= part;
    // The main kernel reads masks.blocks_gmem, the same bytes.
    const_cast<uint8_t*>(masks.blocks_gmem)[block] =
        static_cast<uint8_t>((whole & DENSE_SEEN) != 0 ? whole : 0);
  }
}

// --- the warp of the terms: what comes behind a block's note ---

struct DenseNote {
  int32_t block;  // the number of the mask's block with the tile's first key
  // The states of the tile's two blocks of keys, a byte for each, and above them the head, of those
  // that share a head of K.
  uint32_t states;

  static constexpr int HEAD_SHIFT = 2 * DENSE_STATE_BITS;
  __device__ __forceinline__ uint32_t state(int group) const {
    return states >> (DENSE_STATE_BITS * group);
  }
  __device__ __forceinline__ int head() const { return static_cast<int>(states >> HEAD_SHIFT); }
  // All warps where some row sees lowest scores only.
  __device__ __forceinline__ unsigned masked_warps() const {
    return (states & DENSE_LOWEST) != 0 ? 0xFF : 0;
  }
};

// Whether some row of a block may see lowest scores only (device/lowest_rows.cuh). terms: of the
// lane's rows. Called by a whole warp.
template <class Terms>
__device__ __forceinline__ bool any_lowest(const Terms& terms) {
  float least = terms[0].lse_log2;
#pragma unroll
  for (const device::RowTerms& of_row : terms) least = fminf(least, of_row.lse_log2);
  return __any_sync(device::FULL_WARP, least < device::LOWEST_LOG2);
}

template <class C>
struct DenseNotes {
  using Note = DenseNote;
  const DenseBackwardParams& params;
  const CtaWork& work;

  template <class Terms>
  __device__ __forceinline__ DenseNote operator()(int head, int row, const Terms& terms) const {
    const MaskParams& masks = params.masks;
    const int of_q = work.head * params.call.backward.attention.heads_per_kv + head;
    const int block = static_cast<int>(work.batch * masks.blocks_batch + of_q * masks.blocks_head +
                                       row / MASK_BLOCK * masks.blocks_row) +
                      work.first_row / MASK_BLOCK;
    uint32_t states = static_cast<uint32_t>(head) << DenseNote::HEAD_SHIFT;
    if (row < work.passing_rows) {
      states |= masks.blocks_gmem[block];
      if (C::WARPGROUPS > 1 && work.first_row + MASK_BLOCK < work.own_rows)
        states |= static_cast<uint32_t>(masks.blocks_gmem[block + 1]) << DENSE_STATE_BITS;
    }
    if (any_lowest(terms)) states |= DENSE_LOWEST | DENSE_LOWEST << DENSE_STATE_BITS;
    return {block, states};
  }
};

// --- consumers ---

template <class C>
__device__ __forceinline__ const DenseNote& dense_note(const unsigned char* shared, int q_stage) {
  return *reinterpret_cast<const DenseNote*>(shared + C::TERMS_SMEM + q_stage * C::TERMS_BYTES +
                                             8 * C::BLOCK + sizeof(BlockNote));
}

// The bits of a thread's scores in a block, all of them where none is hidden.
template <class C>
__device__ __forceinline__ uint32_t load_seen(const DenseBackwardParams& params,
                                              const DenseNote& note) {
  const int thread = ptx::mov_tid_x_volatile();
  const int group = thread / DENSE_THREADS;
  uint32_t seen = 0xFFFFFFFFu;
  if ((note.state(group) & DENSE_HIDDEN) != 0) {
    seen = params.seen_gmem[static_cast<int64_t>(note.block + group) * DENSE_THREADS +
                            thread % DENSE_THREADS];
  }
  return seen;
}

// Sets to 0 what the bits say does not count.
template <class C>
__device__ __forceinline__ void clear_hidden(KeysByQueries<C>& x_rmem, uint32_t seen) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((seen >> (4 * n + e) & 1) == 0) x_rmem[n][e] = 0.0f;
    }
  }
}

// Limits P of the rows that see lowest scores only.
template <class C>
__device__ __forceinline__ void limit_lowest(KeysByQueries<C>& p_rmem, const float2* terms) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 lse = terms[4 * n];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float most = device::most_weight(e % 2 == 0 ? lse.x : lse.y);
      p_rmem[n][e] = ptx::min_nan(p_rmem[n][e], most);
    }
  }
}

// P = 2^(S + what is added - LSE), which may lie in the registers of S.
template <class C>
__device__ __forceinline__ void exponentiate_added(KeysByQueries<C>& p_rmem,
                                                   KeysByQueries<C>& s_rmem, const float2* terms,
                                                   const DenseBackwardParams& params,
                                                   const DenseNote& note) {
  const float scale = params.call.backward.attention.exp2_scale;
  const int thread = ptx::mov_tid_x_volatile();
  const int block = note.block + thread / DENSE_THREADS;
  const auto exponentiate = [&](int n, int e, float bias) {
    const float2 lse = terms[4 * n];
    float score = fmaf(bias, device::LOG2_E, s_rmem[n][e] * scale);
    if (score < device::LOWEST_LOG2) score = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
    const float exponent = score - (e % 2 == 0 ? lse.x : lse.y);
    p_rmem[n][e] = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
  };
  if (params.masks.mask_element == MaskElement::F32) {
    const uint4* const added_gmem =
        static_cast<const uint4*>(params.added_gmem) +
        static_cast<int64_t>(block) * (DENSE_F32_CHUNKS * DENSE_THREADS) + thread % DENSE_THREADS;
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
      // Loads stay behind it, or ptxas would start more of them than there are registers for.
      constexpr int LOADS = C::HEAD_DIM > 128 ? 2 : 1;
      if (C::HEAD_DIM > 64 && n > 0 && n % LOADS == 0) __syncwarp();
      const uint4 x = added_gmem[n * DENSE_THREADS];
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) exponentiate(n, e, __uint_as_float(words[e]));
    }
  } else {
    const uint4* const added_gmem =
        static_cast<const uint4*>(params.added_gmem) +
        static_cast<int64_t>(block) * (DENSE_16_BIT_CHUNKS * DENSE_THREADS) +
        thread % DENSE_THREADS;
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; n += 2) {
      const uint4 x = added_gmem[n / 2 * DENSE_THREADS];
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        exponentiate(n + e / 4, e % 4, device::added_of_half<C::DTYPE>(words[e / 2], e % 2));
      }
    }
  }
}

// P of a block, from S in the same registers, in kernels whose warpgroup has no other keys. seen:
// which scores the mask keeps.
template <class C>
__device__ __forceinline__ void exponentiate_masked(KeysByQueries<C>& p_rmem, const float2* terms,
                                                    const DenseBackwardParams& params,
                                                    const CtaWork& work, const BlockNote& block,
                                                    const DenseNote& note, uint32_t seen,
                                                    int warp) {
  const uint32_t state = note.state(0);
  if ((state & DENSE_ADDED) != 0) {
    exponentiate_added<C>(p_rmem, p_rmem, terms, params, note);
  } else {
    exponentiate_scores<C>(p_rmem, p_rmem, terms, params.call.backward.attention);
  }
  if ((state & DENSE_HIDDEN) != 0) clear_hidden<C>(p_rmem, seen);
  if ((block.masked_warps >> warp & 1) == 0) return;
  constexpr int BEHIND_ALL = 1 << 30;  // a row whose block sees no key
  const bool unseen = (block.masked_warps >> (warp + BlockNote::UNSEEN_SHIFT) & 1) != 0;
  clear_unseen<C>(p_rmem, work, unseen ? BEHIND_ALL : block.row);
  if ((state & DENSE_LOWEST) != 0) limit_lowest<C>(p_rmem, terms);
}

// Adds dS, the gradient of what is added, to that of attn_mask.
template <class C>
__device__ __forceinline__ void add_mask_gradient(const KeysByQueries<C>& ds_rmem,
                                                  const DenseBackwardParams& params,
                                                  const CtaWork& work, const BlockNote& block,
                                                  const DenseNote& note) {
  const MaskGradientParams& dmask = params.dmask;
  const int thread = ptx::mov_tid_x_volatile();
  const int head = work.head * params.call.backward.attention.heads_per_kv + note.head();
  const int query = block.row + thread % 4 * 2;
  const int key = work.first_row + thread / 32 % C::KEY_WARPS * C::WARP_ROWS + thread % 32 / 4;
  float* const gmem = dmask.gmem + work.batch * dmask.batch + head * dmask.head +
                      query * dmask.row + key * dmask.key;
  const int queries = work.passing_rows - query, keys = work.own_rows - key;
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = e % 2, r = e / 2;
      if (8 * n + i < queries && 8 * r < keys)
        ptx::red_add_f32(gmem + (8 * n + i) * dmask.row + 8 * r * dmask.key, ds_rmem[n][e]);
    }
  }
}

// Keeps dS of a block for sum_mask_gradients(). head: of those that share a head of K.
template <class C>
__device__ __forceinline__ void keep_mask_gradient(const KeysByQueries<C>& ds_rmem,
                                                   const BackwardKernelParams& params,
                                                   const KeptScoresParams& kept,
                                                   const CtaWork& work, int row, int head) {
  const AttentionParams& attention = params.backward.attention;
  const int of_q = work.head * attention.heads_per_kv + head;
  const int key_block = work.first_row / MASK_BLOCK + ptx::mov_tid_x_volatile() / DENSE_THREADS;
  keep_scores<C>(ds_rmem, kept, work.batch * attention.heads_q + of_q, row / MASK_BLOCK, key_block);
}

}  // namespace archflash::hopper
