// Which of hopper's tiles (tile_tables.cpp) serves a call. Pure host code.
#include "hopper/plan/plan_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "common/device/row_tiles.h"
#include "common/planning/makespan.h"
#include "common/planning/order.h"
#include "hopper/forward/group_heads.h"

namespace archflash::hopper {
namespace {

// The least KernelTile::start_keys of a tile that has no rows for some of its warpgroups.
constexpr int START_ALONE = 64;
// A tile with a share of a whole one's rows takes SHORT_SHARE + SHORT_SLOPE * share of its time,
// where every head has one such tile and CTAs take many of them. A CTA that begins where another
// one has ended takes the time of NEW_CTA more keys. From 29 calls of 32 to 160 rows (H200,
// 2026-11-29).
constexpr double SHORT_SHARE = 0.19, SHORT_SLOPE = 1.03;
constexpr double NEW_CTA = 200;
// Parts of the last round take so much of their time where sequences of up to 64 columns are short:
// 16x12 256 and 16x20 196 take 1.48 and 2.34 rounds of whole tiles (H200, 2026-11-30).
constexpr double SHORT_CUT = 0.7;
// A kernel that does not start early takes as much longer as LATE_ROWS rows with LATE_KEYS keys do
// (H200, 2026-11-30).
constexpr double LATE_KEYS = 110, LATE_ROWS = 192;
// Up to how many rows and keys sequences are short, which tiles of short sequences and the numbers
// above were measured for; and up to how many keys if rows are few: 8x20 64x1500 takes 25.2 us with
// such a tile, 33.2 with the next best that is not split.
constexpr int64_t SHORT_ROWS = 300, SHORT_KEYS = 512, FEW_ROWS = 128, KEYS_OF_FEW_ROWS = 1536;
constexpr int64_t FEW_KEYS = 128;
constexpr int64_t PACKED_ROWS = 64;  // of a tile of kernels that split

// Whether a tile is one of short sequences: several CTAs of its kernel stay on an SM.
bool is_of_short(const KernelTile& tile, const Device& device) {
  return tile.cuts_tiles && core::resident_ctas(tile, device) > 1;
}

// How much longer the keys of a tail take than as many others, in keys (H200, 2026-11-30).
constexpr int TAIL_START = 8;
// Zeroing the counter of tiles takes about 2 us, in which a CTA multiplies a tile with about so
// many keys, or with COUNTER_KEYS_FP8 of 8 bits: both neighbours wait for its memset.
constexpr double COUNTER_KEYS = 128, COUNTER_KEYS_FP8 = 512;

// The times of a call's tiles as they are handed out: the heads of a group take turns, each row
// tile of all of them, then the next one.
std::vector<core::Run> runs_in_order(const Problem& problem, const HeadModel& head,
                                     const KernelTile& tile, int64_t heads_per_group,
                                     int64_t slices) {
  const int64_t heads = problem.batch * problem.heads_q / tile.packed_heads;
  const int64_t group = heads_per_group / tile.packed_heads;
  std::vector<core::Run> runs;
  runs.reserve(head.times.size() * core::ceil_div(heads, group));
  for (int64_t first = 0; first < heads; first += group) {
    for (const double time : head.times)
      runs.push_back({time, std::min(group, heads - first) * slices});
  }
  return core::merge_equal(std::move(runs));
}

// The row tiles of a head. Each of the packed sequences counts as filling half of its last tile.
double tiles_of_head(const Problem& problem, const KernelTile& tile, const HeadModel& head) {
  if (!problem.varlen) return static_cast<double>(head.times.size());
  return static_cast<double>(head.nq) / tile.block_q + 0.5;
}

double speed_of(const KernelTile& tile, const Problem& problem) {
  if (tile.odd_speed > 0 && has_odd_rows(problem)) return tile.odd_speed;
  if (tile.uneven_speed > 0 && !core::equal_tiles(problem)) return tile.uneven_speed;
  return tile.speed;
}

// How long a call of short sequences takes with such a tile, as time_of() counts it. CTAs that are
// alone on an SM take less than twice the time for their keys, but more than their share.
double time_of_short(const Problem& problem, const Device& device, const KernelTile& tile,
                     const HeadModel& head) {
  const double keys_alone = tile.head_dim > 64 ? 1.7 : 2.7;
  const double keys_beside = tile.head_dim > 64 ? 0.575 : 0.62;
  const double resident = static_cast<double>(core::resident_ctas(tile, device));
  const double rows = static_cast<double>(head.times.size());
  const double of_sm = tiles_of_head(problem, tile, head) *
                       static_cast<double>(problem.batch * problem.heads_q) /
                       static_cast<double>(device.sm_count);
  const double fixed = core::TILE_KEYS + tile.start_keys;
  double keys = 0;
  for (const double time : head.times) keys += (time - fixed) / rows;
  if (of_sm <= resident) keys = *std::max_element(head.times.begin(), head.times.end()) - fixed;
  const auto of_round = [&](double ctas) {
    return ctas > 0 ? fixed * ctas + keys * (keys_alone + keys_beside * ctas) : 0;
  };
  // CTAs of the first rounds begin and end together, and those of many keys longer.
  const double few_rounds = keys > 256 ? 8 : 3;
  const double rounds = of_sm / resident, whole = std::floor(rounds);
  const double keys_passed =
      rounds > few_rounds
          ? rounds * of_round(resident)
          : whole * of_round(resident) + of_round(std::ceil(of_sm - whole * resident));
  return keys_passed * tile.block_q / speed_of(tile, problem);
}

// Whether a call's last block of keys is one of those that a tile multiplies a few keys of.
bool has_tail(const Problem& problem, const KernelTile& tile) {
  // In more blocks a tail saves less than the kernel with one costs (docs/lab/hopper.md).
  constexpr int64_t MOST_BLOCKS = 64;
  const int64_t keys = problem.nk % tile.block_k;
  return !problem.varlen && core::equal_tiles(problem) && problem.softcap == 0 && keys > 0 &&
         keys <= tile.tail_keys && problem.nk > tile.block_k &&
         problem.nk <= MOST_BLOCKS * tile.block_k;
}

// With more rounds of tiles than these a model says little: they come out even.
constexpr int64_t MOST_ROUNDS_TO_MODEL = 16;

// How long a call takes with a tile, by the model of makespans: keys, times the rows that an SM
// passes with the first tile of the table meanwhile. Where that is above `limit`, any time above
// it.
double time_of(const Problem& problem, const Device& device, const KernelTile& tile,
               double limit = std::numeric_limits<double>::infinity()) {
  // A CTA that has an SM for itself, where there is room for two, is faster than beside another
  // one: in so much of the time (docs/lab/hopper.md).
  constexpr double ALONE = 0.65;
  const int64_t heads = problem.batch * problem.heads_q;
  const HeadModel head(problem, tile);
  std::vector<core::Run> runs;
  double sum = 0, longest = 0;
  const auto rows = static_cast<int64_t>(head.times.size());
  const int64_t workers = core::workers_of(tile, device);
  const int64_t resident = core::resident_ctas(tile, device);
  // Few rows of heads that share a head of K are packed into one tile by the kernels that split.
  const int64_t ratio = problem.heads_q / std::max<int64_t>(problem.heads_kv, 1);
  const bool packs = problem.num_splits != 0 || (ratio > 1 && ratio * head.nq <= PACKED_ROWS);
  const bool is_short = !packs && head.nq <= SHORT_ROWS && !has_far_longer_ones(problem) &&
                        head.nk <= (head.nq <= FEW_ROWS ? KEYS_OF_FEW_ROWS : SHORT_KEYS);
  // Up to 64 columns in all calls, with more columns in short packed ones and for one tile of keys
  // that are about as few; others are unmeasured.
  const bool fits_short = !packs && !has_far_longer_ones(problem) &&
                          (problem.varlen ? is_short
                                          : tile.head_dim <= 64 || (head.nq <= tile.block_q &&
                                                                    head.nk <= 2 * tile.block_k));
  if (is_of_short(tile, device) && rows > 0)
    return fits_short ? time_of_short(problem, device, tile, head)
                      : std::numeric_limits<double>::infinity();
  const bool few_keys = is_short || (!packs && !problem.varlen && head.nk <= SHORT_KEYS);
  const bool begins_anew = few_keys && (resident > 1 || tile.can_split) && rows * heads > workers;
  const int64_t many_rounds = tile.head_dim > 64 ? 1 : 2;
  runs.reserve(core::equal_tiles(problem) ? 2 : head.times.size());
  for (double time : head.times) {
    if (head.time_among_others > 0 && heads > many_rounds * workers) time = head.time_among_others;
    time += begins_anew ? NEW_CTA : 0;
    sum += time;
    longest = std::max(longest, time);
    if (runs.empty() || runs.back().time != time) runs.push_back({time, 0});
    runs.back().count += heads;
  }
  // How many of the SMs have a second CTA. Equal tiles end together: one such SM is the last.
  const bool equal = core::equal_tiles(problem);
  const double second =
      std::clamp(static_cast<double>(rows * heads - device.sm_count) / device.sm_count, 0.0, 1.0);
  const double beside = second > 0 && equal ? 1 : second;
  // As measured before such calls started early, by is_soon_done() in plan.cpp: without this their
  // tiles are unmeasured, as they are with more keys.
  const bool starts_late = resident > 1 && rows * heads < workers && head.nk <= FEW_KEYS;
  const auto of_rows = [&](double time) {
    if (resident > 1) time *= ALONE + (1 - ALONE) * beside;
    return time * tile.block_q * static_cast<double>(resident) / speed_of(tile, problem) +
           (starts_late ? LATE_KEYS * LATE_ROWS : 0);
  };
  const auto of_packed = [&](double time) {
    if (!problem.varlen || rows == 0) return time;
    return time * (tiles_of_head(problem, tile, head) / static_cast<double>(rows));
  };
  const double even = sum * static_cast<double>(heads) / static_cast<double>(workers);
  // Where all tiles take equal times the last round is as long as the others.
  const bool has_rounds = tile.cuts_tiles && equal && runs.size() == 1;
  const bool many = rows * heads > MOST_ROUNDS_TO_MODEL * workers && !has_rounds;
  if (!many && !equal) {  // no queue is faster
    constexpr double ROUNDED = 1 - 1e-9;
    const double least = of_rows(of_packed(ROUNDED * std::max(even, longest)));
    if (least > limit) return least;
  }
  double time = of_packed(many ? even : core::queue_time(runs, workers));
  const CutTiles cut = cut_last_round(problem, device, tile, head, rows * heads, workers);
  if (cut.rows > 0) {
    const double rounds = static_cast<double>(cut.whole / workers);
    const double share = core::share_of_rows(cut.rows, tile.block_q);
    const bool cuts_short = is_short && head.nk <= SHORT_KEYS && tile.head_dim <= 64;
    time = std::min(time, (rounds + (cuts_short ? SHORT_CUT : 1) * share) * runs[0].time);
  }
  return of_rows(time);
}

// The tile of a table with which a call is expected to be done first; null: the device has too
// little shared memory for all of them.
struct Fastest {
  const KernelTile* tile = nullptr;
  double time = 0;  // time_of(), where that was asked; 0: it was not
};
Fastest fastest(std::span<const KernelTile> tiles, const Problem& problem, const Device& device) {
  const bool packed = are_many_packed(problem, device);
  Fastest found;
  const KernelTile*& best = found.tile;
  int columns = 0, columns_v = 0;
  double time = 0;
  for (const KernelTile& tile : tiles) {
    if (!core::takes_head_dims(tile, problem)) continue;
    if (best == nullptr) columns = tile.columns, columns_v = tile.columns_v;
    const bool as_wide = tile.columns == columns && tile.columns_v == columns_v;
    // Tiles are for larger heads from here on.
    if (!as_wide && !(packed && takes_wider(problem, tile))) continue;
    if (tile.shared_bytes > device.shared_per_block) continue;
    if (tile.tail_keys > 0 && !has_tail(problem, tile)) continue;
    const bool measured = packed && tile.packed.start > 0;
    if (tile.is_short && !measured && !is_of_short(tile, device)) continue;  // one CTA on an SM
    // Kernels with such tiles are for packed sequences, and divide rows as GroupHeads does.
    if (tile.packs && !tile.is_short && (!measured || problem.nq > MOST_GROUPED_ROWS)) continue;
    // Tiles without such times serve calls of few tiles.
    if (packed && !measured && best != nullptr && best->packed.start > 0) continue;
    const KernelTile packs = pack_if_faster(problem, device, tile);
    if (best != nullptr && leaves_groups_empty(problem, packs)) continue;
    const double limit = best == nullptr ? std::numeric_limits<double>::infinity() : time;
    const double modelled = measured ? 0 : time_of(problem, device, tile, limit);
    double of_tile = measured ? packed_time(problem, device, packs) : modelled;
    if (const FewRows few = few_rows_of(problem, device, packs); few.rows > 0) of_tile = few.time;
    if (best == nullptr || of_tile < time) found = {&tile, modelled}, time = of_tile;
  }
  return found;
}

// Whether a call's tiles leave at most a fifth of the places of their rounds empty.
bool fills_rounds(const Problem& problem, const Device& device, const KernelTile& tile) {
  const int64_t tiles = core::tiles_of(problem, tile);
  const int64_t places = int64_t{tile.ctas_per_sm} * device.sm_count;
  return 5 * tiles >= 4 * places * core::ceil_div(tiles, places);
}

}  // namespace

bool has_far_longer_ones(const Problem& problem) {
  constexpr int64_t FAR_LONGER = 4;  // than the mean; up to 1.8 was measured
  return problem.varlen && problem.max_seqlen_k * problem.batch > FAR_LONGER * problem.nk;
}

HeadModel::HeadModel(const Problem& problem, const KernelTile& tile)
    : nq(problem.nq), nk(problem.nk) {
  if (problem.varlen) nq /= problem.batch, nk /= problem.batch;
  // Only products of its own keys can fill a tile's start and end.
  constexpr double MOST_FILLED = 1.0 / 3;
  const core::RowTileSize size{tile.block_q, tile.block_k, tile.row_step};
  const int64_t rows_of_head = core::ceil_div(nq, tile.block_q);
  double last_keys = 0;
  times.reserve(rows_of_head);
  const core::KeysOfTiles keys_of(problem, nq, nk);
  const bool windowed = problem.window_left != UNBOUNDED || problem.window_right != UNBOUNDED;
  for (int64_t index = rows_of_head - 1; index >= 0; --index) {
    if (!windowed && !times.empty()) {  // all see the same keys
      times.resize(rows_of_head, times.front());
      break;
    }
    last_keys = static_cast<double>(core::keys_of_row_tile(keys_of, size, nq, index));
    if (tile.tail_keys > 0) last_keys -= tile.block_k - tile.tail_keys - TAIL_START;
    const double filled = -MOST_FILLED * last_keys;
    times.push_back(core::TILE_KEYS + last_keys + std::max<double>(tile.start_keys, filled));
  }
  if (problem.varlen || tile.row_step == 0 || times.empty()) return;
  // The first tile may have rows for some of the warpgroups only.
  const device::RowTile first =
      device::row_tile_from_end(static_cast<int>(nq), 0, tile.block_q, tile.row_step);
  const int64_t rows =
      core::ceil_div(first.end_row - first.first_row, tile.row_step) * tile.row_step;
  if (rows >= tile.block_q) return;
  const double keys = last_keys;
  const double start =
      core::TILE_KEYS +
      (tile.head_dim > 64 ? std::max(tile.start_keys, START_ALONE) : tile.start_keys);
  const double share = static_cast<double>(rows) / static_cast<double>(tile.block_q);
  const double shared = times.size() == 1 ? SHARED_BY_GROUPS : tile.shared_by_groups;
  times.back() = start + keys * std::lerp(shared, 1.0, share);
  if (times.size() == 1) {
    time_among_others = (start + keys) * (SHORT_SHARE + SHORT_SLOPE * share);
  }
}

std::variant<core::SplitChoice<KernelTile>, Reasons> choose_tile(const Problem& problem,
                                                                 const Device& device) {
  std::span<const KernelTile> table = tiles_for(problem);
  if (table[0].in_full_rounds && !fills_rounds(problem, device, table[0])) table = table.subspan(1);
  const Fastest fastest_tile = table[0].speed > 0 ? fastest(table, problem, device) : Fastest{};
  const KernelTile* const best = fastest_tile.tile;
  // Whole tiles of rows on all SMs compute no faster in shares, which a second kernel has to
  // combine: 8x20 64x1500 D=64 took 41.4 us with three, 25.2 without.
  constexpr int64_t KEYS_OF_WHOLE_TILES = 4096;
  const bool is_whole = problem.nq >= PACKED_ROWS && problem.nk <= KEYS_OF_WHOLE_TILES;
  // Short packed sequences with packed heads compute no faster in shares, either.
  const bool fills = best != nullptr && problem.batch * problem.heads_q >= device.sm_count &&
                     (problem.varlen ? is_of_short(*best, device) : is_whole);
  // Packed sequences are not split where a tile's packed time is known, unless their keys are far
  // more than their rows.
  constexpr int64_t FAR_MORE_KEYS = 8;
  const bool by_packed_time = best != nullptr && best->packed.start > 0 &&
                              are_many_packed(problem, device) &&
                              problem.nk < FAR_MORE_KEYS * problem.nq;
  if ((fills || by_packed_time) && problem.num_splits == 0 && !problem.batch_invariant)
    return core::SplitChoice<KernelTile>{pack_if_faster(problem, device, *best)};
  if (best == nullptr) {
    // A CTA for tables of blocks computes several tiles side by side, which the model of splits
    // does not know: it would split the keys of calls that fill the GPU.
    const KernelTile* whole = core::choose("hopper", table, problem, device).tile;
    const bool splits_asked = problem.num_splits > 0 || problem.batch_invariant;
    if (whole != nullptr && whole->streams > 0 && !splits_asked)
      return core::SplitChoice<KernelTile>{*whole};
    if (whole != nullptr && whole->dense && problem.mask != 0) {
      // Keys pass in so much of the time that they take in a CTA that reads the mask in place
      // (docs/lab/hopper.md).
      const double share = problem.mask > 1 ? 0.92 : 0.42;
      const auto time_without = [&](const KernelTile& few) {
        const int64_t keys = core::unsplit_time(problem, device, *whole, few.split_costs);
        return static_cast<int64_t>(share * static_cast<double>(keys));
      };
      return core::choose_splits_of<KernelTile>("hopper", whole, table, problem, device,
                                                time_without);
    }
    return core::choose_with_splits("hopper", table, problem, device);
  }
  // CTAs of the tile for few rows compute more slowly than those of larger tiles. Of a tile with
  // packed times alone it is not known how much.
  const auto time_without = [&](const KernelTile& few) {
    const auto rows = static_cast<double>(few.block_q * core::resident_ctas(few, device));
    const double time = fastest_tile.time > 0 ? fastest_tile.time : time_of(problem, device, *best);
    if (std::isinf(time)) return core::unsplit_time(problem, device, *best, few.split_costs);
    return static_cast<int64_t>(time * few.speed / rows);
  };
  return core::choose_splits_of<KernelTile>("hopper", best, table, problem, device, time_without);
}

// Which heads' row tiles follow one another, measured on an H200 (docs/lab/hopper.md): with at most
// 16 MB of K and V, which then come from L2, and about as many as the GPU computes at the same
// time. Tiles of unequal length come from the longest to the shortest, so that larger groups share
// them out more evenly; where they are few, all heads are one group.
int32_t heads_per_group(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_BYTES = int64_t{16} << 20;
  constexpr int64_t FEW_TILES_PER_SM = 7, UNEQUAL_ROUNDS = 8;
  const int64_t ratio = problem.heads_q / problem.heads_kv;
  const int64_t kv_heads = problem.batch * problem.heads_kv;
  const int64_t tiles = core::tiles_of(problem, tile);
  int64_t size = kv_heads;
  if (core::equal_tiles(problem) || tiles > FEW_TILES_PER_SM * device.sm_count) {
    const int64_t fitting = MOST_BYTES / std::max<int64_t>(core::kv_head_bytes(problem), 1);
    const bool ordered = !core::equal_tiles(problem) && !problem.varlen && !problem.kv_cache;
    const int64_t rounds = ordered ? UNEQUAL_ROUNDS : 1;
    const int64_t at_once = rounds * core::workers_of(tile, device);
    const int64_t wave = core::ceil_div(at_once * kv_heads, std::max<int64_t>(tiles, 1));
    size = std::clamp<int64_t>(std::min(fitting, wave), 1, kv_heads);
  }
  // A remnant of heads would start with its longest tiles when all others are done.
  const int64_t even = core::equal_tiles(problem)
                           ? core::ceil_div(kv_heads, core::ceil_div(kv_heads, size))
                           : core::even_size(kv_heads, size);
  return static_cast<int32_t>(even * ratio);
}

bool has_one_tile_each(const Problem& problem, const KernelTile& tile) {
  return tile.is_short && problem.varlen && problem.max_seqlen_q != UNKNOWN &&
         problem.max_seqlen_q <= tile.block_q && problem.nq <= problem.batch * tile.block_q;
}

CutTiles cut_last_round(const Problem& problem, const Device& device, const KernelTile& tile,
                        const HeadModel& head, int64_t tiles, int64_t ctas) {
  const bool few_rounds = tiles > ctas && tiles <= MOST_ROUNDS_TO_MODEL * ctas;
  const int64_t left = tiles % ctas;
  if (!tile.cuts_tiles || !core::equal_tiles(problem) || !few_rounds || left == 0) return {};
  for (int64_t rows = tile.row_step; rows < tile.block_q; rows *= 2) {
    if (left * core::ceil_div(tile.block_q, rows) > ctas) continue;
    // Where the first tile of each head has fewer rows, a counter of tiles may fill the last round
    // as well (docs/lab/hopper.md).
    if (head.times.back() < head.times[0]) {
      const std::vector<core::Run> runs =
          runs_in_order(problem, head, tile, heads_per_group(problem, device, tile), 1);
      const double rounds = static_cast<double>(tiles / ctas);
      const double of_parts = (rounds + core::share_of_rows(rows, tile.block_q)) * head.times[0];
      const double counted = core::time_of_walk(runs, ctas, core::Walk::Queue);
      if (counted + COUNTER_KEYS < of_parts) return {};
    }
    return {tiles - left, rows};
  }
  return {};
}

bool counts_tiles(const LaunchPlan& plan, const Problem& problem, const KernelTile& tile) {
  // Tiles that take unequal times, as where the first one of each head has fewer rows, take so much
  // more time in fixed rounds than the model says, because the time of each varies
  // (docs/lab/hopper.md).
  constexpr double ROUNDS_VARY = 1.03;
  const int64_t slices = plan.tile.v_slices;
  const int64_t tiles = plan.tile.tiles * slices, ctas = plan.tile.ctas;
  const bool unknown_lengths =
      (problem.kv_cache && problem.batch > 1) || problem.block_mask || problem.key_ranges != 0;
  if (tiles > ctas && unknown_lengths) return true;
  if (tiles <= ctas || plan.tile.part_rows > 0) return false;
  // With whole tiles alone this was measured with tiles that can be cut.
  const bool equal = core::equal_tiles(problem);
  const bool shorter_first = equal && is_fp8(problem.dtype) && problem.nq % tile.block_q != 0;
  if (equal && !tile.cuts_tiles && !shorter_first) return false;
  if (problem.varlen && lists_tiles(problem, tile)) return true;
  if (problem.varlen) return tiles > 2 * ctas;
  const HeadModel head(problem, tile);
  const bool in_full_rounds = equal && head.times.back() == head.times[0] && tiles % ctas == 0;
  if (in_full_rounds && !shorter_first) return false;
  if (tiles > MOST_ROUNDS_TO_MODEL * ctas) return tiles > 2 * ctas;
  const std::vector<core::Run> runs =
      runs_in_order(problem, head, tile, plan.tile.heads_per_group, slices);
  const auto walk_time = [&](core::Walk walk) { return core::time_of_walk(runs, ctas, walk); };
  const double counter_keys = shorter_first ? COUNTER_KEYS_FP8 : COUNTER_KEYS;
  const bool varies = equal ? problem.nq % tile.block_q != 0 : tile.head_dim == 128;
  return walk_time(core::Walk::Queue) + counter_keys <
         (varies ? ROUNDS_VARY : 1) * walk_time(core::Walk::Rounds);
}

}  // namespace archflash::hopper
