#include "common/planning/backward_parts.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "common/options.h"
#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/masks.h"

namespace archflash::core {
namespace {

// The most frugal of PyTorch's kernels, cuDNN's, holds exact sums of dQ in fp32 beside the output
// and the gradients, and where query heads share a head of K gradients of K and V for each of them
// (peaks on an H200, 2026-11-28: tests/unit/test_backward_memory.py). A call may take this many
// times as much.
constexpr double SHARE_OF_PEERS = 1.15;
// Times that the CTAs of a part fill the GPU. A part ends with CTAs that leave SMs idle, and has
// three launches: on an H200 up to ten parts cost 0.5 to 4% with four times, up to 12% with two.
constexpr int64_t WAVES_OF_PART = 4;

// Some heads of k of a call, and the heads of q that share them: all of some batches, or some of
// one batch.
struct Part {
  int64_t batch, batches;
  int64_t head, heads;  // of k
};

// Whether a call of packed sequences may take so much memory: cuDNN's kernel does not serve it, and
// the one that does pads each sequence by 128 rows. At most three times its rows.
bool is_little_for_packed(const Problem& call, int64_t bytes) {
  constexpr int64_t PADDING = 128;
  const int64_t rows = call.heads_q * std::min(call.nq + PADDING * call.batch, 3 * call.nq);
  return call.varlen && bytes <= rows * (call.d * int64_t{sizeof(float)} + ROW_TERMS_BYTES);
}

// The parts of a call of at most `heads` heads of k each, as equal as whole batches allow.
std::vector<Part> split(const Problem& call, int64_t heads) {
  const int64_t sequences = sequences_of(call);
  std::vector<Part> parts;
  if (heads >= call.heads_kv) {
    const int64_t most = heads / call.heads_kv;
    const int64_t step = ceil_div(sequences, ceil_div(sequences, most));
    for (int64_t batch = 0; batch < sequences; batch += step)
      parts.push_back({batch, std::min(step, sequences - batch), 0, call.heads_kv});
    return parts;
  }
  const int64_t step = ceil_div(call.heads_kv, ceil_div(call.heads_kv, heads));
  for (int64_t batch = 0; batch < sequences; ++batch) {
    for (int64_t head = 0; head < call.heads_kv; head += step)
      parts.push_back({batch, 1, head, std::min(step, call.heads_kv - head)});
  }
  return parts;
}

// The number of the part's first head among all heads of q.
int64_t first_head(const Problem& call, const Part& part) {
  return part.batch * call.heads_q + part.head * (call.heads_q / call.heads_kv);
}

// The call that a part is, for tensors that start where those of the part do.
BackwardProblem problem_of(const BackwardProblem& whole, const Part& part) {
  const Problem& call = whole.call;
  BackwardProblem problem = whole;
  if (!call.varlen) problem.call.batch = part.batches;
  problem.call.heads_q = part.heads * (call.heads_q / call.heads_kv);
  problem.call.heads_kv = part.heads;
  if (call.dropout_p != 0 || whole.dsinks) {
    problem.first_head = first_head(call, part);
    problem.heads_of_sequence = call.heads_q;
  }
  if (whole.dsinks) {  // that gradient is summed up over the terms of all parts, behind them
    problem.dsinks = false;
    problem.kept_terms = sequences_of(call) * call.heads_q * call.nq * ROW_TERMS_BYTES;
  }
  return problem;
}

// The bytes from the start of each tensor to what the part has of it.
int64_t start_of(const BackwardProblem& whole, const Part& part, Operand operand) {
  const Problem& call = whole.call;
  const int64_t head_q = part.head * (call.heads_q / call.heads_kv);
  const auto at = [&](const Strides& strides, int64_t head, int64_t bytes) {
    return (part.batch * strides.batch + head * strides.head) * bytes;
  };
  const auto of = [&](const BackwardTensor& tensor, int64_t head) {
    return at(tensor.strides, head, dtype_bytes(tensor.dtype));
  };
  const int64_t row = first_head(call, part) * call.nq;  // of the log-sum-exp
  constexpr int64_t FLOAT = sizeof(float);
  switch (operand) {
    case Operand::Q:
      return at(call.q, head_q, dtype_bytes(call.dtype));
    case Operand::K:
      return at(call.k, part.head, dtype_bytes(call.kv_dtype));
    case Operand::V:
      return at(call.v, part.head, dtype_bytes(call.kv_dtype));
    case Operand::Out:
      return at(call.out, head_q, dtype_bytes(call.out_dtype));
    case Operand::Lse:
    case Operand::DLse:
      return row * FLOAT;
    case Operand::DOut:
      return of(whole.dout, head_q);
    case Operand::DQ:
      return of(whole.dq, head_q);
    case Operand::DK:
      return of(whole.dk, part.head);
    case Operand::DV:
      return of(whole.dv, part.head);
    case Operand::Sinks:
      return head_q * dtype_bytes(static_cast<DType>(call.sinks - 1));
    case Operand::QOffset:
      return part.batch * int64_t{sizeof(int32_t)};
    case Operand::Mask:
      return at(call.mask_strides, head_q, call.mask == 1 ? 1 : dtype_bytes(added_dtype(call)));
    case Operand::DMask:
      return at(whole.dmask_strides, head_q, FLOAT);
    case Operand::KeyRanges:
      return at(call.range_strides, head_q, sizeof(int32_t));
    default:
      for (const int i : STRIDED_OPTIONS) {
        const Option& option = OPTIONS[i];
        if (option.operand == operand)
          return at(call.*option.strides, head_q, element_bytes(option));
      }
      return 0;  // all parts read the same, or share it
  }
}

// The first launch of a kernel with these words in its name; null: there is none.
const Launch* find_launch(const LaunchPlan& plan, const char* words) {
  for (const Launch& launch : plan.launches) {
    if (launch.kernel.find(words) != std::string::npos) return &launch;
  }
  return nullptr;
}

}  // namespace

int64_t most_workspace(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  const int64_t queries = sequences_of(call) * call.heads_q * call.nq;
  const int64_t keys = sequences_of(call) * call.heads_kv * call.nk;
  const int64_t held =
      queries * (call.dv * dtype_bytes(call.out_dtype) + call.d * dtype_bytes(problem.dq.dtype)) +
      keys * (call.d * dtype_bytes(problem.dk.dtype) + call.dv * dtype_bytes(problem.dv.dtype));
  int64_t beside = queries * call.d * int64_t{sizeof(float)};
  if (call.heads_q != call.heads_kv) {  // gradients of keys and values for each head of q
    beside +=
        sequences_of(call) * call.heads_q * call.nk * (call.d + call.dv) * dtype_bytes(call.dtype);
  }
  return static_cast<int64_t>(SHARE_OF_PEERS * static_cast<double>(held + beside)) - held;
}

PlanResult plan_in_parts(const BackwardProblem& problem, const Device& device,
                         const PlanBackward& plan) {
  PlanResult planned = plan(problem, device);
  const auto* whole = std::get_if<LaunchPlan>(&planned);
  const Problem& call = problem.call;
  if (whole == nullptr) return planned;
  // Others keep the gradient of each score, too.
  const int64_t most =
      most_workspace(problem) + std::min(whole->kept_bytes, LaunchPlan::MOST_KEPT_BYTES);
  if (whole->workspace_bytes <= most) return planned;
  if (call.key_indices > 0) return planned;  // what peers hold there, a mask, is larger
  if (is_little_for_packed(call, whole->workspace_bytes)) return planned;
  const Launch* main = find_launch(*whole, "_attention_bwd_");
  if (main == nullptr) return planned;
  const int64_t wanted = ceil_div(whole->workspace_bytes, std::max<int64_t>(most, 1));
  const int64_t ctas = main->grid[0] * main->grid[1] * main->grid[2];
  const int64_t tiles = std::max(ctas, whole->tile.tiles);  // where CTAs stay
  const int64_t possible = std::max<int64_t>(tiles / (WAVES_OF_PART * device.sm_count), 1);
  const int64_t heads = sequences_of(call) * call.heads_kv;
  const std::vector<Part> parts = split(call, ceil_div(heads, std::min(wanted, possible)));
  if (parts.size() == 1) return planned;

  // Parts of a size have the same plan, if it does not depend on which heads they are.
  std::map<std::array<int64_t, 3>, LaunchPlan> plans;
  LaunchPlan result = *whole;
  result.launches.clear();
  result.workspace_bytes = 0;
  result.writes_dmask = false;
  for (const Part& part : parts) {
    const BackwardProblem of_part = problem_of(problem, part);
    const std::array key = {of_part.call.batch, of_part.call.heads_kv, of_part.first_head};
    auto found = plans.find(key);
    if (found == plans.end()) {
      PlanResult answer = plan(of_part, device);
      if (!std::holds_alternative<LaunchPlan>(answer)) return planned;
      found = plans.emplace(key, std::get<LaunchPlan>(std::move(answer))).first;
    }
    result.workspace_bytes = std::max(result.workspace_bytes, found->second.workspace_bytes);
    for (Launch launch : found->second.launches) {
      for (PointerSlot& slot : launch.pointers)
        slot.addend += start_of(problem, part, slot.operand);
      for (TensorMapSpec& map : launch.tensor_maps)
        map.addend += start_of(problem, part, map.operand);
      result.launches.push_back(std::move(launch));
    }
  }
  if (problem.dsinks) {
    Launch sinks = *find_launch(*whole, "_backward_sinks_");
    for (PointerSlot& slot : sinks.pointers) {
      if (slot.operand == Operand::Workspace) slot.addend = 0;  // where the kept terms are
    }
    result.launches.push_back(std::move(sinks));
  }
  return result;
}

}  // namespace archflash::core
