// How long packed sequences take with a tile, where they fill the GPU, and which kernels serve
// those of unequal lengths. Pure host code.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "common/device/packed_heads.cuh"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"
#include "hopper/packed_lists.h"
#include "hopper/params.h"
#include "hopper/plan_parts.h"
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

// The time that a tile takes for a key, if all of its rows see it.
double time_of_key(const Problem& problem, const KernelTile& tile) {
  const bool odd = tile.packed.odd_key > 0 && has_odd_rows(problem);
  return odd ? tile.packed.odd_key : tile.packed.key;
}

// The time of a head of a sequence, or of packed heads.
double time_of_head(const Problem& problem, const KernelTile& tile, int64_t nq, int64_t nk) {
  constexpr int64_t MOST_GROUPS = 4;  // of rows, whose keys are looked up
  constexpr int GROUP_ROWS = 64;
  const int rows = std::min(tile.block_q, GROUP_ROWS);
  const int64_t groups = core::ceil_div(nq, rows);
  const int64_t step = core::ceil_div(groups, MOST_GROUPS);
  int64_t keys = 0, seen = 0;  // of how many groups, and by them
  for (int64_t group = step / 2; group < groups; group += step, ++seen)
    keys += core::keys_of_tile(problem, rows, tile.block_k, nq, nk, group * rows);
  const double tiles = static_cast<double>(core::ceil_div(nq, tile.block_q));
  const double of_groups = static_cast<double>(keys * groups) / static_cast<double>(seen);
  return tile.packed.start * tiles + time_of_key(problem, tile) * of_groups * rows / tile.block_q;
}

// The time of all heads of all sequences, where time_of(nq, nk) is that of a head.
template <class TimeOf>
double time_of_all(const Problem& problem, const Device& device, const TimeOf& time_of) {
  // Few sequences have most of the work: the longer ones are looked at more closely.
  struct Part {
    double until, weight;  // the share of the sequences in the middle of it, and in it
  };
  constexpr Part PARTS[] = {{0.25, 0.5},       {0.625, 0.25},       {0.8125, 0.125},
                            {0.90625, 0.0625}, {0.953125, 0.03125}, {0.984375, 0.03125}};
  double time = 0;
  for (const Part& part : PARTS) {
    const int64_t nq = length_at(part.until, problem.nq, problem.batch, problem.max_seqlen_q);
    const int64_t nk = length_at(part.until, problem.nk, problem.batch, problem.max_seqlen_k);
    time += part.weight * time_of(nq, nk);
  }
  return time * static_cast<double>(problem.batch * problem.heads_q) /
         static_cast<double>(device.sm_count);
}

// The time of the longest tile. CTAs that share an SM are no faster when they are alone.
double time_of_longest(const Problem& problem, const Device& device, const KernelTile& tile) {
  const int64_t nq = length_at(1, problem.nq, problem.batch, problem.max_seqlen_q);
  const int64_t nk = length_at(1, problem.nk, problem.batch, problem.max_seqlen_k);
  const int64_t last = std::max<int64_t>(nq - tile.block_q, 0);
  const auto keys =
      static_cast<double>(core::keys_of_tile(problem, tile.block_q, tile.block_k, nq, nk, last));
  return static_cast<double>(core::resident_ctas(tile, device)) *
         (tile.packed.start + time_of_key(problem, tile) * keys);
}

// The tile with the heads that share a head of K packed into its rows, where there are any that a
// tensor map has side by side; else the tile as it is.
KernelTile pack_heads(const Problem& problem, const KernelTile& tile) {
  constexpr int WARP_ROWS = 16;
  const auto heads_per_kv = static_cast<int>(problem.heads_q / problem.heads_kv);
  if (heads_per_kv == 1 || problem.q.head == 0 || problem.out.head == 0) return tile;
  const device::PackedHeads heads = device::pack_heads(tile.block_q, heads_per_kv);
  KernelTile packed = tile;
  packed.block_q = packed.q_box.rows = heads.rows();
  packed.packed_heads = heads.count;
  packed.q_box.heads = tile.block_q / heads.rows();
  packed.out_box.rows = std::min(WARP_ROWS, heads.rows());  // a warp's
  packed.out_box.heads = WARP_ROWS / packed.out_box.rows;
  return packed;
}

// Whether a kernel can list the tiles of a call's sequences.
bool can_list(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_SEQUENCES = 2048;  // each is compared with all others
  return tile.takes_lists && are_many_packed(problem, device) && !is_masked(problem) &&
         problem.batch <= MOST_SEQUENCES;
}

}  // namespace

bool is_uneven(const Problem& problem) {
  constexpr int64_t LONG = 512, LONGER = 2;  // keys, and times the mean
  return problem.varlen && problem.max_seqlen_q != UNKNOWN && problem.max_seqlen_k >= LONG &&
         problem.max_seqlen_k * problem.batch >= LONGER * problem.nk;
}

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
  const double time = time_of_all(problem, device, [&](int64_t nq, int64_t nk) {
    return time_of_head(problem, tile, nq, nk) / tile.packed_heads;
  });
  return is_uneven(problem) ? std::max(time, time_of_longest(problem, device, tile)) : time;
}

