#include "common/planning/backward.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/backward_params.h"
#include "common/masked_backward_params.h"
#include "common/planning/backward_shares.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::core {
namespace {

constexpr size_t MOST_USUAL_BACKWARD_LAUNCHES = 4;
constexpr int64_t SUM_BYTES = 4, TURN_BYTES = 4;
// BackwardTile::turns_from where queries see unequal numbers of keys: between 4, where turns were
// slower on an H200, and 16 (docs/lab/ampere.md).
constexpr double UNEQUAL_TURNS_FROM = 8;

GradientParams gradient_params(const BackwardTensor& tensor, bool accumulate) {
  return {nullptr,   tensor.strides.batch, tensor.strides.head, tensor.strides.row, tensor.dtype,
          accumulate};
}

MaskedBackwardParams masked_params(const BackwardProblem& problem, const BackwardParams& call,
                                   bool base_2) {
  MaskedBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.call = call;
  if (base_2)
    transform_scores_to_base_2(problem.call, params.call.attention);
  else
    always_transform_scores(problem.call, params.call.attention);
  params.masks = mask_params(problem.call);
  params.dropout = dropout_params(problem.call);
  const Strides& dmask = problem.dmask_strides;
  params.dmask.batch = dmask.batch, params.dmask.head = dmask.head, params.dmask.row = dmask.row;
  params.dmask.key = problem.dmask_key;
  params.dropped_heads = dropped_heads(problem);
  return params;
}

std::vector<PointerSlot> masked_pointers(const BackwardProblem& problem,
                                         std::vector<PointerSlot> slots) {
  using P = MaskedBackwardParams;
  for (const PointerSlot& slot : mask_pointers(problem.call, offsetof(P, masks)))
    slots.push_back(slot);
  for (const PointerSlot& slot : dropout_pointers(problem.call, offsetof(P, dropout)))
    slots.push_back(slot);
  if (problem.dmask) {
    constexpr size_t DMASK = offsetof(P, dmask) + offsetof(MaskGradientParams, gmem);
    slots.push_back({Operand::DMask, static_cast<int32_t>(DMASK), 0});
  }
  return slots;
}

using Tiles = std::span<const BackwardTile>;

// The set at the start of a table.
Tiles first_set(Tiles tiles) {
  int computed = 0;
  size_t count = 0;
  while (computed != (DQ | DK | DV)) computed |= tiles[count++].gradients;
  return tiles.first(count);
}

int shared_bytes_of(Tiles set) {
  int bytes = 0;
  for (const BackwardTile& tile : set) bytes = std::max(bytes, tile.shared_bytes);
  return bytes;
}

int64_t ctas_of(const BackwardTile& tile, const Problem& call) {
  const bool of_queries = tile.gradients == DQ;
  const int64_t per_head = ceil_div(of_queries ? call.nq : call.nk, tile.rows);
  const int64_t of_all = call.varlen && per_head > 0 ? per_head + call.batch
                                                     : per_head * (call.varlen ? 1 : call.batch);
  return of_all * (of_queries ? call.heads_q : call.heads_kv);
}

// Whether an SM has the shared memory for as many CTAs of a tile as it asks for.
bool has_room(const BackwardTile& tile, const Device& device) {
  constexpr int64_t RESERVED_BYTES = 1024;  // CUDA: of each CTA
  return tile.min_ctas_per_sm == 1 ||
         tile.min_ctas_per_sm * (tile.shared_bytes + RESERVED_BYTES) <= device.shared_per_sm;
}

// The kernels of a call; none if its head dimensions are larger than those of all. If the device
// has too little shared memory for any: those that need least.
Tiles choose_set(Tiles tiles, const Problem& call, const Device& device) {
  Tiles chosen;
  while (!tiles.empty()) {
    const Tiles set = first_set(tiles);
    tiles = tiles.subspan(set.size());
    if (call.d > set.front().head_dim || call.dv > set.front().head_dim_v) continue;
    if (!has_room(set.front(), device)) continue;
    if (shared_bytes_of(set) <= device.shared_per_block) return set;
    if (chosen.empty() || shared_bytes_of(set) < shared_bytes_of(chosen)) chosen = set;
  }
  return chosen;
}

// Heads of k whose tiles follow one another, the first of each, then the second of each. About as
// many as there are SMs: a head has one CTA at a time then, and what that CTA reads and adds to is
// still in L2 when the next one starts.
int64_t heads_of_group(int64_t heads, const Device& device) {
  const int64_t groups = (heads + device.sm_count / 2) / std::max(device.sm_count, 1);
  return ceil_div(heads, std::max<int64_t>(groups, 1));
}

// Whether the CTAs of a head add to its sums of dQ in turns. They start together and get out of
// step by a block for each CTA but the first, which costs little where each has many more blocks
// than that, and nothing where a head has one CTA at a time.
bool takes_turns(const BackwardTile& tile, const BackwardProblem& problem, const Device& device,
                 int64_t head_shares) {
  if (problem.deterministic || tile.turns_from == 0) return problem.deterministic;
  const Problem& call = problem.call;
  const int64_t sequences = call.varlen ? 1 : call.batch;
  const int64_t heads = call.heads_kv * head_shares;
  const int64_t group = heads_of_group(sequences * heads, device);
  const int64_t at_a_time =  // a tenth of them more is none
      std::min(ceil_div(10 * device.sm_count - group, 10 * group), ceil_div(call.nk, tile.rows));
  const int64_t queries = call.varlen ? call.nq / std::max<int64_t>(call.batch, 1) : call.nq;
  const int64_t blocks = ceil_div(queries, tile.dq_block) * (call.heads_q / heads);
  const double from = equal_tiles(call) ? tile.turns_from : UNEQUAL_TURNS_FROM;
  return from * static_cast<double>(at_a_time - 1) <= static_cast<double>(blocks);
}

}  // namespace

