#include "common/planning/split_keys.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::core {
namespace {

int64_t all_rows(const Problem& problem) {  // (heads, rows) as the LSE has them
  return (problem.varlen ? 1 : problem.batch) * problem.heads_q * problem.nq;
}

// Whether the tiles of a call come from the longest to the shortest, of which the next one always
// goes to whoever is free, and count with their mean length.
bool counts_mean(const Problem& problem, const SplitCosts& costs) {
  return costs.by_mean && !problem.varlen && !problem.kv_cache && is_triangle(problem);
}

int64_t mean_keys(const Problem& problem, int64_t longest) {
  return longest - std::min(longest, problem.nq) / 2;
}

}  // namespace

int64_t visited_keys(const Problem& problem, const Tile& tile) {
  int64_t keys = problem.nk;
  if (problem.varlen && !problem.kv_cache) {
    const int64_t longest = problem.max_seqlen_k;
    keys = longest == UNKNOWN ? ceil_div(problem.nk, problem.batch) : std::min(longest, keys);
  }
  // Positions are below 2^30 (why_not), so that sides beyond that are none.
  constexpr int64_t NO_SIDE = int64_t{1} << 31;
  const int64_t left = std::min(problem.window_left, NO_SIDE);
  const int64_t right = std::min(problem.window_right, NO_SIDE);
  const int64_t rows = std::min<int64_t>(problem.nq, tile.block_q);
  int64_t visible = std::min(keys, left + rows + right);
  if (problem.attention_chunk > 0)
    visible = std::min(visible, std::min(problem.attention_chunk, NO_SIDE) + rows);
  if (!problem.varlen && !problem.q_offset_tensor) {
    const int64_t offset = std::clamp(problem.q_offset, -NO_SIDE, NO_SIDE);
    const int64_t last = offset + problem.nq - 1 + right;  // of the last row
    visible = std::clamp<int64_t>(last + 1, 0, visible);
  }
  return ceil_div(visible, tile.block_k) * tile.block_k;
}

int64_t unsplit_time(const Problem& problem, const Device& device, const Tile& tile,
                     const SplitCosts& costs) {
  const int64_t tiles = filled_tiles(problem, tile), workers = workers_of(tile, device);
  const int64_t keys = visited_keys(problem, tile);
  if (!counts_mean(problem, costs)) return ceil_div(tiles, workers) * keys;
  return std::max(keys, tiles * (mean_keys(problem, keys) + costs.start) / workers);
}

int64_t choose_splits(const Problem& problem, const Device& device, const Tile& tile,
                      int64_t otherwise) {
  if (writes_f32(problem)) return 1;  // the combining kernels write 16 bits
  if (problem.num_splits > 0) {
    const int64_t most = std::max<int64_t>(ceil_div(problem.nk, tile.block_k), 1);
    return std::min(problem.num_splits, most);
  }
  const int64_t keys = visited_keys(problem, tile);
  const int64_t blocks = keys / tile.block_k;
  const int64_t tiles = filled_tiles(problem, tile);
  const int64_t workers = workers_of(tile, device);
  const SplitCosts& costs = tile.split_costs;
  const bool may_differ = problem.page_size > 0 && problem.batch > 1 && keys >= problem.nk;
  const auto of_unlike = [&](int64_t n, int64_t start) {
    const int64_t longest = ceil_div(blocks, n) * tile.block_k, mean = longest / 2;
    return may_differ ? std::max(longest + start, n * tiles * (mean + start) / workers) : 0;
  };
  const bool shrinks = counts_mean(problem, costs);
  int64_t splits = 1, time = otherwise + costs.unsplit_start + of_unlike(1, 0);
  const int64_t most = std::min(keys / costs.fewest_keys, MOST_SPLITS);
  for (int64_t n = 2; n <= most && (n - 1) * tiles < 2 * workers; ++n) {
    const int64_t of_share = ceil_div(blocks, n) * tile.block_k + costs.start;
    int64_t combine = (costs.combine + n * costs.combine_share) * (may_differ ? 2 : 1);
    if (costs.rows_per_key > 0) combine += n * all_rows(problem) / costs.rows_per_key;
    if (costs.combined_per_key > 0) combine += all_rows(problem) / costs.combined_per_key;
    const int64_t of_alike =
        shrinks ? std::max(of_share, tiles * (mean_keys(problem, keys) + n * costs.start) / workers)
                : ceil_div(n * tiles, workers) * of_share;
    const int64_t of_n = of_alike + of_unlike(n, costs.start) + combine;
    if (of_n < time) splits = n, time = of_n;
  }
  return splits;
}

// Measured on an H200 (docs/lab/ampere.md). Up to 1.25 CTAs for each SM the next call's CTAs start
// early beside them, and lie evenly; with two on most SMs, which start late, and whose number
// choose_splits() gives, calls take longer than with some numbers between two and three.
int64_t choose_joined(const Problem& problem, const Device& device, const Tile& tile,
                      int64_t combined) {
  constexpr int64_t MOST_BYTES = 200'000;  // of a share's K and V, where more shares are combined
  if (problem.num_splits > 0) return problem.num_splits <= tile.most_joined ? combined : 1;
  const int64_t keys = visited_keys(problem, tile), tiles = filled_tiles(problem, tile);
  const int64_t most = std::min<int64_t>(
      {tile.most_joined, keys / tile.split_costs.fewest_keys, keys / tile.block_k});
  const int64_t sms = device.sm_count;
  const auto between = [&](int64_t shares, double least, double largest) {
    const double of_sm = static_cast<double>(shares * tiles) / static_cast<double>(sms);
    return of_sm > least && of_sm <= largest;
  };
  int64_t shares = 5 * sms / (4 * std::max<int64_t>(tiles, 1));
  if (between(5, 2, 2.5)) shares = 5;
  if (between(3, 2.4, 2.75)) shares = 3;
  if (shares < 3) shares = between(2, 1, 1.5) ? std::max<int64_t>(combined, 2) : combined;
  shares = std::max<int64_t>(std::min(shares, most), 1);
  const int64_t row_bytes = (problem.d + problem.dv) * dtype_bytes(problem.dtype);
  const bool too_long = combined > tile.most_joined && keys / shares * row_bytes > MOST_BYTES;
  return shares > 1 && !too_long ? shares : 1;
}

