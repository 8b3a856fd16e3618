#include "common/planning/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <variant>

#include "common/mma_sync/params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/split_keys.h"
#include "common/planning/workspace.h"

namespace archflash::core {

KvCache kv_cache(const Problem& problem) {
  KvCache cache;
  std::memset(&cache, 0, sizeof cache);
  cache.page_table_row = problem.page_table_row;
  cache.blocks = static_cast<int32_t>(problem.kv_cache ? problem.cache_batch : problem.batch);
  cache.block_rows = static_cast<int32_t>(problem.page_size > 0 ? problem.page_size : problem.nk);
  cache.capacity = static_cast<int32_t>(problem.nk);
  cache.n_new = static_cast<int32_t>(problem.n_new);
  return cache;
}

std::vector<PointerSlot> kv_cache_pointers(const Problem& problem, int offset) {
  std::vector<PointerSlot> slots;
  if (!problem.kv_cache) return slots;
  const auto add = [&](Operand operand, size_t field) {
    slots.push_back({operand, static_cast<int32_t>(offset + field), 0});
  };
  add(Operand::CacheSeqlens, offsetof(KvCache, seqlens_gmem));
  if (problem.page_size > 0) add(Operand::PageTable, offsetof(KvCache, page_table_gmem));
  if (problem.cache_batch_idx) add(Operand::CacheBatchIdx, offsetof(KvCache, batch_idx_gmem));
  if (problem.leftpad_k) add(Operand::LeftpadK, offsetof(KvCache, leftpad_gmem));
  return slots;
}

int32_t chunk_of(const Problem& problem) {
  constexpr int64_t LARGEST_CHUNK = int64_t{1} << 30;  // more than there are positions
  return static_cast<int32_t>(std::min(problem.attention_chunk, LARGEST_CHUNK));
}

Reasons add_append(LaunchPlan& plan, const Problem& problem, const std::string& image,
                   const std::string& kernel) {
  if (problem.n_new == 0 && problem.rotary_dim == 0) return {};
  AppendParams params;
  init_params(problem, params);
  params.cache = kv_cache(problem);
  params.k_new_batch = problem.k_new.batch, params.k_new_head = problem.k_new.head;
  params.k_new_row = problem.k_new.row;
  params.v_new_batch = problem.v_new.batch, params.v_new_head = problem.v_new.head;
  params.v_new_row = problem.v_new.row;
  params.heads_kv = static_cast<int32_t>(problem.heads_kv);
  params.new_rows = problem.batch * problem.n_new * problem.heads_kv;
  params.cache_dtype = problem.kv_dtype;
  const bool rotates = problem.rotary_dim > 0;
  const int64_t rows_of_q = (problem.varlen ? 1 : problem.batch) * problem.nq;
  if (rotates) {
    params.q_rows = rows_of_q * problem.heads_q;
    params.rotary_dim = static_cast<int32_t>(problem.rotary_dim);
    params.rotary_rows = static_cast<int32_t>(std::min<int64_t>(problem.rotary_rows, INT32_MAX));
    params.rotary_dtype = static_cast<DType>(problem.rotary_dtype - 1);
    params.interleaved = problem.rotary_interleaved;
    const bool windowed = problem.window_left != UNBOUNDED || problem.window_right != UNBOUNDED;
    params.ordered = windowed || problem.attention_chunk > 0 ? 1 : 0;
  }
  const int64_t ctas = ceil_div(2 * params.new_rows + params.q_rows, APPEND_WARPS);
  if (ctas > GRID_LIMIT) return grid_too_large(ctas);

  Launch& attention = plan.launches[0];
  Launch append;
  append.kernel = kernel;
  append.image = image;
  append.grid = {ctas, 1, 1};
  append.block = {32 * APPEND_WARPS, 1, 1};
  append.pointers = pointers(problem);
  std::erase_if(append.pointers, [](const PointerSlot& slot) {
    return slot.operand == Operand::Out || slot.operand == Operand::Lse ||
           slot.operand == Operand::Sinks;
  });
  for (const PointerSlot& slot : kv_cache_pointers(problem, offsetof(AppendParams, cache)))
    append.pointers.push_back(slot);
  const auto add = [&](Operand operand, size_t field, int64_t addend = 0) {
    append.pointers.push_back({operand, static_cast<int32_t>(field), addend});
  };
  add(Operand::KNew, offsetof(AppendParams, k_new_gmem));
  add(Operand::VNew, offsetof(AppendParams, v_new_gmem));
  if (rotates) {
    add(Operand::RotaryCos, offsetof(AppendParams, rotary_cos_gmem));
    add(Operand::RotarySin, offsetof(AppendParams, rotary_sin_gmem));
    Workspace workspace;
    workspace.add(plan.workspace_bytes);
    const int64_t start = workspace.add(params.q_rows * problem.d * dtype_bytes(problem.dtype));
    plan.workspace_bytes = workspace.bytes();
    add(Operand::Workspace, offsetof(AppendParams, rotated_q_gmem), start);
    // The attention kernel reads the copy.
    for (PointerSlot& slot : attention.pointers) {
      if (slot.operand == Operand::Q) slot = {Operand::Workspace, slot.offset, start};
    }
    AttentionParams changed;
    std::memcpy(&changed, attention.params.data(), sizeof changed);
    changed.q_head = problem.d;
    changed.q_row = problem.heads_q * problem.d;
    changed.q_batch = problem.varlen ? 0 : problem.nq * changed.q_row;
    std::memcpy(attention.params.data(), &changed, sizeof changed);
  }
  append.params = bytes(params);
  plan.launches.insert(plan.launches.begin(), std::move(append));
  return {};
}

}  // namespace archflash::core

