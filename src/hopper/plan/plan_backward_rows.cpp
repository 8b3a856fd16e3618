#include "hopper/plan/plan_backward_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/rows_config.cuh"
#include "hopper/backward/rows_params.h"
#include "hopper/plan/plan_backward_order.h"
#include "hopper/plan/plan_kept_scores.h"

namespace archflash::hopper {

const Description& describe();

namespace {

template <class C>
constexpr RowsTile rows_tile(const char* name) {
  RowsTile tile{};
  tile.name = name;
  tile.head_dim = C::HEAD_DIM, tile.head_dim_v = C::HEAD_DIM_V;
  tile.gradients = DQ | DK | DV;
  tile.rows = C::BLOCK;
  tile.threads = C::THREADS;
  tile.ctas_per_sm = C::CTAS_PER_SM;
  tile.shared_bytes = C::SHARED_BYTES;
  tile.round_rows = C::MOST_ROWS;
  tile.sums_step = C::HEAD_DIM;
  tile.q_box = tile.dout_box = core::box<typename C::QTile>(1);
  tile.k_box = tile.v_box = core::box<typename C::KTile>(1);
  tile.writes_dq = true;
  tile.most_rows = C::MOST_ROWS;
  tile.block = C::BLOCK;
  tile.row_tiles = C::ROW_TILES;
  tile.packed = C::PACKED;
  tile.sums_elements = C::SUMS_ELEMENTS;
  return tile;
}

// The tiles of the smallest head dimensions and of the fewest rows come first.
constexpr RowsTile TILES[] = {
    rows_tile<RowsBackwardD32>("d32_rows"),
    rows_tile<RowsBackwardD32Two>("d32_rows_two"),
    rows_tile<RowsBackwardD32Four>("d32_rows_four"),
    rows_tile<RowsBackwardD64>("d64_rows"),
    rows_tile<RowsBackwardD64Two>("d64_rows_two"),
    rows_tile<RowsBackwardD64Three>("d64_rows_three"),
    rows_tile<RowsBackwardD96>("d96_rows"),
    rows_tile<RowsBackwardD128>("d128_rows"),
};

// For a dense attn_mask. The last one knows no elements of fp32.
constexpr RowsTile MASKED_TILES[] = {
    rows_tile<RowsBackwardD32ShortMasked>("d32_rows_short_masked"),
    rows_tile<RowsBackwardD64ShortMasked>("d64_rows_short_masked"),
    rows_tile<RowsBackwardD64Masked>("d64_rows_masked"),
    rows_tile<RowsBackwardD64TwoMasked>("d64_rows_two_masked"),
};

// How many CTAs share out the keys of a head, and blocks of each; and how many heads have a CTA
// each before those.
struct KeyShares {
  int64_t shares, blocks;
  int64_t whole_heads;
  double steps;  // that the call takes by the model of share_keys()
};

// Finds those with which a call takes the least time by a model of the makespan, in steps of a
// block: what a CTA's start and end take, and the launch behind, and how much of the shares is
// written and read meanwhile. Measured on an H200 (docs/lab/hopper.md). Either all heads are shared
// out, or those that are left when all CTAs have had as many; the latter is unmeasured with masks.
KeyShares share_keys(const Problem& call, const RowsTile& tile, const Device& device) {
  constexpr int64_t START_STEPS = 4, LAUNCH_STEPS = 3, BYTES_OF_STEP = int64_t{8} << 20;
  constexpr double LAUNCH_OF_LAST = 2.5, BYTES_OF_LAST = 4 << 20;
  constexpr int64_t MOST_WAVES = 4;
  const int64_t heads = call.batch * call.heads_q, workers = core::workers_of(tile, device);
  const int64_t blocks = core::ceil_div(call.nk, tile.block);
  KeyShares best{1, blocks, heads, 0};
  if (call.varlen) return best;
  const auto steps = [&](int64_t of_cta) { return START_STEPS + of_cta * tile.row_tiles; };
  best.steps = static_cast<double>(core::ceil_div(heads, workers) * steps(blocks));
  const int64_t full_rounds = call.mask == 0 ? heads / workers * workers : 0;
  for (const int64_t whole : {int64_t{0}, full_rounds}) {
    const int64_t shared = heads - whole;
    for (int64_t wanted = 2; wanted <= blocks && shared > 0; ++wanted) {
      const int64_t of_share = core::ceil_div(blocks, wanted);
      const int64_t shares = core::ceil_div(blocks, of_share);
      if (shares != wanted) continue;
      if (shared * shares > MOST_WAVES * workers) break;
      const int64_t bytes = 2 * shared * shares * call.nq * call.d * int64_t{sizeof(float)};
      const int64_t of_ctas = whole / workers * steps(blocks) +
                              core::ceil_div(shared * shares, workers) * steps(of_share);
      // Less of what the last CTAs write and read is hidden by others.
      const double more = whole > 0 ? LAUNCH_OF_LAST + static_cast<double>(bytes) / BYTES_OF_LAST
                                    : static_cast<double>(LAUNCH_STEPS + bytes / BYTES_OF_STEP);
      const double time = static_cast<double>(of_ctas) + more;
      if (time < best.steps) best = {shares, of_share, whole, time};
    }
  }
  return best;
}

// Gives the CTAs room for shares of dQ, and adds the launch that adds them up.
void share_dq(LaunchPlan& plan, Launch& main, const BackwardProblem& problem,
              const KeyShares& shares) {
  using P = BackwardKernelParams;
  const Problem& call = problem.call;
  const int64_t shared_heads = call.batch * call.heads_q - shares.whole_heads;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t start =
      workspace.add(shared_heads * shares.shares * call.nq * call.d * int64_t{sizeof(float)});
  plan.workspace_bytes = workspace.bytes();
  for (PointerSlot& slot : main.pointers) {
    if (slot.offset == static_cast<int32_t>(offsetof(P, dq_sums_gmem))) slot.addend = start;
  }
  Launch last = plan.launches.front();
  last.kernel = std::string("hopper_backward_dq_") + core::dtype_word(call.dtype) + "_rows";
  last.image = main.image;
  last.params = main.params;
  last.pointers.clear();
  add_pointer(last, Operand::DQ, offsetof(BackwardParams, dq) + offsetof(GradientParams, gmem));
  add_pointer(last, Operand::Workspace, offsetof(P, dq_sums_gmem), start);
  const int64_t chunks = shared_heads * call.nq * (call.d / 8);
  last.grid = {core::ceil_div(chunks, int64_t{BACKWARD_DQ_THREADS}), 1, 1};
  last.block = {BACKWARD_DQ_THREADS, 1, 1};
  plan.launches.insert(plan.launches.end() - (problem.dsinks ? 1 : 0), std::move(last));
}

// Turns the main launch into that of a kernel for a dense attn_mask. kept: where dS is kept, or
// null.
void add_mask(Launch& main, const BackwardProblem& problem, const KeptScores* kept) {
  using P = MaskedRowsParams;
  P params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main.params.data(), sizeof params.call);
  params.masks = core::mask_params(problem.call);
  const Strides& dmask = problem.dmask_strides;
  params.dmask.batch = dmask.batch, params.dmask.head = dmask.head, params.dmask.row = dmask.row;
  params.dmask.key = problem.dmask_key;
  if (kept != nullptr) params.kept = kept->params;
  main.params = core::bytes(params);
  add_pointers(main, core::mask_pointers(problem.call, offsetof(P, masks)));
  if (kept != nullptr) {
    add_kept_scores(main, *kept, offsetof(P, kept));
  } else if (problem.dmask) {
    add_pointer(main, Operand::DMask, offsetof(P, dmask) + offsetof(MaskGradientParams, gmem));
  }
}

// The tile for a call with a dense attn_mask, or null. Of two tiles of rows those with more keys,
// and those whose elements lanes read one at a time, were measured slower, and so were two CTAs on
// an SM for few heads (docs/lab/hopper.md).
const RowsTile* masked_tile_for(const Problem& call, const Device& device) {
  constexpr int64_t KEYS_OF_TWO = 512;
  if (call.varlen) return nullptr;
  const bool is_f32 = call.mask > 1 && static_cast<DType>(call.mask - 2) == DType::F32;
  const bool reads_pairs = core::mask_params(call).mask_step != 0;
  for (const RowsTile& tile : MASKED_TILES) {
    if (tile.ctas_per_sm > 1 && call.batch * call.heads_q < device.sm_count) continue;
    if (call.d > tile.head_dim || call.dv > tile.head_dim_v || call.nq > tile.most_rows) continue;
    const bool serves = tile.row_tiles == 1 || (!is_f32 && reads_pairs && call.nk <= KEYS_OF_TWO);
    return serves ? &tile : nullptr;
  }
  return nullptr;
}

}  // namespace

