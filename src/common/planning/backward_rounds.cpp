#include "common/planning/backward_rounds.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/planning/backward_parts.h"
#include "common/planning/tiles.h"

namespace archflash::core {

Reasons refuse_rounds(const BackwardProblem& problem, const std::string& implementation) {
  const Problem& call = problem.call;
  Reasons reasons;
  add_tma_reasons(call, implementation, false, reasons);
  if (problem.dout.strides.row == 0 && call.nq > 1) {
    reasons.push_back("dout repeats one row (a row stride of 0): " + implementation +
                      " copies by tensor maps, which have no such stride; make dout contiguous" +
                      USE_TORCH);
  }
  if (is_fp8(call.dtype)) {
    reasons.push_back(std::string("gradients of ") + dtype_name(call.dtype) + " inputs: " +
                      implementation + " computes those of float16 and bfloat16" + USE_TORCH);
  }
  return reasons;
}

TensorMapSpec dout_map(const BackwardProblem& problem, int offset, const Box& box) {
  Problem call = problem.call;
  call.out = problem.dout.strides;
  call.out_dtype = call.dtype;
  TensorMapSpec map = tensor_map(call, Operand::Out, offset, box);
  map.operand = Operand::DOut;
  return map;
}

TensorMapSpec dq_map(const BackwardProblem& problem, int offset, const Box& box) {
  Problem call = problem.call;
  call.out = problem.dq.strides;
  call.out_dtype = problem.dq.dtype;
  call.dv = call.d;
  TensorMapSpec map = tensor_map(call, Operand::Out, offset, box);
  map.operand = Operand::DQ;
  return map;
}

int64_t count_rounds(const Problem& call, int64_t round_rows) {
  const int64_t rounds = ceil_div(call.nq, round_rows);
  if (!call.varlen) return call.batch * call.heads_q * rounds;
  return rounds == 0 ? 0 : (rounds + call.batch) * call.heads_q;
}

int64_t sums_rows(const Problem& call, const RoundsTile& tile) {
  constexpr int64_t WARP_ROWS = 16;
  if (call.varlen || tile.sums_step == tile.head_dim) return tile.round_rows;
  return std::min(ceil_div(call.nq, WARP_ROWS) * WARP_ROWS, tile.round_rows);
}

int64_t sums_bytes_of_round(const Problem& call, const RoundsTile& tile) {
  const int64_t columns = ceil_div(call.d, tile.sums_step) * tile.sums_step;
  return sums_rows(call, tile) * columns * int64_t{sizeof(float)};
}

int64_t sums_of_round(const BackwardProblem& problem, const RoundsTile& tile, const Device& device,
                      int64_t shares) {
  // A tile's steps for each of the tiles that it waits for at most, below which CTAs begin apart.
  // Measured on an H200 (docs/lab/hopper.md): waiting took 14 to 55% up to 4, and 4 to 8% from 10
  // on. Above 128 columns tiles apart read Q and dO from memory again, which costs as much as to
  // wait for 3.
  const int64_t steps_of_tile = tile.head_dim <= 128 ? 8 : 3;
  const Problem& call = problem.call;
  if (!problem.deterministic || call.varlen || tile.ends_dq) return 1;
  const int64_t heads = std::max<int64_t>(call.batch * call.heads_kv * shares, 1);
  const int64_t tiles = ceil_div(call.nk, tile.rows);
  const int64_t at_a_time = std::min(tiles, ceil_div(int64_t{device.sm_count}, heads));
  const int64_t rounds = ceil_div(ceil_div(call.nq, tile.round_rows), shares);
  const int64_t steps = rounds * (call.heads_q / std::max<int64_t>(call.heads_kv, 1));
  if (at_a_time <= 1 || steps >= steps_of_tile * at_a_time) return 1;
  // Few of the tiles that are taken first wait where nearly each of them is of another head. Where
  // a head has few, and CTAs take several, these come one after another soon. Where few CTAs take
  // two, all wait for them.
  if (steps * heads > steps_of_tile * (device.sm_count - heads)) return 1;
  // Under a causal mask tiles have other lengths; of three all begin with the last rounds.
  constexpr int64_t FEW_TILES = 4;
  const bool triangle = is_triangle(call) && call.nk <= call.nq;
  if (triangle && tiles < FEW_TILES) return 1;
  const int64_t few_tiles = tile.head_dim == 96 ? 0 : std::min(steps, FEW_TILES);
  const bool few_take_two = tiles > FEW_TILES - 1 && call.nk <= call.nq && !triangle &&
                            2 * tiles * heads <= 3 * device.sm_count;
  // So few take two that the others do not wait for them.
  const bool nearly_all_run = 8 * tiles * heads <= 9 * device.sm_count;
  if (!nearly_all_run && (tiles <= few_tiles || few_take_two)) return 1;
  // Where keys are many more than rows, a second sum does not help: nearly all tiles begin with the
  // last round, and each sum would be handed on from tile to tile. So there are chains, whose sums
  // take no more memory than dK would in fp32. Many of them only if they stay in L2. Measured on an
  // H200 (docs/lab/hopper.md).
  constexpr int64_t MANY_KEYS = 16, L2_BYTES = int64_t{16} << 20, MOST_CHAINS = 32;
  const bool many_keys = call.nk >= MANY_KEYS * call.nq;
  const int64_t wanted = ceil_div(at_a_time, std::max<int64_t>(steps / steps_of_tile, 1));
  const int64_t fitting = call.nk * call.heads_kv / std::max<int64_t>(call.nq * call.heads_q, 1);
  const int64_t bytes = count_rounds(call, tile.round_rows) * sums_bytes_of_round(call, tile);
  int64_t most = many_keys ? tile.most_chains : 0;
  if (tile.reads_many_chains)
    most = std::max(most, std::min(L2_BYTES / std::max<int64_t>(bytes, 1), MOST_CHAINS));
  // So many that a large call needs no second part, if that leaves any.
  constexpr int64_t FEWEST_CHAINS = 3, WAVES_OF_PARTS = 8;
  const int64_t room = most_workspace(problem) / std::max<int64_t>(bytes, 1);
  if (tiles * heads >= WAVES_OF_PARTS * device.sm_count && room >= FEWEST_CHAINS)
    most = std::min(most, room);
  // Sums that stay in L2 are few where rows are, of however many heads. Measured with 128 columns,
  // and where heads share one of K.
  const bool fits = tile.reads_many_chains &&
                    (tile.head_dim == 128 || call.heads_q != call.heads_kv) &&
                    call.nk >= 4 * call.nq && call.nk <= 32 * call.nq;
  const int64_t chains = std::min({wanted, fits ? wanted : fitting, most});
  if (!many_keys && 3 * chains < wanted) return 2;
  return std::max<int64_t>(chains, 2);
}

float exponent_scale(const AttentionParams& attention) {
  const bool folds = attention.transform_scores && attention.rule.softcap == 0;
  return folds ? attention.exp2_scale * attention.rule.tanh_scale : attention.exp2_scale;
}

}  // namespace archflash::core
