#include "common/planning/list_backward.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/list_backward_params.h"
#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/key_lists.h"
#include "common/planning/launch.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::core {
namespace {

int64_t group_of(const Problem& call) { return call.heads_q / std::max<int64_t>(call.heads_kv, 1); }

// The heads that share a head of K, and rows of a list, in a tile.
device::PackedHeads pack(const Problem& call, const ListTile& tile) {
  device::PackedHeads packed = device::pack_heads(tile.rows, static_cast<int>(group_of(call)));
  const int most = std::countr_zero(static_cast<uint32_t>(call.list_rows));  // rows are of one list
  packed.row_bits = std::min(packed.row_bits, most);
  return packed;
}

int64_t tiles_of_list(const Problem& call, const device::PackedHeads& packed) {
  return group_of(call) / packed.count * ceil_div(call.list_rows, packed.rows());
}

// The tile with which a list takes the least time.
const ListTile* choose_tile(std::span<const ListTile> tiles, const Problem& call,
                            const Device& device) {
  const ListTile* best = nullptr;
  int64_t best_time = 0;
  for (const ListTile& tile : tiles) {
    if (call.d > tile.head_dim || call.dv > tile.head_dim_v) continue;
    if (best != nullptr && tile.head_dim != best->head_dim) break;  // for larger heads
    if (tile.shared_bytes > device.shared_per_block) continue;
    const device::PackedHeads packed = pack(call, tile);
    if (packed.count * std::min<int64_t>(packed.rows(), call.nq) < tile.fewest_rows) continue;
    const int64_t time = tiles_of_list(call, packed) * tile.time;
    if (best == nullptr || time < best_time) best = &tile, best_time = time;
  }
  return best;
}

int64_t lists_of(const Problem& call) {
  return call.batch * call.heads_kv * ceil_div(call.nq, call.list_rows);
}

// Whether the mask of the lists is the faster way: where few rows share a list that names many of
// the keys, and heads share lists. A mask that is too large is none. The numbers are picoseconds of
// both passes (H200, 2026-11-30): of 245 calls of 16 bits 240 go the faster way, or one at most 5%
// slower, of 13 in fp32 12.
bool mask_pays(const Problem& call, const ListTile& tile, const Device& device) {
  constexpr int64_t MOST_BYTES = int64_t{4} << 30;
  constexpr int RAGGED_KEYS = 32;     // of the last block of a list, in the mean
  constexpr double MAKING = 20;       // for each element of a mask
  constexpr double LAUNCHES = 250e6;  // that make it
  constexpr int KEYS_OF_CTA = 128;    // of a kernel that reads masks
  const double of_head = static_cast<double>(call.nq) * static_cast<double>(call.nk);
  const int64_t masks = (call.list_strides.batch == 0 ? 1 : call.batch) *
                        (call.list_strides.head == 0 ? 1 : call.heads_q);
  if (static_cast<double>(masks) * of_head * sizeof(float) > MOST_BYTES) return false;
  const int64_t tiles = lists_of(call) * tiles_of_list(call, pack(call, tile));
  const double lists = static_cast<double>(std::max<int64_t>(tiles, device.sm_count)) *
                       static_cast<double>(call.key_indices + RAGGED_KEYS) * tile.time;
  // Kernels of 16 bits for more than 128 columns are slow with masks. The others leave SMs without
  // work where a head of K has few keys.
  const bool fp32 = call.dtype == DType::F32;
  double of_score = 57;
  if (fp32 || tile.head_dim <= 128) {
    const int64_t ctas = call.batch * call.heads_kv * ceil_div(call.nk, int64_t{KEYS_OF_CTA});
    const double for_a_cta = static_cast<double>(device.sm_count) / std::max<int64_t>(ctas, 1);
    of_score = tile.head_dim <= 64 ? 3.5 : 4.4;
    if (fp32) of_score = tile.head_dim <= 64 ? 33 : tile.head_dim <= 128 ? 55 : 105;
    of_score *= std::max(1.0, (for_a_cta + 1) / 2);
  }
  const double of_heads = static_cast<double>(call.batch * call.heads_q) * of_score;
  return lists > (of_heads + static_cast<double>(masks) * MAKING) * of_head + LAUNCHES;
}

}  // namespace