const RowsTile* rows_tile_for(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  if (call.softcap != 0 || call.dropout_p != 0 || call.block_mask) return nullptr;
  if (call.heads_q != call.heads_kv || call.batch == 0 || call.nq == 0 || call.nk == 0)
    return nullptr;
  // The keys of a packed sequence are not shared out, and so must not keep one CTA busy for long.
  constexpr int64_t KEYS_OF_FEW = 512, KEYS_OF_MANY = 2048;
  constexpr int64_t ONE_TILE = 128, HALF_TILE = 64;
  int64_t rows = call.nq;
  if (call.varlen) {
    if (is_windowed(call) && !core::is_triangle(call)) return nullptr;
    if (call.max_seqlen_q == UNKNOWN || call.max_seqlen_k == UNKNOWN) return nullptr;
    rows = call.max_seqlen_q;
    const bool many = call.batch * call.heads_q >= device.sm_count;
    if (call.max_seqlen_k > (many ? KEYS_OF_MANY : KEYS_OF_FEW)) return nullptr;
  } else if (!is_plain_or_causal(call)) {
    return nullptr;
  }
  if (call.mask != 0) return masked_tile_for(call, device);
  for (const RowsTile& tile : TILES) {
    if (call.d > tile.head_dim || call.dv > tile.head_dim_v || rows > tile.most_rows) continue;
    if (call.varlen) return tile.packed ? &tile : nullptr;
    // Where all keys are one tile, the other kernels were faster for half of its rows and for more
    // than 96 columns, and they write dQ of many rows themselves.
    const bool is_one = call.nk <= ONE_TILE;
    const bool halves = std::max(call.nq, call.nk) <= HALF_TILE;
    if (is_one && (halves || rows > ONE_TILE || tile.head_dim > 96)) return nullptr;
    return &tile;
  }
  return nullptr;
}

