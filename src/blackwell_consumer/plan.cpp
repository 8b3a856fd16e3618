// blackwell_consumer: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/params.h"
#include "common/core_set.h"
#include "common/problem.h"
#include "common/tma_plan.h"

namespace archflash::blackwell_consumer {
namespace {

// A tile's TMA boxes: their columns in units of 16 bits, and how rows of that length are swizzled.
struct Slab {
  int columns;
  Swizzle swizzle;
};

// One kernel of each type. Rows of VARIANTS stand largest first among those that serve the
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
  Slab qk, v;  // of the TMA boxes
  // It serves only where it has more row tiles, of all heads, than `fill` / 4 for each SM; where
  // tiles take unequal time, finer ones balance better, it needs `unequal_fill` / 4.
  int fill, unequal_fill;
  int per_sm;          // ... and only where an SM holds this many of its CTAs
  const char* reason;  // why it is there
};

template <class C>
constexpr Variant variant(const char* name, int per_sm, int fill, int unequal_fill,
                          const char* reason) {
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
          .qk = {C::QTile::SLAB, C::QTile::SWIZZLE},
          .v = {C::VTile::SLAB, C::VTile::SWIZZLE},
          .fill = fill,
          .unequal_fill = unequal_fill,
          .per_sm = per_sm,
          .reason = reason};
}

constexpr Variant VARIANTS[] = {
    variant<D64Pair<DType::F16>>("d64_pair", 2, 6, 16,
                                 "two CTAs per SM of 128 rows with 128 keys at a time"),
    variant<D64Large<DType::F16>>("d64_large", 1, 3, 8,
                                  "one CTA per SM: 8 warps of 32 rows share K and V"),
    variant<D64Medium<DType::F16>>("d64_medium", 1, 16, 16, "fewer tiles: 64 rows balance better"),
    variant<D64Few<DType::F16>>("d64_few", 1, 0, 0, "few tiles: 64 rows with 128 keys at a time"),
    variant<D96Large<DType::F16>>("d96_large", 1, 4, 8, "8 warps of 32 rows share K and V"),
    variant<D96Few<DType::F16>>("d96_few", 1, 0, 0, "few tiles: 64 rows make four times as many"),
    variant<D128Large<DType::F16>>("d128_large", 1, 4, 8, "8 warps of 32 rows share K and V"),
    variant<D128Medium<DType::F16>>("d128_medium", 1, 2, 2,
                                    "fewer tiles: 128 rows make twice as many"),
    variant<D128Few<DType::F16>>("d128_few", 1, 0, 0, "few tiles: 64 rows make four times as many"),
    variant<D192Large<DType::F16>>("d192_large", 1, 2, 2, "8 warps of 16 rows share K and V"),
    variant<D192Few<DType::F16>>("d192_few", 1, 0, 0, "few tiles: 64 rows make twice as many"),
    variant<D256Pair<DType::F16>>("d256_pair", 2, 0, 0,
                                  "two CTAs per SM with 64 keys where 227 KB are there"),
    variant<D256Large<DType::F16>>("d256_large", 1, 2, 2,
                                   "one CTA per SM: 8 warps of 16 rows share K and V"),
    variant<D256Few<DType::F16>>("d256_few", 1, 0, 0, "few tiles: 64 rows make twice as many"),
};

// By analogy: no GPU with 8-bit mma.sync and TMA was measured (NOTES.md).
constexpr Variant FP8_VARIANTS[] = {
    variant<Fp8D64Pair<DType::E4M3>>(
        "d64_pair", 1, 6, 16,
        "two CTAs per SM with 4 warps of 32 rows; its speed is unmeasured on 12.x"),
    variant<Fp8D64Few<DType::E4M3>>(
        "d64_few", 1, 0, 0,
        "few tiles: 64 rows make twice as many; its speed is unmeasured on 12.x"),
    variant<Fp8D128Large<DType::E4M3>>(
        "d128_large", 1, 2, 2, "8 warps of 16 rows share K and V; its speed is unmeasured on 12.x"),
    variant<Fp8D128Few<DType::E4M3>>(
        "d128_few", 1, 0, 0,
        "few tiles: 64 rows make twice as many; its speed is unmeasured on 12.x"),
    variant<Fp8D192<DType::E4M3>>("d192", 1, 0, 0,
                                  "4 warps of 16 rows; its speed is unmeasured on 12.x"),
    variant<Fp8D256<DType::E4M3>>("d256", 1, 0, 0,
                                  "8 warps of 16 rows; its speed is unmeasured on 12.x"),
};

std::span<const Variant> variants_of(DType dtype) {
  if (is_fp8(dtype)) return FP8_VARIANTS;
  return VARIANTS;
}

std::string str(int64_t x) { return std::to_string(x); }

std::string dtype_word(DType dtype) {
  return dtype == DType::F16 ? "f16" : dtype == DType::BF16 ? "bf16" : "e4m3";
}

