#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/masked_config.cuh"
#include "hopper/masked_params.h"
#include "hopper/params.h"
#include "hopper/plan_parts.h"

namespace archflash::hopper {
namespace {

// The blocks of the summary of attn_mask, or else of key_ranges, which has size 1 along dimensions
// of stride 0.
struct SummaryBlocks {
  int64_t batches, heads, row_blocks, key_blocks;

  explicit SummaryBlocks(const Problem& problem)
      : batches(strides(problem).batch == 0 ? 1 : problem.batch),
        heads(strides(problem).head == 0 ? 1 : problem.heads_q),
        row_blocks(core::ceil_div(problem.nq, MASK_BLOCK)),
        key_blocks(core::ceil_div(problem.nk, MASK_BLOCK)) {}

  int64_t count() const { return batches * heads * row_blocks * key_blocks; }
  int64_t bits_bytes() const { return count() * SUMMARY_WORDS * 4; }

  static const Strides& strides(const Problem& problem) {
    return problem.mask != 0 ? problem.mask_strides : problem.range_strides;
  }
};

// Whether each element of an added attn_mask is read for one head only: then it needs no summary.
bool heads_have_masks(const Problem& problem) {
  return problem.mask > 1 && (problem.mask_strides.head != 0 || problem.heads_q == 1);
}

// The parts of the workspace that a launch is given: `field` is the offset of a pointer in its
// parameter.
struct FieldsInWorkspace {
  Launch& launch;
  core::Workspace workspace{};