PlanResult plan_list_backward(const Description& description, std::span<const ListTile> tiles,
                              const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  Reasons reasons = why_not_backward(problem, description, false, true);
  const std::string start = "key_indices in a call whose gradients are needed: ";
  const auto refuse = [&](const std::string& why) {
    reasons.push_back(start + why + "; pass attn_mask=masks.from_key_indices(...)" + USE_TORCH);
  };
  if (problem.deterministic)
    refuse("CTAs of " + description.name + " add to dk and dv in any order");
  if (!reasons.empty()) return reasons;
  const ListTile* const tile = choose_tile(tiles, call, device);
  if (tile == nullptr) {
    refuse(description.name + " takes head dimensions up to " +
           std::to_string(tiles.back().head_dim) + ", of at least " +
           std::to_string(tiles.back().fewest_rows) + " rows that share a list");
    return reasons;
  }
  if (mask_pays(call, *tile, device)) {
    refuse("a mask is faster where lists name so many of the keys and so few rows share one");
    return reasons;
  }
  const auto in_sums = [](int64_t columns) {
    return ceil_div(columns, int64_t{LIST_SUM_COLUMNS}) * LIST_SUM_COLUMNS;
  };
  const int64_t heads = call.batch * call.heads_q, rows = heads * call.nq;
  const int64_t keys = call.batch * call.heads_kv * call.nk;
  ListBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.call = backward_params(problem, {});
  params.lists = key_lists(call);
  params.packed_heads = pack(call, *tile);
  params.sums.dk_columns = static_cast<int32_t>(in_sums(call.d));
  params.sums.dv_columns = static_cast<int32_t>(in_sums(call.dv));

  LaunchPlan plan;
  plan.accumulates = problem.accumulate;
  Workspace workspace;
  WorkspaceParts parts;
  constexpr int64_t FLOAT = sizeof(float);
  const int64_t dk_sums = workspace.add(keys * params.sums.dk_columns * FLOAT);
  const int64_t dv_sums = workspace.add(keys * params.sums.dv_columns * FLOAT);
  parts.terms = workspace.add(rows * ROW_TERMS_BYTES);
  plan.workspace_bytes = workspace.bytes();
  std::vector<PointerSlot> slots = backward_pointers(problem, {}, parts);
  const std::vector<PointerSlot> of_call = slots;
  for (const PointerSlot& slot : key_list_pointers(call, offsetof(ListBackwardParams, lists)))
    slots.push_back(slot);
  if (rows > 0) {  // else nothing is added, and nothing clears the sums
    const auto add_sums = [&](size_t offset, int64_t start) {
      const size_t sums = offsetof(ListBackwardParams, sums);
      slots.push_back({Operand::Workspace, static_cast<int32_t>(sums + offset), start});
    };
    add_sums(offsetof(KeySums, dk_gmem), dk_sums);
    add_sums(offsetof(KeySums, dv_gmem), dv_sums);
  }

  const std::string word = dtype_word(call.dtype), &folder = description.name;
  int64_t most_ctas = 0;
  const auto add = [&](const std::string& kernel, int64_t ctas, int threads, int shared_bytes = 0) {
    if (ctas == 0) return;
    most_ctas = std::max(most_ctas, ctas);
    Launch& launch = plan.launches.emplace_back();
    launch.kernel = folder + "_" + kernel;
    launch.image = folder + "/bwd_lists_" + word;
    launch.grid = {ctas, 1, 1};
    launch.block = {threads, 1, 1};
    launch.shared_bytes = shared_bytes;
    launch.params = bytes(params);
    launch.pointers = slots;
  };
  add("backward_rows_" + word + "_lists", heads * ceil_div(call.nq, BACKWARD_ROWS),
      BACKWARD_ROWS_THREADS);
  add("attention_bwd_" + word + "_" + tile->name,
      lists_of(call) * tiles_of_list(call, params.packed_heads), tile->threads, tile->shared_bytes);
  const int64_t sum_parts = (params.sums.dk_columns + params.sums.dv_columns) / LIST_SUM_COLUMNS;
  add("backward_keys_" + word + "_lists", ceil_div(keys * sum_parts, LIST_SUMS_THREADS),
      LIST_SUMS_THREADS);
  if (problem.dsinks) {
    add("backward_sinks_" + word, call.heads_q, BACKWARD_SINKS_THREADS);
    Launch& sinks = plan.launches.back();
    sinks.image = folder + "/bwd_" + word;
    sinks.params = bytes(params.call);
    sinks.pointers = of_call;
  }
  if (most_ctas > GRID_LIMIT) return grid_too_large(most_ctas);
  return plan;
}

}  // namespace archflash::core
