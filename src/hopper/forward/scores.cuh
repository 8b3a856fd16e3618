// What the scores of a block need before their softmax, where they need anything: descales, a
// softcap, the bias of ALiBi, and masks.
#pragma once

#include <cstdint>

#include "common/device/descales.cuh"
#include "common/ptx/special_registers.cuh"
#include "hopper/cache/cache_params.h"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// This lane's first key of a block.
__device__ __forceinline__ int lane_key(int block) {
  return block + static_cast<int>(threadIdx.x) % 4 * 2;
}

// Below it tanhf() is a polynomial. Most scores that have a softcap are that small against it.
constexpr float SMALL_TANH = 0.6f;

// What tanhf(x) gives for |x| < SMALL_TANH, bit for bit but for the sign of 0.
__device__ __forceinline__ float small_tanh(float x) {
  const float square = x * x;
  float p = fmaf(0.0157396831f, square, -0.0523039624f);
  p = fmaf(p, square, 0.133152977f);
  p = fmaf(p, square, -0.333327681f);
  return fmaf(p * square, x, x);
}

// Does what device::transform_scores() does, with the same bits. There the question whether there
// is a softcap stands at each score, and such a branch lets the tanh of no score start before that
// of the last one has ended. Here it is asked once. Where no score of the warp is large, none needs
// the exponential and the division of tanhf().
template <class C>
__device__ __forceinline__ void cap_scores(device::Scores<C>& s_rmem, ScoreRule rule) {
  const float tanh_scale = rule.tanh_scale, softcap = rule.softcap;
  const auto change = [&](const auto& changed) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = changed(s_rmem[0][n][i] * tanh_scale);
    }
  };
  if (softcap == 0.0f) return change([](float x) { return x; });
  float largest[4] = {};  // four maxima are found side by side
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = fmaxf(largest[i], fabsf(s_rmem[0][n][i]));
  }
  const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  if (__any_sync(device::FULL_WARP, all * fabsf(tanh_scale) >= SMALL_TANH)) {
    change([&](float x) { return softcap * tanhf(x); });
  } else {
    change([&](float x) { return softcap * small_tanh(x); });
  }
}

// Does what device::mask_rows() does with a word of bits for each row, which takes fewer
// instructions for a score, for the first KEYS keys.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void mask_rows_by_bits(device::Scores<C>& s_rmem,
                                                  const device::VisibleKeys& visible,
                                                  const int (&rows)[2], int first_key) {
  static_assert(KEYS <= 128, "a lane has at most 32 keys of a row");
  // The lane's keys among the first `keys` of the block, counted from its first one: bit 2n + i is
  // key 8n + i.
  const auto below = [](int keys) {
    const int count = 2 * (max(keys, 0) >> 3) + min(max(keys, 0) & 7, 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t seen =
        below(visible.last(rows[r]) + 1 - first_key) & ~below(visible.first(rows[r]) - first_key);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) {
      float& s = s_rmem[0][i / 2][2 * r + i % 2];
      if ((seen >> i & 1) == 0) s = device::MINUS_INFINITY;
    }
  }
}

// Subtracts what ALiBi does from the scores of a block of keys. `row_of_tile`: the first of this
// lane's two rows.
template <class C>
__device__ __forceinline__ void add_alibi(device::Scores<C>& s_rmem, const CacheParams& params,
                                          const TileOf<C>& tile, int row_of_tile, int block) {
  const AttentionParams& attention = params.call.attention;
  const AlibiSlopes& slopes = params.slopes;
  const device::PackedHeads packed = [&] {
    if constexpr (C::MIXED) return heads_of(params.call, tile);
    return params.call.packed_heads;
  }();
  const int batch = tile.batch_head / attention.heads_q;
  const int first_key = block + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row = row_of_tile + 8 * r, head = tile.batch_head % attention.heads_q;
    if constexpr (C::CAN_PACK || C::MIXED) {
      head += min(packed.head(row), packed.count - 1);
      row = packed.row(row);
    }
    const float slope = slopes.gmem[batch * slopes.batch + head * slopes.head];
    const float distance = static_cast<float>(tile.first_row + row + tile.nk - tile.nq - first_key);
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& s = s_rmem[0][n][2 * r + i];
        s = fmaf(-slope, fabsf(distance - static_cast<float>(8 * n + i)), s);
      }
    }
  }
}

