#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_params.h"
#include "hopper/params.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {
namespace {

// Whether the rows of attn_mask are all the same one.
bool repeats_row(const Problem& problem) {
  return problem.mask != 0 && problem.mask_strides.row == 0;
}

// The blocks of the summary of attn_mask, or else of key_ranges, which has size 1 along dimensions
// of stride 0, but for the rows of key_ranges.
struct SummaryBlocks {
  int64_t batches, heads, row_blocks, key_blocks;

  explicit SummaryBlocks(const Problem& problem)
      : batches(strides(problem).batch == 0 ? 1 : problem.batch),
        heads(strides(problem).head == 0 ? 1 : problem.heads_q),
        row_blocks(repeats_row(problem) ? 1 : core::ceil_div(problem.nq, MASK_BLOCK)),
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

  // Returns where the part starts.
  int64_t add(size_t field, int64_t bytes) {
    const int64_t start = workspace.add(bytes);
    add_pointer(launch, Operand::Workspace, static_cast<int32_t>(field), start);
    return start;
  }
};

// Puts a kernel of hopper/summarize_<dtype> before that of `plan`, with the same parameter.
void put_first(LaunchPlan& plan, const Problem& problem, const std::string& kernel, int64_t ctas,
               int32_t threads) {
  const Launch& last = plan.launches[0];
  Launch first;
  first.kernel = kernel + core::dtype_word(problem.dtype);
  first.image = std::string("hopper/summarize_") + core::dtype_word(problem.dtype);
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
  return true;
}

// Whether a kernel summarizes the mask before. A call whose CTAs pass few keys is done sooner
// without one: they look at what is added themselves.
bool needs_summary(const LaunchPlan& plan, const Problem& problem) {
  constexpr int64_t FEW_KEYS = 512;
  if (problem.alibi_slopes || heads_have_masks(problem)) return false;
  if (copies_mask(problem)) return true;
  const int64_t rounds = core::ceil_div(plan.tile.tiles, plan.tile.ctas);
  return problem.mask <= 1 || rounds * problem.nk > FEW_KEYS;
}

// Whether the summary says of blocks of the lowest elements alone which rows need none of them. A
// mask of each head is read once, so that this would cost more than it saves; fp16 has no such
// elements; and a high element that a row's position hides would not count.
bool tells_high_rows(const Problem& problem) {
  const bool sees_all = problem.window_left == UNBOUNDED && problem.window_right == UNBOUNDED;
  return problem.mask > 1 && core::added_dtype(problem) != DType::F16 && sees_all &&
         !heads_have_masks(problem);
}

// For kernels that read a summary of a mask, which another one makes first, where they need one.
void add_summary(LaunchPlan& plan, const Problem& problem, const Device& device,
                 const KernelTile& tile) {
  const SummaryBlocks blocks(problem);
  Launch& last = plan.launches[0];
  auto params = with_masks<SummarizedParams>(plan, problem);
  params.mask_batches = static_cast<int32_t>(blocks.batches);
  params.mask_heads = static_cast<int32_t>(blocks.heads);
  params.row_blocks = static_cast<int32_t>(blocks.row_blocks);
  params.key_blocks = static_cast<int32_t>(blocks.key_blocks);
  constexpr float LOG2_E = 1.4426950408889634f;
  params.factor = LOG2_E / params.call.attention.exp2_scale;
  last.params = core::bytes(params);
  FieldsInWorkspace fields{last};
  constexpr size_t taken = offsetof(SummarizedParams, call) + offsetof(Params, taken_gmem);
  constexpr size_t map = offsetof(SummarizedParams, mask_map);
  const int64_t rows = repeats_row(problem) ? 1 : plan.tile.block_q;
  const bool summarizes = needs_summary(plan, problem);
  std::optional<CopiedMask> copy;
  if (copies_mask(problem) && !tile.copies_own) copy.emplace(problem);
  int64_t copied = 0;
  if (copy) {
    if (summarizes) {
      params.copied_row = copy->row_words;
      params.copied_rows = static_cast<int32_t>(copy->rows);
      last.params = core::bytes(params);
      copied = fields.add(offsetof(SummarizedParams, copied_gmem), copy->bytes());
    } else {
      copied = fields.workspace.add(copy->bytes());
    }
    last.tensor_maps.push_back(copy->map(problem, rows, map, copied));
  } else if (problem.mask > 1 && !tile.copies_own) {
    last.tensor_maps.push_back(mask_map(problem, rows, map));
  }
  if (!summarizes) {
    last.uses_pdl = copy || fills_places(plan, device);
    plan.tile.counts_tiles = plan.tile.tiles > plan.tile.ctas;
    std::optional<int64_t> counter;
    if (plan.tile.counts_tiles) counter = fields.add(taken, sizeof(*Params::taken_gmem));
    plan.workspace_bytes = fields.workspace.bytes();
    if (copy) {
      plan.launches.insert(plan.launches.begin(), copy->launch(problem, copied, counter));
    } else if (counter) {
      clear_counter(plan, problem, *counter);
    }
    return;
  }
  fields.add(taken, sizeof(*Params::taken_gmem));
  const int64_t row_blocks = blocks.count() / blocks.key_blocks;
  fields.add(offsetof(SummarizedParams, states_gmem), blocks.count());
  if (problem.mask != 0) {
    fields.add(offsetof(SummarizedParams, bits_gmem), blocks.bits_bytes());
    if (tells_high_rows(problem))
      fields.add(offsetof(SummarizedParams, high_rows_gmem), blocks.count() * HIGH_BYTES);
  } else {
    fields.add(offsetof(SummarizedParams, seen_keys_gmem),
               row_blocks * static_cast<int64_t>(sizeof(SeenKeys)));
  }
  plan.workspace_bytes = fields.workspace.bytes();
  last.uses_pdl = true;
  if (problem.mask != 0) {
    const bool wide = problem.mask > 1 && core::added_dtype(problem) == DType::F32;
    const char* const what = wide ? "wide_" : tells_high_rows(problem) ? "low_" : "";
    put_first(plan, problem, std::string("hopper_summarize_") + what + "mask_", blocks.count(),
              SUMMARY_THREADS);
  } else {
    put_first(plan, problem, "hopper_summarize_ranges_", row_blocks, SUMMARY_THREADS);
  }
  plan.launches[0].uses_pdl = true;
}

}  // namespace

