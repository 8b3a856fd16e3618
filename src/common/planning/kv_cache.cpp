#include "common/planning/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>
#include <variant>

#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
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
  if (!problem.kv_cache || problem.physical_indices) return slots;  // nothing says what counts
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

AlibiSlopes alibi_slopes(const Problem& problem) {
  return {nullptr, problem.alibi_slopes_strides.batch, problem.alibi_slopes_strides.head};
}

bool has_append(const Problem& problem) { return problem.n_new != 0 || problem.rotary_dim != 0; }

Reasons add_append(LaunchPlan& plan, const Problem& problem, const std::string& image,
                   const std::string& kernel) {
  if (!has_append(problem)) return {};
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
  add_pointers(append, kv_cache_pointers(problem, offsetof(AppendParams, cache)));
  const auto add = [&](Operand operand, size_t field, int64_t addend = 0) {
    add_pointer(append, operand, field, addend);
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
    // The other kernels, whose parameters all begin with AttentionParams, read the copy.
    for (Launch& launch : plan.launches) {
      for (PointerSlot& slot : launch.pointers) {
        if (slot.operand == Operand::Q) slot = {Operand::Workspace, slot.offset, start};
      }
      for (TensorMapSpec& map : launch.tensor_maps) {
        if (map.operand != Operand::Q) continue;
        map.operand = Operand::Workspace;
        map.addend = start;
        const int64_t row = problem.d * dtype_bytes(problem.dtype);
        map.dims = {problem.d, problem.nq, problem.heads_q, problem.varlen ? 1 : problem.batch};
        map.strides = {problem.heads_q * row, row, problem.nq * problem.heads_q * row};
      }
      AttentionParams changed;
      std::memcpy(&changed, launch.params.data(), sizeof changed);
      changed.q_head = problem.d;
      changed.q_row = problem.heads_q * problem.d;
      changed.q_batch = problem.varlen ? 0 : problem.nq * changed.q_row;
      std::memcpy(launch.params.data(), &changed, sizeof changed);
    }
  }
  append.params = bytes(params);
  plan.launches.insert(plan.launches.begin(), std::move(append));
  return {};
}

}  // namespace archflash::core

namespace archflash::mma_sync {

namespace {

std::string cache_image(const std::string& folder, const Problem& problem) {
  const char* kind = is_fp8(problem.kv_dtype)   ? "/cache_fp8_"
                     : has_cache_masks(problem) ? "/cache_masked_"
                                                : "/cache_";
  return folder + kind + core::dtype_word(problem.dtype);
}

using Choice = core::SplitChoice<core::Tile>;

// Turns the attention kernel of a plan into that with masks as data.
void add_masks(Launch& attention, const Problem& problem) {
  MaskedCacheParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), attention.params.data(), sizeof params.call);
  core::transform_scores_to_base_2(problem, params.call.attention);
  params.masks = core::mask_params(problem);
  params.mask_keys = problem.mask_keys;
  attention.params = core::bytes(params);
  add_pointers(attention, core::mask_pointers(problem, offsetof(MaskedCacheParams, masks)));
}

// Tells the kernel of decode_fwd.cuh of attn_mask.
void add_mask_of_rows(Launch& attention, const Problem& problem) {
  MaskedDecodeParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params), attention.params.data(), attention.params.size());
  core::transform_scores_to_base_2(problem, params.attention);
  params.masks = core::mask_params(problem);
  attention.params = core::bytes(params);
  add_pointers(attention, core::mask_pointers(problem, MaskedDecodeParams::MASKS));
}

// Turns the parameters of the launches of decode_fwd.cuh and of its combining kernel into theirs.
template <class Params>
Params& longer(Launch& launch, Params& params) {
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params), launch.params.data(), launch.params.size());
  return params;
}
void add_share_ctas(LaunchPlan& plan, int64_t share_ctas) {
  DecodeParams attention;
  longer(plan.launches[0], attention).share_ctas = static_cast<int32_t>(share_ctas);
  plan.launches[0].params = core::bytes(attention);
  if (plan.launches.size() == 1) return;
  CombineUnlikeParams combine;
  plan.launches[1].params = core::bytes(longer(plan.launches[1], combine));
  if (share_ctas == 0) return;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t start = workspace.add(combine.partials.rows * int64_t{sizeof(int32_t)});
  plan.workspace_bytes = workspace.bytes();
  const auto add = [&](Launch& launch, size_t field) {
    add_pointer(launch, Operand::Workspace, field, start);
  };
  add(plan.launches[0], DecodeParams::SHARES);
  add(plan.launches[1], CombineUnlikeParams::SHARES);
}