// Does what device::find_warp_descale() does, where no descale is by blocks of keys and the head is
// known: without descales it divides nothing. `row`: one of the warp's rows.
__device__ __forceinline__ device::WarpDescale find_head_descale(const Descales& descales,
                                                                 const AttentionParams& attention,
                                                                 const TileHead& at, int row) {
  device::WarpDescale result{1.0f, 1.0f};
  if (descales.q.gmem != nullptr) {
    const int q_head = at.head / static_cast<int>(descales.heads_per_q_descale);
    result.qk =
        device::descale_of_head(descales.q, at.batch, q_head)[row / SCALE_ROWS * descales.q.block];
  }
  if (descales.k.gmem != nullptr || descales.v.gmem != nullptr) {
    const int kv_head = at.head / attention.heads_per_kv;
    if (descales.k.gmem != nullptr)
      result.qk *= *device::descale_of_head(descales.k, at.batch, kv_head);
    if (descales.v.gmem != nullptr)
      result.v = *device::descale_of_head(descales.v, at.batch, kv_head);
  }
  return result;
}

// device::mask_rows() of a block. The thread's number is read anew, so that its rows need no
// registers between the blocks.
template <class C>
__device__ __forceinline__ void mask_rows_read_anew(device::Scores<C>& s_rmem,
                                                    const device::VisibleKeys& visible,
                                                    const Tile& tile, int block) {
  const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
  const int row = tile.first_row + static_cast<int>(thread / 32 * C::WARP_ROWS + thread % 32 / 4);
  const int rows[2] = {row, row + 8};
  device::mask_rows<C>(s_rmem, visible, rows, block + static_cast<int>(thread % 4 * 2));
}

// ALiBi and the masks of a block of a cache. `tile`: the message, which is read anew.
template <class C>
__device__ __forceinline__ void mask_cached_rows(device::Scores<C>& s_rmem,
                                                 const CacheParams& params, const TileOf<C>& tile,
                                                 const device::VisibleKeys& visible,
                                                 const int (&lane_rows)[2], int warp_row,
                                                 int block) {
  const int row_of_tile = warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  if (params.slopes.gmem != nullptr) add_alibi<C>(s_rmem, params, tile, row_of_tile, block);
  const device::ChunkedKeys keys{visible, params.attention_chunk, tile.nk - tile.nq};
#pragma unroll
  for (int r = 0; r < 2; ++r)
    device::mask_row<C>(s_rmem, keys.of_row(lane_rows[r]), 0, r, 0, lane_key(block));
}

// Multiplies the scale of the scores by the descales that serve all keys, and finds the others.
// Sets all_need_more where the scores of every block need more than a softmax.
template <class C>
__device__ __forceinline__ void find_scale(const Params& params, unsigned char* shared,
                                           const Tile& tile, int q_stage, int warp_row,
                                           float& exp2_scale, device::KeyDescales& key_descales,
                                           device::WarpDescale& warp_descale, bool& all_need_more) {
  const AttentionParams& attention = params.attention;
  if constexpr (C::FP8) {
    if constexpr (C::TAKES_DESCALES_BY_BLOCK)
      key_descales = device::find_key_descales(params.descales, attention, tile);
    if constexpr (C::PREPARES_TILES && !C::SPARES_REGISTERS) {
      static_assert(!C::TAKES_DESCALES_BY_BLOCK, "find_head_descale() knows none by block");
      warp_descale =
          find_head_descale(params.descales, attention, blocks_message<C>(shared, q_stage).head,
                            min(tile.first_row + warp_row, tile.nq - 1));
    } else {
      warp_descale =
          device::find_warp_descale(params.descales, attention, tile, tile.first_row + warp_row);
    }
    exp2_scale *= warp_descale.qk;
    if constexpr (C::SPARES_REGISTERS) {  // uniform registers are left
      warp_descale.qk = uniform(warp_descale.qk);
      exp2_scale = uniform(exp2_scale);
    }
    all_need_more |= key_descales.k_gmem != nullptr || !(exp2_scale >= device::SMALLEST_NORMAL);
  } else if constexpr (C::CACHE) {  // the cache may be the copy of one of 8 bits
    if (params.descales.k.gmem != nullptr) {
      exp2_scale *= device::find_warp_descale(params.descales, attention, tile, 0).qk;
      all_need_more |= !(exp2_scale >= device::SMALLEST_NORMAL);
    }
    exp2_scale = uniform(exp2_scale);
  }
}

}  // namespace archflash::hopper