KernelTile pack_short(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_ROWS = 128;  // of a sequence in the mean; more are unmeasured
  const bool fills = problem.batch * problem.heads_q >= device.sm_count;
  if (!tile.is_short || !fills || !are_many_packed(problem, device) ||
      problem.nq > MOST_ROWS * problem.batch)
    return tile;
  const KernelTile packed = pack_heads(problem, tile);
  return packed_time(problem, device, packed) < packed_time(problem, device, tile) ? packed : tile;
}

bool lists_tiles(const Problem& problem, const Device& device, const KernelTile& tile) {
  return can_list(problem, device, tile) && (!tile.is_short || is_uneven(problem));
}

FewRows few_rows_of(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_ROWS = 512, ROWS = 64;
  // What a second launch takes besides, in ns, and the part of the longest tile's time in which the
  // CTAs of the first one end. Measured on an H200 (docs/lab/hopper.md).
  constexpr double SECOND_LAUNCH = 6000, END = 0.3;
  const bool measured = tile.packed.start > 0 && !tile.is_short;
  if (!measured || !is_uneven(problem) || !can_list(problem, device, tile)) return {};
  const double longest = time_of_longest(problem, device, tile);
  FewRows best{{}, 0, packed_time(problem, device, tile)};
  for (const KernelTile& given : tiles_for(problem)) {
    if (!given.is_short || !core::takes_head_dims(given, problem)) continue;
    for (const KernelTile& few : {given, pack_heads(problem, given)}) {
      const auto of_many = [&](int64_t nq, int64_t nk) {
        return time_of_head(problem, tile, nq, nk);
      };
      const auto of_few = [&](int64_t nq, int64_t nk) {
        return time_of_head(problem, few, nq, nk) / few.packed_heads;
      };
      const auto is_faster = [&](int64_t length) {
        return of_few(length, length) <= of_many(length, length);
      };
      int64_t rows = 0;
      while (rows < MOST_ROWS && is_faster(rows + ROWS)) rows += ROWS;
      if (rows == 0 || rows >= problem.max_seqlen_q) continue;
      const double first = time_of_all(
          problem, device, [&](int64_t nq, int64_t nk) { return nq > rows ? of_many(nq, nk) : 0; });
      const double second = time_of_all(
          problem, device, [&](int64_t nq, int64_t nk) { return nq > rows ? 0 : of_few(nq, nk); });
      const double time = std::max(first + END * longest, longest) + SECOND_LAUNCH + second;
      if (time < best.time) best = {few, rows, time};
    }
  }
  return best;
}

void list_tiles(LaunchPlan& plan, const Problem& problem, const TileList& many,
                const TileList& few) {
  PackedListsParams params{};
  const std::string word = core::dtype_word(problem.dtype);
  Launch first;
  const auto tell = [&](const TileList& list, Launch& attention, PackedList& told, size_t field) {
    constexpr int32_t LISTED = 1;
    std::memcpy(attention.params.data() + offsetof(Params, listed), &LISTED, sizeof LISTED);
    std::erase_if(attention.pointers, [](const PointerSlot& slot) {
      return slot.offset == static_cast<int32_t>(offsetof(Params, taken_gmem));
    });
    add_pointer(attention, Operand::Workspace, offsetof(Params, taken_gmem), list.start);
    told.tile_rows = list.tile_rows;
    told.room = static_cast<uint32_t>(list.tiles);
    add_pointer(first, Operand::Workspace, field, list.start);
  };
  tell(many, plan.launches[0], params.many, offsetof(PackedListsParams, many.gmem));
  if (few.tiles > 0) tell(few, plan.launches[1], params.few, offsetof(PackedListsParams, few.gmem));
  params.few_rows = static_cast<int32_t>(few.tiles > 0 ? few.rows : -1);
  params.batch = static_cast<int32_t>(problem.batch);
  params.nq = static_cast<int32_t>(problem.nq), params.nk = static_cast<int32_t>(problem.nk);
  first.kernel = "hopper_order_packed_" + word;
  first.image = "hopper/fwd_" + word;
  first.uses_pdl = true;
  first.grid = {core::ceil_div(problem.batch, int64_t{ORDER_PACKED_WARPS}), 1, 1};
  first.block = {ORDER_PACKED_THREADS, 1, 1};
  first.params = core::bytes(params);
  add_pointer(first, Operand::CuSeqlensQ, offsetof(PackedListsParams, cu_seqlens_q_gmem));
  add_pointer(first, Operand::CuSeqlensK, offsetof(PackedListsParams, cu_seqlens_k_gmem));
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

}  // namespace archflash::hopper
