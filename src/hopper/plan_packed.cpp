// How long packed sequences take with a tile, where they fill the GPU. Pure host code.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/device/packed_heads.cuh"
#include "common/planning/core_set.h"
#include "common/planning/order.h"
#include "common/planning/plan.h"
#include "common/problem.h"
#include "hopper/plan_tiles.h"

namespace archflash::hopper {
namespace {

// The length that a share of the packed sequences does not exceed. Their mean and longest lengths
// alone are known, so that lengths count as spread evenly about the mean, or where the longest has
// more than twice the mean, as many short ones and few long ones.
int64_t length_at(double share, int64_t all, int64_t batch, int64_t longest) {
  const double mean = static_cast<double>(all) / static_cast<double>(batch);
  const double most = longest == UNKNOWN ? 2 * mean : std::max(static_cast<double>(longest), mean);
  const double least = 2 * mean - most;
  const double length =
      least >= 0 ? least + (most - least) * share : most * std::pow(share, most / mean - 1);
  return std::max<int64_t>(std::lround(length), 1);
}

// The time of a head of a sequence, or of packed heads.
double time_of_head(const Problem& problem, const KernelTile& tile, int64_t nq, int64_t nk) {
  constexpr int64_t MOST_GROUPS = 4;  // of rows, whose keys are looked up
  constexpr int GROUP_ROWS = 64;
  const int rows = std::min(tile.block_q, GROUP_ROWS);
  const bool odd = tile.packed.odd_key > 0 && has_odd_rows(problem);
  const double key = odd ? tile.packed.odd_key : tile.packed.key;
  const int64_t groups = core::ceil_div(nq, rows);
  const int64_t step = core::ceil_div(groups, MOST_GROUPS);
  int64_t keys = 0, seen = 0;  // of how many groups, and by them
  for (int64_t group = step / 2; group < groups; group += step, ++seen)
    keys += core::keys_of_tile(problem, rows, tile.block_k, nq, nk, group * rows);
  const double tiles = static_cast<double>(core::ceil_div(nq, tile.block_q));
  const double of_groups = static_cast<double>(keys * groups) / static_cast<double>(seen);
  return tile.packed.start * tiles + key * of_groups * rows / tile.block_q;
}

}  // namespace

bool has_odd_rows(const Problem& problem) {
  constexpr int64_t SECTOR_BYTES = 32;
  const auto is_odd = [&](int64_t d) { return d * dtype_bytes(problem.dtype) % SECTOR_BYTES != 0; };
  return is_odd(problem.d) || is_odd(problem.dv);
}

bool are_many_packed(const Problem& problem, const Device& device) {
  return problem.varlen && !problem.kv_cache && problem.num_splits == 0 &&
         !problem.batch_invariant && problem.nq > 0 && problem.nk > 0 &&
         2 * problem.batch * problem.heads_q >= device.sm_count;
}

double packed_time(const Problem& problem, const Device& device, const KernelTile& tile) {
  // Few sequences have most of the work: the longer ones are looked at more closely.
  struct Part {
    double until, weight;  // the share of the sequences in the middle of it, and in it
  };
  constexpr Part PARTS[] = {
      {0.25, 0.5}, {0.625, 0.25}, {0.8125, 0.125}, {0.90625, 0.0625}, {0.96875, 0.0625}};
  double time = 0;
  for (const Part& part : PARTS) {
    const int64_t nq = length_at(part.until, problem.nq, problem.batch, problem.max_seqlen_q);
    const int64_t nk = length_at(part.until, problem.nk, problem.batch, problem.max_seqlen_k);
    time += part.weight * time_of_head(problem, tile, nq, nk);
  }
  const int64_t heads = problem.batch * problem.heads_q / tile.packed_heads;
  return time * static_cast<double>(heads) / static_cast<double>(device.sm_count);
}

KernelTile pack_short(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int WARP_ROWS = 16;
  constexpr int64_t MOST_ROWS = 128;  // of a sequence in the mean; more are unmeasured
  const auto heads_per_kv = static_cast<int>(problem.heads_q / problem.heads_kv);
  const bool fills = problem.batch * problem.heads_q >= device.sm_count;
  if (!tile.is_short || heads_per_kv == 1 || !fills || !are_many_packed(problem, device) ||
      problem.nq > MOST_ROWS * problem.batch || problem.q.head == 0 || problem.out.head == 0)
    return tile;
  const device::PackedHeads heads = device::pack_heads(tile.block_q, heads_per_kv);
  KernelTile packed = tile;
  packed.block_q = packed.q_box.rows = heads.rows();
  packed.packed_heads = heads.count;
  packed.q_box.heads = tile.block_q / heads.rows();
  packed.out_box.rows = std::min(WARP_ROWS, heads.rows());  // a warp's
  packed.out_box.heads = WARP_ROWS / packed.out_box.rows;
  return packed_time(problem, device, packed) < packed_time(problem, device, tile) ? packed : tile;
}

}  // namespace archflash::hopper
