// blackwell_dc: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/params.h"
#include "common/core_set.h"
#include "common/problem.h"
#include "common/split_keys.h"
#include "common/tma_plan.h"

namespace archflash::blackwell_dc {
namespace {

// One kernel of each type. Each serves head dimensions up to its own; the smallest first.
struct Variant {
  const char* name;
  int head_dim, head_dim_v;  // d and dv up to these
  int ctas, tiles, block_q, block_k;
  int k_stages, v_stages, barriers;
  int polynomial_pairs;  // of 16
  Registers registers;
  int threads, shared_bytes;
  core::Box q_box, k_box, v_box, out_box;
  Swizzle q_swizzle, v_swizzle, out_swizzle;
};

// pack: elements in the 16 bits that a tile calls one.
template <class Tile>
constexpr core::Box box_of(int pack) {
  return {Tile::SLAB * pack, Tile::BOX_ROWS};
}

template <class C>
constexpr Variant variant(const char* name) {
  return {.name = name,
          .head_dim = C::HEAD_DIM,
          .head_dim_v = C::HEAD_DIM_V,
          .ctas = C::CTAS,
          .tiles = C::TILES,
          .block_q = C::BLOCK_Q,
          .block_k = C::BLOCK_K,
          .k_stages = C::K_STAGES,
          .v_stages = C::V_STAGES,
          .barriers = C::BARRIERS,
          .polynomial_pairs = C::SWITCHES.polynomial_pairs,
          .registers = C::REGISTERS,
          .threads = C::THREADS,
          .shared_bytes = C::SHARED_BYTES,
          .q_box = box_of<typename C::QTile>(C::PACK),
          .k_box = box_of<typename C::KTile>(C::PACK),
          .v_box = box_of<typename C::VTile>(C::PACK),
          .out_box = box_of<typename C::OTile>(1),
          .q_swizzle = C::QTile::SWIZZLE,
          .v_swizzle = C::VTile::SWIZZLE,
          .out_swizzle = C::OTile::SWIZZLE};
}

constexpr Variant VARIANTS[] = {variant<D64<DType::F16>>("d64"), variant<D96<DType::F16>>("d96"),
                                variant<D128<DType::F16>>("d128"),
                                variant<D192<DType::F16>>("d192"),
                                variant<D256<DType::F16>>("d256")};

// For the same head dims as one of them each, where that pay_in_pairs().
constexpr Variant PAIRS[] = {variant<D128Pair<DType::F16>>("d128_pair"),
                             variant<D192Pair<DType::F16>>("d192_pair")};

// For few query rows: one tile of 128 rows, whose keys may be split over CTAs.
constexpr Variant FEW_VARIANTS[] = {
    variant<D64Few<DType::F16>>("d64_few"), variant<D96Few<DType::F16>>("d96_few"),
    variant<D128Few<DType::F16>>("d128_few"), variant<D192Few<DType::F16>>("d192_few"),
    variant<D256<DType::F16>>("d256")};

constexpr Variant FP8_VARIANTS[] = {
    variant<Fp8D64<DType::E4M3>>("d64"), variant<Fp8D128<DType::E4M3>>("d128"),
    variant<Fp8D192<DType::E4M3>>("d192"), variant<Fp8D256<DType::E4M3>>("d256")};

std::span<const Variant> variants_of(DType dtype) {
  if (is_fp8(dtype)) return FP8_VARIANTS;
  return VARIANTS;
}

std::string str(int64_t x) { return std::to_string(x); }

std::string dtype_word(DType dtype) {
  return dtype == DType::F16 ? "f16" : dtype == DType::BF16 ? "bf16" : "e4m3";
}

std::string kernel_name(const Variant& variant, DType dtype) {
  return "blackwell_dc_attention_fwd_" + dtype_word(dtype) + "_" + variant.name;
}

std::string image_of(const Variant& variant, DType dtype) {
  if (variant.ctas == 2) return "blackwell_dc/fwd_pair";
  return "blackwell_dc/fwd_" + dtype_word(dtype);
}

const Variant& smallest(std::span<const Variant> variants, const Problem& problem) {
  for (const Variant& variant : variants) {
    if (variant.head_dim >= problem.d && variant.head_dim_v >= problem.dv) return variant;
  }
  return variants.back();  // core::why_not() refuses larger ones
}

int64_t tiles_of(const Problem& problem, const Variant& variant) {
  return core::row_tiles(problem, variant.block_q) * problem.heads_q;
}

// The one of that entry name; null: none.
const Variant* by_kernel(const std::string& kernel, DType dtype) {
  using Variants = std::span<const Variant>;
  for (const Variants& variants : {variants_of(dtype), Variants(FEW_VARIANTS)}) {
    for (const Variant& variant : variants) {
      if (kernel == kernel_name(variant, dtype)) return &variant;
    }
  }
  for (const Variant& variant : PAIRS) {
    if (kernel == kernel_name(variant, dtype)) return &variant;
  }
  return nullptr;
}

// Keys that the middle row of a sequence sees, where all have the mean length and an offset that
// only the device knows is the default.
int64_t keys_of_a_row(const Problem& problem) {
  const int64_t rows = core::rows_per_sequence(problem);
  const int64_t keys = problem.varlen ? problem.nk / problem.batch : problem.nk;
  const bool known = !problem.q_offset_default && !problem.q_offset_tensor;
  // Beyond the keys is beyond the keys: no sum overflows.
  const auto near = [&](int64_t x) { return std::clamp(x, -rows - keys, rows + keys); };
  const int64_t place = rows / 2 + (known ? near(problem.q_offset) : keys - rows);
  const auto shifted = [&](int64_t by) { return std::clamp<int64_t>(place + by, 0, keys); };
  return shifted(near(problem.window_right)) - shifted(-near(problem.window_left));
}

// Whether pairs of CTAs are expected to be faster than CTAs alone: unmeasured, from a model
// (NOTES.md). For a block of 128 keys at d 128 a CTA of a pair reads 128 KB of shared memory in
// products, not 192, and brings 32 KB of K and V from L2, not 64. But at either edge, that of the
// rows and that of the keys they see, a tile has up to 256 more that it does not need, and there
// are half as many tiles to share out. So: where those 256 are at most 1/16, and the tiles of two
// CTAs take no more rounds and fill the GPU.
bool pay_in_pairs(const Problem& problem, const Device& device, const Variant& alone,
                  const Variant& pair) {
  constexpr int64_t LONG = 16 * 256;
  if (core::rows_per_sequence(problem) < LONG || keys_of_a_row(problem) < LONG) return false;
  const int64_t pairs = device.sm_count / 2;
  const int64_t tiles = tiles_of(problem, pair);
  return pairs > 0 && tiles >= pairs &&
         core::ceil_div(tiles, pairs) <= core::ceil_div(tiles_of(problem, alone), device.sm_count);
}

// The kernel that serves all rows of a head with all their keys.
const Variant& alone_or_pair(const Problem& problem, const Device& device) {
  const Variant& alone = smallest(VARIANTS, problem);
  for (const Variant& pair : PAIRS) {
    const bool same_dims = pair.head_dim == alone.head_dim && pair.head_dim_v == alone.head_dim_v;
    if (same_dims && pay_in_pairs(problem, device, alone, pair)) return pair;
  }
  return alone;
}

struct Choice {
  const Variant& variant;
  int64_t splits;
};

// One tile of 128 rows where a head has no more of them, or where its keys are split: asked for, or
// expected to be faster.
Choice choose(const Problem& problem, const Device& device) {
  if (is_fp8(problem.dtype)) return {smallest(FP8_VARIANTS, problem), 1};
  const Variant& few = smallest(FEW_VARIANTS, problem);
  const int64_t longest = problem.max_seqlen_q == UNKNOWN ? problem.nq : problem.max_seqlen_q;
  const Variant& unsplit = longest <= few.block_q ? few : alone_or_pair(problem, device);
  const int64_t sms = std::max(device.sm_count, 1);
  const int64_t rounds = core::ceil_div(tiles_of(problem, unsplit) * unsplit.ctas, sms);
  const int64_t keys = core::visited_keys(problem, unsplit.block_q, unsplit.block_k);
  int64_t time = rounds * keys * unsplit.tiles;
  // What the model leaves out, the workspace's bytes and what two tiles in flight gain, is taken to
  // be a quarter.
  if (unsplit.tiles > few.tiles) time -= time / 4;
  const int64_t splits = core::choose_splits(problem, device, few.block_q, few.block_k, time);
  return {splits > 1 ? few : unsplit, splits};
}

}  // namespace

const Description& describe() {
  static const Description description{
      .name = "blackwell_dc",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by tcgen05 and tensor memory in 16 warps of roles, "
          "for B200, B300, GB200 and GB300 (10.0, 10.3)",
      .home_device = "B200",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = "multiples of 8 (fp8: 16) up to 256, d and dv independent",
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "num_splits", "descales"},
      .needs_capability = 100,  // tcgen05
  };
  return description;
}

