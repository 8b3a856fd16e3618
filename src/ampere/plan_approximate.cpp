#include "ampere/plan_approximate.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ampere/approximate_config.cuh"
#include "ampere/approximate_params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/mma_sync.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::ampere {
namespace {

using core::tile;

constexpr core::Tile INT8_TILES[] = {
    tile<Int8D64>("int8_d64", {}, "two CTAs per SM with two buffers in 99 KB"),
    tile<Int8D128>("int8_d128", {}, "one CTA per SM: 8 warps share two buffers in 99 KB"),
    tile<Int8D256>("int8_d256", {}, "one CTA per SM: 8 warps share two buffers in 99 KB"),
};
constexpr const char* WITH_MASKS = "masks as data: blocks of keys that no row sees are skipped";
// A row of the table without split keys and packed heads: calls of few rows are not worth the
// conversion.
template <class C>
constexpr core::Tile masked_tile(const char* name) {
  core::Tile result = tile<C>(name, {}, WITH_MASKS);
  result.can_split = false;
  return result;
}
constexpr core::Tile INT8_MASKED_TILES[] = {
    masked_tile<Int8D64Masked>("int8_d64_masked"),
    masked_tile<Int8D128Masked>("int8_d128_masked"),
    masked_tile<Int8D256Masked>("int8_d256_masked"),
};
constexpr core::Tile INT8_PV_TILES[] = {
    tile<Int8PvD64>("int8_pv_d64", {}, "two CTAs per SM with two buffers in 99 KB"),
    tile<Int8PvD128>("int8_pv_d128", {}, "one CTA per SM: 8 warps share two buffers in 99 KB"),
    tile<Int8PvD256>("int8_pv_d256", {}, "one CTA per SM: 8 warps share two buffers in 99 KB"),
};
constexpr core::Tile INT8_PV_MASKED_TILES[] = {
    masked_tile<Int8PvD64Masked>("int8_pv_d64_masked"),
    masked_tile<Int8PvD128Masked>("int8_pv_d128_masked"),
    masked_tile<Int8PvD256Masked>("int8_pv_d256_masked"),
};
constexpr core::Tile FP16_TILES[] = {
    tile<Fp16SumsD64>("fp16_d64", {}, "two CTAs per SM with two buffers in 99 KB"),
    tile<Fp16SumsD128>("fp16_d128", {}, "one CTA per SM: 8 warps share two buffers in 99 KB"),
    tile<Fp16SumsD256>("fp16_d256", {}, "one CTA per SM: 8 warps share one buffer in 99 KB"),
};
constexpr core::Tile FP16_MASKED_TILES[] = {
    masked_tile<Fp16SumsD128Masked>("fp16_d128_masked"),
    masked_tile<Fp16SumsD256Masked>("fp16_d256_masked"),
};

bool is_int8_pv(const Problem& problem) {
  return problem.approximate == static_cast<int64_t>(Approximate::Int8Pv);
}

// Whether Q and K are converted to int8.
bool is_int8(const Problem& problem) {
  return problem.approximate == static_cast<int64_t>(Approximate::Int8) || is_int8_pv(problem);
}

std::span<const core::Tile> tiles_of(const Problem& problem, bool masked) {
  if (is_int8_pv(problem)) {
    if (masked) return INT8_PV_MASKED_TILES;
    return INT8_PV_TILES;
  }
  if (is_int8(problem)) {
    if (masked) return INT8_MASKED_TILES;
    return INT8_TILES;
  }
  if (masked) return FP16_MASKED_TILES;
  return FP16_TILES;
}

// Whether the kernel with masks as data serves the call: it alone transforms scores.
bool takes_masked_kernel(const Problem& problem) {
  return takes_masked_kernels(problem) || core::attention_params(problem).transform_scores != 0;
}

// What the methods do not take. Everything else that the folder takes without a cache, they do.
Reasons why_not(const Problem& problem) {
  const std::string name = approximation(problem.approximate).name;
  const std::string given = "approximate='" + name + "'";
  const std::string exactly = "; leave approximate out" + std::string(core::USE_TORCH);
  Reasons reasons;
  constexpr int64_t most = Int8D256::HEAD_DIM;
  if (std::max(problem.d, problem.dv) > most) {
    reasons.push_back("head dimensions " + std::to_string(problem.d) + " and " +
                      std::to_string(problem.dv) + " with " + given + ": ampere takes up to " +
                      std::to_string(most) + " there" + exactly);
  }
  if (is_int8_pv(problem) && problem.dropout_p != 0) {
    reasons.push_back("dropout_p with " + given +
                      ": ampere adds the mean of v back for all weights of a row there" + exactly);
  }
  if (problem.key_indices > 0) {
    reasons.push_back("key_indices with " + given +
                      ": ampere takes causal, window and masks there" + exactly);
  }
  if (core::writes_f32(problem)) {
    reasons.push_back("out_dtype float32 with " + given +
                      ": ampere writes the type of its inputs there; leave out_dtype out" +
                      core::USE_TORCH);
  }
  core::refuse_splits(problem, "ampere", given, reasons);
  core::refuse_batch_invariant(problem, "ampere", given, reasons);
  return reasons;
}

// What the converting kernels are told, but for addresses.
ApproximateInputs inputs_of(const Problem& problem, const core::Tile& tile) {
  ApproximateInputs inputs;
  std::memset(static_cast<void*>(&inputs), 0, sizeof inputs);  // equal plans are equal bytes
  inputs.q_batch = problem.q.batch, inputs.q_head = problem.q.head, inputs.q_row = problem.q.row;
  inputs.k_batch = problem.k.batch, inputs.k_head = problem.k.head, inputs.k_row = problem.k.row;
  inputs.v_batch = problem.v.batch, inputs.v_head = problem.v.head, inputs.v_row = problem.v.row;
  inputs.batches = problem.varlen ? 1 : static_cast<int32_t>(problem.batch);
  inputs.heads_q = static_cast<int32_t>(problem.heads_q);
  inputs.heads_kv = static_cast<int32_t>(problem.heads_kv);
  inputs.nq = static_cast<int32_t>(problem.nq), inputs.nk = static_cast<int32_t>(problem.nk);
  inputs.d = static_cast<int32_t>(problem.d), inputs.dv = static_cast<int32_t>(problem.dv);
  inputs.columns = is_int8(problem) ? tile.head_dim : 0;
  const int64_t v_groups = is_int8_pv(problem) ? core::ceil_div(problem.dv, V_GROUP) : 0;
  inputs.v_columns = static_cast<int32_t>(v_groups * V_GROUP);
  inputs.chunks =
      static_cast<int32_t>(v_groups > 0 ? v_groups : core::ceil_div(problem.nk, STATS_ROWS));
  inputs.dtype = problem.dtype;
  inputs.keys = inputs.batches * problem.heads_kv * problem.nk;
  const int64_t blocks = core::ceil_div(problem.nk, CONVERT_ROWS);
  inputs.v_ctas = static_cast<int32_t>(inputs.batches * inputs.heads_kv * blocks);
  inputs.k_ctas = is_int8(problem) ? inputs.v_ctas : 0;
  return inputs;
}

// Turns the plan of a call of 16-bit inputs into that of an approximate one: two kernels convert
// the inputs first, and the kernel of attention reads what they leave in the workspace. Params is
// that kernel's parameter, whose first member the plan has already.
template <class Params>
PlanResult with_conversion(const Problem& problem, const core::Tile& tile, LaunchPlan made) {
  ApproximateInputs inputs = inputs_of(problem, tile);
  const int64_t q_heads = inputs.batches * problem.heads_q;
  const int64_t k_heads = inputs.batches * problem.heads_kv;
  const int64_t q_ctas = is_int8(problem) ? q_heads * core::ceil_div(problem.nq, CONVERT_ROWS) : 0;
  const int64_t ctas = q_ctas + k_heads * 2 * core::ceil_div(problem.nk, CONVERT_ROWS);
  if (ctas > core::GRID_LIMIT) return core::grid_too_large(ctas);

  core::Workspace workspace;
  workspace.add(made.workspace_bytes);
  std::vector<PointerSlot> slots;  // of ApproximateInputs
  const auto part = [&](size_t pointer, int64_t bytes) {
    const int64_t start = workspace.add(bytes);
    slots.push_back({Operand::Workspace, static_cast<int32_t>(pointer), start});
    return start;
  };
#define ARCHFLASH_AT(FIELD) offsetof(ApproximateInputs, FIELD)
  int64_t v_values = 0;
  if (is_int8_pv(problem)) {
    part(ARCHFLASH_AT(v_columns_gmem), k_heads * inputs.v_columns * sizeof(VColumn));
    v_values = part(ARCHFLASH_AT(v_bytes_gmem), k_heads * problem.nk * inputs.v_columns);
  } else {
    part(ARCHFLASH_AT(v_largest_gmem), k_heads * inputs.chunks * sizeof(float));
    part(ARCHFLASH_AT(v_scales_gmem), k_heads * sizeof(VScale));
    v_values =
        part(ARCHFLASH_AT(v_values_gmem), k_heads * problem.nk * problem.dv * sizeof(uint16_t));
  }
  int64_t q_values = 0, k_values = 0;
  if (is_int8(problem)) {
    part(ARCHFLASH_AT(k_columns_gmem), k_heads * inputs.columns * sizeof(KColumn));
    k_values = part(ARCHFLASH_AT(k_values_gmem), k_heads * problem.nk * inputs.columns);
    const int64_t scales = is_int8_pv(problem) ? Int8PvD64::KEY_SCALES : 1;
    part(ARCHFLASH_AT(k_scales_gmem), scales * inputs.keys * sizeof(float));
    q_values = part(ARCHFLASH_AT(q_values_gmem), q_heads * problem.nq * inputs.columns);
    part(ARCHFLASH_AT(q_rows_gmem), q_heads * problem.nq * sizeof(QRow));
  }
  made.workspace_bytes = workspace.whole_bytes();

  Launch& last = made.launches[0];
  AttentionParams attention;
  std::memcpy(&attention, last.params.data(), sizeof attention);
  const AttentionParams as_given = attention;
  attention.v_row = is_int8_pv(problem) ? inputs.v_columns / 2 : problem.dv;
  attention.v_head = problem.nk * attention.v_row;
  attention.v_batch = problem.varlen ? 0 : problem.heads_kv * attention.v_head;
  if (is_int8(problem)) {
    attention.d = inputs.columns;
    attention.q_row = attention.k_row = inputs.columns / 2;  // in units of 16 bits
    attention.q_head = problem.nq * attention.q_row;
    attention.k_head = problem.nk * attention.k_row;
    attention.q_batch = problem.varlen ? 0 : problem.heads_q * attention.q_head;
    attention.k_batch = problem.varlen ? 0 : problem.heads_kv * attention.k_head;
  }
  Params params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  std::memcpy(static_cast<void*>(&params.call), last.params.data(), sizeof params.call);
  std::memcpy(static_cast<void*>(&params), &attention, sizeof attention);
  params.inputs = inputs;
  last.params = core::bytes(params);
  for (PointerSlot& slot : last.pointers) {
    if (slot.operand == Operand::V) slot = {Operand::Workspace, slot.offset, v_values};
    if (!is_int8(problem)) continue;
    if (slot.operand == Operand::Q) slot = {Operand::Workspace, slot.offset, q_values};
    if (slot.operand == Operand::K) slot = {Operand::Workspace, slot.offset, k_values};
  }
  const auto add_slots = [&](Launch& launch, size_t inputs_start) {
    for (PointerSlot slot : slots) {
      slot.offset += static_cast<int32_t>(inputs_start);
      launch.pointers.push_back(slot);
    }
  };
  add_slots(last, offsetof(Params, inputs));
  const std::string word = core::dtype_word(problem.dtype);
  last.kernel = "ampere_approximate_" + (is_int8(problem) ? "" : word + "_") + made.tile.name;
  last.image = std::string("ampere/") + approximation(problem.approximate).name +
               (is_int8(problem) ? "" : "_" + word);
  for (Launch& launch : std::span(made.launches).subspan(1)) launch.image = "ampere/fwd_" + word;

  ConvertParams convert;
  std::memset(static_cast<void*>(&convert), 0, sizeof convert);
  convert.call = as_given;
  convert.inputs = inputs;
  const auto prepare = [&](const char* kernel, int64_t grid) {
    Launch launch;
    launch.kernel = kernel;
    launch.image = "ampere/int8";
    launch.grid = {grid, 1, 1};
    launch.block = {CONVERT_THREADS, 1, 1};
    launch.params = core::bytes(convert);
    add_slots(launch, offsetof(ConvertParams, inputs));
    const auto add = [&](Operand operand, size_t field) {
      add_pointer(launch, operand, offsetof(ConvertParams, inputs) + field);
    };
    add(Operand::Q, ARCHFLASH_AT(q_gmem));
    add(Operand::K, ARCHFLASH_AT(k_gmem));
    add(Operand::V, ARCHFLASH_AT(v_gmem));
    const auto add_call = [&](bool given, Operand operand, size_t field) {
      if (given) add_pointer(launch, operand, field);
    };
    add_call(problem.q_offset_tensor, Operand::QOffset, offsetof(AttentionParams, q_offsets_gmem));
    add_call(problem.varlen, Operand::CuSeqlensK, offsetof(AttentionParams, cu_seqlens_k_gmem));
    return launch;
  };
#undef ARCHFLASH_AT
  std::vector<Launch> launches;
  if (problem.nk > 0)
    launches.push_back(prepare("ampere_approximate_stats", k_heads * inputs.chunks));
  const int64_t grid = q_ctas + inputs.k_ctas + inputs.v_ctas;
  if (grid > 0) launches.push_back(prepare("ampere_approximate_convert", grid));
  made.launches.insert(made.launches.begin(), launches.begin(), launches.end());
  return made;
}

const core::Tile& tile_of(std::span<const core::Tile> tiles, const LaunchPlan& plan) {
  return *std::find_if(tiles.begin(), tiles.end(),
                       [&](const core::Tile& tile) { return plan.tile.name == tile.name; });
}

}  // namespace

PlanResult plan_approximate(const Problem& problem, const Device& device) {
  const Reasons reasons = why_not(problem);
  if (!reasons.empty()) return reasons;
  const bool masked = takes_masked_kernel(problem);
  const std::span<const core::Tile> tiles = tiles_of(problem, masked);
  PlanResult result =
      masked ? mma_sync::plan_masked("ampere", tiles, problem, device)
             : mma_sync::plan<mma_sync::ManyRowsParams>("ampere", tiles, problem, device);
  auto* made = std::get_if<LaunchPlan>(&result);
  if (made == nullptr) return result;
  const core::Tile& tile = tile_of(tiles, *made);
  return masked ? with_conversion<MaskedApproximateParams>(problem, tile, std::move(*made))
                : with_conversion<ApproximateParams>(problem, tile, std::move(*made));
}

}  // namespace archflash::ampere