bool adds_alone(const Problem& problem) {
  return heads_have_masks(problem) && dtype_bytes(core::added_dtype(problem)) == 2 &&
         !core::attention_params(problem).transform_scores;
}

bool copies_own(const Problem& problem) {
  constexpr int64_t PAIR = 2, PAIR_BYTES = 4;
  const Strides& strides = problem.mask_strides;
  const bool in_pairs = strides.batch % PAIR == 0 && strides.head % PAIR == 0 &&
                        strides.row % PAIR == 0 && problem.mask_align % PAIR_BYTES == 0;
  const bool alone = strides.batch != 0 || problem.batch == 1;
  // Above 64 columns the others have one CTA on an SM, and take longer even where TMA reads the
  // mask or one copy serves all sequences (docs/lab/hopper.md).
  constexpr int64_t COLUMNS = 64, MOST_KEYS = 512;
  const bool wide = std::max(problem.d, problem.dv) > COLUMNS && problem.nk <= MOST_KEYS;
  return adds_alone(problem) && (wide || (copies_mask(problem) && alone)) && in_pairs &&
         problem.mask_key == 1 && strides.row != 0 && problem.nq >= MASK_BLOCK;
}

bool copies_mask(const Problem& problem) {
  if (problem.mask <= 1 || tma_reads_mask(problem)) return false;
  return dtype_bytes(core::added_dtype(problem)) == 2;
}

CopiedMask::CopiedMask(const Problem& problem)
    : batches(problem.mask_strides.batch == 0 ? 1 : problem.batch),
      heads(problem.mask_strides.head == 0 ? 1 : problem.heads_q),
      rows(repeats_row(problem) ? 1 : problem.nq) {
  constexpr int64_t UNIT = 8, OF_WORD = 2;  // elements
  row_words = core::ceil_div(problem.nk, UNIT) * UNIT / OF_WORD;
}

int64_t CopiedMask::bytes() const { return batches * heads * rows * row_words * 4; }

TensorMapSpec CopiedMask::map(const Problem& problem, int64_t box_rows, size_t offset,
                              int64_t start) const {
  Problem copied = problem;
  Strides& strides = copied.mask_strides;
  const int64_t row = 2 * row_words, head = row * rows;
  strides.row = rows == 1 ? 0 : row;
  strides.head = heads == 1 ? 0 : head;
  strides.batch = batches == 1 ? 0 : heads * head;
  TensorMapSpec map = mask_map(copied, box_rows, offset);
  map.operand = Operand::Workspace;
  map.addend = start;
  return map;
}

