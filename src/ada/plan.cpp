// ada: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ada/config.cuh"
#include "ada/params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/mma_sync.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "common/problem.h"

namespace archflash::ada {

const Description& describe() {
  static const Description description{
      .name = "ada",
      .summary =
          "fp8, fp16 and bf16 attention on mma.sync tensor cores, any GPU from compute capability "
          "8.9 on, tiles for 8.9",
      .home_device = "RTX 4090",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3, DType::E5M2},
      .head_dims = core::HEAD_DIMS_WITH_FP8,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "num_splits", "out_dtype", "batch_invariant", "descales",
                   "int8_qk"},
      .needs_capability = 89,  // fp8 products
      .sixteen_bits_made_for = 89,
      .proved_by_any_gpu = true,
      .fp8_sums_of_13_bits_on = {89},
  };
  return description;
}

namespace {

using core::tile;

constexpr const char* FEW_ROWS =
    "few query rows: keys split over CTAs, or heads packed; its speed is unmeasured";

// Measured on an H200 (NOTES.md), those for GPUs with 99 KB of shared memory too: what a GPU of 8.9
// makes of them is unmeasured. So are split keys and packed heads.
constexpr core::Tile TILES[] = {
    tile<D64>("d64", {.min_tiles_per_sm = 1}, "two CTAs per SM with 128 keys in 99 KB"),
    tile<D64Few>("d64_few", {}, "few CTAs or short sequences: 64 rows make twice as many"),
    tile<D96>("d96", {}, "two CTAs per SM with one buffer in 99 KB"),
    tile<D96Few>("d96_few", {}, FEW_ROWS),
    tile<D128>("d128", {}, "two CTAs per SM with 64 rows and 64 keys in 99 KB"),
    tile<D192>("d192", {}, "one CTA per SM: 8 warps share 32 keys in 99 KB"),
    tile<D192Few>("d192_few", {}, FEW_ROWS),
    tile<D256>("d256", {}, "one CTA per SM: 8 warps share 32 keys in 99 KB"),
    tile<D256Few>("d256_few", {}, FEW_ROWS),
};

constexpr core::Tile FP8_TILES[] = {
    tile<Fp8D64<DType::E4M3>>("d64", {}, "three CTAs per SM with two buffers in 99 KB"),
    tile<Fp8D128<DType::E4M3>>("d128", {}, "two CTAs per SM with two buffers in 99 KB"),
    tile<Fp8D192<DType::E4M3>>("d192", {}, "one CTA per SM with two buffers in 99 KB"),
    tile<Fp8D256<DType::E4M3>>("d256", {}, "two CTAs per SM with one buffer in 99 KB"),
};

constexpr core::Tile INT8_TILES[] = {
    tile<Int8D64>("int8_d64", {}, "two CTAs per SM with two buffers"),
    tile<Int8D128Large>("int8_d128_large", {.min_ctas_per_sm = 2},
                        "two CTAs per SM with two buffers from 163 KB on"),
    tile<Int8D128>("int8_d128", {}, "one CTA per SM: 8 warps share two buffers in 99 KB"),
    tile<Int8D256>("int8_d256", {}, "one CTA per SM: 8 warps share one buffer in 99 KB"),
};

// --- 8-bit inputs ---

// The kernel reads 8-bit inputs in units of 16 bits. core::why_not has seen that the strides are
// multiples of 16 bytes.
void count_units_of_16_bits(const Problem&, Params& params) {
  AttentionParams& attention = params.attention;
  for (int64_t* stride : {&attention.q_batch, &attention.q_head, &attention.q_row,
                          &attention.k_batch, &attention.k_head, &attention.k_row,
                          &attention.v_batch, &attention.v_head, &attention.v_row})
    *stride /= 2;
}

// --- approximate="int8_qk" ---

Reasons why_not_int8(const Problem& problem) {
  Reasons reasons = core::why_not(problem, describe());
  const std::string exactly = "; leave approximate out" + std::string(core::USE_TORCH);
  if (problem.varlen) {
    reasons.push_back("cu_seqlens with approximate='int8_qk': ada takes one length for all" +
                      exactly);
  }
  if (problem.softcap != 0) {
    reasons.push_back(
        "softcap with approximate='int8_qk': ada adds the mean of k back where a row ends, which a "
        "cap is not linear for" +
        exactly);
  } else if (core::attention_params(problem).transform_scores) {
    reasons.push_back("scale " + core::number_text(problem.scale) +
                      " with approximate='int8_qk': ada takes positive normal ones" + exactly);
  }
  return reasons;
}

// Columns of the int8 values of a row: whole 16 bytes.
int64_t int8_columns(const Problem& problem) {
  constexpr int64_t STEP = 16;
  return core::ceil_div(problem.d, STEP) * STEP;
}

// What the three kernels are told. The last one reads Q and K as int8 rows of `columns` numbers,
// which the others leave in the workspace.
void set_int8_params(const Problem& problem, Int8Params& params) {
  const int64_t columns = int8_columns(problem);
  AttentionParams& attention = params.attention;
  attention.d = static_cast<int32_t>(columns);
  attention.q_row = attention.k_row = columns / 2;  // in units of 16 bits
  attention.q_head = problem.nq * attention.q_row;
  attention.k_head = problem.nk * attention.k_row;
  attention.q_batch = problem.heads_q * attention.q_head;
  attention.k_batch = problem.heads_kv * attention.k_head;
  params.q_batch = problem.q.batch, params.q_head = problem.q.head, params.q_row = problem.q.row;
  params.k_batch = problem.k.batch, params.k_head = problem.k.head, params.k_row = problem.k.row;
  params.d = static_cast<int32_t>(problem.d);
  params.columns = static_cast<int32_t>(columns);
  params.heads_q = static_cast<int32_t>(problem.heads_q);
  params.heads_kv = static_cast<int32_t>(problem.heads_kv);
  params.nq = static_cast<int32_t>(problem.nq);
  params.nk = static_cast<int32_t>(problem.nk);
  params.q_blocks = static_cast<int32_t>(core::ceil_div(problem.nq, SCALE_ROWS));
  params.k_blocks = static_cast<int32_t>(core::ceil_div(problem.nk, SCALE_ROWS));
  params.k_ctas = static_cast<int32_t>(problem.batch * problem.heads_kv * params.k_blocks);
  params.scale = static_cast<float>(problem.scale);
}

// Two kernels prepare, the mean of K and then the int8 values of K and Q; the last one computes.
PlanResult plan_int8(const Problem& problem, const Device& device) {
  const int64_t q_heads = problem.batch * problem.heads_q;
  const int64_t k_heads = problem.batch * problem.heads_kv;
  const int64_t q_blocks = q_heads * core::ceil_div(problem.nq, SCALE_ROWS);
  const int64_t k_blocks = k_heads * core::ceil_div(problem.nk, SCALE_ROWS);
  if (q_blocks + k_blocks > core::GRID_LIMIT) return core::grid_too_large(q_blocks + k_blocks);
  PlanResult result =
      mma_sync::plan<Int8Params>("ada", INT8_TILES, problem, device, set_int8_params);
  auto* made = std::get_if<LaunchPlan>(&result);
  if (made == nullptr) return result;

  Launch last = std::move(made->launches[0]);
  made->launches.clear();
  const std::string word = core::dtype_word(problem.dtype);
  last.image = "ada/int8_" + word;

  const int64_t columns = int8_columns(problem);
  core::Workspace workspace;
  std::vector<PointerSlot> slots;
  const auto part = [&](size_t pointer, int64_t bytes) {
    const int64_t start = workspace.add(bytes);
    slots.push_back({Operand::Workspace, static_cast<int32_t>(pointer), start});
    return start;
  };
  part(offsetof(Int8Params, k_mean_gmem), k_heads * problem.d * sizeof(float));
  const int64_t q_values =
      part(offsetof(Int8Params, q_values_gmem), q_heads * problem.nq * columns);
  const int64_t k_values =
      part(offsetof(Int8Params, k_values_gmem), k_heads * problem.nk * columns);
  part(offsetof(Int8Params, q_scales_gmem), q_blocks * sizeof(float));
  part(offsetof(Int8Params, k_scales_gmem), k_blocks * sizeof(KeyScale));
  part(offsetof(Int8Params, shifts_gmem), q_heads * problem.nq * sizeof(float));
  made->workspace_bytes = workspace.whole_bytes();

  const auto prepare = [&](const std::string& step, int64_t grid) {
    Launch launch;
    launch.kernel = "ada_int8_" + step;
    launch.image = last.image;
    launch.grid = {grid, 1, 1};
    launch.block = {INT8_THREADS, 1, 1};
    launch.params = last.params;
    launch.pointers = slots;
    add_pointer(launch, Operand::Q, offsetof(Int8Params, q_gmem));
    add_pointer(launch, Operand::K, offsetof(Int8Params, k_gmem));
    if (problem.q_offset_tensor)
      add_pointer(launch, Operand::QOffset,
                  offsetof(Int8Params, attention) + offsetof(AttentionParams, q_offsets_gmem));
    made->launches.push_back(std::move(launch));
  };
  if (problem.nk > 0) prepare("mean_" + word, k_heads);
  prepare("values_" + word + (problem.d <= 128 ? "_d128" : "_d256"), q_blocks + k_blocks);
  for (PointerSlot& slot : last.pointers) {
    if (slot.operand == Operand::Q) slot = {Operand::Workspace, slot.offset, q_values};
    if (slot.operand == Operand::K) slot = {Operand::Workspace, slot.offset, k_values};
  }
  last.pointers.insert(last.pointers.end(), slots.begin(), slots.end());
  made->launches.push_back(std::move(last));
  return result;
}

}  // namespace

PlanResult plan(const Problem& problem, const Device& device) {
  const bool approximate = problem.approximate != 0;
  Reasons reasons = approximate ? why_not_int8(problem) : core::why_not(problem, describe());
  if (approximate || is_fp8(problem.dtype)) {
    const std::string given = approximate ? "approximate='int8_qk'" : dtype_name(problem.dtype);
    core::refuse_splits(problem, "ada", given, reasons);
    core::refuse_batch_invariant(problem, "ada", given, reasons);
  }
  if (!reasons.empty()) return reasons;
  if (approximate) return plan_int8(problem, device);
  if (is_fp8(problem.dtype))
    return mma_sync::plan<Params>("ada", FP8_TILES, problem, device, count_units_of_16_bits);
  return mma_sync::plan_16_bits("ada", TILES, problem, device);
}

Notes notes(const LaunchPlan& plan) {
  if (plan.problem.approximate == 0) return {};
  return {core::approximate_note(plan.problem)};
}

}  // namespace archflash::ada
