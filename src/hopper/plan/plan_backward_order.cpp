#include "hopper/plan/plan_backward_order.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/planning/backward_parts.h"
#include "common/planning/order.h"
#include "common/planning/tiles.h"
#include "hopper/plan/plan_backward_tiles.h"
#include "hopper/plan/plan_backward_times.h"
#include "hopper/plan/plan_tiles.h"

namespace archflash::hopper {
namespace {

// Under a causal mask a tile is shorter than the one before, by one or two steps for each query
// head that shares its head of K, and the tiles that follow begin as far apart, each where another
// one has ended. Two of a head in a row begin together, and read the same at the same time. Without
// turns tiles begin with rounds that are a few steps apart, which is enough for up to four heads.
// Measured on an H100 and an H200 (docs/lab/hopper.md).
int64_t tiles_in_a_row(int64_t heads_per_kv, bool deterministic) {
  return heads_per_kv > (deterministic ? 2 : 4) ? 2 : 1;
}

// Whether a causal mask hides so little that tiles of keys are best ordered as without one: where
// keys are many more than rows.
bool sees_nearly_all(const Problem& call) {
  return core::is_triangle(call) && !call.varlen && call.nk >= 4 * call.nq;
}

}  // namespace

bool is_windowed(const Problem& call) {
  return call.window_left != UNBOUNDED || call.window_right != UNBOUNDED;
}

namespace {

bool is_simple(const Problem& call) {
  return call.nq > 0 && call.nk > 0 && !call.varlen && call.softcap == 0 && call.dropout_p == 0;
}

}  // namespace

bool is_plain(const Problem& call) { return is_simple(call) && !is_windowed(call); }

bool is_plain_or_causal(const Problem& call) {
  return is_plain(call) || (is_simple(call) && core::is_triangle(call) && call.q_offset_default &&
                            call.nk >= call.nq);
}

bool is_packed_short(const Problem& call, int64_t rows) {
  return call.varlen && std::max(call.nq, call.nk) <= rows * call.batch &&
         !has_far_longer_ones(call);
}

bool has_many_rows(const Problem& call) {
  constexpr int64_t MANY_ROWS = 768, MANY_ROWS_OF_KEY = 4;
  return call.nq >= std::max(MANY_ROWS, MANY_ROWS_OF_KEY * call.nk);
}

core::RowShares whole_rows(const Problem& call, const core::RoundsTile& tile) {
  return {1, core::ceil_div(call.nq, tile.round_rows) * tile.round_rows};
}

Problem with_shared_heads(const Problem& call, int64_t head_shares) {
  Problem shared = call;
  shared.heads_kv *= head_shares;
  return shared;
}

Shares share_out(const Problem& call, const BackwardTile& tile, const Device& device) {
  constexpr int64_t MANY_WAVES = 4, MOST_WAVES = 5;  // of CTAs, before and behind
  constexpr double OF_ROWS = 1.1;                    // of the time, since they add to the same sums
  constexpr int64_t MANY_ROWS = 1024;
  constexpr int64_t FLOAT = sizeof(float);
  const int64_t share_bytes = core::share_bytes(call);
  Problem one = call;  // sequence
  if (call.varlen) {
    one.nq = core::ceil_div(call.nq, std::max<int64_t>(call.batch, 1));
    one.nk = core::ceil_div(call.nk, std::max<int64_t>(call.batch, 1));
    one.q_offset = one.nk - one.nq;
  }
  const int64_t group = call.heads_q / std::max<int64_t>(call.heads_kv, 1);
  Shares best{1, whole_rows(call, tile), group};
  const core::RowShares whole = whole_rows(one, tile);
  // CTAs count the query heads of one head of K alone.
  const bool takes_uneven = tile.takes_uneven_shares && call.heads_kv == 1 && !call.varlen &&
                            call.softcap == 0 && call.dropout_p == 0;
  const int64_t heads = call.batch * call.heads_kv;
  const int64_t ctas = heads * core::ceil_div(one.nk, tile.rows);
  const int64_t most_rows = call.varlen ? 1 : whole.rows / tile.round_rows;
  if (ctas == 0 || ctas >= MANY_WAVES * device.sm_count) return best;
  // They take no more memory than a part of the sums of dQ, and the gradients of each query head.
  const int64_t rows = (call.varlen ? 1 : call.batch) * call.nq;
  int64_t most_bytes = call.heads_q * rows * call.d * FLOAT / 4;
  // Many rows that leave half of the SMs idle: twice the sums.
  if (call.nq >= MANY_ROWS && 2 * ctas <= device.sm_count) most_bytes *= 8;
  if (group > 1) most_bytes += share_bytes * group;
  double best_time = 0;
  for (int64_t of_heads = 1; of_heads <= group; ++of_heads) {
    // Where K comes to where V was, the loader knows of no shared heads.
    if (of_heads > 1 && tile.swaps_keys) continue;
    const int64_t of_share = core::ceil_div(group, of_heads);
    const bool uneven = group % of_heads != 0;
    if (uneven && (!takes_uneven || core::ceil_div(group, of_share) != of_heads)) continue;
    for (int64_t of_rows = 1; of_rows == 1 || of_rows <= most_rows; ++of_rows) {
      const int64_t shares = of_heads * of_rows;
      if (shares > 1 &&
          (shares * share_bytes > most_bytes || shares * ctas > MOST_WAVES * device.sm_count))
        break;
      const int64_t rounds = core::ceil_div(whole.rows / tile.round_rows, of_rows);
      const core::RowShares split{of_rows, rounds * tile.round_rows};
      if ((of_rows - 1) * split.rows >= whole.rows) continue;  // a share would be empty
      std::vector<core::Run> runs =
          core::merge_equal(core::runs_of_keys(one, tile.rows, tile.round_rows, split, of_share));
      for (core::Run& run : runs) run.count *= heads * of_heads;
      double time = core::queue_time(runs, device.sm_count);
      if (shares > 1) time += core::time_of_shares(call, tile.head_dim, shares);
      if (of_rows > 1) time *= OF_ROWS;
      if (shares == 1 || time < best_time) {
        best = {of_heads, of_rows > 1 ? split : whole_rows(call, tile), of_share};
        best_time = time;
      }
    }
  }
  return best;
}

bool turns_are_faster(const Problem& call, const core::RoundsTile& tile, const Shares& shares,
                      const Device& device) {
  constexpr int64_t FEW_KEYS = 640, FEW_KEYS_CAUSAL = 1280, MANY_ROWS = 2048, MORE_ROWS = 1024;
  const bool triangle = core::is_triangle(call);
  if (call.varlen) {
    if (shares.all() > 1) return false;
    // The most keys of the mean sequence with which turns are faster. At D=64, and at D=96 under a
    // causal mask, a sequence has one tile; else they are as many as were measured. With no sums of
    // dQ to clear, turns save 5 to 20%.
    int64_t most_keys = 0;
    if (tile.head_dim == 64) most_keys = 64;
    if (tile.head_dim == 96) most_keys = triangle ? 128 : 256;
    if (tile.head_dim == 128) most_keys = 400;
    return (!is_windowed(call) || triangle) && is_packed_short(call, most_keys);
  }
  const int64_t tiles = core::ceil_div(call.nk, tile.rows);
  const int64_t ctas = call.batch * call.heads_kv * tiles;
  if (shares.all() > 1) {
    // Shares of heads add to different sums. Those of rows wait for one another: without a mask
    // where few tiles leave SMs idle, with one where they are many (H200, 2026-12-01).
    constexpr int64_t MOST_OF_TRIANGLE = 2;
    const bool waits =
        triangle ? shares.rows.shares > MOST_OF_TRIANGLE : 4 * ctas < 3 * device.sm_count;
    if (shares.heads > 1 || waits) return false;
    const bool more_than_run = 2 * shares.all() * ctas > 3 * device.sm_count;
    return call.nq >= (more_than_run ? MORE_ROWS : MANY_ROWS);
  }
  if (tile.head_dim > 128) return false;
  if (is_windowed(call) && !triangle) return false;
  // Where query heads share a head of K, each tile has more rounds, so that the next tile waits
  // less.
  constexpr int64_t FEW_KEYS_SHARED = 640;
  if (call.heads_q != call.heads_kv)
    return triangle && tile.head_dim == 128 && tiles > 1 && call.nk <= FEW_KEYS_SHARED &&
           call.nq == call.nk && 4 * ctas >= 3 * device.sm_count;
  // The second one of two tiles waits little, and what the turns save grows with the rows. Up to 64
  // columns the tiles have to be alike.
  const bool alike = tile.head_dim > 64 || 2 * call.nk > 3 * tile.rows;
  const bool many_rows = !triangle && has_many_rows(call) && tiles == 2 && alike;
  if (many_rows && 2 * ctas >= device.sm_count) return true;
  if (call.nk > (triangle ? FEW_KEYS_CAUSAL : FEW_KEYS) || 2 * call.nq < call.nk) return false;
  // A tile that is alone waits for none, and of up to three tiles of 128 columns the one before has
  // mostly ended. Without a mask others of up to 64 columns gain from many waves on, those of more
  // nothing (H200, 2026-12-01).
  const bool waits_little =
      tiles == 1 || (tile.head_dim == 128 && tiles <= 3 && call.nq >= call.nk);
  if (waits_little) return ctas >= 2 * device.sm_count;
  if (triangle) return ctas >= 4 * device.sm_count;
  return tile.head_dim <= 64 && ctas >= 10 * device.sm_count;
}

namespace {

// The rounds, of all heads, of a tile that all rows see.
int64_t steps_of_tile(const Problem& call, const core::RoundsTile& tile,
                      const core::RowShares& split) {
  const int64_t rounds = core::ceil_div(std::min(call.nq, split.rows), tile.round_rows);
  return rounds * (call.heads_q / std::max<int64_t>(call.heads_kv, 1));
}

// Whether tiles for more than 192 columns start apart, in groups as small as without turns: that
// was faster with 32 rounds, and slower with 64 (docs/lab/hopper.md).
bool starts_apart_above_192(const BackwardProblem& problem, const core::RoundsTile& tile,
                            const core::RowShares& split) {
  constexpr int64_t MOST_STEPS = 32;
  return problem.deterministic && tile.head_dim > 192 && is_plain(problem.call) &&
         split.shares == 1 && steps_of_tile(problem.call, tile, split) <= MOST_STEPS;
}

// How many packed sequences are gone over together in turns: so many that a tile comes when the one
// before it of its head is as far ahead as it takes to hand the sums on, and no more than L2 holds.
int64_t sequences_together(const Problem& call, const BackwardTile& tile, int64_t row_bytes,
                           const Device& device) {
  constexpr int64_t MOST = 32, BYTES = int64_t{32} << 20;
  constexpr double MARGIN = 1.5;
  if (call.batch == 0 || call.heads_kv == 0) return 1;
  const int64_t rows = core::ceil_div(call.nq, call.batch);
  if (core::ceil_div(call.nk, call.batch) <= tile.rows) return 1;
  const TileTimes times = times_of(tile);
  const auto steps =
      static_cast<double>(core::ceil_div(rows, tile.round_rows) * (call.heads_q / call.heads_kv));
  const double of_tile = times.start + steps * times.round + times.end;
  const auto ctas = static_cast<double>(int64_t{tile.ctas_per_sm} * device.sm_count);
  const double wanted =
      MARGIN * times.hand_over / of_tile * ctas / static_cast<double>(call.heads_kv);
  const int64_t fitting =
      std::max<int64_t>(BYTES / std::max<int64_t>(rows * call.heads_kv * row_bytes, 1), 1);
  return std::clamp<int64_t>(static_cast<int64_t>(wanted) + 1, 1, std::min(fitting, MOST));
}

}  // namespace

KeyTileOrder order_tiles(const BackwardProblem& problem, const BackwardTile& tile,
                         const core::RowShares& split, const Device& device) {
  constexpr int64_t BYTES = int64_t{32} << 20, L2_BYTES = int64_t{36} << 20;
  const Problem& call = problem.call;
  // A share counts as a head.
  const int64_t heads_kv = (call.varlen ? 1 : call.batch) * call.heads_kv;
  const int64_t all = std::max<int64_t>(heads_kv * split.shares, 1);
  const int64_t rows = std::min(call.nq, split.rows);
  const int64_t heads_per_kv = call.heads_q / call.heads_kv;
  const int64_t row_bytes = heads_per_kv * ((call.d + call.dv) * dtype_bytes(call.dtype) +
                                            int64_t{sizeof(float)} * tile.head_dim);
  const int64_t head_bytes = std::max<int64_t>(rows * row_bytes, 1);
  const int64_t tiles = std::max<int64_t>(core::ceil_div(call.nk, tile.rows), 1);
  const bool triangle = core::is_triangle(call);
  const bool plain = !is_windowed(call) || (problem.deterministic && sees_nearly_all(call));
  KeyTileOrder order{all};
  // The bytes that all CTAs together read and add to, until a tile comes to the rows where its
  // neighbour began: L2 has to keep them.
  const int64_t reach = int64_t{device.sm_count} * tile.rows * row_bytes;
  // Upwards a tile waits for the one behind it. In chains that one adds to other sums.
  const bool in_chains = core::sums_of_round(problem, tile, device, split.shares) > 2;
  const bool goes_upwards =
      !in_chains && (heads_per_kv == 1 || (!call.varlen && reach <= L2_BYTES));
  if (problem.deterministic && !tile.ends_dq && triangle && !plain && goes_upwards) {
    order.packed_rows = BYTES / 2 / row_bytes;
    order.packed_tiles = device.sm_count;
    // By a model of the schedule anything from a quarter to a half of the SMs is as good.
    order.upward_work = 3 * device.sm_count / 8;
    if (call.varlen) return order;
    // With 192 columns in fewer of them, if there are two at least.
    const int64_t fitting = std::min(L2_BYTES / head_bytes, core::ceil_div(all, 2));
    const int64_t of_bytes = tile.head_dim == 192 ? fitting : BYTES / 2 / head_bytes;
    int64_t heads = std::max({of_bytes, device.sm_count / tiles, int64_t{1}});
    // Two groups where L2 holds all that they read and add to.
    if (tile.head_dim > 128 && all * head_bytes <= BYTES / 2 * 3)
      heads = std::max(heads, core::ceil_div(all, 2));
    order.group_heads = core::even_size(all, std::min(heads, all));
    order.upward_heads = (core::ceil_div(all, order.group_heads) - 1) * order.group_heads;
    return order;
  }
  if (triangle && !plain)
    order.tiles_in_a_row = tiles_in_a_row(heads_per_kv, problem.deterministic);
  if (call.varlen && tile.head_dim <= 128) {
    if (problem.deterministic && !is_windowed(call))
      order.packed_sequences = sequences_together(call, tile, row_bytes, device);
    return order;  // as fast, and found sooner
  }
  if (plain && tile.head_dim <= 128) {
    constexpr int64_t TILES_AT_A_TIME = 16, MOST_AT_A_TIME = 64;
    // With room for K and V of one tile smaller groups were 2 to 5% faster.
    const bool small = tile.head_dim == 96 || (tile.swaps_keys && !tile.ends_dq);
    const auto at_a_time = [&](int64_t most) {
      return core::ceil_div(device.sm_count, std::min(tiles, most));
    };
    int64_t heads = std::clamp(at_a_time(TILES_AT_A_TIME), BYTES / (small ? 4 : 2) / head_bytes,
                               std::max(BYTES / head_bytes, int64_t{1}));
    heads = std::max(heads, at_a_time(MOST_AT_A_TIME));
    if (problem.deterministic && tile.head_dim != 96) {
      const int64_t rounds = core::ceil_div(rows, tile.round_rows) * heads_per_kv;
      heads = std::max(heads, 2 * device.sm_count / std::max<int64_t>(rounds, 1));
    }
    order.group_heads = core::ceil_div(all, std::max<int64_t>(all / heads, 1));
    return order;
  }
  if (problem.deterministic && tile.head_dim <= 128) return order;
  const bool apart = starts_apart_above_192(problem, tile, split);
  const bool small = apart || (tile.head_dim == 192 && is_plain(call));
  // Tiles of many steps wait for one another for a small part of their time.
  constexpr int64_t STEPS_OF_TILE = 4;
  const bool waits_little =
      is_plain(call) && steps_of_tile(call, tile, split) >= STEPS_OF_TILE * tiles;
  const int64_t times = problem.deterministic && !small && !waits_little ? 2 : 1;
  order.packed_rows = times * BYTES / row_bytes;
  order.packed_tiles = times * device.sm_count;
  if (call.varlen) return order;
  // Heads whose data stays in L2, or as many more as it takes for their tiles to fill the GPU.
  const int64_t heads = std::max(BYTES / head_bytes, core::ceil_div(device.sm_count, tiles));
  // A smaller last group would start with its longest tiles when all others are done.
  order.group_heads = core::even_size(all, std::min(times * heads, all));
  return order;
}

Turns find_turns(const BackwardProblem& problem, const core::RoundsTile& tile,
                 const core::RowShares& split, int64_t group_heads, bool takes_chains,
                 const Device& device) {
  const Problem& call = problem.call;
  Turns turns{core::sums_of_round(problem, tile, device, split.shares)};
  const bool wide = starts_apart_above_192(problem, tile, split);
  const int64_t all = call.batch * call.heads_kv * split.shares;
  const int64_t heads = std::max<int64_t>(std::min(all, group_heads), 1);
  const int64_t together =
      std::min(core::ceil_div(call.nk, tile.rows), core::ceil_div(device.sm_count, heads));
  const int64_t steps = steps_of_tile(call, tile, split);
  // With as many rows as keys only tiles of which many run together, for few columns.
  constexpr int64_t MANY_TOGETHER = 16, STEPS_OF_TILE = 8;
  const bool many = problem.deterministic && is_plain(call) && tile.head_dim <= 64 &&
                    call.heads_q == call.heads_kv && call.nk <= call.nq &&
                    together >= MANY_TOGETHER && steps < STEPS_OF_TILE * together;
  // Whether tiles for few keys, which have one sum, should start apart is unmeasured.
  if ((turns.sums == 1 && !wide && !many) || !tile.reads_many_chains) return turns;
  if (is_windowed(call) && !sees_nearly_all(call)) return turns;
  const bool shares_keys = call.heads_q != call.heads_kv && !core::is_triangle(call);
  if (call.nk <= call.nq && !shares_keys && !wide && !many) return turns;
  if (together <= 1) return turns;
  // In one chain a sum is handed on from tile to tile. Where that takes as long as the call,
  // several chains alone were faster: with so many steps for each hand-over and for a tile's start
  // and end.
  const double hand_over = tile.head_dim == 192 ? 8.0 / 3 : 4.0 / 3;
  constexpr int64_t START = 3, FEW_TOGETHER = 4;
  const int64_t tiles = core::ceil_div(call.nk, tile.rows);
  const auto call_steps =
      static_cast<double>((steps + START) * core::ceil_div(all * tiles, device.sm_count));
  const bool hands_on_late = hand_over * static_cast<double>(tiles) > 0.9 * call_steps;
  // Where few tiles run together one sum was faster, too.
  if (together <= FEW_TOGETHER && tile.head_dim <= 128 && !hands_on_late) return {};
  // To hand a sum on takes about as long as 64 rows, so that the next tile is 128 behind, or if
  // that takes too many chains, one round. Their sums have to stay in L2, and are no more than
  // those of chains alone; if these were two, tiles would wait for good parts of their time.
  constexpr int64_t ROWS_APART = 128, L2_BYTES = int64_t{20} << 20, MOST_SUMS = 32;
  // Several chains of tiles that start apart were slower than chains alone where a head of few
  // columns has its own keys, and with more keys.
  constexpr int64_t MOST_KEYS_OF_ROW = 32;
  const bool chains_alone = tile.head_dim < 128 && call.heads_q == call.heads_kv;
  const bool may_be_several = takes_chains && (wide || call.nk < MOST_KEYS_OF_ROW * call.nq);
  const int64_t bytes =
      core::count_rounds(call, tile.round_rows) * core::sums_bytes_of_round(call, tile);
  const int64_t most = turns.sums > 2 ? turns.sums : MOST_SUMS;
  constexpr int64_t FEW_CHAINS = 3, MANY_CHAINS = 4, CHAINS_BYTES = int64_t{25} << 20;
  const int64_t fitting = std::min(CHAINS_BYTES / std::max<int64_t>(bytes, 1), MANY_CHAINS);
  for (int64_t apart = core::ceil_div(ROWS_APART, tile.round_rows); apart > 0; --apart) {
    const int64_t of_chain = steps / apart;  // tiles that start apart
    if (of_chain == 0) continue;
    const int64_t chains = core::ceil_div(together, of_chain);
    if (chains > 1 && chains_alone) return turns;
    if (chains > 1 && (2 * chains > most || 2 * chains * bytes > L2_BYTES)) continue;
    if (chains > 1 && !may_be_several) continue;
    if (chains == 1 && hands_on_late && takes_chains && fitting >= FEW_CHAINS) {
      turns.sums = fitting;
      return turns;
    }
    turns.sums = 2 * chains;
    while (core::ceil_div(together, chains) << (turns.steps_shift + 1) <= steps)
      ++turns.steps_shift;
    turns.tiles = core::ceil_div(steps, int64_t{1} << turns.steps_shift);
    return turns;
  }
  return turns;
}

Turns find_turns_of_lists(const BackwardProblem& problem, const core::RoundsTile& tile,
                          int64_t ctas) {
  const Problem& call = problem.call;
  const int64_t heads = call.batch * call.heads_kv;
  const int64_t tiles = core::ceil_div(call.nk, int64_t{tile.rows});
  const int64_t rounds = core::ceil_div(call.nq, tile.round_rows);
  Turns turns;
  if (std::min(tiles, rounds) <= 1) return turns;
  // Where there are more tiles than run at a time, they start at the same rows: those that run
  // together then read and add to rows that L2 has. By a table of blocks they come to a row at
  // other times, so that chains wait less, as many as memory for their sums allows.
  if (heads * tiles > ctas) {
    constexpr int64_t OF_CHAIN = 4, MOST_CHAINS = 4, MORE_BYTES = int64_t{40} << 20;
    const int64_t bytes =
        core::count_rounds(call, tile.round_rows) * core::sums_bytes_of_round(call, tile);
    const int64_t room = (core::most_workspace(problem) + MORE_BYTES) / std::max<int64_t>(bytes, 1);
    const int64_t together = std::min(tiles, core::ceil_div(ctas, heads));
    if (call.block_mask)
      turns.sums = std::clamp<int64_t>(core::ceil_div(together, OF_CHAIN), 1,
                                       std::clamp<int64_t>(room, 1, MOST_CHAINS));
    return turns;
  }
  turns.sums = 2, turns.tiles = std::min(tiles, rounds);
  while (turns.tiles << (turns.steps_shift + 1) <= rounds) ++turns.steps_shift;
  return turns;
}

}  // namespace archflash::hopper
