// ada: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ada/config.cuh"
#include "ada/params.h"
#include "common/core_set.h"
#include "common/mma_sync/plan.h"
#include "common/problem.h"

namespace archflash::ada {
namespace {

using mma_sync::variant;

// Measured on an H200 (NOTES.md), also those for 99 KB: what a GPU of 8.9 makes of them is
// unmeasured.
constexpr mma_sync::Variant VARIANTS[] = {
    variant<D64Large<DType::F16>>("d64_large", 2, 2, 129,
                                  "two CTAs per SM with two buffers from 163 KB on"),
    variant<D64<DType::F16>>("d64", 1, 2, 0, "two CTAs per SM with 128 keys in 99 KB"),
    variant<D64FewLarge<DType::F16>>("d64_few_large", 2, 0, 0,
                                     "few CTAs or short sequences: 64 rows make twice as many, two "
                                     "buffers from 163 KB on"),
    variant<D64Few<DType::F16>>("d64_few", 1, 0, 0,
                                "few CTAs or short sequences: 64 rows make twice as many"),
    variant<D96<DType::F16>>("d96", 1, 0, 0, "two CTAs per SM with one buffer in 99 KB"),
    variant<D128Large<DType::F16>>("d128_large", 2, 2, 0,
                                   "two CTAs per SM with two buffers in 227 KB"),
    variant<D128Tall<DType::F16>>("d128_tall", 1, 8, 0,
                                  "one CTA per SM: 8 warps share 64 keys in 99 KB"),
    variant<D128<DType::F16>>(
        "d128", 1, 0, 0,
        "fewer CTAs or short sequences: two CTAs per SM with 64 rows and 64 keys in 99 KB"),
    variant<D192<DType::F16>>("d192", 1, 0, 0, "one CTA per SM: 8 warps share 32 keys in 99 KB"),
    variant<D256<DType::F16>>("d256", 1, 0, 0, "one CTA per SM: 8 warps share 32 keys in 99 KB"),
};
constexpr mma_sync::Family FAMILY{"ada", VARIANTS};

constexpr mma_sync::Variant FP8_VARIANTS[] = {
    variant<Fp8D64<DType::E4M3>>("d64", 1, 0, 0, "three CTAs per SM with two buffers in 99 KB"),
    variant<Fp8D128<DType::E4M3>>("d128", 1, 0, 0, "two CTAs per SM with two buffers in 99 KB"),
    variant<Fp8D192<DType::E4M3>>("d192", 1, 0, 0, "one CTA per SM with two buffers in 99 KB"),
    variant<Fp8D256<DType::E4M3>>("d256", 1, 0, 0, "two CTAs per SM with one buffer in 99 KB"),
};
constexpr mma_sync::Family FP8_FAMILY{"ada", FP8_VARIANTS};

constexpr mma_sync::Variant INT8_VARIANTS[] = {
    variant<Int8D64<DType::F16>>("int8_d64", 1, 0, 0, "two CTAs per SM with two buffers"),
    variant<Int8D128Large<DType::F16>>("int8_d128_large", 2, 0, 0,
                                       "two CTAs per SM with two buffers from 163 KB on"),
    variant<Int8D128<DType::F16>>("int8_d128", 1, 0, 0,
                                  "one CTA per SM: 8 warps share two buffers in 99 KB"),
    variant<Int8D256<DType::F16>>("int8_d256", 1, 0, 0,
                                  "one CTA per SM: 8 warps share one buffer in 99 KB"),
};
constexpr mma_sync::Family INT8_FAMILY{"ada", INT8_VARIANTS};

// Strides in units of 16 bits: core::why_not has seen that they are multiples of 16 bytes.
void count_units(int64_t& batch, int64_t& head, int64_t& row) { batch /= 2, head /= 2, row /= 2; }

PlanResult plan_fp8(const Problem& problem, const Device& device) {
  Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  AttentionParams& attention = params.attention;
  attention = core::params(problem);
  count_units(attention.q_batch, attention.q_head, attention.q_row);
  count_units(attention.k_batch, attention.k_head, attention.k_row);
  count_units(attention.v_batch, attention.v_head, attention.v_row);
  if (!attention.transform_scores) attention.tanh_scale = static_cast<float>(problem.scale);
  params.descales = core::descales(problem);
  params.out_dtype = problem.out_dtype;

  PlanResult result = mma_sync::plan(FP8_FAMILY, problem, device, core::bytes(params));
  if (auto* made = std::get_if<LaunchPlan>(&result)) {
    for (const PointerSlot& slot : core::descale_pointers(problem, offsetof(Params, descales)))
      made->launches[0].pointers.push_back(slot);
  }
  return result;
}

// --- approximate="int8_qk" ---

Reasons why_not_int8(const Problem& problem) {
  Reasons reasons = core::why_not(problem, "ada", {DType::F16, DType::BF16}, Approximate::Int8Qk);
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
  } else if (core::params(problem).transform_scores) {
    reasons.push_back("scale " + std::to_string(problem.scale) +
                      " with approximate='int8_qk': ada takes positive normal ones" + exactly);
  }
  return reasons;
}

// Parts of the workspace, one after another, each where any of them may start.
struct Workspace {
  int64_t bytes = 0;