std::string kernel_name(const Variant& variant, DType dtype) {
  return "blackwell_consumer_attention_fwd_" + dtype_word(dtype) + "_" + variant.name;
}

int64_t resident_ctas(const Variant& variant, const Device& device) {
  return core::resident_ctas(device, variant.shared_bytes, variant.ctas_per_sm);
}

const Variant* choose(const Problem& problem, const Device& device) {
  const Variant* fits = nullptr;
  for (const Variant& variant : variants_of(problem.dtype)) {
    if (variant.head_dim < problem.d || variant.head_dim_v < problem.dv) continue;
    if (fits != nullptr && variant.head_dim != fits->head_dim)
      break;  // kernels for larger heads follow
    if (variant.shared_bytes > device.shared_per_block) continue;
    fits = &variant;  // the last one of a head_dim serves whatever the ones before it should not
    const int fill = core::equal_tiles(problem) ? variant.fill : variant.unequal_fill;
    const bool fills_gpu =
        4 * core::row_tiles(problem, variant.block_q) * problem.heads_q > fill * device.sm_count;
    const bool rows_mostly_used =
        variant.fill == 0 || core::rows_per_sequence(problem) > variant.block_q / 2;
    const bool enough_per_sm = resident_ctas(variant, device) >= variant.per_sm;
    if (fills_gpu && rows_mostly_used && enough_per_sm) break;
  }
  return fits;
}

}  // namespace

const Description& describe() {
  static const Description description{
      .name = "blackwell_consumer",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by TMA and mma.sync in warps of two roles, for RTX "
          "50 and GB10 (12.x)",
      .home_device = "RTX 5090",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = "multiples of 8 (fp8: 16) up to 256, d and dv independent",
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "descales"},
      .needs_capability = 90,  // TMA, mbarrier
      .only_forced_on_majors = {9},
  };
  return description;
}

PlanResult plan(const Problem& problem, const Device& device) {
  LaunchPlan result;  // the registry adds what it was made for
  if (core::nothing_to_write(problem)) return result;
  Reasons reasons =
      core::why_not(problem, "blackwell_consumer", {DType::F16, DType::BF16, DType::E4M3});
  core::add_tma_reasons(problem, "blackwell_consumer", false, reasons);
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
  params.attention.heads_per_group = core::heads_per_group(problem, device);
  params.tiles = static_cast<int32_t>(tiles);
  if (is_fp8(problem.dtype)) {
    if (!params.attention.transform_scores)
      params.attention.tanh_scale = static_cast<float>(problem.scale);
    params.descales = core::descales(problem);
    params.out_dtype = problem.out_dtype;
  }

  Launch launch;
  launch.kernel = kernel_name(*chosen, problem.dtype);
  launch.image = "blackwell_consumer/fwd_" + dtype_word(problem.dtype);
  // One CTA per SM that goes on to the next tile loads its keys while the last one is written; two
  // of them, and tiles of unequal length, are better served by the hardware, which gives the next
  // tile to whoever is done (NOTES.md).
  const int64_t per_sm = resident_ctas(*chosen, device);
  const bool stays = per_sm == 1 && core::equal_tiles(problem);
  launch.grid = {stays ? std::min<int64_t>(tiles, device.sm_count) : tiles, 1, 1};
  launch.block = {chosen->threads, 1, 1};
  launch.shared_bytes = chosen->shared_bytes;
  launch.params.resize(sizeof params);
  std::memcpy(launch.params.data(), &params, sizeof params);
  launch.pointers = core::pointers(problem);
  for (const PointerSlot& slot : core::descale_pointers(problem, offsetof(Params, descales)))
    launch.pointers.push_back(slot);
  const auto map = [&](Operand operand, size_t offset, const Slab& slab, int rows_per_box) {
    const int columns = slab.columns * 2 / dtype_bytes(problem.dtype);
    launch.tensor_maps.push_back(
        core::tensor_map(problem, operand, offset, slab.swizzle, {columns, rows_per_box}));
  };
  map(Operand::Q, offsetof(Params, q_map), chosen->qk, chosen->block_q);
  if (problem.nk > 0) {  // an empty k or v is never read
    map(Operand::K, offsetof(Params, k_map), chosen->qk, chosen->block_k);
    map(Operand::V, offsetof(Params, v_map), chosen->v, chosen->block_k);
  }
  result.launches.push_back(std::move(launch));
  return result;
}

Notes notes(const LaunchPlan& plan) {
  if (plan.launches.empty()) return {{"launches", "none: there is nothing to write"}};
  const Launch& launch = plan.launches[0];
  const std::span<const Variant> variants = variants_of(plan.problem.dtype);
  const auto used = std::find_if(variants.begin(), variants.end(), [&](const Variant& v) {
    return launch.kernel == kernel_name(v, plan.problem.dtype);
  });
  if (used == variants.end() || launch.params.size() != sizeof(Params)) return {};
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
