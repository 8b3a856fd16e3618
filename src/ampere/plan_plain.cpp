#include "ampere/plan_plain.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "ampere/cut_tiles.h"
#include "ampere/plain_config.cuh"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/tiles.h"

namespace archflash::ampere {

const Description& describe();

namespace {

using core::backward_tile;

// The kernels of bwd_plain.cu, for GPUs of 9.0 with their shared memory.
constexpr core::BackwardTile PLAIN_TILES[] = {
    backward_tile<D32Plain>("d32"),
    backward_tile<D64WidePlain>("d64_wide"),
    backward_tile<D64Plain>("d64"),
    backward_tile<D96Plain>("d96"),
    backward_tile<D128WidePlain>("d128_wide"),
    backward_tile<D192V128Plain>("d192_128"),
    backward_tile<D160Plain>("d160"),
    backward_tile<D192WidePlain>("d192_wide"),
    backward_tile<D256WidePlain>("d256_wide"),
};

// The kernels of bwd_plain.cu whose CTAs add to dQ in any order instead of taking turns.
constexpr core::BackwardTile BULK_TILES[] = {
    backward_tile<D64WideBulk>("d64_wide"),
    backward_tile<D128WideBulk>("d128_wide"),
    backward_tile<D192WideBulk>("d192_wide"),
};

// The tiles of kernels for heads whose keys are one tile.
template <class C>
constexpr core::BackwardTile only_tile(const char* name) {
  core::BackwardTile of = backward_tile<C>(name);
  of.whole_heads = true;
  return of;
}
constexpr core::BackwardTile ONLY_TILES[] = {
    only_tile<D32FewOnly>("d32_few"), only_tile<D32Only>("d32"),
    only_tile<D64FewOnly>("d64_few"), only_tile<D64Only>("d64"),
    only_tile<D96Only>("d96"),        only_tile<D128WideOnly>("d128_wide"),
};

// The tiles of kernels for packed sequences; and those of kernels whose CTAs take no turns, where
// TMA adds to the sums of dQ.
constexpr core::BackwardTile PACKED_TILES[] = {
    backward_tile<D64WidePacked>("d64_wide"),
    backward_tile<D96Packed>("d96"),
    backward_tile<D128WidePacked>("d128_wide"),
};
constexpr core::BackwardTile PACKED_BULK_TILES[] = {
    backward_tile<D64WidePackedBulk>("d64_wide"),
    backward_tile<D128WidePackedBulk>("d128_wide"),
};
constexpr core::BackwardTile PACKED_ONLY_TILES[] = {
    only_tile<D64WidePackedOnly>("d64_wide"),
    only_tile<D96PackedOnly>("d96"),
    only_tile<D128WidePackedOnly>("d128_wide"),
};

// Whether a call asks for nothing that the kernels of bwd_plain.cu and those beside it lack, and
// its head dimensions are those of `tiles`.
bool is_plain(const Problem& call, const Device& device,
              std::span<const core::BackwardTile> tiles) {
  const core::BackwardTile& largest = tiles.back();
  return has_plain_kernels(device) && !takes_masked_kernels(call) && call.dropout_p == 0 &&
         !core::attention_params(call).transform_scores && call.d <= largest.head_dim &&
         call.dv <= largest.head_dim_v;
}

constexpr int64_t GRID_SIDE_LIMIT = 65535;  // CUDA: CTAs along y and z

}  // namespace

bool has_plain_kernels(const Device& device) { return device.major == 9; }

std::span<const core::BackwardTile> only_tiles(const Problem& call, const Device& device) {
  const std::span<const core::BackwardTile> tiles = ONLY_TILES;
  if (call.varlen || call.nq == 0 || call.nk == 0 || !is_plain(call, device, tiles)) return {};
  const auto tile = std::ranges::find_if(tiles, [&](const core::BackwardTile& of) {
    return call.d <= of.head_dim && call.dv <= of.head_dim_v && call.nk <= of.rows;
  });
  return tile == tiles.end() ? std::span<const core::BackwardTile>() : std::span(&*tile, 1);
}

std::span<const core::BackwardTile> only_dropout_tiles(const Problem& undropped,
                                                       const Device& device) {
  using C = D64OnlyDropout;
  static constexpr core::BackwardTile TILES[] = {only_tile<C>("d64_only_dropout")};
  const bool takes =
      undropped.d <= C::HEAD_DIM && undropped.dv <= C::HEAD_DIM_V && undropped.nk <= C::ROWS;
  if (!takes || only_tiles(undropped, device).empty()) return {};
  return TILES;
}

void make_only_dropout(Launch& main, const Problem& call,
                       const mma_sync::DroppingBackwardParams& of_main) {
  mma_sync::DroppingCuttingParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), &of_main.call, sizeof params.call);
  params.dropout = of_main.dropout;
  params.dropped_heads = of_main.dropped_heads;
  const AttentionParams& attention = params.call.attention;
  const int64_t tiles = main.grid[0], heads_kv = call.heads_q / attention.heads_per_kv;
  if (attention.order.heads_per_group >= tiles && call.batch <= GRID_SIDE_LIMIT) {
    main.grid = {heads_kv, call.batch, 1};
  } else {
    params.cut.runs[0] = {static_cast<int32_t>(tiles), 1};
  }
  main.params = core::bytes(params);
  main.image = std::string("ampere/bwd_only_") + core::dtype_word(call.dtype);
  main.uses_pdl = true;
  add_pointers(main,
               core::dropout_pointers(call, offsetof(mma_sync::DroppingCuttingParams, dropout)));
}

