#include "hopper/plan/plan_backward_masks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/workspace.h"
#include "hopper/backward/backward_params.h"
#include "hopper/plan/plan_backward_order.h"
#include "hopper/plan/plan_kept_scores.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {
namespace {

// For block_mask.
constexpr TableTile TABLE_TILES[] = {
    {backward_tile<BackwardD64Table>("d64_short", nullptr, nullptr), "d64_table"},
    {backward_tile<BackwardD128Table>("d128", nullptr, nullptr), "d128_table"},
};

// For a dense attn_mask, and for one whose gradient is wanted.
constexpr TableTile DENSE_TILES[] = {
    {backward_tile<BackwardD64Dense<>>("d64", nullptr, nullptr), "d64_dense"},
    {backward_tile<BackwardD128Dense<>>("d128", nullptr, nullptr), "d128_dense"},
    {backward_tile<BackwardD256Dense<>>("d256", nullptr, nullptr), "d256_dense"},
};
constexpr TableTile BIAS_TILES[] = {
    {backward_tile<BackwardD64Dense<true>>("d64", nullptr, nullptr), "d64_dense_bias"},
    {backward_tile<BackwardD128Dense<true>>("d128", nullptr, nullptr), "d128_dense_bias"},
    {backward_tile<BackwardD256Dense<true>>("d256", nullptr, nullptr), "d256_dense_bias"},
};
// For one whose gradient is wanted, dS of which is kept for a launch behind.
constexpr TableTile KEPT_TILES[] = {
    {backward_tile<BackwardD64DenseKept>("d64", nullptr, nullptr), "d64_dense_kept"},
    {backward_tile<BackwardD128DenseKept>("d128", nullptr, nullptr), "d128_dense_kept"},
};

bool keeps_mask_gradient(const BackwardProblem& problem) {
  const int head_dim = KEPT_TILES[std::size(KEPT_TILES) - 1].tile.head_dim;
  return problem.call.d <= head_dim && problem.call.dv <= head_dim && keeps_scores(problem);
}

// For one that is added, whose elements TMA brings.
constexpr TableTile ADDED_TILE = {backward_tile<BackwardD64Added>("d64", nullptr, nullptr),
                                  "d64_added"};
constexpr TableTile ADDED_KEPT_TILE = {backward_tile<BackwardD64AddedKept>("d64", nullptr, nullptr),
                                       "d64_added_kept"};

// The blocks of a dense attn_mask, with size 1 along dimensions of stride 0.
struct DenseBlocks {
  int64_t batches, heads, row_blocks, key_blocks;

  explicit DenseBlocks(const Problem& call)
      : batches(call.mask_strides.batch == 0 ? 1 : call.batch),
        heads(call.mask_strides.head == 0 ? 1 : call.heads_q),
        row_blocks(call.mask_strides.row == 0 ? 1 : core::ceil_div(call.nq, MASK_BLOCK)),
        key_blocks(core::ceil_div(call.nk, MASK_BLOCK)) {}

  int64_t count() const { return batches * heads * row_blocks * key_blocks; }
};

constexpr int64_t BITS_BYTES = 4;  // of a block's bits, for each thread that reads it

// The bytes of what is added by a block.
int64_t added_bytes(const Problem& call) {
  if (call.mask <= 1) return 0;
  return int64_t{MASK_BLOCK} * MASK_BLOCK * dtype_bytes(static_cast<DType>(call.mask - 2));
}

// Gives the main launch of `plan` the parameter `Params` of a kernel whose CTAs list their rounds
// in the workspace. Returns the parameter, which the caller completes.
template <class Params>
Params add_lists(LaunchPlan& plan, Launch& main, const Problem& call, const BackwardTile& tile) {
  Params params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main.params.data(), sizeof params.call);
  params.masks = core::mask_params(call);
  const int64_t rounds =
      core::ceil_div(call.nq, tile.round_rows) * (call.heads_q / call.heads_kv) + 1;
  params.rounds_of_cta = static_cast<int32_t>(rounds);
  add_pointers(main, core::mask_pointers(call, offsetof(Params, masks)));
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t lists = workspace.add(main.grid[0] * rounds * int64_t{sizeof(device::ListedRound)});
  plan.workspace_bytes = workspace.bytes();
  add_pointer(main, Operand::Workspace, offsetof(Params, rounds_gmem), lists);
  return params;
}

// Whether the tiles of each head are ordered by their work: where some come when others have ended,
// and none waits for another. Under a causal mask they come by their rows, and many rounds of tiles
// gain nothing (docs/lab/hopper.md).
bool orders_tiles(const BackwardProblem& problem, const BackwardTile& tile, const Device& device) {
  constexpr int64_t MOST_ROUNDS = 10;
  const Problem& call = problem.call;
  const int64_t tiles = core::ceil_div(call.nk, tile.rows);
  const int64_t ctas = int64_t{tile.ctas_per_sm} * device.sm_count;
  const int64_t all = call.batch * call.heads_kv * tiles;
  return !problem.deterministic && !is_windowed(call) && call.nq > 0 && tiles > 1 &&
         tiles <= MOST_ORDERED_TILES && all > ctas && all <= MOST_ROUNDS * ctas;
}

