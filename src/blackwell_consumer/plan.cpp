// blackwell_consumer: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/params.h"
#include "common/core_set.h"
#include "common/problem.h"

namespace archflash::blackwell_consumer {
namespace {

// One kernel of each 16-bit type. Rows of VARIANTS stand largest first among those that serve the
// same head dimensions.
struct Variant {
  const char* name;
  int head_dim, head_dim_v;  // d and dv up to these
  int block_q, block_k;
  int threads, warps, m_tiles, stages, barriers;
  Registers registers;
  int consumer_registers;  // with Registers::Roles
  int ctas_per_sm;         // what the registers allow
  int shared_bytes;
  int slab;  // columns of a TMA box
  Swizzle swizzle;
  // It serves only where it has more row tiles, of all heads, than `fill` / 4 for each SM; where
  // tiles take unequal time, finer ones balance better, it needs `unequal_fill` / 4.
  int fill, unequal_fill;
  int per_sm;          // ... and only where an SM holds this many of its CTAs
  const char* reason;  // why it is there
};

template <template <DType> class Tiles>
constexpr Variant variant(const char* name, int per_sm, int fill, int unequal_fill,
                          const char* reason) {
  using C = Tiles<DType::F16>;
  return {.name = name,
          .head_dim = C::HEAD_DIM,
          .head_dim_v = C::HEAD_DIM_V,
          .block_q = C::BLOCK_Q,
          .block_k = C::BLOCK_K,
          .threads = C::THREADS,
          .warps = C::WARPS,
          .m_tiles = C::M_TILES,
          .stages = C::STAGES,
          .barriers = C::BARRIERS,
          .registers = C::REGISTERS,
          .consumer_registers = C::CONSUMER_REGISTERS,
          .ctas_per_sm = C::CTAS_PER_SM,
          .shared_bytes = C::SHARED_BYTES,
          .slab = C::QTile::SLAB,
          .swizzle = C::QTile::SWIZZLE,
          .fill = fill,
          .unequal_fill = unequal_fill,
          .per_sm = per_sm,
          .reason = reason};
}

constexpr Variant VARIANTS[] = {
    variant<D64Pair>("d64_pair", 2, 6, 16, "two CTAs per SM of 128 rows with 128 keys at a time"),
    variant<D64Large>("d64_large", 1, 4, 8, "one CTA per SM: 8 warps of 32 rows share K and V"),
    variant<D64Medium>("d64_medium", 1, 16, 16, "fewer tiles: 64 rows balance better"),
    variant<D64Few>("d64_few", 1, 0, 0, "few tiles: 64 rows with 128 keys at a time"),
    variant<D96Large>("d96_large", 1, 4, 8, "8 warps of 32 rows share K and V"),
    variant<D96Few>("d96_few", 1, 0, 0, "few tiles: 64 rows make four times as many"),
    variant<D128Large>("d128_large", 1, 4, 8, "8 warps of 32 rows share K and V"),
    variant<D128Medium>("d128_medium", 1, 2, 2, "fewer tiles: 128 rows make twice as many"),
    variant<D128Few>("d128_few", 1, 0, 0, "few tiles: 64 rows make four times as many"),
    variant<D192Large>("d192_large", 1, 2, 2, "8 warps of 16 rows share K and V"),
    variant<D192Few>("d192_few", 1, 0, 0, "few tiles: 64 rows make twice as many"),
    variant<D256Pair>("d256_pair", 2, 0, 0, "two CTAs per SM with 64 keys where 227 KB are there"),
    variant<D256Large>("d256_large", 1, 2, 2, "one CTA per SM: 8 warps of 16 rows share K and V"),
    variant<D256Few>("d256_few", 1, 0, 0, "few tiles: 64 rows make twice as many"),
};

// TMA: strides are multiples of 16 bytes below 2^40.
constexpr int64_t STRIDE_UNIT = 16;
constexpr int64_t STRIDE_LIMIT = int64_t{1} << 40;

std::string str(int64_t x) { return std::to_string(x); }

std::string kernel_name(const Variant& variant, DType dtype) {
  return std::string("blackwell_consumer_attention_fwd_") +
         (dtype == DType::F16 ? "f16_" : "bf16_") + variant.name;
}

int64_t resident_ctas(const Variant& variant, const Device& device) {
  return core::resident_ctas(device, variant.shared_bytes, variant.ctas_per_sm);
}

// Whether all row tiles take the same time.
bool equal_tiles(const Problem& problem) {
  return !problem.varlen && problem.window_left == UNBOUNDED && problem.window_right == UNBOUNDED;
}

const Variant* choose(const Problem& problem, const Device& device) {
  const Variant* fits = nullptr;
  for (const Variant& variant : VARIANTS) {
    if (variant.head_dim < problem.d || variant.head_dim_v < problem.dv) continue;
    if (fits != nullptr && variant.head_dim != fits->head_dim)
      break;  // kernels for larger heads follow
    if (variant.shared_bytes > device.shared_per_block) continue;
    fits = &variant;  // the last one of a head_dim serves whatever the ones before it should not
    const int fill = equal_tiles(problem) ? variant.fill : variant.unequal_fill;
    const bool fills_gpu =
        4 * core::row_tiles(problem, variant.block_q) * problem.heads_q > fill * device.sm_count;
    const bool rows_mostly_used =
        variant.fill == 0 || core::rows_per_sequence(problem) > variant.block_q / 2;
    const bool enough_per_sm = resident_ctas(variant, device) >= variant.per_sm;
    if (fills_gpu && rows_mostly_used && enough_per_sm) break;
  }
  return fits;
}

// What TMA cannot describe, beyond the limits of the core set.
void add_tma_reasons(const Problem& problem, Reasons& reasons) {
  const auto check = [&](const char* name, const Strides& strides, int64_t rows) {
    if (strides.row == 0 && rows > 1) {
      reasons.push_back(std::string(name) +
                        " repeats one row (a row stride of 0): blackwell_consumer copies by tensor "
                        "maps, which have no such stride; make " +
                        name + " contiguous" + core::USE_TORCH);
    }
    const int64_t largest =
        std::max({strides.batch, strides.head, strides.row}) * dtype_bytes(problem.dtype);
    if (largest >= STRIDE_LIMIT) {
      reasons.push_back(std::string(name) + " has a stride of " + str(largest) +
                        " bytes: blackwell_consumer copies by tensor maps, whose strides are below "
                        "2^40; split the call" +
                        core::USE_TORCH);
    }
  };
  check("q", problem.q, problem.nq);
  check("k", problem.k, problem.nk);
  check("v", problem.v, problem.nk);
}

// The map of q, k or v: (columns, rows, heads, batch), a box is `rows_per_box` rows of one slab. A
// dimension of stride 0 is one that the kernel does not move along: size 1, any stride.
TensorMapSpec tensor_map(Operand operand, size_t offset, const Problem& problem,
                         const Variant& variant, const Strides& strides, int64_t columns,
                         int64_t rows, int64_t heads, int rows_per_box) {
  TensorMapSpec map{};
  map.operand = operand;
  map.offset = static_cast<int32_t>(offset);
  map.dtype = problem.dtype;
  map.swizzle = variant.swizzle;
  map.dims = {columns, rows};
  map.box = {variant.slab, rows_per_box, 1, 1};
  const int64_t sizes[] = {rows, heads, problem.varlen ? 1 : problem.batch};
  const int64_t steps[] = {strides.row, strides.head, strides.batch};
  map.dims = {columns};
  for (int i = 0; i < 3; ++i) {
    map.dims.push_back(steps[i] == 0 ? 1 : sizes[i]);
    map.strides.push_back(steps[i] == 0 ? STRIDE_UNIT : steps[i] * dtype_bytes(problem.dtype));
  }
  return map;
}

// Heads whose K and V stay in half of L2 while their row tiles are computed: neighbouring CTAs read
// the same keys, and the longest tiles of a causal problem still come first. All groups but the
// last have this size, and the last is not much smaller: its longest tiles would come when the
// others are done.
int32_t heads_per_group(const Problem& problem, const Device& device) {
  const int64_t kv_head_bytes = problem.nk * (problem.d + problem.dv) * dtype_bytes(problem.dtype);
  const int64_t kv_heads = problem.batch * problem.heads_kv;
  const int64_t fitting =
      std::clamp<int64_t>(device.l2_bytes / 2 / std::max<int64_t>(kv_head_bytes, 1), 1, kv_heads);
  const int64_t groups = (kv_heads + fitting - 1) / fitting;
  const int64_t kv_heads_per_group = (kv_heads + groups - 1) / groups;
  return static_cast<int32_t>(kv_heads_per_group * (problem.heads_q / problem.heads_kv));
}

}  // namespace

Description describe() {
  return {
      .name = "blackwell_consumer",
      .summary =
          "fp16 and bf16 attention by TMA and mma.sync in warps of two roles, for RTX 50 and GB10 "
          "(12.x)",
      .home_device = "RTX 5090",
      .dtypes = {DType::F16, DType::BF16},
      .head_dims = core::HEAD_DIMS,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse"},
  };
}

PlanResult plan(const Problem& problem, const Device& device) {
  LaunchPlan result;  // the registry adds what it was made for
  if (core::nothing_to_write(problem)) return result;
  Reasons reasons = core::why_not(problem, "blackwell_consumer", {DType::F16, DType::BF16});
  add_tma_reasons(problem, reasons);
  if (!reasons.empty()) return reasons;

  const Variant* chosen = choose(problem, device);
  if (chosen == nullptr) {
    return Reasons{
        "shared memory: " + device.name + " gives a CTA " + str(device.shared_per_block) +
        " bytes and blackwell_consumer needs up to 99 KB; use another GPU" + core::USE_TORCH};
  }
  const int64_t tiles = core::row_tiles(problem, chosen->block_q) * problem.heads_q;
  if (tiles > core::GRID_LIMIT) return Reasons{core::grid_too_large(tiles)};

  Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  params.attention = core::params(problem);
  params.attention.heads_per_group = heads_per_group(problem, device);
  params.tiles = static_cast<int32_t>(tiles);

  Launch launch;
  launch.kernel = kernel_name(*chosen, problem.dtype);
  launch.image =
      problem.dtype == DType::F16 ? "blackwell_consumer/fwd_f16" : "blackwell_consumer/fwd_bf16";
  // One CTA per SM that goes on to the next tile loads its keys while the last one is written; two
  // of them, and tiles of unequal length, are better served by the hardware, which gives the next
  // tile to whoever is done (NOTES.md).
  const int64_t per_sm = resident_ctas(*chosen, device);
  const bool stays = per_sm == 1 && equal_tiles(problem);
  launch.grid = {stays ? std::min<int64_t>(tiles, device.sm_count) : tiles, 1, 1};
  launch.block = {chosen->threads, 1, 1};
  launch.shared_bytes = chosen->shared_bytes;
  launch.params.resize(sizeof params);
  std::memcpy(launch.params.data(), &params, sizeof params);
  launch.pointers = core::pointers(problem);
  launch.tensor_maps = {tensor_map(Operand::Q, offsetof(Params, q_map), problem, *chosen, problem.q,
                                   problem.d, problem.nq, problem.heads_q, chosen->block_q)};
  if (problem.nk > 0) {  // an empty k or v is never read
    launch.tensor_maps.push_back(tensor_map(Operand::K, offsetof(Params, k_map), problem, *chosen,
                                            problem.k, problem.d, problem.nk, problem.heads_kv,
                                            chosen->block_k));
    launch.tensor_maps.push_back(tensor_map(Operand::V, offsetof(Params, v_map), problem, *chosen,
                                            problem.v, problem.dv, problem.nk, problem.heads_kv,
                                            chosen->block_k));
  }
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
  const std::string registers = used->registers == Registers::Roles
                                    ? str(used->consumer_registers) +
                                          " for each consumer thread, " +
                                          str(D64Large<DType::F16>::PRODUCER_REGISTERS) +
                                          " for each of the producer's warpgroup (setmaxnreg)"
                                    : "the same for all warps";
  return {
      {"tile", str(used->block_q) + " query rows x " + str(used->block_k) +
                   " keys, head_dim up to " + str(used->head_dim) +
                   (used->head_dim == used->head_dim_v ? "" : " and " + str(used->head_dim_v))},
      {"variant", used->reason},
      {"warps", str(used->warps) + " of " + str(16 * used->m_tiles) + " rows" + ", 1 producer"},
      {"registers", registers},
      {"stages", str(used->stages) + " of K and of V, " + str(used->barriers) + " barriers"},
      {"CTAs", str(launch.grid[0]) + " for " + str(params.tiles) + " tiles, " +
                   str(resident_ctas(*used, plan.device)) + " per SM on " +
                   str(plan.device.sm_count) + " SMs"},
      {"order", plan.problem.varlen
                    ? "by sequence, last row tiles first"
                    : "last row tiles first, " + str(params.attention.heads_per_group) +
                          " heads at a time, whose keys stay in L2"},
  };
}

}  // namespace archflash::blackwell_consumer
