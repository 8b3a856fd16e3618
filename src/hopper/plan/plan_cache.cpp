#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/planning/core_set.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/cache/cache_params.h"
#include "hopper/params.h"
#include "hopper/plan/cache_maps.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {
namespace {

// The copies of K and of V in the workspace, one behind the other.
struct ConvertedCache {
  int64_t k_row, v_row;  // elements of all heads
  int64_t rows;
  int64_t k_bytes, v_bytes;

  explicit ConvertedCache(const Problem& problem)
      : k_row(problem.heads_kv * problem.d),
        v_row(problem.heads_kv * problem.dv),
        rows(problem.batch * problem.nk),
        k_bytes(rows * k_row * dtype_bytes(problem.dtype)),
        v_bytes(rows * v_row * dtype_bytes(problem.dtype)) {}
};

// Adds why a cache is not converted: lengths are on the device, so there must be room for all rows
// that the sequences may have.
void refuse_conversion(const Problem& given, Reasons& reasons) {
  constexpr int64_t MOST_BYTES = int64_t{2} << 30;
  if (!converts_cache(given)) return;
  const ConvertedCache copies(given);
  const int64_t bytes = copies.k_bytes + copies.v_bytes;
  if (bytes <= MOST_BYTES) return;
  reasons.push_back(std::string("a cache of dtype ") + dtype_name(given.kv_dtype) + " and up to " +
                    std::to_string(given.nk) + " keys in each of " + std::to_string(given.batch) +
                    " sequences: hopper converts it into a workspace for all of them, " +
                    std::to_string(bytes >> 20) + " MiB of at most " +
                    std::to_string(MOST_BYTES >> 20) + "; leave the implementation out" +
                    core::USE_TORCH);
}

// Lets a plan convert the cache first: its launches read the copies. few_rows:
// CacheParams::few_rows.
void convert_cache(LaunchPlan& plan, const Problem& given, int32_t few_rows) {
  if (given.nk == 0) return;
  const ConvertedCache copies(given);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t k_start = workspace.add(copies.k_bytes), v_start = workspace.add(copies.v_bytes);
  plan.workspace_bytes = workspace.bytes();
  const auto redirect = [&](auto& slot) {
    if (slot.operand != Operand::K && slot.operand != Operand::V) return;
    slot.addend += slot.operand == Operand::K ? k_start : v_start;
    slot.operand = Operand::Workspace;
  };
  for (Launch& launch : plan.launches) {
    std::ranges::for_each(launch.pointers, redirect);
    std::ranges::for_each(launch.tensor_maps, redirect);
  }

  ConvertParams params;
  core::init_params(given, params);
  params.cache = core::kv_cache(given);
  params.cache_dtype = given.kv_dtype;
  params.attention_chunk = core::chunk_of(given);
  params.few_rows = few_rows;
  params.row_blocks = static_cast<int32_t>(core::ceil_div(given.nk, int64_t{CONVERTED_ROWS}));
  const std::string word = core::dtype_word(given.dtype);
  Launch first;
  first.kernel = "hopper_convert_cache_" + word;
  first.image = "hopper/convert_cache_" + word;
  first.grid = {2 * given.batch * params.row_blocks, 1, 1};
  first.block = {32 * CONVERT_WARPS, 1, 1};
  first.params = core::bytes(params);
  for (const PointerSlot& slot : core::pointers(given)) {
    if (slot.operand == Operand::K || slot.operand == Operand::V ||
        slot.operand == Operand::CuSeqlensQ)
      first.pointers.push_back(slot);
  }
  add_pointers(first, core::kv_cache_pointers(given, offsetof(ConvertParams, cache)));
  const auto add = [&](size_t field, int64_t start) {
    add_pointer(first, Operand::Workspace, field, start);
  };
  add(offsetof(ConvertParams, k_gmem), k_start);
  add(offsetof(ConvertParams, v_gmem), v_start);
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

}  // namespace

bool converts_cache(const Problem& given) {
  return given.kv_cache && is_fp8(given.kv_dtype) && !is_fp8(given.dtype) && given.packed_rows == 0;
}

Problem as_kernels_read_it(const Problem& given) {
  Problem problem = given;
  if (!converts_cache(given)) return problem;
  const ConvertedCache copies(given);
  problem.kv_dtype = given.dtype;
  problem.page_size = 0;
  problem.cache_batch = given.batch;
  problem.cache_batch_idx = false;
  problem.k = {.batch = given.nk * copies.k_row, .head = given.d, .row = copies.k_row};
  problem.v = {.batch = given.nk * copies.v_row, .head = given.dv, .row = copies.v_row};
  return problem;
}

void refuse_cached_call(const Problem& problem, const Problem& given, Reasons& reasons) {
  refuse_conversion(given, reasons);
  // Rows of q that share a head of K, as many as tiles of powers of two would have. So few are
  // faster on the decoding kernels of ampere, measured on an H200 (docs/lab/hopper.md).
  const uint64_t most_decoded = converts_cache(given) ? 128 : problem.page_size > 0 ? 16 : 32;
  const auto add = [&](const std::string& text) { reasons.push_back(text + core::USE_TORCH); };
  const int64_t rows = problem.varlen ? problem.max_seqlen_q : problem.nq;
  const auto power_of_two = [](int64_t x) { return std::bit_ceil(static_cast<uint64_t>(x)); };
  const int64_t heads = problem.heads_q / std::max<int64_t>(problem.heads_kv, 1);
  if (rows != UNKNOWN && power_of_two(rows) * power_of_two(heads) <= most_decoded) {
    add(std::to_string(rows) + " query row" + (rows == 1 ? "" : "s") + " of " +
        std::to_string(heads) + " heads for a head of a KV cache: hopper takes more than " +
        std::to_string(most_decoded) + " such rows; leave the implementation out");
  }
  if (is_fp8(problem.dtype))
    add(std::string("a KV cache with q of dtype ") + dtype_name(problem.dtype) +
        ": hopper reads caches of float16 and bfloat16; convert q, k and v");
  if (problem.page_size % FEWEST_BOX_ROWS != 0) {
    add("rows of a cache in pages of " + std::to_string(problem.page_size) +
        ": hopper copies pages of a multiple of " + std::to_string(FEWEST_BOX_ROWS) +
        " rows; choose another page size");
  }
  refuse_cache(problem, "rows of a cache", reasons);
}

void tell_of_cache(CacheParams& params, Launch& launch, const Problem& problem,
                   const KernelTile& tile) {
  params.cache = core::kv_cache(problem);
  params.attention_chunk = core::chunk_of(problem);
  params.slopes = core::alibi_slopes(problem);
  if (problem.alibi_slopes) {
    core::always_transform_scores(problem, params.call.attention);
    constexpr size_t SLOPES = offsetof(CacheParams, slopes) + offsetof(AlibiSlopes, gmem);
    add_pointer(launch, Operand::AlibiSlopes, SLOPES);
  }
  params.box_rows = cache_box_rows(problem, tile.block_k);
  if (tile.grouped_slabs > 0) {
    params.k_page_groups = page_groups(problem, Operand::K).value();
    params.v_page_groups = page_groups(problem, Operand::V).value();
  }
  add_pointers(launch, core::kv_cache_pointers(problem, offsetof(CacheParams, cache)));
  if (problem.nk == 0) {  // an empty cache is never read
    std::erase_if(launch.tensor_maps,
                  [](const TensorMapSpec& map) { return map.operand != Operand::Q; });
  }
  for (TensorMapSpec& map : launch.tensor_maps) {
    if (map.operand == Operand::Q) continue;
    if (tile.grouped_slabs > 0) {
      map = grouped_map(problem, map.operand, map.offset, tile.grouped_slabs, params.box_rows);
      continue;
    }
    map = cache_map(problem, map.operand, map.offset,
                    map.operand == Operand::K ? tile.k_box : tile.v_box, params.box_rows);
  }
}

Reasons read_cache(LaunchPlan& plan, const Problem& problem, const Problem& given,
                   const Device& device, const KernelTile& tile) {
  Launch& launch = plan.launches[0];
  auto params = extend_params<CacheParams>(launch);
  tell_of_cache(params, launch, problem, tile);
  if (converts_cache(given)) {
    AttentionParams& attention = params.call.attention;
    // For descales that leave no normal scale of the exponents.
    if (!attention.transform_scores) attention.rule.tanh_scale = static_cast<float>(given.scale);
    params.call.descales = core::descales(given);
  }
  // A combining kernel writes all rows.
  std::optional<mma_sync::FewRowsPlan> few;
  if (plan.launches.size() == 1) few = mma_sync::plan_few_rows_apart(given, device);
  if (few) params.few_rows = static_cast<int32_t>(few->rows);
  launch.image = std::string("hopper/cache_") + core::dtype_word(problem.dtype);
  launch.params = core::bytes(params);
  if (converts_cache(given)) convert_cache(plan, given, params.few_rows);
  if (few) mma_sync::add_few_rows(plan, std::move(*few));
  const std::string word = core::dtype_word(problem.dtype);
  const std::string append = "hopper_append_" + word + (converts_cache(given) ? "_fp8" : "");
  return core::add_append(plan, given, "hopper/cache_" + word, append);
}

void note_converted_cache(const Problem& given, Notes& lines) {
  if (!converts_cache(given)) return;
  const ConvertedCache copies(given);
  lines.emplace_back("cache", std::string("K and V become ") + dtype_name(given.dtype) +
                                  " before the attention kernel reads them, in a workspace of " +
                                  std::to_string((copies.k_bytes + copies.v_bytes) >> 20) +
                                  " MiB for all rows that the sequences may have");
}

}  // namespace archflash::hopper
