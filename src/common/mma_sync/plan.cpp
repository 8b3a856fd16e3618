#include "common/mma_sync/plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/attention_params.h"
#include "common/core_set.h"

namespace archflash::mma_sync {
namespace {

std::string str(int64_t x) { return std::to_string(x); }

// As file and kernel names spell it.
const char* word(DType dtype) {
  constexpr const char* WORDS[DTYPE_COUNT] = {"f32", "f16", "bf16", "e4m3", "e5m2", "f64"};
  return WORDS[static_cast<int>(dtype)];
}

int64_t resident_ctas(const Variant& variant, const Device& device) {
  return core::resident_ctas(device, variant.shared_bytes, variant.ctas_per_sm);
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

std::string Family::kernel_name(const Variant& variant, DType dtype) const {
  return std::string(folder) + "_attention_fwd_" + word(dtype) + "_" + variant.name;
}

std::string Family::image_name(DType dtype) const {
  return std::string(folder) + "/fwd_" + word(dtype);
}

const Variant* Family::choose(const Problem& problem, const Device& device) const {
  const Variant* fits = nullptr;
  for (const Variant& variant : variants) {
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

PlanResult plan(const Family& family, const Problem& problem, const Device& device,
                std::vector<uint8_t> params) {
  const Variant* chosen = family.choose(problem, device);
  if (chosen == nullptr) {
    int64_t most = 0;  // what the most demanding head_dim takes at least
    for (const Variant& variant : family.variants) {
      int64_t least = variant.shared_bytes;
      for (const Variant& other : family.variants) {
        if (other.head_dim == variant.head_dim)
          least = std::min<int64_t>(least, other.shared_bytes);
      }
      most = std::max(most, least);
    }
    return Reasons{"shared memory: " + device.name + " gives a CTA " +
                   str(device.shared_per_block) + " bytes and " + family.folder + " needs " +
                   str((most + 1023) / 1024) + " KB at most for every head_dim; use another GPU" +
                   core::USE_TORCH};
  }
  const int64_t ctas = core::row_tiles(problem, chosen->block_q) * problem.heads_q;
  if (ctas > core::GRID_LIMIT) return Reasons{core::grid_too_large(ctas)};

  AttentionParams base;
  std::memcpy(&base, params.data(), sizeof base);
  base.heads_per_group = heads_per_group(problem, device);
  std::memcpy(params.data(), &base, sizeof base);

  Launch launch;
  launch.kernel = family.kernel_name(*chosen, problem.dtype);
  launch.image = family.image_name(problem.dtype);
  launch.grid = {ctas, 1, 1};
  launch.block = {chosen->threads, 1, 1};
  launch.shared_bytes = chosen->shared_bytes;
  launch.params = std::move(params);
  launch.pointers = core::pointers(problem);
  LaunchPlan result;  // the registry adds what it was made for
  result.launches.push_back(std::move(launch));
  return result;
}

Notes notes(const Family& family, const LaunchPlan& plan) {
  if (plan.launches.empty()) return {{"launches", "none: there is nothing to write"}};
  const Launch& launch = plan.launches[0];
  const auto used = std::find_if(
      family.variants.begin(), family.variants.end(),
      [&](const Variant& v) { return launch.kernel == family.kernel_name(v, plan.problem.dtype); });
  if (used == family.variants.end() || launch.params.size() < sizeof(AttentionParams)) return {};
  AttentionParams params;
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

}  // namespace archflash::mma_sync
