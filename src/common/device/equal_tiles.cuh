// find_work() of attention_work.cuh for sequences of one length and heads that are not packed,
// without a division: the plan gives the divisors of a call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/attention_params.h"
#include "common/device/divisor.h"
#ifdef __CUDACC__
#include "common/device/attention_work.cuh"
#endif

namespace archflash::device {

struct TileDivisors {
  Divisor tiles_of_group;     // row tiles of all heads of a group of TileOrder
  Divisor heads_of_group;     // heads of a group,
  Divisor heads_of_last;      // and of the last one, which may have fewer
  Divisor heads_of_sequence;  // query heads
  Divisor heads_of_kv;        // query heads that share a head of K
};

inline TileDivisors make_tile_divisors(const AttentionParams& params, int block_q) {
  const auto divisor = [](int64_t by) {
    return make_divisor(std::clamp<int64_t>(by, 1, INT32_MAX));
  };
  const int64_t heads = static_cast<int64_t>(params.batch) * params.heads_q;
  const int64_t group =
      std::clamp<int64_t>(params.order.heads_per_group, 1, std::max<int64_t>(heads, 1));
  const int64_t tiles = (static_cast<int64_t>(params.nq) + block_q - 1) / block_q;
  return {divisor(group * tiles), divisor(group),
          divisor(heads % group == 0 ? group : heads % group), divisor(params.heads_q),
          divisor(params.heads_per_kv)};
}

#ifdef __CUDACC__
// cu_seqlens must be null.
__device__ __forceinline__ Work find_equal_work(const AttentionParams& params,
                                                const TileDivisors& divisors, int index,
                                                int block_q) {
  Work work{};
  work.nq = params.nq;
  work.nk = params.nk;
  // mutants: never-negative (tests/sim/tags.py)
  const int tiles = (work.nq + block_q - 1) / block_q;
  const int heads_per_group = params.order.heads_per_group;
  const int first_head = divisors.tiles_of_group.quotient(index) * heads_per_group;
  const int heads_left = params.batch * params.heads_q - first_head;
  const bool is_last = heads_left < heads_per_group;
  index -= first_head * tiles;
  const Divisor heads = is_last ? divisors.heads_of_last : divisors.heads_of_group;
  const int place = heads.quotient(index);
  work.batch_head = first_head + index - place * (is_last ? heads_left : heads_per_group);
  work.first_row = (tiles - 1 - params.order.from_last(place)) * block_q;
  return work;
}
#endif

}  // namespace archflash::device
