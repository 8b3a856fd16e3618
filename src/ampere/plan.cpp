// ampere: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "ampere/config.cuh"
#include "ampere/params.h"
#include "common/core_set.h"
#include "common/problem.h"

namespace archflash::ampere {
namespace {

// One kernel of each 16-bit type. Rows of VARIANTS stand best first among those that serve the same
// head dimensions.
struct Variant {
  const char* name;
  int head_dim, head_dim_v;  // d and dv up to these
  int block_q, block_k;
  int threads, m_tiles, stages;
  int ctas_per_sm;  // what the registers allow
  int shared_bytes;
  // It serves only where `per_sm` of its CTAs fit an SM, twice its CTAs are more than `fill` times
  // the SMs, and there are `min_keys` keys.
  int per_sm, fill, min_keys;
  const char* reason;  // why it is there
};

template <template <DType> class Tiles>
constexpr Variant variant(const char* name, int per_sm, int fill, int min_keys,
                          const char* reason) {
  using C = Tiles<DType::F16>;
  return {.name = name,
          .head_dim = C::HEAD_DIM,
          .head_dim_v = C::HEAD_DIM_V,
          .block_q = C::BLOCK_Q,
          .block_k = C::BLOCK_K,
          .threads = C::THREADS,
          .m_tiles = C::M_TILES,
          .stages = C::STAGES,
          .ctas_per_sm = C::CTAS_PER_SM,
          .shared_bytes = C::SHARED_BYTES,
          .per_sm = per_sm,
          .fill = fill,
          .min_keys = min_keys,
          .reason = reason};
}

// Measured on an H200 (NOTES.md), also those for 163 and 99 KB: what GPUs with so little shared
// memory do is unmeasured.
constexpr Variant VARIANTS[] = {
    variant<D64Large>("d64_large", 2, 2, 129,
                      "two CTAs per SM with 128 keys and two buffers from 163 KB on"),
    variant<D64Medium>("d64_medium", 1, 2, 0, "99 KB, or few keys: 64 keys at a time"),
    variant<D64Few>("d64_few", 1, 0, 0, "few CTAs or short sequences: 64 rows make twice as many"),
    variant<D96Large>("d96_large", 2, 0, 0, "two CTAs per SM with two buffers from 163 KB on"),
    variant<D96Medium>("d96_medium", 1, 0, 0, "99 KB: two CTAs per SM with one buffer"),
    variant<D128Large>("d128_large", 2, 2, 0, "two CTAs per SM with two buffers in 227 KB"),
    variant<D128Medium>("d128_medium", 2, 2, 0, "two CTAs per SM with one buffer in 163 KB"),
    variant<D128Small>("d128_small", 1, 2, 0, "two CTAs per SM with 32 keys in 99 KB"),
    variant<D128Few>("d128_few", 1, 0, 0,
                     "few CTAs or short sequences: 64 rows make twice as many"),
    variant<D192Large>("d192_large", 2, 0, 0, "two CTAs per SM with 64 keys in 227 KB"),
    variant<D192Medium>("d192_medium", 1, 0, 0, "32 keys: two CTAs per SM in 163 KB, one in 99 KB"),
    variant<D256Large>("d256_large", 2, 0, 0, "two CTAs of 64 rows per SM in 227 KB"),
    variant<D256Medium>("d256_medium", 1, 0, 0, "one CTA per SM: 8 warps share 64 keys in 163 KB"),
    variant<D256Small>("d256_small", 1, 0, 0, "one CTA per SM: 8 warps share 32 keys in 99 KB"),
};

std::string str(int64_t x) { return std::to_string(x); }

std::string kernel_name(const Variant& variant, DType dtype) {
  return std::string("ampere_attention_fwd_") + (dtype == DType::F16 ? "f16_" : "bf16_") +
         variant.name;
}

int64_t resident_ctas(const Variant& variant, const Device& device) {
  return core::resident_ctas(device, variant.shared_bytes, variant.ctas_per_sm);
}

const Variant* choose(const Problem& problem, const Device& device) {
  const Variant* fits = nullptr;
  for (const Variant& variant : VARIANTS) {
    if (variant.head_dim < problem.d || variant.head_dim_v < problem.dv) continue;
    if (fits != nullptr && variant.head_dim != fits->head_dim)
      break;  // kernels for larger heads follow
    if (variant.shared_bytes > device.shared_per_block) continue;
    fits = &variant;  // the last one of a head_dim serves whatever the ones before it should not
    const bool fills_gpu = 2 * core::row_tiles(problem, variant.block_q) * problem.heads_q >
                           variant.fill * device.sm_count;
    const bool rows_mostly_used =
        variant.fill == 0 || core::rows_per_sequence(problem) > variant.block_q / 2;
    const bool enough_per_sm = resident_ctas(variant, device) >= variant.per_sm;
    const bool enough_keys = problem.nk >= variant.min_keys;
    if (fills_gpu && rows_mostly_used && enough_per_sm && enough_keys) break;
  }
  return fits;
}

// Heads whose K and V stay in half of L2 while their row tiles are computed: neighbouring CTAs read
// the same keys, and the longest tiles of a causal problem still come first.
int32_t heads_per_group(const Problem& problem, const Device& device) {
  const int64_t kv_head_bytes = problem.nk * (problem.d + problem.dv) * dtype_bytes(problem.dtype);
  const int64_t kv_heads =
      std::max<int64_t>(device.l2_bytes / 2 / std::max<int64_t>(kv_head_bytes, 1), 1);
  return static_cast<int32_t>(
      std::min(kv_heads * (problem.heads_q / problem.heads_kv), problem.batch * problem.heads_q));
}

}  // namespace

Description describe() {
  return {
      .name = "ampere",
      .summary =
          "fp16 and bf16 attention on mma.sync tensor cores, any GPU from compute capability "
          "8.0 on",
      .home_device = "A100",
      .dtypes = {DType::F16, DType::BF16},
      .head_dims = core::HEAD_DIMS,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse"},
  };
}

PlanResult plan(const Problem& problem, const Device& device) {
  LaunchPlan result;  // the registry adds what it was made for
  if (core::nothing_to_write(problem)) return result;
  Reasons reasons = core::why_not(problem, "ampere", {DType::F16, DType::BF16});
  if (!reasons.empty()) return reasons;

  const Variant* chosen = choose(problem, device);
  if (chosen == nullptr) {
    return Reasons{"shared memory: " + device.name + " gives a CTA " +
                   str(device.shared_per_block) +
                   " bytes and ampere needs 97 KB at most for every head_dim; use another GPU" +
                   core::USE_TORCH};
  }
  const int64_t ctas = core::row_tiles(problem, chosen->block_q) * problem.heads_q;
  if (ctas > core::GRID_LIMIT) return Reasons{core::grid_too_large(ctas)};

  Params params = core::params(problem);
  params.heads_per_group = heads_per_group(problem, device);

  Launch launch;
  launch.kernel = kernel_name(*chosen, problem.dtype);
  launch.image = problem.dtype == DType::F16 ? "ampere/fwd_f16" : "ampere/fwd_bf16";
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
  const auto* used = std::find_if(std::begin(VARIANTS), std::end(VARIANTS), [&](const Variant& v) {
    return launch.kernel == kernel_name(v, plan.problem.dtype);
  });
  if (used == std::end(VARIANTS) || launch.params.size() != sizeof(Params)) return {};
  Params params;
  std::memcpy(&params, launch.params.data(), sizeof params);
  return {
      {"tile", str(used->block_q) + " query rows x " + str(used->block_k) +
                   " keys, head_dim up to " + str(used->head_dim) +
                   (used->head_dim == used->head_dim_v ? "" : " and " + str(used->head_dim_v))},
      {"variant", used->reason},
      {"warps", str(used->threads / 32) + " of " + str(16 * used->m_tiles) + " rows"},
      {"stages", str(used->stages)},
      {"CTAs", str(launch.grid[0]) + ", " + str(resident_ctas(*used, plan.device)) + " per SM on " +
                   str(plan.device.sm_count) + " SMs"},
      {"order", plan.problem.varlen ? "by sequence, last row tiles first"
                                    : "last row tiles first, " + str(params.heads_per_group) +
                                          " heads at a time, whose keys stay in L2"},
  };
}

}  // namespace archflash::ampere
