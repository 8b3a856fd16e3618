// Attention of few query rows (decoding), over a KV cache or over K and V as they are given, on
// mma.sync and cp.async. Few rows make little work for each byte that is read, so that the copies
// must never wait: every warp is a pipeline of its own.
//
//   CTA    16 query rows, mostly the heads of one position that share a head of K, packed
//   warp   all 16 rows, and WARP_KEYS keys of each block, which are a group. It copies them into
//          shared memory of its own, which holds STAGES groups, waits for its own copies only, and
//          has its own running bases, sums and outputs
//   end    the warps' results are merged through shared memory
//
// Numbers of 8 bits are converted in registers, between ldmatrix and the product. ldmatrix moves
// units of two bytes, so that a lane gets four neighbouring columns of a key of K, and two columns
// of two keys of V. No byte has to change its lane:
//   K    the sum over columns may have any order: columns 4t, 4t + 2, 4t + 1, 4t + 3 of each 16 are
//        what mma.sync calls 2t, 2t + 1, 2t + 8, 2t + 9 (t = lane % 4), in Q too
//   V    the even columns of each 16 are one product, the odd ones another
//
// Which warp takes a key depends on the key's number in its sequence alone, so that a row has the
// same bits wherever it lies in whichever tile.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_copies.cuh"
#include "common/mma_sync/decode_join.cuh"
#include "common/mma_sync/decode_masks.cuh"
#include "common/mma_sync/decode_merge.cuh"
#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/decode_products.cuh"
#include "common/mma_sync/decode_query.cuh"
#include "common/mma_sync/unlike_lengths.cuh"
#include "common/ptx/grid_dependency.cuh"

namespace archflash::mma_sync {

// The tile of a CTA of a launch for the packed sequences of at most few_rows rows, which are one
// tile each.
__device__ __forceinline__ device::Work work_of_short_sequence(const AttentionParams& params,
                                                               int index, int few_rows,
                                                               int packed_heads) {
  const int tiles = params.heads_q / packed_heads;  // of a sequence
  const int sequence = index / tiles;
  const int* cu_q = params.cu_seqlens_q_gmem;
  device::Work work{};
  work.batch_head = sequence * params.heads_q + index % tiles * packed_heads;
  work.nq = device::sequence_start(cu_q, sequence + 1, params.nq) -
            device::sequence_start(cu_q, sequence, params.nq);
  work.first_row = work.nq > 0 && work.nq <= few_rows ? 0 : -1;
  return work;
}

// Subtracts what ALiBi does from the scores of a warp's keys, from `key` on. What it needs is found
// anew for each group, so that other calls keep no register for it.
template <class C>
__device__ __forceinline__ void add_alibi(device::Scores<typename C::Warp>& s_rmem,
                                          const CacheParams& params, const CacheContext& cta,
                                          int key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(params.attention, cta.packed_heads, cta.work, lane / 4 + 8 * r);
    const AlibiSlopes& slopes = params.slopes;
    const float slope = slopes.gmem[row.batch * slopes.batch + row.head * slopes.head];
    const float distance =
        static_cast<float>(row.row + cta.work.nk - cta.work.nq - key - lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < C::WARP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& s = s_rmem[0][n][2 * r + i];
        s = fmaf(-slope, fabsf(distance - static_cast<float>(8 * n + i)), s);
      }
    }
  }
}

// What a CTA of a PlainDecodeConfig computes. Each thread finds it, and most of it is the same for
// all of a warp.
__device__ __forceinline__ DecodeContext plain_context(const CacheParams& params) {
  const AttentionParams& attention = params.attention;
  const int batch = static_cast<int>(blockIdx.x), tile = static_cast<int>(blockIdx.y);
  const int head = tile * params.packed_heads.count;
  const bool whole = params.packed_heads.count == attention.heads_per_kv;
  const int kv_head = whole ? tile : head / attention.heads_per_kv;
  DecodeContext cta{};
  cta.work = {batch * attention.heads_q + head, 0, attention.nq, attention.nk};
  cta.visible = device::find_visible_keys(attention, cta.work);
  cta.visible.nk = cta.visible.end(attention.nq);
  cta.k_gmem = static_cast<const uint16_t*>(attention.k_gmem) + batch * attention.k_batch +
               kv_head * attention.k_head;
  cta.v_gmem = static_cast<const uint16_t*>(attention.v_gmem) + batch * attention.v_batch +
               kv_head * attention.v_head;
  cta.packed_heads = params.packed_heads;
  cta.v_descale = 1.0f;
  cta.share = static_cast<int>(blockIdx.z);
  cta.shares = params.partials.splits;
  return cta;
}

