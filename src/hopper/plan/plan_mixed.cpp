// The plan of a call with packed sequences of mixed lengths over a KV cache in pages. Pure host
// code.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "common/device/packed_heads.cuh"
#include "common/planning/core_set.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/workspace.h"
#include "hopper/cache/mixed_params.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {

PlanResult plan_mixed(const Problem& problem, const Device& device, const KernelTile& tile) {
  const int64_t row_tiles = core::row_tiles(problem, tile.block_q);
  const int64_t ctas = core::workers_of(tile, device);
  const int group_rows = tile.block_q / (tile.warps / 4);  // of a warpgroup
  const device::PackedHeads packed_heads =
      device::pack_heads(group_rows, static_cast<int>(problem.heads_q / problem.heads_kv));
  const int64_t tiles_of_few = core::ceil_div(FEW_ROWS, packed_heads.rows());
  const int64_t few_entries =
      problem.batch * tiles_of_few + most_extra_shares(ctas, problem.heads_kv);
  const int64_t tiles = row_tiles * problem.heads_q + few_entries * problem.heads_kv;
  if (tiles > core::GRID_LIMIT) return core::grid_too_large(tiles);

  Params call;
  core::init_params(problem, call);
  call.partials.splits = 1;
  call.v_slices = 1;
  // Only rows of no sequence are found by this number.
  call.tiles = call.whole_tiles =
      static_cast<int32_t>(core::ceil_div(problem.nq, int64_t{tile.block_q}) * problem.heads_q);
  call.packed_heads = packed_heads;
  LaunchPlan plan = core::one_launch("hopper", problem, device, tile, ctas, call);
  plan.tile.row_step = tile.row_step;

  Launch& attention = plan.launches[0];
  auto params = extend_params<MixedParams>(attention);
  tell_of_cache(params, attention, problem, tile);
  MixedTiles& mixed = params.tiles;
  mixed.slots = static_cast<int32_t>(most_slots(ctas));
  mixed.most_many = static_cast<int32_t>(row_tiles);
  mixed.ctas = static_cast<int32_t>(ctas);
  mixed.block_q = tile.block_q, mixed.block_k = tile.block_k;
  mixed.heads_kv = static_cast<int32_t>(problem.heads_kv);
  mixed.page_shift = std::countr_zero(static_cast<uint64_t>(problem.page_size));

  core::Workspace workspace;
  const auto add = [&](size_t offset, int64_t bytes) {
    const int64_t start = workspace.add(bytes);
    add_pointer(attention, Operand::Workspace, offset, start);
    return start;
  };
  const auto add_tiles = [&](size_t offset, int64_t bytes) {
    return add(MixedParams::TILES + offset, bytes);
  };
  constexpr auto ENTRY = static_cast<int64_t>(sizeof(TileEntry));
  // Each layer counts anew what is done and taken.
  const int64_t slots = mixed.slots, done_bytes = 4 * slots * int64_t{sizeof(int32_t)};
  plan.counter_bytes = done_bytes + 4 * int64_t{sizeof(int32_t)};
  const int64_t done = add_tiles(offsetof(MixedTiles, done_gmem), plan.counter_bytes);
  add_pointer(attention, Operand::Workspace, offsetof(Params, taken_gmem), done + done_bytes);
  add_tiles(offsetof(MixedTiles, counts_gmem), sizeof(TileCounts));
  add_tiles(offsetof(MixedTiles, few_gmem), few_entries * ENTRY);
  add_tiles(offsetof(MixedTiles, many_gmem), row_tiles * ENTRY);
  const int64_t rows = slots * group_rows;
  add_tiles(offsetof(MixedTiles, ends_gmem), rows * int64_t{sizeof(PartialEnd)});
  add_tiles(offsetof(MixedTiles, rows_gmem), rows * problem.dv * int64_t{sizeof(float)});
  plan.workspace_bytes = workspace.bytes();

  core::Box packed = tile.q_box;
  packed.rows = packed_heads.rows();
  packed.heads = group_rows / packed.rows;
  constexpr size_t PACKED_MAP = MixedParams::TILES + offsetof(MixedTiles, q_map);
  attention.tensor_maps.push_back(
      core::tensor_map(problem, Operand::Q, static_cast<int>(PACKED_MAP), packed));
  const std::string word = core::dtype_word(problem.dtype);
  attention.image = "hopper/mixed_" + word;
  attention.params = core::bytes(params);
  attention.uses_pdl = true;

  Launch order;
  order.kernel = "hopper_order_mixed_" + word;
  order.image = attention.image;
  order.grid = {1, 1, 1};
  order.block = {ORDER_MIXED_THREADS, 1, 1};
  order.of_batch = true;
  ++params.tiles.slots;
  order.params = core::bytes(params);
  order.pointers = attention.pointers;
  plan.launches.insert(plan.launches.begin(), std::move(order));
  const Reasons reasons =
      core::add_append(plan, problem, "hopper/cache_" + word, "hopper_append_" + word);
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::hopper
