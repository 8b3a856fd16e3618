// simt: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/core_set.h"
#include "common/problem.h"
#include "simt/config.cuh"
#include "simt/params.h"

namespace archflash::simt {
namespace {

// One kernel. Rows of VARIANTS stand best first among those that serve the same head dimensions and
// type.
struct Variant {
  const char* kernel;
  const char* image;
  DType dtype;
  int head_dim;  // d and dv up to this
  int block_q, block_k;
  int threads;
  int ctas_per_sm;  // what the registers allow
  int shared_bytes;
  // It serves only where `per_sm` of its CTAs fit an SM and twice its CTAs are more than `fill`
  // times the SMs.
  int per_sm, fill;
  const char* reason;  // why it is there
};

template <class C>
constexpr Variant variant(const char* kernel, const char* image, int per_sm, int fill,
                          const char* reason) {
  return {kernel,     image,          C::DTYPE,        C::HEAD_DIM, C::BLOCK_Q, C::BLOCK_K,
          C::THREADS, C::CTAS_PER_SM, C::SHARED_BYTES, per_sm,      fill,       reason};
}

constexpr const char* ONE_PER_HEAD_DIM = "16-bit inputs: one kernel per head_dim, for every GPU";

// Measured on an H200 (NOTES.md); one CTA per SM there stands for the GPUs with 64 and 99 KB.
constexpr Variant VARIANTS[] = {
    variant<F32D32>("simt_attention_fwd_f32_d32", "simt/fwd_f32", 1, 0,
                    "64 rows fit every GPU and suit short sequences"),
    variant<F32D64Large>("simt_attention_fwd_f32_d64_large", "simt/fwd_f32", 2, 2,
                         "two CTAs per SM: the fastest in every long case"),
    variant<F32D64Medium>(
        "simt_attention_fwd_f32_d64_medium", "simt/fwd_f32", 1, 2,
        "99 KB: one CTA of 8 warps and 128 rows beats one of 4 warps and 64 rows by a fifth"),
    variant<F32D64Small>("simt_attention_fwd_f32_d64_small", "simt/fwd_f32", 1, 0,
                         "64 KB, few CTAs or short sequences: 8 warps share the 64 rows"),
    variant<F32D128Large>("simt_attention_fwd_f32_d128_large", "simt/fwd_f32", 2, 1,
                          "two CTAs per SM from 227 KB on"),
    variant<F32D128Medium>("simt_attention_fwd_f32_d128_medium", "simt/fwd_f32", 1, 1,
                           "99 KB, or two CTAs per SM in 163 KB: 32 keys at a time"),
    variant<F32D128Small>("simt_attention_fwd_f32_d128_small", "simt/fwd_f32", 1, 0,
                          "64 KB, few CTAs or short sequences: 32 rows make twice as many"),
    variant<F32D256Large>("simt_attention_fwd_f32_d256_large", "simt/fwd_f32", 1, 1,
                          "64 rows where 227 KB allow it"),
    variant<F32D256Small>("simt_attention_fwd_f32_d256_small", "simt/fwd_f32", 1, 0,
                          "64 KB, few CTAs or short sequences: 16 rows"),
    variant<HalfD32<DType::F16>>("simt_attention_fwd_f16_d32", "simt/fwd_f16", 1, 0,
                                 ONE_PER_HEAD_DIM),
    variant<HalfD64<DType::F16>>("simt_attention_fwd_f16_d64", "simt/fwd_f16", 1, 0,
                                 ONE_PER_HEAD_DIM),
    variant<HalfD128<DType::F16>>("simt_attention_fwd_f16_d128", "simt/fwd_f16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD256<DType::F16>>("simt_attention_fwd_f16_d256", "simt/fwd_f16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD32<DType::BF16>>("simt_attention_fwd_bf16_d32", "simt/fwd_bf16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD64<DType::BF16>>("simt_attention_fwd_bf16_d64", "simt/fwd_bf16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD128<DType::BF16>>("simt_attention_fwd_bf16_d128", "simt/fwd_bf16", 1, 0,
                                   ONE_PER_HEAD_DIM),
    variant<HalfD256<DType::BF16>>("simt_attention_fwd_bf16_d256", "simt/fwd_bf16", 1, 0,
                                   ONE_PER_HEAD_DIM),
};

std::string str(int64_t x) { return std::to_string(x); }

int64_t resident_ctas(const Variant& variant, const Device& device) {
  return core::resident_ctas(device, variant.shared_bytes, variant.ctas_per_sm);
}

const Variant* choose(const Problem& problem, const Device& device) {
  const int64_t head_dim = std::max(problem.d, problem.dv);
  const Variant* fits = nullptr;
  for (const Variant& variant : VARIANTS) {
    if (variant.dtype != problem.dtype || variant.head_dim < head_dim) continue;
    if (fits != nullptr && variant.head_dim != fits->head_dim)
      break;  // kernels for larger heads follow
    if (variant.shared_bytes > device.shared_per_block) continue;
    fits = &variant;  // the last one of a head_dim serves whatever the ones before it should not
    const bool fills_gpu = 2 * core::row_tiles(problem, variant.block_q) * problem.heads_q >
                           variant.fill * device.sm_count;
    const bool rows_mostly_used = core::rows_per_sequence(problem) > variant.block_q / 2;
    const bool enough_per_sm = resident_ctas(variant, device) >= variant.per_sm;
    if (fills_gpu && rows_mostly_used && enough_per_sm) break;
  }
  return fits;
}

}  // namespace

const Description& describe() {
  static const Description description{
      .name = "simt",
      .summary = "exact fp32 attention on CUDA cores, any GPU from compute capability 7.5 on",
      .home_device = "A100",
      .dtypes = {DType::F32, DType::F16, DType::BF16},
      .head_dims = core::HEAD_DIMS,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse"},
      .needs_capability = 75,
      .uses_tensor_cores = false,
  };
  return description;
}

PlanResult plan(const Problem& problem, const Device& device) {
  LaunchPlan result;  // the registry adds what it was made for
  if (core::nothing_to_write(problem)) return result;
  Reasons reasons = core::why_not(problem, "simt", {DType::F32, DType::F16, DType::BF16});
  if (!reasons.empty()) return reasons;

  const Variant* chosen = choose(problem, device);
  if (chosen == nullptr) {
    return Reasons{"shared memory: " + device.name + " gives a CTA " +
                   str(device.shared_per_block) +
                   " bytes and simt needs 64 KB at most for every head_dim; use another GPU" +
                   core::USE_TORCH};
  }
  const int64_t ctas = core::row_tiles(problem, chosen->block_q) * problem.heads_q;
  if (ctas > core::GRID_LIMIT) return Reasons{core::grid_too_large(ctas)};

  Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  static_cast<AttentionParams&>(params) = core::params(problem);
  params.snake_from = INT32_MAX;
  const int64_t resident = resident_ctas(*chosen, device);
  const bool uneven_tiles = problem.window_right < problem.nk && !problem.varlen;
  const bool two_per_sm = resident >= 2 && ctas > device.sm_count && ctas <= 2 * device.sm_count;
  if (uneven_tiles && two_per_sm) params.snake_from = device.sm_count;

  Launch launch;
  launch.kernel = chosen->kernel;
  launch.image = chosen->image;
  launch.grid = {ctas, 1, 1};
  launch.block = {chosen->threads, 1, 1};
  launch.shared_bytes = chosen->shared_bytes;
  launch.params.resize(sizeof params);
  std::memcpy(launch.params.data(), &params, sizeof params);
  launch.pointers = core::pointers(problem);
  result.launches.push_back(std::move(launch));
  return result;
}

Notes notes(const LaunchPlan& plan) {
  if (plan.launches.empty()) return {{"launches", "none: there is nothing to write"}};
  const Launch& launch = plan.launches[0];
  const auto* used = std::find_if(std::begin(VARIANTS), std::end(VARIANTS),
                                  [&](const Variant& v) { return launch.kernel == v.kernel; });
  if (used == std::end(VARIANTS) || launch.params.size() != sizeof(Params)) return {};
  Params params;
  std::memcpy(&params, launch.params.data(), sizeof params);
  return {
      {"tile", str(used->block_q) + " query rows x " + str(used->block_k) +
                   " keys, head_dim up to " + str(used->head_dim)},
      {"variant", used->reason},
      {"warps", str(used->threads / 32)},
      {"CTAs", str(launch.grid[0]) + ", " + str(resident_ctas(*used, plan.device)) + " per SM on " +
                   str(plan.device.sm_count) + " SMs"},
      {"order", params.snake_from == INT32_MAX
                    ? "last row tiles first"
                    : "last row tiles first, then the first ones first: two per SM balance"},
  };
}

}  // namespace archflash::simt