int64_t combine_ctas(const Problem& problem) { return ceil_div(all_rows(problem), COMBINE_WARPS); }

device::PackedHeads packed_heads(const Tile& tile) {
  return {tile.packed_heads, std::countr_zero(static_cast<unsigned>(tile.block_q))};
}

void refuse_splits(const Problem& problem, const std::string& folder, const std::string& given,
                   Reasons& reasons) {
  if (problem.num_splits <= 1) return;
  reasons.push_back(
      "num_splits " + std::to_string(problem.num_splits) + " with " + given + ": " + folder +
      " splits the keys of 16-bit inputs only; leave num_splits out or pass 1" + USE_TORCH);
}

void refuse_batch_invariant(const Problem& problem, const std::string& folder,
                            const std::string& given, Reasons& reasons) {
  if (!problem.batch_invariant) return;
  reasons.push_back("batch_invariant=True with " + given + ": " + folder +
                    " keeps the bits of a row with 16-bit inputs only; leave it at False");
}

int64_t fixed_shares(const Problem& problem) {
  const bool known = problem.varlen && problem.max_seqlen_k != UNKNOWN;
  const int64_t keys = known ? std::min(problem.max_seqlen_k, problem.nk) : problem.nk;
  return std::max<int64_t>(ceil_div(keys, FIXED_SHARE_KEYS), 1);
}

Reasons refuse_workspace(const Problem& problem, const std::string& folder, int64_t splits) {
  const int64_t row = problem.dv * static_cast<int64_t>(sizeof(float)) + sizeof(PartialEnd);
  const int64_t rows = splits * all_rows(problem);
  if (rows <= MOST_WORKSPACE_BYTES / row) return {};
  return {"batch_invariant=True with " + std::to_string(problem.nq) + " query rows and " +
          std::to_string(splits) + " shares of the keys: " + folder + " would need " +
          std::to_string(ceil_div(rows, (int64_t{1} << 30) / row)) +
          " GB for partial results and takes at most 4; call it for fewer rows or sequences at a "
          "time, which changes no bit" +
          (problem.varlen && !problem.kv_cache ? ", or give max_seqlen_k" : "")};
}

void split_keys(LaunchPlan& plan, const Problem& problem, int64_t splits, int64_t share_keys,
                size_t offset, const std::string& combine_kernel, int64_t partial_rows) {
  CombineParams params;
  init_params(problem, params);
  params.partials.rows = partial_rows > 0 ? partial_rows : all_rows(problem);
  params.partials.splits = static_cast<int32_t>(splits);
  params.partials.share_keys = static_cast<int32_t>(share_keys);
  const int64_t rows = splits * params.partials.rows;
  Workspace workspace;
  const int64_t ends_start = workspace.add(rows * static_cast<int64_t>(sizeof(PartialEnd)));
  const int64_t rows_start = workspace.add(rows * problem.dv * static_cast<int64_t>(sizeof(float)));
  plan.workspace_bytes = workspace.bytes();
  plan.tile.splits = splits;

  Launch& first = plan.launches[0];
  std::memcpy(first.params.data() + offset, &params.partials, sizeof params.partials);
  Launch second;
  second.kernel = combine_kernel;
  second.image = first.image;
  second.grid = {combine_ctas(problem), 1, 1};
  second.block = {32 * COMBINE_WARPS, 1, 1};
  second.params = bytes(params);
  second.pointers = pointers(problem);
  const auto add_partials = [&](Launch& launch, size_t partials) {
    const auto add = [&](size_t field, int64_t start) {
      add_pointer(launch, Operand::Workspace, partials + field, start);
    };
    add(offsetof(Partials, ends_gmem), ends_start);
    add(offsetof(Partials, rows_gmem), rows_start);
  };
  add_partials(first, offset);
  add_partials(second, offsetof(CombineParams, partials));
  plan.launches.push_back(std::move(second));
}

void combine_shares(Launch& combine, int64_t splits, bool one_warp, int64_t few_rows,
                    float base_scale) {
  CombineSharesParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params), combine.params.data(), sizeof(CombineParams));
  constexpr int64_t FEW_SHARES = 4, MANY_ROWS = 1 << 14;
  const bool by_one = one_warp || splits <= FEW_SHARES || params.partials.rows > MANY_ROWS;
  params.warps_of_row = by_one ? 1 : COMBINE_WARPS;
  params.few_rows = static_cast<int32_t>(few_rows);
  params.base_scale = base_scale;
  combine.params = bytes(params);
  combine.grid[0] = ceil_div(params.partials.rows, COMBINE_WARPS / params.warps_of_row);
}

}  // namespace archflash::core