// Turns the main launch of `plan` into that of a kernel for tables of blocks, and the first one
// into one that orders their tiles.
void add_block_mask(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile,
                    const Device& device) {
  using P = ListingBackwardParams;
  Launch* const main = main_launch(plan);
  if (main == nullptr) return;
  const Problem& call = problem.call;
  P params = add_lists<P>(plan, *main, call, tile);
  params.tile_blocks = static_cast<int32_t>(tile.rows / MASK_BLOCK);
  main->params = core::bytes(params);
  main->image = std::string("hopper/bwd_table_") + core::dtype_word(call.dtype);
  Launch& first = plan.launches.front();
  if (&first == main || !orders_tiles(problem, tile, device)) return;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t tiles = core::ceil_div(call.nk, tile.rows);
  const int64_t order =
      workspace.add(call.batch * call.heads_kv * tiles * int64_t{sizeof(*params.order_gmem)});
  plan.workspace_bytes = workspace.bytes();
  add_pointer(*main, Operand::Workspace, offsetof(P, order_gmem), order);
  add_pointer(first, Operand::Workspace, offsetof(P, order_gmem), order);
  add_pointers(first, core::mask_pointers(call, offsetof(P, masks)));
  std::memcpy(static_cast<void*>(&params.call), first.params.data(), sizeof params.call);
  first.params = core::bytes(params);
  first.kernel += "_table";
  first.image = main->image;
}

// Turns the main launch of `plan` into that of a kernel for a dense attn_mask, and puts the one
// before all others that reads the mask.
void add_dense_mask(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile) {
  using P = DenseBackwardParams;
  Launch* const main = main_launch(plan);
  if (main == nullptr || problem.call.nq == 0) return;
  const Problem& call = problem.call;
  const DenseBlocks blocks(call);
  P params = add_lists<P>(plan, *main, call, tile);
  params.masks.blocks_row = blocks.row_blocks == 1 ? 0 : blocks.key_blocks;
  params.masks.blocks_head = blocks.heads == 1 ? 0 : blocks.row_blocks * blocks.key_blocks;
  params.masks.blocks_batch =
      blocks.batches == 1 ? 0 : blocks.heads * blocks.row_blocks * blocks.key_blocks;
  params.mask_heads = static_cast<int32_t>(blocks.heads);
  params.row_blocks = static_cast<int32_t>(blocks.row_blocks);
  params.key_blocks = static_cast<int32_t>(blocks.key_blocks);
  const Strides& dmask = problem.dmask_strides;
  params.dmask.batch = dmask.batch, params.dmask.head = dmask.head, params.dmask.row = dmask.row;
  params.dmask.key = problem.dmask_key;
  const bool keeps = keeps_mask_gradient(problem);
  KeptScores kept;
  if (keeps) {
    constexpr bool LISTS_ROUNDS = true;
    kept = keep_scores(plan, problem, tile.round_rows, tile.rows, LISTS_ROUNDS);
    add_kept_scores(*main, kept, offsetof(P, kept));
    params.kept = kept.params;
  }
  main->params = core::bytes(params);
  main->image = std::string("hopper/bwd_dense_") + core::dtype_word(call.dtype);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const auto add = [&](size_t field, int64_t bytes) {
    add_pointer(*main, Operand::Workspace, static_cast<int32_t>(field), workspace.add(bytes));
  };
  add(offsetof(P, masks) + offsetof(MaskParams, blocks_gmem), blocks.count());
  add(offsetof(P, seen_gmem), blocks.count() * DENSE_THREADS * BITS_BYTES);
  if (call.mask > 1) add(offsetof(P, added_gmem), blocks.count() * added_bytes(call));
  plan.workspace_bytes = workspace.bytes();
  if (problem.dmask) {
    const auto gradient = static_cast<int32_t>(offsetof(P, dmask));
    add_pointer(*main, Operand::DMask, gradient + offsetof(MaskGradientParams, gmem), 0);
  }
  Launch first;
  first.kernel = std::string("hopper_prepare_mask_") + core::dtype_word(call.dtype);
  first.image = main->image;
  first.grid = {blocks.count(), 1, 1};
  first.block = {DENSE_THREADS, 1, 1};
  first.params = main->params;
  first.pointers = main->pointers;
  if (keeps) add_mask_sums(plan, kept, problem, /*by_rows=*/false);
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

}  // namespace