  void add(size_t field, int64_t bytes) {
    const auto slot = static_cast<int32_t>(field);
    add_pointer(launch, Operand::Workspace, slot, workspace.add(bytes));
  }
};

// Puts a kernel before that of `plan`, from the same image and with the same parameter.
void put_first(LaunchPlan& plan, const Problem& problem, const std::string& kernel, int64_t ctas,
               int32_t threads) {
  const Launch& last = plan.launches[0];
  Launch first;
  first.kernel = kernel + core::dtype_word(problem.dtype);
  first.image = last.image;
  first.grid = {ctas, 1, 1};
  first.block = {threads, 1, 1};
  first.params = last.params;
  first.pointers = last.pointers;
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

// How many of the last tiles of a call with block_mask are ordered by their work: those of two
// rounds. Under a causal mask or a window the tiles' positions say more of it than the table.
int64_t ordered_tiles(const LaunchPlan& plan, const Problem& problem, const KernelTile& tile) {
  constexpr int64_t ROUNDS = 2;
  const int64_t tiles = plan.tile.tiles, ctas = plan.tile.ctas * std::max(tile.streams, 1);
  if (!problem.block_mask || tiles <= ctas || !core::equal_tiles(problem) || problem.varlen ||
      core::packed_heads(tile).count > 1)
    return 0;
  return std::min({tiles, ROUNDS * ctas, int64_t{MOST_ORDERED}});
}

// The parameter of the plan's kernel when it has masks, too.
template <class AllParams>
AllParams with_masks(LaunchPlan& plan, const Problem& problem, const char* image = "masked_") {
  Launch& launch = plan.launches[0];
  launch.image = std::string("hopper/") + image + core::dtype_word(problem.dtype);
  add_pointers(launch, core::mask_pointers(problem, offsetof(AllParams, masks)));
  auto params = extend_params<AllParams>(launch);
  params.masks = core::mask_params(problem);
  return params;
}

// For kernels that read the masks themselves. Returns whether the last tiles are ordered.
bool add_masks_in_place(LaunchPlan& plan, const Problem& problem, const KernelTile& tile) {
  Launch& launch = plan.launches[0];
  auto params = with_masks<MaskedParams>(plan, problem, tile.streams > 0 ? "table_" : "masked_");
  const int64_t ordered = ordered_tiles(plan, problem, tile);
  params.ordered = static_cast<int32_t>(ordered);
  launch.params = core::bytes(params);
  if (ordered == 0) return false;
  FieldsInWorkspace fields{launch};
  fields.add(offsetof(MaskedParams, call) + offsetof(Params, taken_gmem),
             sizeof(*Params::taken_gmem));
  fields.add(offsetof(MaskedParams, order_gmem), ordered * sizeof(*MaskedParams::order_gmem));
  plan.workspace_bytes = fields.workspace.bytes();
  launch.uses_pdl = true;
  put_first(plan, problem, "hopper_order_tiles_", core::ceil_div(ordered, int64_t{ORDER_TILES}),
            ORDER_THREADS);
  // Tables alone have attention kernels in an image of their own, but no other order.
  plan.launches[0].image = std::string("hopper/masked_") + core::dtype_word(problem.dtype);
  return true;
}

// For kernels that read a summary of a mask, which another one makes first, where they need one.
void add_summary(LaunchPlan& plan, const Problem& problem) {
  const SummaryBlocks blocks(problem);
  Launch& last = plan.launches[0];
  auto params = with_masks<SummarizedParams>(plan, problem);
  params.mask_batches = static_cast<int32_t>(blocks.batches);
  params.mask_heads = static_cast<int32_t>(blocks.heads);
  params.row_blocks = static_cast<int32_t>(blocks.row_blocks);
  params.key_blocks = static_cast<int32_t>(blocks.key_blocks);
  last.params = core::bytes(params);
  FieldsInWorkspace fields{last};
  fields.add(offsetof(SummarizedParams, call) + offsetof(Params, taken_gmem),
             sizeof(*Params::taken_gmem));
  if (problem.mask > 1)
    last.tensor_maps.push_back(
        mask_map(problem, plan.tile.block_q, offsetof(SummarizedParams, mask_map)));
  if (problem.alibi_slopes || heads_have_masks(problem)) {  // nothing to summarize
    plan.workspace_bytes = fields.workspace.bytes();
    plan.zeroed_bytes = sizeof(*Params::taken_gmem);
    plan.tile.counts_tiles = true;
    return;
  }
  const int64_t row_blocks = blocks.count() / blocks.key_blocks;
  fields.add(offsetof(SummarizedParams, states_gmem), blocks.count());
  if (problem.mask != 0) {
    fields.add(offsetof(SummarizedParams, bits_gmem), blocks.bits_bytes());
  } else {
    fields.add(offsetof(SummarizedParams, seen_keys_gmem),
               row_blocks * static_cast<int64_t>(sizeof(SeenKeys)));
  }
  plan.workspace_bytes = fields.workspace.bytes();
  // The bits of attn_mask are read as memory that nothing writes while the kernel runs.
  last.uses_pdl = problem.mask == 0;
  if (problem.mask != 0) {
    put_first(plan, problem, "hopper_summarize_mask_", blocks.count(), SUMMARY_THREADS);
  } else {
    put_first(plan, problem, "hopper_summarize_ranges_", row_blocks, SUMMARY_THREADS);
  }
}

}  // namespace

TensorMapSpec mask_map(const Problem& problem, int64_t rows, size_t offset) {
  const Strides& strides = problem.mask_strides;
  const int64_t sizes[] = {problem.nq, strides.head == 0 ? 1 : problem.heads_q,
                           strides.batch == 0 ? 1 : problem.batch};
  const int64_t steps[] = {strides.row, strides.head, strides.batch};
  constexpr int64_t UNIT_BYTES = 16;  // a stride along which nothing moves
  TensorMapSpec elements{};
  elements.operand = Operand::Mask;
  elements.offset = static_cast<int32_t>(offset);
  elements.dtype = problem.dtype;
  elements.swizzle = Swizzle::B128;
  elements.dims = {problem.nk};
  for (int i = 0; i < 3; ++i) {
    elements.dims.push_back(sizes[i]);
    elements.strides.push_back(steps[i] == 0 ? UNIT_BYTES : steps[i] * 2);
  }
  elements.box = {MASK_BLOCK, static_cast<int32_t>(rows), 1, 1};
  return elements;
}

bool tma_reads_mask(const Problem& problem) {
  constexpr int64_t UNIT = 8;  // elements of 16 bits in the 16 bytes that TMA's strides count
  constexpr int64_t LARGEST_STRIDE = int64_t{1} << 38;
  if (problem.mask <= 1 || dtype_bytes(static_cast<DType>(problem.mask - 2)) != 2) return false;
  const Strides& strides = problem.mask_strides;
  const bool in_units = strides.batch % UNIT == 0 && strides.head % UNIT == 0 &&
                        strides.row % UNIT == 0 && problem.mask_align % (2 * UNIT) == 0;
  const int64_t largest = std::max({strides.batch, strides.head, strides.row});
  return in_units && strides.row != 0 && problem.mask_key == 1 && largest < LARGEST_STRIDE;
}

bool add_masks(LaunchPlan& plan, const Problem& problem, const KernelTile& tile) {
  plan.tile.summarizes_masks = tile.dense;
  if (!tile.dense) return add_masks_in_place(plan, problem, tile);
  add_summary(plan, problem);
  return true;
}

bool reads_table(const Problem& problem) {
  return problem.block_mask && problem.mask == 0 && problem.key_ranges == 0 &&
         !problem.alibi_slopes && !problem.varlen &&
         !core::attention_params(problem).transform_scores;
}

bool reads_summary(const Problem& problem) {
  constexpr int64_t MOST_SUMMARY_BYTES = int64_t{1} << 30;
  const int given =
      (problem.mask != 0) + (problem.key_ranges != 0) + (problem.alibi_slopes ? 1 : 0);
  if (given != 1 || problem.block_mask) return false;
  if (problem.alibi_slopes) return !problem.varlen;
  const SummaryBlocks blocks(problem);
  const int64_t bytes = problem.mask != 0 ? blocks.bits_bytes() : blocks.count();
  if (blocks.count() == 0) return false;
  if (bytes > MOST_SUMMARY_BYTES && !heads_have_masks(problem)) return false;
  return problem.mask <= 1 || tma_reads_mask(problem);
}

}  // namespace archflash::hopper