// DecodeParams::share_ctas of a call whose sequences may differ in length: its keys are shared out
// by the lengths, and `chosen` gets the most shares that a sequence may have. 0 where they are not.
// rows: query rows of all heads. Measured on an H200 (docs/lab/ampere.md).
int64_t share_by_length(Choice& chosen, const Problem& problem, const Device& device,
                        int64_t rows) {
  const core::Tile& tile = chosen.tile;
  const bool decodes = tile.rows_per_warp == 0;  // a kernel of decode_fwd.cuh
  const bool may_differ = problem.page_size > 0 && problem.batch > 1;
  const bool to_choose = problem.num_splits == 0 && !problem.batch_invariant;
  if (!decodes || !may_differ || !to_choose || core::visited_keys(problem, tile) < problem.nk)
    return 0;
  constexpr int64_t MOST_BYTES = int64_t{32} << 20;  // of partial results
  const int64_t row_bytes = problem.dv * static_cast<int64_t>(sizeof(float)) + sizeof(PartialEnd);
  const int64_t workers = core::workers_of(tile, device), tiles = core::tiles_of(problem, tile);
  const int64_t most = std::min(
      {core::ceil_div(workers, problem.heads_q / tile.packed_heads), core::MOST_SPLITS,
       problem.nk / (FEWEST_SHARE_BLOCKS * tile.block_k), MOST_BYTES / (rows * row_bytes)});
  const int64_t blocks = tiles * core::ceil_div(problem.nk, tile.block_k);  // the kernel adds up
  if (most < 2 || blocks > INT32_MAX / 2 || tiles > core::GRID_LIMIT / 2) return 0;
  chosen.splits = most;
  return std::min(3 * workers / 2, tiles * (most - 1));
}

// Whether the CTAs of a call whose shares are a cluster start early though they are on the SMs at
// once: those of the next call then all have room beside them (docs/lab/ampere.md).
bool starts_early(int64_t ctas, int64_t shares, const Device& device) {
  return 4 * ctas <= (shares > 2 ? 5 : 6) * int64_t{device.sm_count};
}

// The launches of a call with a cache, but for the append. few_rows, share_ctas: of DecodeParams.
LaunchPlan launches_with_cache(const std::string& folder, const Choice& chosen,
                               const Problem& problem, const Device& device, int64_t few_rows,
                               int64_t share_ctas) {
  const auto& [tile, splits, share_keys] = chosen;
  const std::string word = core::dtype_word(problem.dtype);
  const bool decodes = tile.rows_per_warp == 0;  // a kernel of decode_fwd.cuh
  const bool for_few_rows = decodes && few_rows > 0;
  const bool joins = tile.most_joined > 0, combines = chosen.combines() && !joins;
  CacheParams params;
  core::init_params(problem, params);
  params.attention.order = core::choose_order(problem, device, tile);
  params.partials.splits = joins ? static_cast<int32_t>(splits) : 1;
  params.packed_heads = core::packed_heads(tile);
  params.cache = core::kv_cache(problem);
  params.attention_chunk = core::chunk_of(problem);
  params.few_rows = static_cast<int32_t>(few_rows);
  params.slopes = core::alibi_slopes(problem);
  if (problem.alibi_slopes) core::always_transform_scores(problem, params.attention);
  const bool fp8 = is_fp8(problem.kv_dtype);
  if (fp8) {
    const Descales descales = core::descales(problem);
    params.k_descale = descales.k;
    params.v_descale = descales.v;
    params.cache_dtype = problem.kv_dtype;
    core::always_transform_scores(problem, params.attention);
  }
  const int64_t tiles = for_few_rows ? problem.batch * (problem.heads_q / tile.packed_heads)
                                     : core::tiles_of(problem, tile);
  const int64_t ctas = share_ctas > 0 ? tiles + share_ctas : tiles * splits;
  LaunchPlan plan = core::one_launch(folder, problem, device, tile, ctas, params);
  if (joins) plan.tile.splits = splits;
  if (combines) {
    const int64_t rows = for_few_rows ? problem.batch * problem.heads_q * few_rows : 0;
    core::split_keys(plan, problem, splits, share_keys, offsetof(CacheParams, partials),
                     folder + "_combine_" + word, rows);
  }
  const std::string decode_image = folder + (joins ? "/decode_joined_" : "/decode_") + word;
  Launch& attention = plan.launches[0];
  attention.image = cache_image(folder, problem);
  if (decodes && !fp8) attention.image = decode_image;
  // PDL also saves host time. It is left out where all CTAs of a call are on the SMs at once: those
  // of the next call would start where the first ones have ended, and then lie unevenly, three on
  // some SMs and one on others. (Behind an append no such call comes right before.)
  const bool all_at_once = !combines && !for_few_rows && !core::has_append(problem) &&
                           ctas <= int64_t{plan.tile.ctas_per_sm} * device.sm_count &&
                           !(joins && starts_early(ctas, splits, device));
  attention.uses_pdl = decodes && !all_at_once;
  if (decodes && combines) {
    Launch& combine = plan.launches[1];
    combine.kernel += "_decode";
    combine.image = decode_image;
    core::combine_shares(combine, splits, share_keys > 0 || share_ctas > 0,
                         for_few_rows ? few_rows : 0);
    combine.uses_pdl = true;
  }
  add_pointers(attention, core::kv_cache_pointers(problem, offsetof(CacheParams, cache)));
  if (has_cache_masks(problem)) {
    add_masks(attention, problem);
  } else if (problem.alibi_slopes) {
    constexpr size_t SLOPES = offsetof(CacheParams, slopes) + offsetof(AlibiSlopes, gmem);
    add_pointer(attention, Operand::AlibiSlopes, SLOPES);
  }
  const auto add_descale = [&](int bit, Operand operand, size_t field) {
    if (problem.descale >> bit & 1) {
      add_pointer(attention, operand, field + offsetof(Descale, gmem));
    }
  };
  add_descale(1, Operand::KDescale, offsetof(CacheParams, k_descale));
  add_descale(2, Operand::VDescale, offsetof(CacheParams, v_descale));
  if (decodes) add_share_ctas(plan, share_ctas);
  if (decodes && problem.mask != 0) add_mask_of_rows(plan.launches[0], problem);
  return plan;
}

}  // namespace