bool adds_elements(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  const int head_dim = ADDED_TILE.tile.head_dim;
  // A row that is the same for all queries hides whole blocks, which a list of rounds leaves out.
  const bool hides_columns = call.mask_strides.row == 0 && call.nq > 1;
  const bool of_16_bits = call.mask > 1 && static_cast<DType>(call.mask - 2) == call.dtype;
  if (!of_16_bits) return false;
  const bool reads = tma_reads_mask(call) || CopiedMask(call).bytes() <= CopiedMask::MOST_BYTES;
  // All blocks are kept, and no launch before would note which are.
  const bool takes_gradient = !problem.dmask || (keeps_scores(problem) && is_plain(call));
  return reads && !hides_columns && takes_gradient && !call.block_mask && call.softcap == 0 &&
         call.dropout_p == 0 && call.d <= head_dim && call.dv <= head_dim;
}

bool lists_rounds(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  return call.block_mask || (call.mask != 0 && !adds_elements(problem));
}

const TableTile& table_tile_for(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  if (adds_elements(problem)) return problem.dmask ? ADDED_KEPT_TILE : ADDED_TILE;
  const std::span<const TableTile> tables(TABLE_TILES), biases(BIAS_TILES), masks(DENSE_TILES);
  const std::span<const TableTile> kept(KEPT_TILES);
  const auto tiles = call.mask == 0                 ? tables
                     : keeps_mask_gradient(problem) ? kept
                     : problem.dmask                ? biases
                                                    : masks;
  for (const TableTile& of : tiles) {
    if (std::max(call.d, call.dv) <= of.tile.head_dim) return of;
  }
  return tiles.back();
}

void refuse_table(const BackwardProblem& problem, Reasons& reasons) {
  constexpr int64_t MOST_MASK_BYTES = int64_t{1} << 30;
  const Problem& call = problem.call;
  const std::string name = call.mask != 0 ? "attn_mask" : "block_mask";
  const auto add = [&](const std::string& given) {
    reasons.push_back("gradients of " + name + " with " + given +
                      ": hopper computes those without; leave the implementation out" +
                      core::USE_TORCH);
  };
  const int64_t columns = std::max(call.d, call.dv);
  if (call.mask == 0 && columns > 128) {
    add("head dimensions above 128");
  } else if (columns > 128 && problem.deterministic) {
    add("deterministic=True and head dimensions above 128");
  }
  if (call.softcap != 0) add("a softcap");
  if (call.dropout_p != 0) add("dropout_p");
  if (call.heads_q > call.heads_kv * device::ListedRound::MOST_HEADS)
    add("more than " + std::to_string(device::ListedRound::MOST_HEADS) + " heads for each of k");
  if (core::ceil_div(call.nq, MASK_BLOCK) > device::ListedRound::MOST_BLOCKS) add("so many rows");
  if (call.mask == 0) return;
  if (call.block_mask) add("block_mask");
  const DenseBlocks blocks(call);
  if (blocks.count() * (DENSE_THREADS * BITS_BYTES + added_bytes(call)) > MOST_MASK_BYTES)
    add("so many elements");
}

void add_table(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile,
               const Device& device) {
  if (problem.call.mask != 0) {
    add_dense_mask(plan, problem, tile);
  } else {
    add_block_mask(plan, problem, tile, device);
  }
}

void add_elements(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile) {
  Launch* const main = main_launch(plan);
  if (main == nullptr) return;
  const Problem& call = problem.call;
  AddingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  params.mask_batch = call.mask_strides.batch != 0;
  params.mask_head = call.mask_strides.head != 0;
  KeptScores kept;
  if (problem.dmask) {
    constexpr bool LISTS_ROUNDS = false;
    kept = keep_scores(plan, problem, tile.round_rows, tile.rows, LISTS_ROUNDS);
    add_kept_scores(*main, kept, offsetof(AddingBackwardParams, kept));
    params.kept = kept.params;
  }
  main->params = core::bytes(params);
  main->image = std::string("hopper/bwd_dense_") + core::dtype_word(call.dtype);
  constexpr int64_t ROWS = BackwardD64Added::BLOCK;
  constexpr size_t MAP = offsetof(AddingBackwardParams, mask_map);
  if (!copies_mask(call)) {
    main->tensor_maps.push_back(mask_map(call, ROWS, MAP));
    if (problem.dmask) add_mask_sums(plan, kept, problem, /*by_rows=*/false);
    return;
  }
  const CopiedMask copy(call);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t start = workspace.add(copy.bytes());
  plan.workspace_bytes = workspace.bytes();
  main->tensor_maps.push_back(copy.map(call, ROWS, MAP, start));
  if (problem.dmask) add_mask_sums(plan, kept, problem, /*by_rows=*/false);
  plan.launches.insert(plan.launches.begin(), copy.launch(call, start, std::nullopt));
}

}  // namespace archflash::hopper
