// Attention to listed rows of a latent cache (sparse multi-head latent attention), on mma.sync: the
// kernel of mla_fwd.cuh, whose rows are those that key_indices name. A CTA computes up to 64 rows,
// mostly the query heads of one position, packed: each row that is gathered serves all of them.
// gathered_keys.cuh says how rows are found; a round is that of mla_fwd.cuh. Packed rows
// (common/packed_rows.h) are copied as they are; each thread multiplies numbers that it has copied
// itself by their scales and rounds them to 16 bits.
#pragma once

#include <cstdint>

#include "ampere/gather_config.cuh"
#include "ampere/gathered_keys.cuh"
#include "ampere/mla_fwd.cuh"
#include "ampere/pair.cuh"
#include "common/attention_params.h"
#include "common/device/fp8_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/packed_rows.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"

namespace archflash::ampere {

// Starts the copy of the latent rows of a block: V first, then K. Rows of no key become zeros.
// Eight neighbouring threads copy a row, 16 bytes at a time. Strides are in bytes.
template <class C>
__device__ __forceinline__ void start_gathered_latent(uint32_t stage_smem,
                                                      const AttentionParams& params,
                                                      const GatherContext& cta,
                                                      const Places<C>& places, int block) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int row = thread / Tile::GROUP, chunk = thread % Tile::GROUP;
  const device::KeyPlace key = places.load(block, row);
  const bool valid = key.position != device::NO_KEY;
  const int bytes = valid ? 16 : 0;
  const auto* v_gmem = reinterpret_cast<const unsigned char*>(cta.v_gmem) + chunk * 16;
  const auto* k_gmem = reinterpret_cast<const unsigned char*>(cta.k_gmem) + chunk * 16;
  if (valid) {
    v_gmem += key.block * params.v_batch + key.row * params.v_row;
    k_gmem += key.block * params.k_batch + key.row * params.k_row;
  } else {
    v_gmem = k_gmem = static_cast<const unsigned char*>(params.q_gmem);
  }
  constexpr int GROUP_BYTES = Tile::GROUP * 16;
  uint32_t target = stage_smem + Tile::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM_V * 2 / GROUP_BYTES; ++i) {
    ptx::cp_async_cg_16(target, v_gmem + (valid ? i * GROUP_BYTES : 0), bytes);
    target += GROUP_BYTES;
  }
  ptx::cp_async_cg_16(target, k_gmem, bytes);
}

// Starts the copy of the packed rows of a block, as they are; zeros where there is no key.
template <class C>
__device__ __forceinline__ void start_packed_rows(uint32_t packed_smem,
                                                  const AttentionParams& params,
                                                  const KvCache& cache, bool bytes_656,
                                                  const GatherContext& cta, const Places<C>& places,
                                                  int block) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int row = thread / Tile::GROUP, chunk = thread % Tile::GROUP;
  const device::KeyPlace key = places.load(block, row);
  const bool valid = key.position != device::NO_KEY;
  const auto* page_gmem =
      reinterpret_cast<const unsigned char*>(cta.v_gmem) + key.block * params.v_batch;
  const unsigned char* row_gmem = page_gmem + key.row * params.v_row;
  const auto* some_gmem = static_cast<const unsigned char*>(params.q_gmem);
  const uint32_t target = packed_smem + row * C::PACKED_ROW_BYTES;
  const int chunks = bytes_656 ? 41 : 36;
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const int c = chunk + i * Tile::GROUP;
    if (c < chunks)
      ptx::cp_async_cg_16(target + c * 16, valid ? row_gmem + c * 16 : some_gmem, valid ? 16 : 0);
  }
  if (!bytes_656 && chunk == 0) {
    const unsigned char* scales_gmem = page_gmem + cache.block_rows * 576 + key.row * 8;
    ptx::cp_async_ca_8(target + C::PACKED_SCALES_BYTES, valid ? scales_gmem : some_gmem,
                       valid ? 8 : 0);
  }
}

// Multiplies eight numbers of bf16 and rounds the products.
__device__ __forceinline__ uint4 scale_8(const uint4& x, float scale) {
  const auto two = [&](uint32_t pair) {
    return ptx::cvt_rn_x2_f32<DType::BF16>(__uint_as_float(pair << 16) * scale,
                                           __uint_as_float(pair & 0xFFFF0000u) * scale);
  };
  return {two(x.x), two(x.y), two(x.z), two(x.w)};
}