namespace archflash::mma_sync {
PlanResult plan_with_cache(const std::string& folder, std::span<const core::Tile> tiles,
                           const Problem& problem, const Device& device) {
  const auto choice = core::choose_with_splits(folder, tiles, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& chosen = std::get<core::SplitChoice<core::Tile>>(choice);
  const auto& [tile, splits, share_keys] = chosen;
  const std::string word = core::dtype_word(problem.dtype);
  const bool decodes = tile.rows_per_warp == 0;  // a kernel of decode_fwd.cuh
  CacheParams params;
  core::init_params(problem, params);
  params.attention.order = core::choose_order(problem, device, tile);
  params.partials.splits = 1;
  params.packed_heads = core::packed_heads(tile);
  params.cache = core::kv_cache(problem);
  params.attention_chunk = core::chunk_of(problem);
  const bool fp8 = is_fp8(problem.kv_dtype);
  if (fp8) {
    const Descales descales = core::descales(problem);
    params.k_descale = descales.k;
    params.v_descale = descales.v;
    params.cache_dtype = problem.kv_dtype;
    core::always_transform_scores(problem, params.attention);
  }
  const int64_t ctas = core::tiles_of(problem, tile) * splits;
  LaunchPlan plan = core::one_launch(folder, problem, device, tile, ctas, params);
  if (chosen.combines()) {
    core::split_keys(plan, problem, splits, share_keys, offsetof(CacheParams, partials),
                     folder + "_combine_" + word);
  }
  const std::string cache_image = folder + (fp8 ? "/cache_fp8_" : "/cache_") + word;
  const std::string decode_image = folder + "/decode_" + word;
  Launch& attention = plan.launches[0];
  attention.image = fp8 || !decodes ? cache_image : decode_image;
  if (decodes && chosen.combines()) {
    plan.launches[1].kernel += "_decode";
    core::combine_shares(plan.launches[1], splits, share_keys);
    plan.launches[1].image = decode_image;
  }
  for (const PointerSlot& slot : core::kv_cache_pointers(problem, offsetof(CacheParams, cache)))
    attention.pointers.push_back(slot);
  const auto add_descale = [&](int bit, Operand operand, size_t field) {
    if (problem.descale >> bit & 1) {
      attention.pointers.push_back(
          {operand, static_cast<int32_t>(field + offsetof(Descale, gmem)), 0});
    }
  };
  add_descale(1, Operand::KDescale, offsetof(CacheParams, k_descale));
  add_descale(2, Operand::VDescale, offsetof(CacheParams, v_descale));
  const Reasons reasons = core::add_append(plan, problem, cache_image,
                                           folder + "_append_" + word + (fp8 ? "_fp8" : ""));
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::mma_sync