int64_t workers_of(const BackwardTile& tile, const Device& device) {
  const int64_t room = device.shared_per_sm / tile.shared_bytes;
  return device.sm_count * std::clamp<int64_t>(room, 1, tile.ctas_per_sm);
}

Reasons why_not_backward(const BackwardProblem& problem, const Description& description,
                         bool takes_masks, bool takes_lists) {
  Reasons reasons = why_not(problem.call, description);
  if (writes_f32(problem.call)) {
    reasons.push_back("gradients of out_dtype float32: " + description.name +
                      " reads outputs of the inputs' type; leave out_dtype out" + USE_TORCH);
  }
  if (problem.call.slopes_need_grad) {
    reasons.push_back("the gradient of alibi_slopes: " + description.name +
                      " computes none; detach alibi_slopes" + USE_TORCH);
  }
  if (problem.call.dropout_p != 0 && !takes_masks) {
    reasons.push_back("dropout_p in a call whose gradients are needed: " + description.name +
                      " computes gradients without dropout only; drop dropout_p" + USE_TORCH);
  }
  if (problem.call.key_indices > 0 && !takes_lists) {
    reasons.push_back("key_indices in a call whose gradients are needed: " + description.name +
                      " reads masks there; pass attn_mask=masks.from_key_indices(...)" + USE_TORCH);
  }
  for (const auto& [name, given] : masks_of(problem.call)) {
    if (!given || takes_masks) continue;
    reasons.push_back(std::string(name) +
                      " in a call whose gradients are needed: " + description.name +
                      " computes gradients without masks as data only; drop " + name + USE_TORCH);
  }
  const auto check = [&](const char* name, const BackwardTensor& tensor, bool gradient) {
    add_layout_reasons(description.name, name, tensor.strides, tensor.column == 1, tensor.align,
                       tensor.dtype, reasons);
    if (gradient && tensor.dtype != problem.call.dtype && tensor.dtype != DType::F32) {
      reasons.push_back(std::string(name) + " has dtype " + dtype_name(tensor.dtype) + ": " +
                        description.name + " writes " + dtype_name(problem.call.dtype) +
                        " or float32; pass one of them" + USE_TORCH);
    }
  };
  check("dout", problem.dout, false);
  check("dq", problem.dq, true);
  if (problem.call.nk > 0) check("dk", problem.dk, true), check("dv", problem.dv, true);
  return reasons;
}