PlanResult plan(const Problem& problem, const Device& device) {
  LaunchPlan result;  // the registry adds what it was made for
  if (core::nothing_to_write(problem)) return result;
  Reasons reasons = core::why_not(problem, "blackwell_dc", {DType::F16, DType::BF16, DType::E4M3},
                                  Approximate::Nothing, true);
  if (is_fp8(problem.dtype) && problem.num_splits > 1) {
    reasons.push_back("num_splits " + str(problem.num_splits) + " with " +
                      dtype_name(problem.dtype) +
                      " inputs: blackwell_dc splits the keys of 16-bit inputs only; leave "
                      "num_splits out or pass 1" +
                      core::USE_TORCH);
  }
  core::add_tma_reasons(problem, "blackwell_dc", true, reasons);
  if (!reasons.empty()) return reasons;
  const int64_t most_tiles = tiles_of(problem, smallest(FEW_VARIANTS, problem));
  if (most_tiles > core::GRID_LIMIT) return Reasons{core::grid_too_large(most_tiles)};
  const auto [chosen, splits] = choose(problem, device);
  if (chosen.shared_bytes > device.shared_per_block) {
    return Reasons{"shared memory: " + device.name + " gives a CTA " +
                   str(device.shared_per_block) + " bytes and blackwell_dc needs " +
                   str(chosen.shared_bytes) + "; use another GPU" + core::USE_TORCH};
  }
  const int64_t tiles = tiles_of(problem, chosen) * splits;
  const int64_t largest = std::max(tiles, splits > 1 ? core::combine_ctas(problem) : 0);
  if (largest > core::GRID_LIMIT) return Reasons{core::grid_too_large(largest)};

  Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  params.attention = core::params(problem);
  params.attention.heads_per_group = core::heads_per_group(problem, device);
  params.tiles = static_cast<int32_t>(tiles);
  params.partials.splits = 1;
  if (is_fp8(problem.dtype)) {
    if (!params.attention.transform_scores)
      params.attention.tanh_scale = static_cast<float>(problem.scale);
    params.descales = core::descales(problem);
    params.out_dtype = problem.out_dtype;
  }

  Launch launch;
  launch.kernel = kernel_name(chosen, problem.dtype);
  launch.image = image_of(chosen, problem.dtype);
  // One CTA per SM, all of whose tensor memory it takes, goes on to the next tile: that one's
  // products start while the last one's output is written. Or one pair of CTAs for two SMs.
  launch.grid = {chosen.ctas * std::min<int64_t>(tiles, device.sm_count / chosen.ctas), 1, 1};
  launch.cluster = {chosen.ctas, 1, 1};
  launch.block = {chosen.threads, 1, 1};
  launch.shared_bytes = chosen.shared_bytes;
  launch.params = core::bytes(params);
  launch.pointers = core::pointers(problem);
  for (const PointerSlot& slot : core::descale_pointers(problem, offsetof(Params, descales)))
    launch.pointers.push_back(slot);
  const auto map = [&](Operand operand, size_t offset, Swizzle swizzle, core::Box box) {
    launch.tensor_maps.push_back(core::tensor_map(problem, operand, offset, swizzle, box));
  };
  map(Operand::Q, offsetof(Params, q_map), chosen.q_swizzle, chosen.q_box);
  if (problem.nk > 0) {  // an empty k or v is never read
    map(Operand::K, offsetof(Params, k_map), chosen.q_swizzle, chosen.k_box);
    map(Operand::V, offsetof(Params, v_map), chosen.v_swizzle, chosen.v_box);
  }
  map(Operand::Out, offsetof(Params, out_map), chosen.out_swizzle, chosen.out_box);
  result.launches.push_back(std::move(launch));
  if (splits > 1) {
    core::split_keys(result, problem, splits, offsetof(Params, partials),
                     "blackwell_dc_combine_" + dtype_word(problem.dtype));
  }
  return result;
}

