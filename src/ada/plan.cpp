// ada: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
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

// By paper (NOTES.md): what a GPU of 8.9 makes of them is unmeasured.
constexpr mma_sync::Variant VARIANTS[] = {
    variant<D64<DType::F16>>("d64", 1, 2, 0, "two CTAs per SM with 128 keys in 99 KB"),
    variant<D64Few<DType::F16>>("d64_few", 1, 0, 0,
                                "few CTAs or short sequences: 64 rows make twice as many"),
    variant<D96<DType::F16>>("d96", 1, 0, 0, "two CTAs per SM with one buffer in 99 KB"),
    variant<D128Wide<DType::F16>>("d128_wide", 1, 2, 0,
                                  "two CTAs per SM with 128 rows and 32 keys in 99 KB",
                                  /*unmasked_only=*/true),
    variant<D128<DType::F16>>(
        "d128", 1, 0, 0,
        "few CTAs, short sequences or masks: two CTAs per SM with 64 rows and 64 "
        "keys in 99 KB, which end more evenly"),
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

}  // namespace

Description describe() {
  return {
      .name = "ada",
      .summary =
          "fp8, fp16 and bf16 attention on mma.sync tensor cores, any GPU from compute capability "
          "8.9 on, tiles for 8.9",
      .home_device = "RTX 4090",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3, DType::E5M2},
      .head_dims = "multiples of 8 (fp8: 16) up to 256, d and dv independent",
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "descales"},
  };
}

PlanResult plan(const Problem& problem, const Device& device) {
  if (core::nothing_to_write(problem)) return LaunchPlan{};
  Reasons reasons =
      core::why_not(problem, "ada", {DType::F16, DType::BF16, DType::E4M3, DType::E5M2});
  if (!reasons.empty()) return reasons;
  if (is_fp8(problem.dtype)) return plan_fp8(problem, device);
  return mma_sync::plan(FAMILY, problem, device, core::bytes(core::params(problem)));
}

Notes notes(const LaunchPlan& plan) {
  return mma_sync::notes(is_fp8(plan.problem.dtype) ? FP8_FAMILY : FAMILY, plan);
}

}  // namespace archflash::ada
