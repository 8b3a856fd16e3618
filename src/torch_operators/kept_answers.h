// What was decided for calls of PyTorch's operators: which operators this module knows, and for
// each kind of call the plan that serves it, or that PyTorch's own kernel does.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/planning/plan.h"
#include "torch_operators/arguments.h"
#include "torch_operators/operators.h"

namespace archflash::torch_operators {

// How one result is made: a number, no tensor, a new tensor, or one tensor for all calls, whose
// values nothing reads.
struct Result {
  enum class Kind { Number, None, New, Shared } kind = Kind::None;
  Word number = 0;
  int64_t dims = 0;
  std::array<int64_t, 5> sizes{}, strides{};
  int64_t padding = 0;  // columns of infinity, appended to the last dimension of a new tensor
  int32_t dtype = 0;
  std::shared_ptr<HeldTensor> shared;
};

constexpr size_t MAX_RESULTS = 9;

struct KeptAnswer {
  std::shared_ptr<PreparedPlan> plan;  // null: PyTorch's own kernel serves the call
  Counts::Counter* count = nullptr;
  std::vector<Result> results;  // of the plan, those that it writes first
};

constexpr size_t MOST_ANSWERS = 1024;

// The arguments of _flash_attention_forward, without and with block_table and num_splits.
constexpr std::string_view PACKED = "TTTttiifbbgjjtt", PACKED_WITH_PAGES = "TTTttiifbbgjjtttj";

// The arguments of the backward operators of SDPA's flash and cuDNN kernels, and of
// _flash_attention_backward.
constexpr std::string_view FLASH_BACKWARD = "TTTTTTTTiifbTTg", CUDNN_BACKWARD = "TTTTTTTTTTTiifbg",
                           PACKED_BACKWARD = "TTTTTTTTiifbTTgjj";

// The operators that this module knows: how PyTorch's own kernel is called.
enum class Known {
  None,
  Flash,
  Cudnn,
  Efficient,
  Packed,
  FlashBackward,
  CudnnBackward,
  PackedBackward,
  Node  // the backward operator of node.h, of which PyTorch has no kernel
};

inline bool is_backward(Known known) { return known >= Known::FlashBackward; }

// What a tensor of an operator is to a plan, by its place among the operator's tensors. No plan
// takes the slopes of packed sequences. What comes behind these tensors is not read: the state of a
// random generator, and tensors that are None where a plan serves.
constexpr std::array OF_SDPA{Operand::Q, Operand::K, Operand::V, Operand::Mask};
constexpr std::array OF_PACKED{Operand::Q,           Operand::K,          Operand::V,
                               Operand::CuSeqlensQ,  Operand::CuSeqlensK, Operand::CacheSeqlens,
                               Operand::AlibiSlopes, Operand::PageTable};
constexpr std::array OF_BACKWARD{Operand::DOut, Operand::Q,   Operand::K,
                                 Operand::V,    Operand::Out, Operand::Lse};
constexpr std::array OF_PACKED_BACKWARD{Operand::DOut,       Operand::Q,         Operand::K,
                                        Operand::V,          Operand::Out,       Operand::Lse,
                                        Operand::CuSeqlensQ, Operand::CuSeqlensK};
inline std::span<const Operand> operands_of(Known known) {
  switch (known) {
    case Known::Packed:
      return OF_PACKED;
    case Known::FlashBackward:
    case Known::CudnnBackward:
    case Known::Node:
      return OF_BACKWARD;
    case Known::PackedBackward:
      return OF_PACKED_BACKWARD;
    default:
      return OF_SDPA;
  }
}

// The place among the tensors of a backward operator of the mask, which only PyTorch's own kernel
// takes; 0: it has none.
inline size_t mask_of(Known known) { return known == Known::CudnnBackward ? 8 : 0; }

// What a plan of an operator writes: its results in their order.
constexpr std::array OUTPUTS{Operand::Out, Operand::Lse};
constexpr std::array GRADIENTS{Operand::DQ, Operand::DK, Operand::DV};
inline std::span<const Operand> outputs_of(Known known, const LaunchPlan& plan) {
  if (is_backward(known)) return GRADIENTS;
  return std::span<const Operand>(OUTPUTS).first(plan.problem.want_lse ? 2 : 1);
}

struct Operator {
  std::string types;
  Known known = Known::None;
  nb::object by_python;
  using KeptAnswers =
      std::unordered_map<OperatorKey, std::shared_ptr<const KeptAnswer>, OperatorKeyHash>;
  // Guards the answers. None is destroyed under it: that may run Python, for whose lock the
  // thread would wait, while another one that holds Python's lock waits for this.
  std::mutex lock;
  KeptAnswers answers;
  std::vector<const OperatorKey*> in_order;  // the keys of the answers, as they came
  size_t oldest = 0;                         // in that, where all places are taken

  std::shared_ptr<const KeptAnswer> find(const OperatorKey& key) {
    const std::lock_guard guard(lock);
    const auto found = answers.find(key);
    return found == answers.end() ? nullptr : found->second;
  }
  // In the place of an earlier answer for such a call, or of the one that came first.
  void keep(const OperatorKey& key, KeptAnswer answer) {
    auto kept = std::make_shared<const KeptAnswer>(std::move(answer));
    const std::lock_guard guard(lock);
    if (const auto known = answers.find(key); known != answers.end()) {
      known->second.swap(kept);
    } else if (in_order.size() < MOST_ANSWERS) {
      in_order.push_back(&answers.emplace(key, std::move(kept)).first->first);
    } else {
      auto node = answers.extract(*in_order[oldest]);
      node.key() = key;
      node.mapped().swap(kept);
      in_order[oldest] = &answers.insert(std::move(node)).position->first;
      oldest = (oldest + 1) % MOST_ANSWERS;
    }
  }
  void forget() {
    KeptAnswers replaced;
    const std::lock_guard guard(lock);
    answers.swap(replaced);
    in_order.clear();
    oldest = 0;
  }
};

// Puts the results of a call on the stack. `made`: a tensor for each result that is not a number.
inline void give(const std::vector<Result>& results, std::span<HeldTensor> made, Word* stack) {
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    stack[i] =
        r.kind == Result::Kind::Number ? r.number : reinterpret_cast<Word>(made[i].release());
  }
}

}  // namespace archflash::torch_operators
