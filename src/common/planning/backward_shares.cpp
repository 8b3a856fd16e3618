#include "common/planning/backward_shares.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "common/device/visible_keys.cuh"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/workspace.h"

namespace archflash::core {
namespace {

// Sequences that are taken to have the same length, and one of them.
struct AlikeSequences {
  Problem one;
  int64_t count;
};

// The sequences of a call. Of packed ones the mean length is known, and maybe the longest one.
std::vector<AlikeSequences> sequences_of_call(const Problem& call) {
  if (!call.varlen) return {{call, call.batch}};
  const auto of_lengths = [&](int64_t nq, int64_t nk, int64_t count) {
    AlikeSequences of{call, count};
    of.one.nq = nq, of.one.nk = nk, of.one.q_offset = nk - nq;
    return of;
  };
  const int64_t batch = std::max<int64_t>(call.batch, 1);
  std::vector<AlikeSequences> all;
  int64_t rest_q = call.nq, rest_k = call.nk, rest = batch;
  if (batch > 1 && call.max_seqlen_q != UNKNOWN && call.max_seqlen_k != UNKNOWN) {
    const int64_t nq = std::clamp<int64_t>(call.max_seqlen_q, ceil_div(call.nq, batch), call.nq);
    const int64_t nk = std::clamp<int64_t>(call.max_seqlen_k, ceil_div(call.nk, batch), call.nk);
    all.push_back(of_lengths(nq, nk, 1));
    rest_q -= nq, rest_k -= nk, --rest;
  }
  if (rest_q > 0 && rest_k > 0)
    all.push_back(of_lengths(ceil_div(rest_q, rest), ceil_div(rest_k, rest), rest));
  return all;
}

bool is_main(const Launch& launch) {
  return launch.kernel.find("_attention_bwd_") != std::string::npos;
}

}  // namespace

std::vector<Run> runs_of_keys(const Problem& call, int64_t tile_rows, int64_t block_rows,
                              const RowShares& split, int64_t heads) {
  // What a tile's start and end take, as query rows that it could pass meanwhile (hopper's notes).
  constexpr double TILE_ROWS = 256;
  constexpr int64_t NO_SIDE = int64_t{1} << 62;  // what visible_keys() takes for an open window
  const device::VisibleKeys keys = device::visible_keys(
      static_cast<int>(call.nq), static_cast<int>(call.nk), call.q_offset,
      std::min(call.window_left, NO_SIDE), std::min(call.window_right, NO_SIDE));
  const device::VisibleKeys rows{-keys.last_shift, -keys.first_shift, static_cast<int>(call.nq)};
  std::vector<Run> runs;
  runs.reserve(ceil_div(call.nk, tile_rows) * split.shares);
  const bool windowed = call.window_left != UNBOUNDED || call.window_right != UNBOUNDED;
  for (int64_t key = 0; key < call.nk; key += tile_rows) {
    if (!windowed && key > 0) {  // all keys see the same rows
      runs.insert(runs.end(), runs.begin(), runs.begin() + split.shares);
      continue;
    }
    const int64_t last_key = std::min(key + tile_rows, call.nk) - 1;
    const int64_t first = rows.first(static_cast<int>(key)) / block_rows * block_rows;
    const int64_t end =
        ceil_div(rows.last(static_cast<int>(last_key)) + 1, block_rows) * block_rows;
    for (int64_t share = 0; share < split.shares; ++share) {
      const int64_t seen =
          std::min(end, (share + 1) * split.rows) - std::max(first, share * split.rows);
      runs.push_back({TILE_ROWS + static_cast<double>(std::max<int64_t>(seen, 0) * heads), 1});
    }
  }
  return runs;
}

double time_of_shares(const Problem& call, int head_dim, int64_t shares) {
  // The time of the launch behind, in rows; and the bytes that a GPU writes and reads again while
  // its tiles pass a row, for each column of a tile. Measured on an H200 (hopper's notes).
  constexpr double LAUNCH_ROWS = 128, BYTES_OF_ROW = 1024;
  return LAUNCH_ROWS +
         static_cast<double>(2 * shares * share_bytes(call)) / (BYTES_OF_ROW * head_dim);
}

int64_t share_bytes(const Problem& call) {
  return sequences_of(call) * call.heads_kv * call.nk * (call.d + call.dv) * int64_t{sizeof(float)};
}

int64_t share_heads(const Problem& call, const BackwardTile& tile, const Device& device) {
  constexpr int64_t MOST_WAVES = 4;  // of CTAs, with which all SMs are busy
  const int64_t group = call.heads_q / std::max<int64_t>(call.heads_kv, 1);
  if (group == 1 || call.nq == 0 || call.nk == 0) return 1;
  const int64_t workers = workers_of(tile, device);
  const int64_t block = std::max(tile.dq_block, 1);
  const std::vector<AlikeSequences> sequences = sequences_of_call(call);
  int64_t tiles = 0;
  for (const AlikeSequences& of : sequences)
    tiles += of.count * call.heads_kv * ceil_div(of.one.nk, tile.rows);
  if (tiles >= MOST_WAVES * workers) return 1;
  // The first tiles of all sequences come first.
  const auto runs_of = [&](int64_t shares) {
    std::vector<std::vector<Run>> of_lengths;
    size_t most = 0;
    for (const AlikeSequences& of : sequences) {
      const RowShares whole{1, ceil_div(of.one.nq, block) * block};
      of_lengths.push_back(runs_of_keys(of.one, tile.rows, block, whole, group / shares));
      most = std::max(most, of_lengths.back().size());
    }
    std::vector<Run> runs;
    for (size_t at = 0; at < most; ++at) {
      for (size_t i = 0; i < sequences.size(); ++i) {
        if (at >= of_lengths[i].size()) continue;
        const int64_t count = sequences[i].count * call.heads_kv * shares;
        runs.push_back({of_lengths[i][at].time, count});
      }
    }
    return runs;
  };
  int64_t best = 1, last = 0;  // the last one's CTAs
  double best_time = 0;
  for (int64_t shares = 1; shares <= group; ++shares) {
    if (group % shares != 0) continue;
    if (shares > 1 && last >= MOST_WAVES * workers) break;
    const std::vector<Run> runs = runs_of(shares);
    last = 0;
    for (const Run& run : runs) last += run.count;
    double time = queue_time(runs, workers);
    if (shares > 1) time += time_of_shares(call, tile.head_dim, shares);
    if (shares == 1 || time < best_time) best = shares, best_time = time;
  }
  return best;
}

void add_shares(LaunchPlan& plan, const BackwardProblem& problem, const std::string& folder,
                int64_t shares) {
  using Sums = SharedGradientsParams;
  const Problem& call = problem.call;
  Workspace workspace;
  workspace.add(plan.workspace_bytes);
  Sums sums;
  std::memset(static_cast<void*>(&sums), 0, sizeof sums);  // equal plans are equal bytes
  Launch last = plan.launches.front();
  last.kernel = folder + "_backward_shares_" + dtype_word(call.dtype);
  last.pointers.clear();
  last.shared_bytes = 0;
  const int64_t bytes_of_column = share_bytes(call) / std::max<int64_t>(call.d + call.dv, 1);
  const int64_t dk_start = workspace.add(shares * bytes_of_column * call.d);
  const int64_t dv_start = workspace.add(shares * bytes_of_column * call.dv);
  size_t behind = 0;  // the main launches
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    Launch& launch = plan.launches[i];
    if (!is_main(launch)) continue;
    behind = i + 1;
    BackwardParams params;
    std::memcpy(static_cast<void*>(&params), launch.params.data(), sizeof params);
    sums.dk = params.dk, sums.dv = params.dv;
    const auto share = [&](GradientParams& gradient, int64_t columns) {
      const int64_t head = call.nk * columns;
      const int64_t sequence = call.varlen ? 0 : call.heads_kv * shares * head;
      gradient = {nullptr, sequence, head, columns, DType::F32, 0};
    };
    share(params.dk, call.d), share(params.dv, call.dv);
    std::memcpy(launch.params.data(), static_cast<const void*>(&params), sizeof params);
    for (PointerSlot& slot : launch.pointers) {
      if (slot.operand == Operand::DK) slot.operand = Operand::Workspace, slot.addend = dk_start;
      if (slot.operand == Operand::DV) slot.operand = Operand::Workspace, slot.addend = dv_start;
    }
  }
  const auto point = [&](Operand operand, size_t offset, int64_t addend) {
    add_pointer(last, operand, offset, addend);
  };
  point(Operand::DK, offsetof(Sums, dk) + offsetof(GradientParams, gmem), 0);
  point(Operand::Workspace, offsetof(Sums, dk_shares_gmem), dk_start);
  point(Operand::DV, offsetof(Sums, dv) + offsetof(GradientParams, gmem), 0);
  point(Operand::Workspace, offsetof(Sums, dv_shares_gmem), dv_start);
  sums.shares = static_cast<int32_t>(shares);
  sums.heads_kv = static_cast<int32_t>(call.heads_kv);
  sums.nk = static_cast<int32_t>(call.nk);
  sums.d_chunks = static_cast<int32_t>(call.d / 8);
  sums.chunks = static_cast<int32_t>((call.d + call.dv) / 8);
  sums.all_chunks = sequences_of(call) * call.heads_kv * call.nk * sums.chunks;
  last.params = bytes(sums);
  last.grid = {ceil_div(sums.all_chunks, BACKWARD_DQ_THREADS), 1, 1};
  last.block = {BACKWARD_DQ_THREADS, 1, 1};
  plan.launches.insert(plan.launches.begin() + static_cast<std::ptrdiff_t>(behind),
                       std::move(last));
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace archflash::core