std::optional<FewRowsPlan> plan_few_rows(const std::string& folder,
                                         std::span<const core::Tile> tiles, const Problem& problem,
                                         const Device& device) {
  if (tiles.empty() || !problem.varlen || problem.batch_invariant || problem.num_splits != 0)
    return {};
  const core::Tile* found = core::choose(folder, tiles, problem, device).tile;
  if (found == nullptr) return {};
  Choice few{*found};
  const device::PackedHeads packed =
      device::pack_heads(few.tile.block_q, static_cast<int>(problem.heads_q / problem.heads_kv));
  few.tile.block_q = packed.rows();
  few.tile.packed_heads = packed.count;
  if (packed.count * problem.heads_kv != problem.heads_q) return {};  // they need several tiles
  const int64_t longest = problem.max_seqlen_q;
  if (longest != UNKNOWN && problem.nq - (problem.batch - 1) * longest > packed.rows()) return {};
  Problem shorter = problem;  // as if all sequences had few rows
  shorter.varlen = false;
  shorter.nq = packed.rows();
  shorter.q_offset = shorter.nk - shorter.nq;
  const int64_t rounds =
      core::ceil_div(core::tiles_of(shorter, few.tile), core::workers_of(few.tile, device));
  few.splits = core::choose_splits(shorter, device, few.tile,
                                   rounds * core::visited_keys(shorter, few.tile));
  const int64_t rows = packed.rows();
  const int64_t all_rows = problem.batch * problem.heads_q * rows;
  const int64_t share_ctas = share_by_length(few, shorter, device, all_rows);
  return FewRowsPlan{rows, launches_with_cache(folder, few, problem, device, rows, share_ctas)};
}

bool shares_by_length(const LaunchPlan& plan) {
  for (const Launch& launch : plan.launches) {
    if (launch.params.size() != sizeof(DecodeParams) || !launch.kernel.ends_with(plan.tile.name))
      continue;
    DecodeParams params;
    std::memcpy(static_cast<void*>(&params), launch.params.data(), sizeof params);
    return params.share_ctas > 0;
  }
  return false;
}

void add_few_rows(LaunchPlan& plan, FewRowsPlan few) {
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t start = workspace.add(few.plan.workspace_bytes);
  plan.workspace_bytes = workspace.bytes();
  for (Launch& launch : few.plan.launches) {
    for (PointerSlot& slot : launch.pointers)
      if (slot.operand == Operand::Workspace) slot.addend += start;
    plan.launches.push_back(std::move(launch));
  }
}

PlanResult plan_with_cache(const std::string& folder, std::span<const core::Tile> tiles,
                           const Problem& problem, const Device& device,
                           std::span<const core::Tile> for_few_rows) {
  const auto choice = core::choose_with_splits(folder, tiles, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  auto chosen = std::get<Choice>(choice);
  auto few =
      chosen.combines() ? std::nullopt : plan_few_rows(folder, for_few_rows, problem, device);
  const int64_t rows = (problem.varlen ? 1 : problem.batch) * problem.heads_q * problem.nq;
  const int64_t share_ctas = share_by_length(chosen, problem, device, rows);
  LaunchPlan plan =
      launches_with_cache(folder, chosen, problem, device, few ? few->rows : 0, share_ctas);
  if (few) add_few_rows(plan, std::move(*few));
  const std::string append = folder + "_append_" + core::dtype_word(problem.dtype);
  Problem unmasked = problem;  // one kernel appends, with masks and without
  unmasked.mask = unmasked.key_ranges = 0;
  const Reasons reasons = core::add_append(plan, problem, cache_image(folder, unmasked),
                                           append + (is_fp8(problem.kv_dtype) ? "_fp8" : ""));
  if (!reasons.empty()) return reasons;
  return plan;
}

}  // namespace archflash::mma_sync
