// How long packed sequences take with a tile, where they fill the GPU, and which kernels serve
// those of unequal lengths. Pure host code.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"
#include "hopper/forward/group_heads.h"
#include "hopper/params.h"
#include "hopper/plan/packed_lists.h"
#include "hopper/plan/plan_parts.h"
#include "hopper/plan/plan_tiles.h"

namespace archflash::hopper {
namespace {

// The length that a share of the packed sequences does not exceed. Their mean and longest lengths
// alone are known, so that lengths count as spread evenly about the mean, or where the longest is
// far above it, as many short ones, of LEAST of the mean and more, and few long ones.
int64_t length_at(double share, int64_t all, int64_t batch, int64_t longest) {
  constexpr double LEAST = 0.1;
  const double mean = static_cast<double>(all) / static_cast<double>(batch);
  const double most = longest == UNKNOWN ? 2 * mean : std::max(static_cast<double>(longest), mean);
  const double least = std::max(2 * mean - most, LEAST * mean);
  const double power = most > mean ? (most - least) / (mean - least) - 1 : 1;
  return std::max<int64_t>(std::lround(least + (most - least) * std::pow(share, power)), 1);
}

// The times of a tile for a call.
const PackedTimes& times_of(const Problem& problem, const KernelTile& tile) {
  return tile.odd_packed.start > 0 && has_odd_rows(problem) ? tile.odd_packed : tile.packed;
}

// The time of a tile's start and end.
double start_of(const Problem& problem, const KernelTile& tile) {
  // Rows of V behind a sequence's last key are cleared when they have come, which takes a large
  // tile or one of many columns so long. There are none where all sequences are known to have whole
  // blocks of keys.
  constexpr double CLEARS = 900, CLEARS_SHORT = 500;
  const bool equal = problem.max_seqlen_k != UNKNOWN &&
                     problem.max_seqlen_k * problem.batch == problem.nk &&
                     problem.max_seqlen_k % tile.block_k == 0;
  const double start = times_of(problem, tile).start;
  if (!equal || tile.head_dim <= 64 || tile.clears_beside) return start;
  return start - (tile.is_short ? tile.head_dim > 128 ? CLEARS_SHORT : 0 : CLEARS);
}

// The time of a head of a sequence, or of packed heads.
double time_of_head(const Problem& problem, const KernelTile& tile, int64_t nq, int64_t nk) {
  constexpr int64_t MOST_GROUPS = 4;  // of rows, whose keys are looked up
  constexpr int GROUP_ROWS = 64;
  const int rows = tile.packs ? tile.q_box.rows : std::min(tile.block_q, GROUP_ROWS);
  const int64_t groups = core::ceil_div(nq, rows);
  const int64_t step = core::ceil_div(groups, MOST_GROUPS);
  int64_t keys = 0, seen = 0;  // of how many groups, and by them
  for (int64_t group = step / 2; group < groups; group += step, ++seen)
    keys += core::keys_of_tile(problem, rows, tile.block_k, nq, nk, group * rows);
  const double tiles = static_cast<double>(core::ceil_div(nq, tile.block_q));
  const double of_groups = static_cast<double>(keys * groups) / static_cast<double>(seen);
  return start_of(problem, tile) * tiles +
         times_of(problem, tile).key * of_groups * rows / tile.block_q;
}

// Some of the sequences, which count as having the same length.
struct LikeSequences {
  int64_t nq, nk, most_rows;  // most_rows: of the longest of them
  double heads_per_sm;
};
constexpr int PARTS = 6;
using Parts = std::array<LikeSequences, PARTS>;

// Few sequences have most of the work: the longer ones are looked at more closely.
Parts parts_of(const Problem& problem, const Device& device) {
  constexpr double UNTIL[PARTS] = {0.5, 0.75, 0.875, 0.9375, 0.96875, 1};  // shares of sequences
  const double heads = static_cast<double>(problem.batch * problem.heads_q) / device.sm_count;
  const auto rows_at = [&](double share) {
    return length_at(share, problem.nq, problem.batch, problem.max_seqlen_q);
  };
  Parts parts;
  double begin = 0;
  for (int i = 0; i < PARTS; begin = UNTIL[i++]) {
    const double middle = (begin + UNTIL[i]) / 2;
    parts[i] = {rows_at(middle), length_at(middle, problem.nk, problem.batch, problem.max_seqlen_k),
                rows_at(UNTIL[i]), heads * (UNTIL[i] - begin)};
  }
  return parts;
}

double time_of_part(const Problem& problem, const KernelTile& tile, const LikeSequences& part) {
  return time_of_head(problem, tile, part.nq, part.nk) * part.heads_per_sm / tile.packed_heads;
}

// The time of the longest tile, beside as many others on its SM as there are at first.
double time_of_longest(const Problem& problem, const Device& device, const KernelTile& tile) {
  const int64_t nq = length_at(1, problem.nq, problem.batch, problem.max_seqlen_q);
  const int64_t nk = length_at(1, problem.nk, problem.batch, problem.max_seqlen_k);
  const int64_t last = std::max<int64_t>(nq - tile.block_q, 0);
  const auto keys =
      static_cast<double>(core::keys_of_tile(problem, tile.block_q, tile.block_k, nq, nk, last));
  const int64_t tiles_of_sm = core::ceil_div(core::tiles_of(problem, tile), device.sm_count);
  const int64_t together = std::clamp<int64_t>(tiles_of_sm, 1, core::resident_ctas(tile, device));
  return static_cast<double>(together) *
         (start_of(problem, tile) + times_of(problem, tile).key * keys);
}

// When CTAs are done that share out so much work, the longest tile first: in this part of its time
// they end. Measured on an H200 (docs/lab/hopper.md).
double time_until_end(double work, double longest) {
  constexpr double END = 0.3;
  return std::max(work + END * longest, longest);
}

// The tile with the heads that share a head of K packed into its rows, where there are any that a
// tensor map has side by side; else the tile as it is.
KernelTile pack_heads(const Problem& problem, const KernelTile& tile) {
  constexpr int GROUP_ROWS = 64, MOST_HEADS = 32;  // of a warpgroup
  const auto heads_per_kv = static_cast<int>(problem.heads_q / problem.heads_kv);
  if (heads_per_kv == 1 || problem.q.head == 0 || problem.out.head == 0 ||
      problem.nq > MOST_GROUPED_ROWS)
    return tile;
  const int heads = heads_per_kv <= MOST_HEADS ? heads_per_kv
                                               : std::min(heads_per_kv & -heads_per_kv, MOST_HEADS);
  // No more rows than sequences have: then fewer warps write some.
  int64_t rows = GROUP_ROWS / heads;
  if (problem.max_seqlen_q != UNKNOWN)
    rows = std::min(rows, std::max<int64_t>(problem.max_seqlen_q, 2));
  KernelTile packed = tile;
  packed.block_q = groups_of(tile) * static_cast<int>(rows);
  packed.packed_heads = heads;
  packed.q_box.rows = packed.out_box.rows = static_cast<int>(rows);
  packed.q_box.heads = packed.out_box.heads = heads;
  return packed;
}

// Whether a tile of short sequences may serve those of few rows beside `tile`. Of 256 columns it
// was always slower.
bool serves_few(const Problem& problem, const KernelTile& few, const KernelTile& tile) {
  constexpr int MOST_COLUMNS = 128;
  if (!few.is_short || few.head_dim > MOST_COLUMNS || !core::takes_head_dims(few, problem))
    return false;
  return few.head_dim == tile.head_dim || takes_wider(problem, few);
}

// What a launch before takes that lists tiles, in ns. Measured on an H200 (docs/lab/hopper.md).
constexpr double LISTS = 2500;

// Whether a kernel can list the tiles of a call's sequences.
bool can_list(const Problem& problem, const KernelTile& tile) {
  constexpr int64_t MOST_SEQUENCES = 2048;  // each is compared with all others
  const bool has_list =
      problem.varlen && problem.batch > 1 && !problem.kv_cache && problem.nq > 0 && problem.nk > 0;
  return tile.takes_lists && has_list && !is_masked(problem) && problem.batch <= MOST_SEQUENCES;
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

bool takes_wider(const Problem& problem, const KernelTile& tile) {
  if (!tile.is_short || tile.packed.start == 0) return false;
  return tile.head_dim == 128 ? has_odd_rows(problem) : tile.head_dim == 256 && problem.d > 128;
}

bool are_many_packed(const Problem& problem, const Device& device) {
  // Or unlike ones that have so many tiles of 192 rows as there are SMs, and a third more.
  constexpr int64_t ROWS = 192;
  const int64_t heads = problem.batch * problem.heads_q;
  const int64_t tiles = problem.heads_q * core::ceil_div(problem.nq, ROWS) + heads / 2;
  const bool unlike =
      problem.batch > 1 && (problem.max_seqlen_q == UNKNOWN ||
                            10 * problem.max_seqlen_q * problem.batch > 11 * problem.nq);
  const bool fills =
      2 * heads >= device.sm_count || (unlike && 3 * tiles >= 4 * int64_t{device.sm_count});
  return problem.varlen && !problem.kv_cache && problem.num_splits == 0 &&
         !problem.batch_invariant && problem.nq > 0 && problem.nk > 0 && fills;
}

double packed_time(const Problem& problem, const Device& device, const KernelTile& tile) {
  double work = 0;
  for (const LikeSequences& part : parts_of(problem, device))
    work += time_of_part(problem, tile, part);
  // Where every sequence has one tile as long as all others, whose CTAs have an SM each, the last
  // round of tiles takes as long as a full one.
  const int64_t heads = problem.batch * problem.heads_q / tile.packed_heads;
  const bool is_equal = problem.max_seqlen_q * problem.batch == problem.nq &&
                        problem.max_seqlen_k * problem.batch == problem.nk;
  if (is_equal && problem.max_seqlen_q <= tile.block_q && core::resident_ctas(tile, device) == 1) {
    const auto rounds = static_cast<double>(core::ceil_div(heads, device.sm_count));
    work *= rounds * device.sm_count / static_cast<double>(heads);
  }
  return time_until_end(work, time_of_longest(problem, device, tile)) +
         (lists_tiles(problem, tile) ? LISTS : 0);
}

int groups_of(const KernelTile& tile) {
  constexpr int WARPS_OF_GROUP = 4;
  return tile.warps / WARPS_OF_GROUP;
}

bool leaves_groups_empty(const Problem& problem, const KernelTile& tile) {
  return tile.packs && !tile.is_short && tile.head_dim_v > 128 && problem.max_seqlen_q != UNKNOWN &&
         problem.max_seqlen_q <= tile.q_box.rows;
}

KernelTile pack_if_faster(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_ROWS = 512;  // of a sequence in the mean; more are unmeasured
  const bool fills = problem.batch * problem.heads_q >= device.sm_count;
  if (!tile.packs || !are_many_packed(problem, device) ||
      (tile.is_short && (!fills || problem.nq > MOST_ROWS * problem.batch)))
    return tile;
  const KernelTile packed = pack_heads(problem, tile);
  return packed_time(problem, device, packed) < packed_time(problem, device, tile) ? packed : tile;
}

bool lists_tiles(const Problem& problem, const KernelTile& tile) {
  return can_list(problem, tile) && (!tile.is_short || is_uneven(problem));
}

FewRows few_rows_of(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_ROWS = 256, ROWS = 64;
  // What two launches take besides, in ns and as a share. Measured on an H200 (docs/lab/hopper.md).
  constexpr double SECOND_LAUNCH = 14000, SHARE = 0.05;
  // Where so many heads share K, they fill long tiles with the rows of short sequences, too: then
  // one launch is faster.
  constexpr int64_t SHARING_HEADS = 3;
  const bool shares = tile.head_dim > 64 && problem.heads_q >= SHARING_HEADS * problem.heads_kv;
  const bool measured = tile.packed.start > 0 && !tile.is_short && !shares;
  if (!measured || !is_uneven(problem) || !can_list(problem, tile)) return {};
  const double longest = time_of_longest(problem, device, tile);
  const Parts parts = parts_of(problem, device);
  double all = 0;
  std::array<double, PARTS> of_many;
  for (int i = 0; i < PARTS; ++i) all += of_many[i] = time_of_part(problem, tile, parts[i]);
  FewRows best{{}, 0, time_until_end(all, longest) + LISTS};
  for (const KernelTile& given : tiles_for(problem)) {
    if (!serves_few(problem, given, tile)) continue;
    for (const KernelTile& few : {given, pack_heads(problem, given)}) {
      double first = all, second = SECOND_LAUNCH;
      for (int i = 0; i + 1 < PARTS; ++i) {  // those of few rows are the parts up to this one
        first -= of_many[i];
        second += time_of_part(problem, few, parts[i]);
        const int64_t rows = core::ceil_div(parts[i].most_rows, ROWS) * ROWS;
        if (rows > MOST_ROWS || rows >= problem.max_seqlen_q) break;
        const double time = (1 + SHARE) * (time_until_end(first, longest) + second) + LISTS;
        if (time < best.time) best = {few, rows, time};
      }
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