BackwardParams backward_params(const BackwardProblem& problem, const DqSums& sums) {
  BackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.attention = attention_params(problem.call);
  params.dout_batch = problem.dout.strides.batch, params.dout_head = problem.dout.strides.head,
  params.dout_row = problem.dout.strides.row;
  params.dq = gradient_params(problem.dq, problem.accumulate);
  params.dk = gradient_params(problem.dk, problem.accumulate);
  params.dv = gradient_params(problem.dv, problem.accumulate);
  params.scale = static_cast<float>(problem.call.scale);
  params.head_shares = 1;
  params.dq_sums.blocks = sums.blocks;
  params.dq_sums.block_rows = sums.block_rows;
  params.dq_sums.columns = sums.columns;
  return params;
}

std::vector<PointerSlot> backward_pointers(const BackwardProblem& problem, const DqSums& sums,
                                           const WorkspaceParts& parts) {
  using P = BackwardParams;
  std::vector<PointerSlot> slots = pointers(problem.call);
  const auto add = [&](Operand operand, size_t offset, int64_t addend = 0) {
    slots.push_back({operand, static_cast<int32_t>(offset), addend});
  };
  add(Operand::DOut, offsetof(P, dout_gmem));
  if (problem.dlse) add(Operand::DLse, offsetof(P, dlse_gmem));
  if (parts.terms >= 0) add(Operand::Workspace, offsetof(P, terms_gmem), parts.terms);
  if (sums.blocks > 0)
    add(Operand::Workspace, offsetof(P, dq_sums) + offsetof(DqSums, gmem), parts.sums);
  if (parts.turns >= 0)
    add(Operand::Workspace, offsetof(P, dq_sums) + offsetof(DqSums, turns_gmem), parts.turns);
  add(Operand::DQ, offsetof(P, dq) + offsetof(GradientParams, gmem));
  add(Operand::DK, offsetof(P, dk) + offsetof(GradientParams, gmem));
  add(Operand::DV, offsetof(P, dv) + offsetof(GradientParams, gmem));
  if (problem.dsinks) add(Operand::DSinks, offsetof(P, dsinks_gmem));
  return slots;
}

DroppedHeads dropped_heads(const BackwardProblem& problem) {
  const bool part = problem.heads_of_sequence > 0;
  return {static_cast<int32_t>(problem.first_head),
          static_cast<int32_t>(part ? problem.heads_of_sequence : problem.call.heads_q)};
}