// Makes the 16-bit rows of a block, in the first stage, of packed ones.
template <class C>
__device__ __forceinline__ void convert_packed_rows(unsigned char* shared, bool bytes_656) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int row = thread / Tile::GROUP, chunk = thread % Tile::GROUP;
  const unsigned char* packed = shared + C::PACKED_SMEM + row * C::PACKED_ROW_BYTES;
  const device::Fp8To16Bits<DType::BF16> to_16_bits(DType::E4M3);
  const int numbers = bytes_656 ? 32 : 28;  // chunks of e4m3
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = chunk + i * Tile::GROUP;
    if (c >= numbers) break;
    // Scales are fp32 of 128 numbers, or exponents of 64.
    const float scale =
        bytes_656 ? reinterpret_cast<const float*>(packed + 512)[c / 8]
                  : __uint_as_float(uint32_t{packed[C::PACKED_SCALES_BYTES + c / 4]} << 23);
    uint4 low, high;
    to_16_bits.convert(*reinterpret_cast<const uint4*>(packed + c * 16), low, high);
    *reinterpret_cast<uint4*>(shared + Tile::offset(row, 2 * c)) = scale_8(low, scale);
    *reinterpret_cast<uint4*>(shared + Tile::offset(row, 2 * c + 1)) = scale_8(high, scale);
  }
  // The 64 columns that are bf16 already.
  const int from = (bytes_656 ? 33 : 28) + chunk, to = (bytes_656 ? 64 : 56) + chunk;
  *reinterpret_cast<uint4*>(shared + Tile::offset(row, to)) =
      *reinterpret_cast<const uint4*>(packed + from * 16);
}

template <class C>
__device__ __forceinline__ void mla_gather_fwd(const MlaGatherParams& params) {
  using Warp = typename C::Warp;
  using Tile = typename C::Tile;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const mma_sync::CacheParams& call = params.mla.call;
  const AttentionParams& attention = call.attention;
  GatherContext& cta = *reinterpret_cast<GatherContext*>(shared + C::CONTEXT_SMEM);
  {
    const device::Work work = device::find_list_work(attention, params.lists, call.packed_heads,
                                                     blockIdx.x / call.partials.splits);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) cta = make_gather_context<C, 1>(call, params.lists, work);
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const Places<C> places{reinterpret_cast<int*>(shared + C::PLACES_SMEM)};
  Lookup<C> lookup(cta, call.cache, places);
  __syncthreads();  // the places of the first block are known to all
  const int first = cta.share.first, last = cta.share.last;
  const auto stage_of = [&](int block) {
    return shared_smem + (C::PACKED ? 0 : number_of<C>(block) % C::STAGES * C::STAGE_BYTES);
  };
  const bool bytes_656 = params.packed == PackedRows::Bytes656;
  const auto start_block = [&](int block) {
    if constexpr (C::PACKED) {
      start_packed_rows<C>(shared_smem + C::PACKED_SMEM, attention, call.cache, bytes_656, cta,
                           places, block);
    } else {
      start_gathered_latent<C>(stage_of(block), attention, cta, places, block);
    }
  };
  if (C::PACKED && !bytes_656) {  // columns of K alone, which the format lacks
    const int row = threadIdx.x / Tile::GROUP, chunk = threadIdx.x % Tile::GROUP;
    *reinterpret_cast<uint4*>(shared + Tile::offset(row, C::HEAD_DIM_V / 8 + chunk)) = uint4{};
  }
  if (first <= last) start_block(first);
  PairQuery<C> q_rmem;
  load_query<C>(q_rmem, params.mla, cta);
  device::Outputs<Warp> o_rmem = {};
  device::RowState<Warp> state;
  device::clear(state);
#pragma unroll 1
  for (int block = first; block <= last; block += C::BLOCK_K) {
    const bool looks_up = ptx::mov_tid_x_volatile() < C::BLOCK_K;
    device::KeyPlace found{};
    if (looks_up) {
      found = lookup.find(lookup.next_entry);
      lookup.next_entry = lookup.load(block + 3 * C::BLOCK_K);
    }
    ptx::copies_wait_all();
    __syncthreads();  // as in gather_fwd.cuh; and all have read the scores of the block before
    if constexpr (C::PACKED) {
      convert_packed_rows<C>(shared, bytes_656);
      __syncthreads();  // rows are complete, and no thread still reads packed ones
    }
    if (looks_up) lookup.store(block + 2 * C::BLOCK_K, found);
    if (block < last) start_block(block + C::BLOCK_K);
    const PairWarp<C> at(cta);
    if (at.last_row < at.first_row) continue;  // both warps of a pair, or neither
    device::Scores<Warp> s_rmem;
    multiply_half_scores<C>(s_rmem, q_rmem, stage_of(block));
    add_scores_of_pair<C>(s_rmem, shared + C::SCORES_SMEM);
    if (attention.transform_scores) device::transform_scores<Warp>(s_rmem, attention.rule);
    int rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows[r] = cta.work.first_row + cta.packed_heads.row(at.warp_row + at.lane / 4 + 8 * r);
    mask_gathered<C, Warp>(s_rmem, places, cta.visible, rows, block, 0);
    device::Probabilities<Warp> p_rmem;
    exponentiate_pair_scores<Warp>(p_rmem, s_rmem, state, o_rmem, attention.exp2_scale);
    mma_sync::multiply_pv<Warp>(o_rmem, p_rmem, half_v_smem<C>(stage_of(block)));
  }
  store_half_rows<C>(o_rmem, state, attention, call.partials, cta, C::HEAD_DIM_V);
}

}  // namespace archflash::ampere
