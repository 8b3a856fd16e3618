// ampere: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <cstdint>
#include <vector>

#include "ampere/config.cuh"
#include "common/core_set.h"
#include "common/mma_sync/plan.h"
#include "common/problem.h"

namespace archflash::ampere {
namespace {

using mma_sync::variant;

// Measured on an H200 (NOTES.md), also those for 163 and 99 KB: what GPUs with so little shared
// memory do is unmeasured.
constexpr mma_sync::Variant VARIANTS[] = {
    variant<D64Large<DType::F16>>("d64_large", 2, 2, 129,
                                  "two CTAs per SM with 128 keys and two buffers from 163 KB on"),
    variant<D64Medium<DType::F16>>("d64_medium", 1, 2, 0, "99 KB, or few keys: 64 keys at a time"),
    variant<D64Few<DType::F16>>("d64_few", 1, 0, 0,
                                "few CTAs or short sequences: 64 rows make twice as many"),
    variant<D96Large<DType::F16>>("d96_large", 2, 0, 0,
                                  "two CTAs per SM with two buffers from 163 KB on"),
    variant<D96Medium<DType::F16>>("d96_medium", 1, 0, 0, "99 KB: two CTAs per SM with one buffer"),
    variant<D128Large<DType::F16>>("d128_large", 2, 2, 0,
                                   "two CTAs per SM with two buffers in 227 KB"),
    variant<D128Medium<DType::F16>>("d128_medium", 2, 2, 0,
                                    "two CTAs per SM with one buffer in 163 KB"),
    variant<D128Small<DType::F16>>("d128_small", 1, 2, 0, "two CTAs per SM with 32 keys in 99 KB"),
    variant<D128Few<DType::F16>>("d128_few", 1, 0, 0,
                                 "few CTAs or short sequences: 64 rows make twice as many"),
    variant<D192Large<DType::F16>>("d192_large", 2, 0, 0, "two CTAs per SM with 64 keys in 227 KB"),
    variant<D192Medium<DType::F16>>("d192_medium", 1, 0, 0,
                                    "32 keys: two CTAs per SM in 163 KB, one in 99 KB"),
    variant<D256Large<DType::F16>>("d256_large", 2, 0, 0, "two CTAs of 64 rows per SM in 227 KB"),
    variant<D256Medium<DType::F16>>("d256_medium", 1, 0, 0,
                                    "one CTA per SM: 8 warps share 64 keys in 163 KB"),
    variant<D256Small<DType::F16>>("d256_small", 1, 0, 0,
                                   "one CTA per SM: 8 warps share 32 keys in 99 KB"),
};

constexpr mma_sync::Family FAMILY{"ampere", VARIANTS};

}  // namespace

const Description& describe() {
  static const Description description{
      .name = "ampere",
      .summary =
          "fp16 and bf16 attention on mma.sync tensor cores, any GPU from compute capability "
          "8.0 on",
      .home_device = "A100",
      .dtypes = {DType::F16, DType::BF16},
      .head_dims = core::HEAD_DIMS,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse"},
      .needs_capability = 80,  // cp.async, bf16 products
  };
  return description;
}

PlanResult plan(const Problem& problem, const Device& device) {
  if (core::nothing_to_write(problem)) return LaunchPlan{};
  Reasons reasons = core::why_not(problem, "ampere", {DType::F16, DType::BF16});
  if (!reasons.empty()) return reasons;
  return mma_sync::plan(FAMILY, problem, device, core::bytes(core::params(problem)));
}

Notes notes(const LaunchPlan& plan) { return mma_sync::notes(FAMILY, plan); }

}  // namespace archflash::ampere