Launch CopiedMask::launch(const Problem& problem, int64_t start,
                          std::optional<int64_t> counter) const {
  CopiedMaskParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  const Strides& strides = problem.mask_strides;
  params.mask_batch = strides.batch, params.mask_head = strides.head;
  params.mask_row = strides.row, params.mask_key = problem.mask_key;
  params.row_words = row_words;
  params.batches = static_cast<int32_t>(batches), params.heads = static_cast<int32_t>(heads);
  params.rows = static_cast<int32_t>(rows), params.keys = static_cast<int32_t>(problem.nk);
  Launch launch;
  launch.kernel = std::string("hopper_copy_mask_") + core::dtype_word(problem.dtype);
  launch.image = std::string("hopper/summarize_") + core::dtype_word(problem.dtype);
  launch.grid = {core::ceil_div(batches * heads * rows, int64_t{COPY_ROWS}), 1, 1};
  launch.block = {32 * COPY_WARPS, 1, 1};
  launch.uses_pdl = true;
  launch.params = core::bytes(params);
  add_pointer(launch, Operand::Mask, offsetof(CopiedMaskParams, mask_gmem), 0);
  add_pointer(launch, Operand::Workspace, offsetof(CopiedMaskParams, copied_gmem), start);
  if (counter)
    add_pointer(launch, Operand::Workspace, offsetof(CopiedMaskParams, taken_gmem), *counter);
  return launch;
}

TensorMapSpec mask_map(const Problem& problem, int64_t rows, size_t offset) {
  const Strides& strides = problem.mask_strides;
  const int64_t sizes[] = {strides.row == 0 ? 1 : problem.nq,
                           strides.head == 0 ? 1 : problem.heads_q,
                           strides.batch == 0 ? 1 : problem.batch};
  const int64_t steps[] = {strides.row, strides.head, strides.batch};
  constexpr int64_t UNIT_BYTES = 16;  // a stride along which nothing moves
  TensorMapSpec elements{};
  elements.operand = Operand::Mask;
  elements.offset = static_cast<int32_t>(offset);
  const auto dtype = core::added_dtype(problem);
  elements.dtype = dtype;
  elements.swizzle = Swizzle::B128;
  elements.dims = {problem.nk};
  for (int i = 0; i < 3; ++i) {
    elements.dims.push_back(sizes[i]);
    const bool once = sizes[i] == 1 && steps[i] == 0;
    elements.strides.push_back(once ? UNIT_BYTES : steps[i] * dtype_bytes(dtype));
  }
  // As many keys as fill a swizzle span.
  elements.box = {2 * MASK_BLOCK / dtype_bytes(dtype), static_cast<int32_t>(rows), 1, 1};
  return elements;
}

bool tma_reads_mask(const Problem& problem) {
  constexpr int64_t UNIT_BYTES = 16;  // that TMA's strides count
  constexpr int64_t LARGEST_STRIDE = int64_t{1} << 37;
  if (problem.mask <= 1) return false;
  const int64_t unit = UNIT_BYTES / dtype_bytes(core::added_dtype(problem));
  const Strides& strides = problem.mask_strides;
  const bool in_units = strides.batch % unit == 0 && strides.head % unit == 0 &&
                        strides.row % unit == 0 && problem.mask_align % UNIT_BYTES == 0;
  const int64_t largest = std::max({strides.batch, strides.head, strides.row});
  return in_units && problem.mask_key == 1 && largest < LARGEST_STRIDE;
}

bool add_masks(LaunchPlan& plan, const Problem& problem, const Device& device,
               const KernelTile& tile) {
  plan.tile.summarizes_masks = tile.dense;
  if (!tile.dense) return add_masks_in_place(plan, problem, tile);
  add_summary(plan, problem, device, tile);
  return true;
}

bool reads_table(const Problem& problem) {
  const bool of_keys = problem.mask == 1 && repeats_row(problem);
  return problem.block_mask && (problem.mask == 0 || of_keys) && problem.key_ranges == 0 &&
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
  if (copies_mask(problem)) return CopiedMask(problem).bytes() <= CopiedMask::MOST_BYTES;
  return problem.mask <= 1 || tma_reads_mask(problem);
}

}  // namespace archflash::hopper