Notes notes(const LaunchPlan& plan) {
  if (plan.launches.empty()) return {{"launches", "none: there is nothing to write"}};
  const Launch& launch = plan.launches[0];
  const Variant* const found = by_kernel(launch.kernel, plan.problem.dtype);
  if (found == nullptr || launch.params.size() != sizeof(Params)) return {};
  const Variant& used = *found;
  Params params;
  std::memcpy(&params, launch.params.data(), sizeof params);
  const int splits = std::max(params.partials.splits, 1);
  const std::string halves = used.ctas == 2 ? ", half a block each" : "";
  const std::string stages =
      used.v_stages == 0 ? str(used.k_stages) + " that K and V share" + halves
                         : str(used.k_stages) + " of K, " + str(used.v_stages) + " of V" + halves;
  return {
      {"tile", str(used.block_q) + " query rows x " + str(used.block_k) + " keys, head_dim up to " +
                   str(used.head_dim) +
                   (used.head_dim == used.head_dim_v ? "" : " and " + str(used.head_dim_v))},
      {"products", used.ctas == 2 ? "2 CTAs: 256 rows each, 128 of either CTA (cta_group::2)"
                                  : "1 CTA: 128 rows each"},
      {"warps", std::string(used.tiles == 2 ? "8" : "4") +
                    " softmax, 4 correction, 1 each for products, loads and stores"},
      {"registers", str(used.registers.softmax) + " softmax, " + str(used.registers.correction) +
                        " correction, " + str(used.registers.other) + " others (setmaxnreg)"},
      {"stages", stages + ", " + str(used.barriers) + " barriers"},
      {"exponentials", str(used.polynomial_pairs) + " of 16 by polynomial"},
      {"CTAs", str(launch.grid[0]) + " for " + str(params.tiles / splits) + " tiles" +
                   (splits > 1 ? " x " + str(splits) + " shares" : "") + ", 1 per SM on " +
                   str(plan.device.sm_count) + " SMs" + (used.ctas == 2 ? ", in pairs" : "")},
      {"splits", splits == 1 ? "none"
                             : str(splits) + " shares of the keys of each tile, " +
                                   (plan.problem.num_splits > 0 ? "as asked for"
                                                                : "expected to be the fastest") +
                                   "; a second kernel combines them"},
      {"order", plan.problem.varlen
                    ? "by sequence, last row tiles first"
                    : "last row tiles first, " + str(params.attention.heads_per_group) +
                          " heads at a time, whose keys stay in L2"},
  };
}

}  // namespace archflash::blackwell_dc