bool make_plain(LaunchPlan& plan, const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  const std::string word = core::dtype_word(call.dtype);
  const auto launch_of = [&](const std::string& start) {
    return std::ranges::find_if(plan.launches,
                                [&](const Launch& of) { return of.kernel.starts_with(start); });
  };
  auto main = launch_of("ampere_attention_bwd_");
  const auto none = plan.launches.end();
  if (!has_plain_kernels(device) || call.varlen || call.nq == 0 || main == none) return false;
  const auto tile_of = [&](std::span<const core::BackwardTile> tiles) {
    return std::ranges::find_if(tiles, [&](const core::BackwardTile& of) {
      return main->kernel == "ampere_attention_bwd_" + word + "_" + of.name;
    });
  };
  const bool only = launch_of("ampere_backward_dq_") == none;
  const std::span<const core::BackwardTile> plain = PLAIN_TILES, in_bulk = BULK_TILES;
  const std::span<const core::BackwardTile> tiles_of_kind = only ? ONLY_TILES : plain;
  const auto tile = tile_of(tiles_of_kind), bulk = tile_of(in_bulk);
  if (tile == tiles_of_kind.end()) return false;
  mma_sync::CuttingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  const AttentionParams& attention = params.call.attention;
  if (attention.transform_scores) return false;
  main->image = only ? "ampere/bwd_only_" + word : PLAIN_IMAGE + word;

  const int64_t tiles = main->grid[0], heads_kv = call.heads_q / attention.heads_per_kv;
  const int64_t heads = call.batch * heads_kv;
  const bool shared = launch_of("ampere_backward_shares_") != none;
  const Runs runs = shared ? Runs{} : cut_tiles(problem, *tile, *main, device);
  if (!runs.empty()) {
    if (only) {
      Launch adds = *main;
      adds.kernel = "ampere_backward_dq_" + word, adds.shared_bytes = 0;
      adds.grid = {0, 1, 1}, adds.block = {BACKWARD_DQ_THREADS, 1, 1};
      plan.launches.push_back(std::move(adds));
      main = launch_of("ampere_attention_bwd_");
    }
    const auto last = launch_of("ampere_backward_dq_");
    share_out(plan, problem, *tile, device, runs, params, *main, *last);
  } else if (attention.order.heads_per_group >= heads && call.batch <= GRID_SIDE_LIMIT &&
             tiles / heads <= GRID_SIDE_LIMIT) {
    main->grid = {heads_kv, call.batch, tiles / heads};
  } else {
    params.cut.runs[0] = {static_cast<int32_t>(tiles), 1};
  }
  main->params = core::bytes(params);
  const bool in_turns =
      std::ranges::any_of(main->pointers, [](const PointerSlot& of) { return of.offset == TURNS; });
  const bool adds_in_bulk = bulk != in_bulk.end() && !in_turns && !only;
  main->shared_bytes = adds_in_bulk ? bulk->shared_bytes : tile->shared_bytes;
  main->kernel += only ? "_only" : adds_in_bulk ? "_bulk" : "_plain";
  return !runs.empty();
}

std::optional<PlanResult> plan_packed_backward(const BackwardProblem& problem,
                                               const Device& device) {
  constexpr int64_t MOST_PLACES = 3;  // for each tile
  const Problem& call = problem.call;
  constexpr int ROWS = D64WidePacked::ROWS;
  static_assert(D96Packed::ROWS == ROWS && D128WidePacked::ROWS == ROWS);
  if (!call.varlen || !is_plain(call, device, PACKED_TILES) || call.nk == 0 || call.batch == 0)
    return std::nullopt;
  if (call.max_seqlen_q == UNKNOWN || std::max(call.d, call.dv) <= D32::HEAD_DIM)
    return std::nullopt;
  const int64_t places = core::ceil_div(call.max_seqlen_k, ROWS);
  if (places <= 0 || places > GRID_SIDE_LIMIT || call.batch > GRID_SIDE_LIMIT ||
      places * call.batch > MOST_PLACES * (core::ceil_div(call.nk, ROWS) + call.batch))
    return std::nullopt;
  // With so many heads the first CTAs of all come before the second ones, and none waits long. TMA
  // adds to the sums of long sequences as fast, where it does.
  constexpr int64_t LONG_SEQUENCE = 400;
  const bool only = places == 1;
  const bool waits_less = call.batch * call.heads_kv >= device.sm_count;
  const bool by_tma = std::max(call.d, call.dv) <= D64Wide::HEAD_DIM &&
                      core::rows_per_sequence(call) >= LONG_SEQUENCE;
  BackwardProblem of = problem;
  of.deterministic |= waits_less && !by_tma;
  const std::span<const core::BackwardTile> tiles =
      only ? std::span<const core::BackwardTile>(PACKED_ONLY_TILES) : PACKED_TILES;
  PlanResult result = core::plan_backward(describe(), tiles, of, device, {}, true);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return result;
  const std::string word = core::dtype_word(call.dtype), start = "ampere_attention_bwd_" + word;
  const auto main = std::ranges::find_if(
      plan->launches, [&](const Launch& x) { return x.kernel.starts_with(start); });
  if (main == plan->launches.end()) return result;
  mma_sync::CuttingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  main->params = core::bytes(params);
  main->grid = {call.heads_q / params.call.attention.heads_per_kv, call.batch, places};
  main->image = "ampere/bwd_packed_" + word;
  const auto bulk = std::ranges::find_if(PACKED_BULK_TILES, [&](const core::BackwardTile& x) {
    return main->kernel == start + "_" + x.name;
  });
  const bool adds_in_bulk = !only && !of.deterministic && bulk != std::end(PACKED_BULK_TILES);
  if (adds_in_bulk) main->shared_bytes = bulk->shared_bytes;
  main->kernel += only ? "_packed_only" : adds_in_bulk ? "_packed_bulk" : "_packed";
  return result;
}

}  // namespace archflash::ampere
