// The kernel behind main kernels for lists of keys that keep dK and dV of each entry (KeptKeys): it
// adds up the rows of each key, always in the same order: by lists, in a list by the CTAs that have
// its rows.
#pragma once

#include <cstdint>

#include "common/device/backward_rows.cuh"
#include "common/list_backward_params.h"
#include "common/ptx/f32_of_half.cuh"
#include "common/ptx/grid_dependency.cuh"

namespace archflash::device {

// The column of pair `pair` (of 4) of a kept chunk of 8 numbers. What a lane has of COLUMNS columns
// (16 or 32) is kept together: of every 8 columns 2.
template <int COLUMNS>
__device__ __forceinline__ int kept_column(int chunk, int pair) {
  constexpr int CHUNKS = COLUMNS / 8, PAIRS = COLUMNS / 8;  // of a lane
  const int number = chunk % CHUNKS * 4 + pair;             // of a pair among those of the columns
  return chunk / CHUNKS * COLUMNS + number % PAIRS * 8 + number / PAIRS * 2;
}

// The rows that a list has kept for a key: `times` neighbours, since a key may be named more than
// once, by each of some CTAs, whose rows lie topk apart.
struct KeptHit {
  int32_t row;
  uint16_t times, tiles;
};

// Adds up the kept rows of some keys of a group, 8 columns for each thread, to dK and dV or to
// KeySums.
template <DType DTYPE, int COLUMNS>
__device__ __forceinline__ void add_kept_rows(const ListBackwardParams& params) {
  constexpr int LISTS = 128;  // at a time
  constexpr int WARPS = KEPT_SUMS_THREADS / 32, AT_A_TIME = 8;
  __shared__ KeptHit hits[KEPT_MOST_KEYS][LISTS];
  __shared__ int counts[KEPT_MOST_KEYS];
  __shared__ int starts[LISTS], ends[LISTS];
  __shared__ uint32_t named[LISTS];  // bit i: the list names key i of the group
  const AttentionParams& attention = params.call.attention;
  const KeyLists& lists = params.lists;
  const KeptKeys& kept = params.kept;
  const int groups = (attention.nk + KEPT_KEYS - 1) / KEPT_KEYS;
  const int number_of_lists = (attention.nq + lists.list_rows - 1) / lists.list_rows;
  const int head_of_all = kept.first_list / number_of_lists + static_cast<int>(blockIdx.x) / groups;
  const int group = static_cast<int>(blockIdx.x) % groups;
  const int first = kept.first_list - head_of_all * number_of_lists;
  const int begin = max(first, 0);
  const int end = min(kept.end_list - head_of_all * number_of_lists, number_of_lists);
  const int heads_kv = attention.heads_q / attention.heads_per_kv;
  const int batch = head_of_all / heads_kv, head = head_of_all - batch * heads_kv;
  const int64_t first_entry = batch * lists.batch + head * lists.head;
  const int row_tile = params.packed_heads.rows();
  const int head_tiles = attention.heads_per_kv / params.packed_heads.count;
  const int tiles = head_tiles * ((lists.list_rows + row_tile - 1) / row_tile);

  // The keys of the CTA, and what a thread adds up: 8 columns of one of them.
  const int dk_chunks = params.sums.dk_columns / 8;
  const int chunks = dk_chunks + params.sums.dv_columns / 8;
  const int most_keys = min(KEPT_SUMS_THREADS / chunks, KEPT_MOST_KEYS);
  const int first_key = most_keys * static_cast<int>(blockIdx.y);  // of the group
  const int keys =
      min(min(most_keys, KEPT_KEYS - first_key), attention.nk - group * KEPT_KEYS - first_key);
  if (keys <= 0) return;
  const int own = static_cast<int>(threadIdx.x) / chunks;
  const int chunk = static_cast<int>(threadIdx.x) - own * chunks;
  const bool is_dk = chunk < dk_chunks;
  const int chunk_of_row = is_dk ? chunk : chunk - dk_chunks;
  const int64_t key = group * KEPT_KEYS + first_key + own;
  float x[8] = {};
  // The sums of launches before, and for those behind.
  const int columns = is_dk ? params.sums.dk_columns : params.sums.dv_columns;
  float4* const sums_gmem = reinterpret_cast<float4*>(
      (is_dk ? params.sums.dk_gmem : params.sums.dv_gmem) +
      (static_cast<int64_t>(head_of_all) * attention.nk + key) * columns + 8 * chunk_of_row);
  ptx::griddepcontrol_wait();  // all rows are kept
  if (begin > 0 && own < keys) {
    const float4 low = sums_gmem[0], high = sums_gmem[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint4* const chunk_gmem = static_cast<const uint4*>(kept.rows_gmem) + chunk;
#pragma unroll 1
  for (int base = begin; base < end; base += LISTS) {
    // Which keys of the group a list names: a thread for each list.
    const auto entries_of = [&](int list) {
      return lists.indices_gmem + first_entry + static_cast<int64_t>(list) * lists.row;
    };
    __syncthreads();  // the hits of the lists before are read
    if (threadIdx.x < LISTS) {
      const int list = base + static_cast<int>(threadIdx.x);
      int start = 0, stop = 0;
      uint32_t names = 0;
      if (list < end) {
        const int64_t number = (first_entry + static_cast<int64_t>(list) * lists.row) / lists.topk;
        const int32_t* const starts_gmem = kept.starts_gmem + number * (groups + 1) + group;
        start = starts_gmem[0], stop = starts_gmem[1];
        const int32_t* const entries_gmem = entries_of(list);
#pragma unroll 4
        for (int i = start; i < stop; ++i) names |= 1u << (entries_gmem[i] % KEPT_KEYS);
      }
      starts[threadIdx.x] = start, ends[threadIdx.x] = stop, named[threadIdx.x] = names;
    }
    __syncthreads();  // what lists name is known

    // The lists that name a key, in order: a warp for a key.
#pragma unroll 1
    for (int of_cta = warp; of_cta < keys; of_cta += WARPS) {
      const int of_group = first_key + of_cta;
      const uint32_t bit = 1u << of_group;
      int count = 0;
#pragma unroll
      for (int i = lane; i < LISTS; i += 32) {
        const uint32_t names = named[i];
        const uint32_t naming = __ballot_sync(~0u, (names & bit) != 0);
        if ((names & bit) != 0) {
          const int list = base + i, start = starts[i], entries = ends[i] - start;
          int place = __popc(names & (bit - 1)), times = 1;
          if (__popc(names) != entries) {  // it names a key of the group more than once
            const int32_t* const entries_gmem = entries_of(list) + start;
            place = times = 0;
            for (int e = 0; e < entries; ++e) {
              const int named_key = entries_gmem[e] % KEPT_KEYS;
              place += named_key < of_group, times += named_key == of_group;
            }
          }
          const int list_rows = min(lists.list_rows, attention.nq - list * lists.list_rows);
          KeptHit& hit = hits[of_cta][count + __popc(naming & ((1u << lane) - 1))];
          hit.row = (list - first) * tiles * lists.topk + start + place;
          hit.times = static_cast<uint16_t>(times);
          hit.tiles = static_cast<uint16_t>(head_tiles * ((list_rows + row_tile - 1) / row_tile));
        }
        count += __popc(naming);
      }
      if (lane == 0) counts[of_cta] = count;
    }
    __syncthreads();  // the hits are there
    if (own >= keys) continue;
    const int count = counts[own];
    int number = 0, tile = 0, time = 0;  // of the hit, and of its rows
#pragma unroll 1
    while (number < count) {
      uint4 loaded[AT_A_TIME];
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        loaded[i] = uint4{0, 0, 0, 0};
        if (number >= count) continue;
        const KeptHit hit = hits[own][number];
        loaded[i] = chunk_gmem[static_cast<int64_t>(hit.row + tile * lists.topk + time) * chunks];
        if (++time < hit.times) continue;
        time = 0;
        if (++tile < hit.tiles) continue;
        tile = 0, ++number;
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] += ptx::f32_of_half<DTYPE>(words[e / 2], e % 2);
      }
    }
  }

  if (own >= keys) return;
  if (end < number_of_lists) {  // a launch behind goes on
    sums_gmem[0] = {x[0], x[1], x[2], x[3]};
    sums_gmem[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
  const GradientParams& gradient = is_dk ? params.call.dk : params.call.dv;
  const float factor = is_dk ? params.call.scale : 1.0f;
  const int64_t start = batch * gradient.batch + head * gradient.head + key * gradient.row;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = kept_column<COLUMNS>(chunk_of_row, i);
    if (column >= (is_dk ? attention.d : attention.dv)) continue;
    store_gradient_pair<DTYPE>(gradient, start + column,
                               {x[2 * i] * factor, x[2 * i + 1] * factor});
  }
}

}  // namespace archflash::device