bool leaves_rows_empty(const BackwardProblem& problem, const RowsTile& tile) {
  constexpr int64_t ROWS = 128;
  const Problem& call = problem.call;
  return !call.varlen && call.mask == 0 && !problem.deterministic &&
         call.nq <= (tile.row_tiles - 1) * ROWS;
}

bool wastes_rows(const Problem& call, const RowsTile& tile, const BackwardTile& of_keys,
                 const Device& device) {
  // Microseconds of a step, and of a round of a tile of keys with its share of a start and an end,
  // where one or two CTAs of these are on an SM (H200, 2026-12-01).
  constexpr double STEP = 1.33, ROUND = 5, ROUND_OF_TWO = 2.55, MARGIN = 0.97;
  constexpr double FEW_WAVES = 4;  // whose tiles end together
  const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, int64_t{of_keys.rows});
  double waves = static_cast<double>(tiles) / (of_keys.ctas_per_sm * device.sm_count);
  if (waves <= FEW_WAVES) waves = std::ceil(waves);
  const auto rounds = static_cast<double>(core::ceil_div(call.nq, of_keys.round_rows));
  const double of_round = of_keys.ctas_per_sm > 1 ? ROUND_OF_TWO : ROUND;
  return waves * rounds * of_round < MARGIN * STEP * share_keys(call, tile, device).steps;
}

PlanResult plan_rows(const BackwardProblem& asked, const RowsTile& tile, const Device& device) {
  BackwardProblem problem = asked;
  problem.deterministic = false;  // the order of sums is fixed
  const Problem& call = problem.call;
  Reasons reasons = core::refuse_rounds(problem, "hopper");
  const core::BackwardTile main_tile = tile;
  BackwardProblem plain = problem;  // add_mask() adds what is left out here
  plain.call.mask = 0;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, plain, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  if (std::get<LaunchPlan>(result).launches.empty()) return result;  // there is no head
  const KeyShares shares = share_keys(call, tile, device);
  const int64_t heads = call.batch * call.heads_q;
  const int64_t works = shares.whole_heads + (heads - shares.whole_heads) * shares.shares;
  result = core::complete_rounds<BackwardKernelParams>(
      std::get<LaunchPlan>(std::move(result)), problem, tile, "hopper",
      [&](BackwardKernelParams& params) {
        params.shares = static_cast<int32_t>(shares.shares);
        params.tiles = static_cast<int32_t>(works);
        params.share_rows = static_cast<int32_t>(shares.blocks * tile.block);
        params.first_shared_head = static_cast<int32_t>(shares.whole_heads);
      },
      1);
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    // Else the CTAs make the terms of their rows themselves. The launch that makes them also clears
    // rows of packed tensors that belong to no sequence.
    const bool keeps_terms = call.varlen || problem.dsinks || problem.kept_terms > 0;
    // Under a causal mask some blocks are left out, which no launch before would note.
    const bool adds_once = tile.sums_elements && problem.dmask &&
                           problem.dmask_strides.batch == 0 && !asked.deterministic;
    const bool keeps = keeps_scores(asked) && is_plain(call) && !adds_once;
    for (Launch& launch : plan->launches) {
      launch.uses_pdl = !launch.kernel.starts_with("hopper_backward_sinks_");
      if (!launch.kernel.starts_with("hopper_attention_bwd_")) continue;
      launch.image = std::string("hopper/bwd_rows_") + core::dtype_word(call.dtype);
      launch.grid[0] = std::min(works, core::workers_of(tile, device));
      // A CTA that has one head of all sequences adds its part of their mask's gradient once.
      const int64_t of_sequence = call.heads_q * shares.shares;
      if (adds_once && launch.grid[0] >= 8 * of_sequence)
        launch.grid[0] -= launch.grid[0] % of_sequence;
      if (keeps_terms) continue;
      std::erase_if(launch.pointers, [](const PointerSlot& slot) {
        return slot.offset == static_cast<int32_t>(offsetof(BackwardParams, terms_gmem));
      });
    }
    plan->tile.tiles = works;
    if (shares.shares > 1) share_dq(*plan, plan->launches[1], problem, shares);
    KeptScores kept;
    if (keeps) kept = keep_scores(*plan, problem, tile.most_rows, tile.block, false);
    for (Launch& launch : plan->launches) {
      if (call.mask != 0 && launch.kernel.starts_with("hopper_attention_bwd_"))
        add_mask(launch, problem, keeps ? &kept : nullptr);
    }
    if (keeps) add_mask_sums(*plan, kept, problem, /*by_rows=*/true);
    if (!keeps_terms) plan->launches.erase(plan->launches.begin());
  }
  return result;
}

}  // namespace archflash::hopper