  int64_t add(int64_t size) {
    constexpr int64_t ALIGNMENT = 256;
    const int64_t offset = bytes;
    bytes += core::ceil_div(size, ALIGNMENT) * ALIGNMENT;
    return offset;
  }
};

PlanResult plan_int8(const Problem& problem, const Device& device) {
  constexpr int64_t COLUMN_STEP = 16;  // rows of whole 16 bytes
  Int8Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  const int64_t columns = core::ceil_div(problem.d, COLUMN_STEP) * COLUMN_STEP;
  const int64_t q_heads = problem.batch * problem.heads_q;
  const int64_t k_heads = problem.batch * problem.heads_kv;
  const int64_t q_blocks = core::ceil_div(problem.nq, SCALE_ROWS);
  const int64_t k_blocks = core::ceil_div(problem.nk, SCALE_ROWS);
  const int64_t ctas = k_heads * k_blocks + q_heads * q_blocks;  // of the second kernel
  if (ctas > core::GRID_LIMIT) return Reasons{core::grid_too_large(ctas)};

  AttentionParams& attention = params.attention;
  attention = core::params(problem);
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
  params.q_blocks = static_cast<int32_t>(q_blocks);
  params.k_blocks = static_cast<int32_t>(k_blocks);
  params.k_ctas = static_cast<int32_t>(k_heads * k_blocks);
  params.scale = static_cast<float>(problem.scale);

  PlanResult result = mma_sync::plan(INT8_FAMILY, problem, device, core::bytes(params));
  auto* made = std::get_if<LaunchPlan>(&result);
  if (made == nullptr) return result;

  Launch last = std::move(made->launches[0]);
  made->launches.clear();
  const std::string word = problem.dtype == DType::F16 ? "f16" : "bf16";
  last.image = "ada/int8_" + word;
  Workspace workspace;
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
  part(offsetof(Int8Params, q_scales_gmem), q_heads * q_blocks * sizeof(float));
  part(offsetof(Int8Params, k_scales_gmem), k_heads * k_blocks * sizeof(KeyScale));
  part(offsetof(Int8Params, shifts_gmem), q_heads * problem.nq * sizeof(float));
  made->workspace_bytes = workspace.bytes;

  const auto prepare = [&](const std::string& step, int64_t grid) {
    if (grid == 0) return;
    Launch launch;
    launch.kernel = "ada_int8_" + step;
    launch.image = last.image;
    launch.grid = {grid, 1, 1};
    launch.block = {INT8_THREADS, 1, 1};
    launch.params = last.params;
    launch.pointers = slots;
    launch.pointers.push_back({Operand::Q, offsetof(Int8Params, q_gmem), 0});
    launch.pointers.push_back({Operand::K, offsetof(Int8Params, k_gmem), 0});
    if (problem.q_offset_tensor)
      launch.pointers.push_back(
          {Operand::QOffset,
           offsetof(Int8Params, attention) + offsetof(AttentionParams, q_offsets_gmem), 0});
    made->launches.push_back(std::move(launch));
  };
  if (problem.nk > 0) prepare("mean_" + word, k_heads);
  prepare("values_" + word + (problem.d <= 128 ? "_d128" : "_d256"), ctas);
  for (PointerSlot& slot : last.pointers) {
    if (slot.operand == Operand::Q) slot = {Operand::Workspace, slot.offset, q_values};
    if (slot.operand == Operand::K) slot = {Operand::Workspace, slot.offset, k_values};
  }
  last.pointers.insert(last.pointers.end(), slots.begin(), slots.end());
  made->launches.push_back(std::move(last));
  return result;
}

Notes notes_int8(const LaunchPlan& plan) {
  LaunchPlan last = plan;
  if (!plan.launches.empty()) last.launches = {plan.launches.back()};
  Notes notes = mma_sync::notes(INT8_FAMILY, last);
  notes.insert(notes.begin(),
               {"approximate", "q k^T in int8, one scale for each 64 rows of q and k"});
  return notes;
}

}  // namespace

const Description& describe() {
  static const Description description{
      .name = "ada",
      .summary =
          "fp8, fp16 and bf16 attention on mma.sync tensor cores, any GPU from compute capability "
          "8.9 on, tiles for 8.9",
      .home_device = "RTX 4090",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3, DType::E5M2},
      .head_dims = "multiples of 8 (fp8: 16) up to 256, d and dv independent",
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "descales", "int8_qk"},
      .needs_capability = 89,  // fp8 products
      .sixteen_bits_made_for = 89,
  };
  return description;
}

PlanResult plan(const Problem& problem, const Device& device) {
  if (core::nothing_to_write(problem)) return LaunchPlan{};
  if (problem.approximate != 0) {
    Reasons reasons = why_not_int8(problem);
    if (!reasons.empty()) return reasons;
    return plan_int8(problem, device);
  }
  Reasons reasons =
      core::why_not(problem, "ada", {DType::F16, DType::BF16, DType::E4M3, DType::E5M2});
  if (!reasons.empty()) return reasons;
  if (is_fp8(problem.dtype)) return plan_fp8(problem, device);
  return mma_sync::plan(FAMILY, problem, device, core::bytes(core::params(problem)));
}

Notes notes(const LaunchPlan& plan) {
  if (plan.problem.approximate != 0) return notes_int8(plan);
  return mma_sync::notes(is_fp8(plan.problem.dtype) ? FP8_FAMILY : FAMILY, plan);
}

}  // namespace archflash::ada