PlanResult plan_backward(const Description& description, std::span<const BackwardTile> tiles,
                         const BackwardProblem& problem, const Device& device,
                         const MaskedBackwardTiles& masked, bool shares_heads) {
  const Problem& call = problem.call;
  Reasons reasons = why_not_backward(problem, description, !masked.tiles.empty());
  if (!reasons.empty()) return reasons;
  const bool is_masked_call = takes_masked_kernels(call);
  if (is_masked_call) tiles = masked.tiles;

  const Tiles set = choose_set(tiles, call, device);
  if (set.empty()) {
    const BackwardTile& largest = tiles.back();
    return Reasons{"gradients of head dimensions " + std::to_string(call.d) + " and " +
                   std::to_string(call.dv) + ": those of " + description.name + " are for up to " +
                   std::to_string(largest.head_dim) + " and " + std::to_string(largest.head_dim_v) +
                   OTHERS_COMPUTE_THEM};
  }
  if (shared_bytes_of(set) > device.shared_per_block)
    return too_little_shared_memory(description.name, shared_bytes_of(set), device);
  const char* const word = dtype_word(call.dtype);
  LaunchPlan plan;
  plan.accumulates = problem.accumulate;
  const int64_t heads = (call.varlen ? 1 : call.batch) * call.heads_q;
  const int64_t rows = heads * call.nq;
  const int64_t shares = shares_heads ? share_heads(call, set.front(), device) : 1;

  DqSums sums{};
  Workspace workspace;
  WorkspaceParts parts;
  const bool keeps_terms = problem.kept_terms > 0;
  if (keeps_terms) workspace.add(problem.kept_terms);
  if (const int block = set.front().dq_block; block > 0 && rows > 0) {
    sums.blocks = static_cast<int32_t>(ceil_div(call.nq, block) + (call.varlen ? call.batch : 0));
    sums.block_rows = block;
    sums.columns = set.front().head_dim;
    const int64_t blocks = heads * sums.blocks;
    if (takes_turns(set.front(), problem, device, shares))
      parts.turns = workspace.add(blocks * TURN_BYTES);
    parts.sums = workspace.add(blocks * block * sums.columns * SUM_BYTES);
  }
  if (keeps_terms) {
    parts.terms = problem.first_head * call.nq * ROW_TERMS_BYTES;
  } else {
    parts.terms = workspace.add(rows * ROW_TERMS_BYTES);
  }
  plan.workspace_bytes = workspace.bytes();
  const BackwardParams of_call = backward_params(problem, sums);
  const auto params = bytes(of_call);
  const auto slots = backward_pointers(problem, sums, parts);
  BackwardParams of_main = of_call;
  of_main.head_shares = static_cast<int32_t>(shares);
  of_main.attention.heads_per_kv /= of_main.head_shares;
  of_main.attention.order.heads_per_group = static_cast<int32_t>(
      heads_of_group((call.varlen ? 1 : call.batch) * call.heads_kv * shares, device));
  std::vector<uint8_t> main_params = bytes(of_main);
  std::vector<PointerSlot> main_slots = slots;
  if (is_masked_call) {
    main_params = bytes(masked_params(problem, of_main, masked.base_2));
    main_slots = masked_pointers(problem, slots);
  }
  int64_t most_ctas = 0;
  plan.launches.reserve(MOST_USUAL_BACKWARD_LAUNCHES);
  const auto add = [&](const char* start, const char* end, int64_t ctas, int threads,
                       int shared_bytes, bool is_main = false) {
    if (ctas == 0) return;
    most_ctas = std::max(most_ctas, ctas);
    Launch& launch = plan.launches.emplace_back();
    launch.kernel.reserve(MOST_OF_NAME);
    launch.kernel.append(description.name).append(start).append(word);
    if (*end != '\0') launch.kernel.append("_").append(end);
    launch.image.append(description.name);
    launch.image.append(is_main && is_masked_call ? "/bwd_masked_" : "/bwd_").append(word);
    launch.grid = {ctas, 1, 1};
    launch.block = {threads, 1, 1};
    launch.shared_bytes = shared_bytes;
    launch.params = is_main ? main_params : params;
    launch.pointers.reserve(slots.capacity());
    launch.pointers = is_main ? main_slots : slots;
  };

  add("_backward_rows_", "", heads * ceil_div(call.nq, BACKWARD_ROWS), BACKWARD_ROWS_THREADS, 0);
  for (const BackwardTile& tile : set) {
    const int64_t ctas = ctas_of(tile, call) * (tile.gradients == DQ ? 1 : shares);
    add("_attention_bwd_", tile.name, ctas, tile.threads, tile.shared_bytes, true);
  }
  add("_backward_dq_", "", heads * sums.blocks, BACKWARD_DQ_THREADS, 0);
  if (problem.dsinks) add("_backward_sinks_", "", call.heads_q, BACKWARD_SINKS_THREADS, 0);
  if (most_ctas > GRID_LIMIT) return grid_too_large(most_ctas);
  if (shares > 1) add_shares(plan, problem, description.name, shares);
  return plan;
}

}  // namespace archflash::core