// What a CTA does when it knows what it computes.
template <class C>
__device__ __forceinline__ void decode_tile(const DecodeParamsOf<C>& params,
                                            const DecodeContext& cta, unsigned char* shared) {
  using Warp = typename C::Warp;
  const AttentionParams& attention = params.attention;
  const device::PackedHeads& packed = params.packed_heads;
  const Partials& partials = params.partials;
  // Two ranges of keys: `first` to `last`, which any row of the tile sees, cut to the part of this
  // CTA where the keys are split; and all_first to all_last, which every row sees, so that scores
  // there need no mask.
  const device::ChunkedKeys visible = visible_keys<C>(cta);
  const int first_row = cta.work.first_row;
  const int last_row = min(first_row + packed.rows(), cta.work.nq) - 1;
  const int all_first = visible.first(last_row), all_last = visible.last(first_row);
  int first = visible.first(first_row), last = visible.last(last_row);
  Partials of_tile = partials;
  of_tile.splits = cta.shares;
  const device::Blocks share = device::blocks_of_share<C::BLOCK_K>(
      {first & -C::BLOCK_K, last & -C::BLOCK_K}, of_tile, cta.share);
  first = max(first & -C::WARP_KEYS, share.first);
  last = min(last, share.last + C::BLOCK_K - 1);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int key = (first & -C::BLOCK_K) + warp * C::WARP_KEYS;
  if (key < first) key += C::BLOCK_K;

  unsigned char* own = shared + warp * C::WARP_BYTES;
  const uint32_t own_smem = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  if (attention.d < C::HEAD_DIM || attention.dv < C::HEAD_DIM_V) {
    // Columns that no copy writes, over which the products run too.
    for (int i = lane; i < C::WARP_BYTES / 16; i += 32)
      reinterpret_cast<uint4*>(own)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();  // before other lanes' copies write the other columns
  }
  DecodeCopies<C> copies(attention, cta);
  int copied = key;  // the next group to copy
  if (copied <= last) copies.look_up(copied);
  uint32_t filled = 0;  // offset of the stage that it goes to
  const auto start_next = [&] {
    if (copied <= last) {
      copies.start(own_smem + filled, copied);
      copied += C::BLOCK_K;
      if (copied <= last) copies.look_up(copied);
    }
    ptx::cp_async_commit_group();
    filled = filled == (C::STAGES - 1) * C::STAGE_BYTES ? 0 : filled + C::STAGE_BYTES;
  };
#pragma unroll
  for (int stage = 0; stage < C::STAGES - 1; ++stage) start_next();
  // The mask of the group that is read, and of the next one.
  [[maybe_unused]] const DecodeMasks<C> masks(params, cta);
  [[maybe_unused]] typename DecodeMasks<C>::Elements mask, next_mask;
  if constexpr (C::MASKED) masks.load(next_mask, key);

  const DecodeQuery<C> query(attention, cta, shared);
  if (!C::Q_IN_REGISTERS) __syncthreads();  // all warps have stored their part of Q
  device::Outputs<Warp> o_rmem = {};
  device::RowState<Warp> state;
  state.large = false;
  device::clear(state);
  const uint32_t k_lane = own_smem + rows_first_offset<typename C::Tile>(lane);
  const uint32_t v_lane = own_smem + C::K_BYTES + rows_first_offset<typename C::Tile>(lane);
  const bool e4m3 = params.cache_dtype == DType::E4M3;
  // What the numbers of K and V have to be multiplied by.
  float v_factor = cta.v_descale, k_factor[2];
  if (C::FP8_CACHE) {
    const float of_format = e4m3 ? device::Fp8Pairs<DType::E4M3>::FACTOR : 1.0f;
    v_factor *= of_format;
    for (int r = 0; r < 2; ++r)
      k_factor[r] = query.scale[r] * of_format * (attention.rule.tanh_scale * cta.k_descale);
  }
  uint32_t read = 0;  // offset of the stage that is read
#pragma unroll 1
  for (; key <= last; key += C::BLOCK_K) {
    // This lane's copies of the group are complete, and after the barrier those of the other lanes.
    // No lane still reads the group before, whose stage is filled next.
    ptx::cp_async_wait_group<C::STAGES - 2>();
    __syncwarp();
    start_next();
    if constexpr (C::MASKED) {
      mask = next_mask;
      masks.load(next_mask, key + C::BLOCK_K);
    }

    const device::RaiseLimits<Warp> limits(state);
    device::Scores<Warp> s_rmem;
    if (C::FP8_CACHE && !e4m3) {
      multiply_decode_qk<C, DType::E5M2>(s_rmem, query, k_lane + read);
    } else {
      multiply_decode_qk<C, DType::E4M3>(s_rmem, query, k_lane + read);
    }
    if constexpr (C::FP8_CACHE) {
#pragma unroll
      for (int n = 0; n < C::WARP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s_rmem[0][n][i] *= k_factor[i / 2];
      }
      if (attention.rule.softcap != 0.0f)
        device::transform_scores<Warp>(s_rmem, ScoreRule{1.0f, attention.rule.softcap});
    } else if (C::MASKED || attention.transform_scores) {
      if (C::MASKED && attention.rule.softcap == 0.0f) {
        device::transform_scores<Warp>(s_rmem, ScoreRule{attention.rule.tanh_scale, 0.0f});
      } else {
        device::transform_scores<Warp>(s_rmem, attention.rule);
      }
    }
    if constexpr (C::MASKED) {
      masks.apply(s_rmem, mask);
    } else if (!C::PLAIN && params.slopes.gmem != nullptr) {
      add_alibi<C>(s_rmem, params, cta, key);
    }
    if (key < all_first || key + C::WARP_KEYS - 1 > all_last) {
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + packed.row(lane / 4 + 8 * r);
        device::mask_row<Warp>(s_rmem, visible.of_row(row), 0, r, 0, key + lane % 4 * 2);
      }
    }
    typename DecodeMasks<C>::Seen seen;
    if constexpr (C::MASKED) seen = masks.keys_of_warp(s_rmem);
    if (seen.any) {
      const float exp2_scale =
          device::update_row_max<Warp>(s_rmem, state, o_rmem, attention.exp2_scale, &limits);
      device::Probabilities<Warp> p_rmem;
      device::exponentiate_all_scores<Warp>(s_rmem, p_rmem, state, exp2_scale);
      const auto correct = [&](uint32_t (&)[4], int) {};
      if (C::FP8_CACHE && !e4m3) {
        multiply_decode_pv<C, DType::E5M2>(o_rmem, p_rmem, v_lane + read, correct);
      } else if (C::MASKED && !seen.all) {
        multiply_decode_pv<C, DType::E4M3>(
            o_rmem, p_rmem, v_lane + read,
            [&](uint32_t (&v_rmem)[4], int k) { clear_unseen_values(v_rmem, seen.bits, k); });
      } else {
        multiply_decode_pv<C, DType::E4M3>(o_rmem, p_rmem, v_lane + read, correct);
      }
    }
    read = read == (C::STAGES - 1) * C::STAGE_BYTES ? 0 : read + C::STAGE_BYTES;
  }
  __syncwarp();  // every lane has read its stages, before outputs overwrite them
  store_warp<C>(shared, o_rmem, state);
  __syncthreads();  // all warps have stored theirs, before they are merged
  if constexpr (C::JOINED) {
    join_shares<C>(shared, params, cta, v_factor);
  } else {
    merge_warps<C>(shared, params, cta, v_factor);
  }
}

