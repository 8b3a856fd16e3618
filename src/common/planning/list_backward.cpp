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
// slower, of 13 in fp32 12. In order lists took 2 to 2.7 times as long where up to 32 rows share
// one and 1.2 to 2 where more do, a mask 1 to 1.2 (13 calls).
bool mask_pays(const BackwardProblem& problem, const ListTile& tile, const Device& device) {
  const Problem& call = problem.call;
  constexpr int64_t MOST_BYTES = int64_t{4} << 30;
  constexpr int RAGGED_KEYS = 32;     // of the last block of a list, in the mean
  constexpr double MAKING = 20;       // for each element of a mask
  constexpr double LAUNCHES = 250e6;  // that make it
  constexpr int KEYS_OF_CTA = 128;    // of a kernel that reads masks
  const double of_head = static_cast<double>(call.nq) * static_cast<double>(call.nk);
  const int64_t masks = (call.list_strides.batch == 0 ? 1 : call.batch) *
                        (call.list_strides.head == 0 ? 1 : call.heads_q);
  if (static_cast<double>(masks) * of_head * sizeof(float) > MOST_BYTES) return false;
  const device::PackedHeads packed = pack(call, tile);
  constexpr int64_t FEW_ROWS = 32;  // of a list
  const bool few_rows = packed.count * std::min<int64_t>(packed.rows(), call.nq) <= FEW_ROWS;
  const double in_order = !problem.deterministic ? 1 : few_rows ? 2.1 : 1.5;
  const int64_t tiles = lists_of(call) * tiles_of_list(call, packed);
  const double lists = in_order * static_cast<double>(std::max<int64_t>(tiles, device.sm_count)) *
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

// Lists that are sorted in shared memory have at most so many entries.
constexpr int64_t MOST_SORTED = 16384;

// Chooses the chains of a head's CTAs that add in order, and after how many blocks they hand turns
// on, which takes a while, as it waits for additions. A CTA starts about a block more than these
// behind the one before it in its chain, so that those which run at a time need several chains, but
// L2 holds less of the sums of many (H200, 2026-11-30).
void choose_chains(ListOrder& order, const Problem& call, const ListTile& tile, int64_t tiles,
                   int64_t sums_bytes, const Device& device) {
  constexpr int64_t BLOCK_K = 64, MANY_BLOCKS = 32, MOST_BYTES = int64_t{512} << 20;
  const int64_t heads = call.batch * call.heads_kv;
  const int64_t running = std::min<int64_t>(device.sm_count * tile.ctas_per_sm, heads * tiles);
  const int64_t blocks = ceil_div(call.key_indices, BLOCK_K);
  order.every = blocks >= MANY_BLOCKS ? 2 : 1;
  const int64_t wanted = ceil_div((order.every + 1) * running, heads * blocks);
  const int64_t most = std::clamp<int64_t>(MOST_BYTES / sums_bytes, 1, tiles);
  order.chains = static_cast<int32_t>(std::min(wanted, most));
}

// How many lists come in a launch of a kernel that keeps dK and dV of their entries: so many that
// all its CTAs run together some times, and are kept in MOST_KEPT_BYTES.
int64_t lists_at_a_time(int64_t lists, int64_t ctas_of_list, int64_t list_bytes,
                        const ListTile& tile, const Device& device) {
  const int64_t most = std::max<int64_t>(LaunchPlan::MOST_KEPT_BYTES / list_bytes, 1);
  if (most >= lists) return lists;
  const int64_t running = int64_t{device.sm_count} * tile.ctas_per_sm;
  const int64_t whole = most * ctas_of_list / running * running / ctas_of_list;
  return whole > 0 ? whole : most;
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
  if (problem.deterministic && call.key_indices > MOST_SORTED) {
    refuse("CTAs of " + description.name + " add to dk and dv in any order where lists have over " +
           std::to_string(MOST_SORTED) + " entries");
  }
  if (!reasons.empty()) return reasons;
  const ListTile* const tile = choose_tile(tiles, call, device);
  if (tile == nullptr) {
    refuse(description.name + " takes head dimensions up to " +
           std::to_string(tiles.back().head_dim) + ", of at least " +
           std::to_string(tiles.back().fewest_rows) + " rows that share a list");
    return reasons;
  }
  if (mask_pays(problem, *tile, device)) {
    refuse("a mask is faster where lists name so many of the keys and so few rows share one");
    return reasons;
  }
  const int64_t heads = call.batch * call.heads_q, rows = heads * call.nq;
  const int64_t heads_kv = call.batch * call.heads_kv, keys = heads_kv * call.nk;
  const bool in_order = problem.deterministic && rows > 0 && keys > 0;
  const bool keeps = in_order && tile->kept != nullptr;
  const auto in_sums = [&](int64_t columns) {
    const int64_t step = keeps ? KEPT_COLUMNS : LIST_SUM_COLUMNS;
    return ceil_div(columns, step) * step;
  };
  ListBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.call = backward_params(problem, {});
  params.lists = key_lists(call);
  params.packed_heads = pack(call, *tile);
  params.sums.dk_columns = static_cast<int32_t>(in_sums(call.d));
  params.sums.dv_columns = static_cast<int32_t>(in_sums(call.dv));
  const int64_t ctas = lists_of(call) * tiles_of_list(call, params.packed_heads);
  ListOrder& order = params.order;
  order.chains = 1;

  LaunchPlan plan;
  plan.accumulates = problem.accumulate;
  Workspace workspace;
  WorkspaceParts parts;
  constexpr int64_t FLOAT = sizeof(float), INT = sizeof(int32_t);
  const int64_t lists = lists_of(call), ctas_of_list = ctas / std::max<int64_t>(lists, 1);
  const int64_t sum_columns = params.sums.dk_columns + params.sums.dv_columns;
  const int64_t list_bytes = ctas_of_list * call.key_indices * sum_columns * 2;
  const int64_t at_a_time =
      keeps ? lists_at_a_time(lists, ctas_of_list, list_bytes, *tile, device) : lists;
  if (keeps) order.chains = 0;
  if (in_order && !keeps) {
    const int64_t sums_bytes = keys * sum_columns * FLOAT;
    order.heads = static_cast<int32_t>(heads_kv);
    choose_chains(order, call, *tile, ctas / heads_kv, sums_bytes, device);
    order.left_bytes = static_cast<int32_t>(ceil_div(ctas * INT, 16) * 16);
  }
  const int64_t sums = at_a_time < lists ? keys : order.chains * keys;
  const int64_t dk_sums = workspace.add(sums * params.sums.dk_columns * FLOAT);
  const int64_t dv_sums = workspace.add(sums * params.sums.dv_columns * FLOAT);
  parts.terms = workspace.add(rows * ROW_TERMS_BYTES);
  // Lists that serve several heads or sequences are sorted once.
  const KeyLists& given = params.lists;
  const int64_t of_head = ceil_div(call.nq, call.list_rows);
  const int64_t sorted_heads = given.head != 0 || given.lengths_head != 0 ? call.heads_kv : 1;
  const int64_t sorted_batch = given.batch != 0 || given.lengths_batch != 0 ? call.batch : 1;
  const int64_t sorted = in_order ? sorted_batch * sorted_heads * of_head : 0;
  const int64_t sorted_start = workspace.add(sorted * call.key_indices * INT);
  const int64_t left_start = workspace.add(order.left_bytes);
  const int64_t key_groups = ceil_div(call.nk, int64_t{KEPT_KEYS});
  const int64_t starts_start = workspace.add(keeps ? sorted * (key_groups + 1) * INT : 0);
  const int64_t kept_start = workspace.add(keeps ? at_a_time * list_bytes : 0);
  plan.workspace_bytes = workspace.bytes();
  std::vector<PointerSlot> slots = backward_pointers(problem, {}, parts);
  const std::vector<PointerSlot> of_call = slots;
  const auto in_workspace = [](size_t offset, int64_t start) -> PointerSlot {
    return {Operand::Workspace, static_cast<int32_t>(offset), start};
  };
  constexpr size_t LISTS = offsetof(ListBackwardParams, lists);
  constexpr size_t SUMS = offsetof(ListBackwardParams, sums);
  constexpr size_t ORDER = offsetof(ListBackwardParams, order);
  constexpr size_t KEPT = offsetof(ListBackwardParams, kept);
  for (const PointerSlot& slot : key_list_pointers(call, LISTS)) slots.push_back(slot);
  if (rows > 0) {  // else nothing is added, and nothing clears the sums
    slots.push_back(in_workspace(SUMS + offsetof(KeySums, dk_gmem), dk_sums));
    slots.push_back(in_workspace(SUMS + offsetof(KeySums, dv_gmem), dv_sums));
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
    // It waits where it has to. Kernels that keep nothing were faster without.
    launch.uses_pdl = keeps && plan.launches.size() > 1;
  };
  const auto add_rows = [&] {
    add("backward_rows_" + word + "_lists", heads * ceil_div(call.nq, BACKWARD_ROWS),
        BACKWARD_ROWS_THREADS);
  };
  if (in_order) {
    slots.push_back(in_workspace(ORDER + offsetof(ListOrder, sorted_gmem), sorted_start));
    if (keeps) {
      slots.push_back(in_workspace(KEPT + offsetof(KeptKeys, starts_gmem), starts_start));
      slots.push_back(in_workspace(KEPT + offsetof(KeptKeys, rows_gmem), kept_start));
    } else {
      slots.push_back(in_workspace(ORDER + offsetof(ListOrder, left_gmem), left_start));
    }
    add_rows();
    add("backward_order_" + word + "_lists", sorted, LIST_SORT_THREADS,
        static_cast<int>(list_sort_ints(call.key_indices, call.nk) * INT));
    // The other launches read the sorted lists.
    for (PointerSlot& slot : slots)
      if (slot.operand == Operand::KeyIndices)
        slot = in_workspace(LISTS + offsetof(KeyLists, indices_gmem), sorted_start);
    KeyLists& lists = params.lists;
    lists.row = call.key_indices;
    lists.head = sorted_heads > 1 ? of_head * lists.row : 0;
    lists.batch = sorted_batch > 1 ? sorted_heads * of_head * lists.row : 0;
  } else {
    add_rows();
  }
  const auto add_main = [&](const char* name, int64_t ctas) {
    add("attention_bwd_" + word + "_" + name, ctas, tile->threads, tile->shared_bytes);
  };
  if (keeps) {
    const int64_t lists_of_head = lists / heads_kv;
    for (int64_t first = 0; first < lists; first += at_a_time) {
      const int64_t end = std::min(first + at_a_time, lists);
      params.kept.first_list = static_cast<int32_t>(first);
      params.kept.end_list = static_cast<int32_t>(end);
      params.kept.first_tile = static_cast<int32_t>(first * ctas_of_list);
      add_main(tile->kept, (end - first) * ctas_of_list);
      const int64_t heads_of_launch = ceil_div(end, lists_of_head) - first / lists_of_head;
      add("backward_kept_" + word + "_lists", heads_of_launch * key_groups, KEPT_SUMS_THREADS);
      const int64_t keys_of_cta =
          std::min<int64_t>(KEPT_SUMS_THREADS / (sum_columns / 8), KEPT_MOST_KEYS);
      plan.launches.back().grid[1] = ceil_div(KEPT_KEYS, keys_of_cta);
    }
  } else {
    add_main(tile->name, ctas);
    const int64_t sum_parts = sum_columns / LIST_SUM_COLUMNS;
    add("backward_keys_" + word + "_lists", ceil_div(keys * sum_parts, LIST_SUMS_THREADS),
        LIST_SUMS_THREADS);
  }
  if (problem.dsinks) {
    add("backward_sinks_" + word, call.heads_q, BACKWARD_SINKS_THREADS);
    Launch& sinks = plan.launches.back();
    sinks.image = folder + "/bwd_" + word;
    sinks.params = bytes(params.call);
    sinks.uses_pdl = false;
    sinks.pointers = of_call;
  }
  if (most_ctas > GRID_LIMIT) return grid_too_large(most_ctas);
  return plan;
}

}  // namespace archflash::core