template <class C>
__device__ __forceinline__ void decode_fwd(const DecodeParamsOf<C>& params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  static_assert(sizeof(DecodeContext) <= C::CONTEXT_BYTES);
  // This kernel starts early (Launch::uses_pdl): what it reads is written now, and what it
  // writes was read.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the combining kernel waits for the last share
  if constexpr (C::PLAIN) {
    decode_tile<C>(params, plain_context(params), shared);
  } else {
    const AttentionParams& attention = params.attention;
    const device::PackedHeads& packed = params.packed_heads;
    const Partials& partials = params.partials;
    DecodeContext& cta = *reinterpret_cast<DecodeContext*>(shared + C::CONTEXT_SMEM);
    const bool all_rows = params.few_rows == 0;  // of all sequences
    for (int head = 0; all_rows && !partials.wanted() && head < packed.count; ++head) {
      device::write_rows_of_no_sequence(attention, blockIdx.x, threadIdx.x, C::THREADS,
                                        packed.rows(), packed.count, head);
    }
    SharedWork own;
    if (params.share_ctas > 0) {
      own = find_shared_work<C::BLOCK_K>(params);
    } else {
      const int index = static_cast<int>(blockIdx.x) / partials.splits;
      own.work = all_rows ? device::find_work(attention, index, packed.rows(), packed.count)
                          : work_of_short_sequence(attention, index, params.few_rows, packed.count);
      own.share = blockIdx.x % partials.splits;
      own.shares = partials.splits;
    }
    if (own.work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const device::CacheRows rows = find_rows(params, own.work);
      own.work.nk = rows.count;
      cta = {make_cache_context<C>(params, own.work, rows), own.share, own.shares};
    }
    __syncthreads();  // thread 0 has written `cta`, before the other threads read it
    decode_tile<C>(params, cta, shared);
  }
}

}  // namespace archflash::mma_sync
