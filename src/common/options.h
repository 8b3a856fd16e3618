// The options of a call as data: the table common/options.inc as an array.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash {

// What values an option takes. Where a default is not said, it is None (False for a Flag).
enum class OptionKind {
  Flag,    // True or False, in a field of Problem
  Number,  // a float or an int
  Integer,
  Tensor,
  IntegerOrTensor,
  Window,  // a pair of integers, each of which may be None
  Dtype,
  Text,
  Output,  // the tensor that the call writes: no input of the operator
};

struct Option {
  const char* name;
  OptionKind kind;
  ::archflash::Flag Problem::* flag = nullptr;  // the field that an option of kind Flag sets
  std::optional<Operand> operand;  // the operand that an option which is a tensor becomes
  // Whether a call gives the option; null where calls are not described by it, and for a Flag.
  bool (*given)(const Problem&) = nullptr;
  // How a folder that serves the option lists it among its features; the option's name if null.
  // Empty: whoever serves caches serves it.
  const char* feature = nullptr;
  const char* default_text = nullptr;  // the default of a Text
  bool differentiable = false;         // whether autograd may want its gradient
  // Whether the exact result is the same without it: `torch` and the float64 reference ignore it.
  bool advice = false;
  bool of_attention = true;  // whether attention() has it
  bool of_cache = true;      // whether attention_with_kvcache() has it
  bool of_backward = true;   // whether attention_backward() has it
  const char* doc = "";      // how the option's entry in the docstring of attention() begins
};

#define ARCHFLASH_WHERE(condition) [](const Problem& p) -> bool { return condition; }
constexpr Option OPTIONS[] = {
#define ARCHFLASH_OPTION(option, ...) Option{.name = #option, __VA_ARGS__},
#include "common/options.inc"
};
#undef ARCHFLASH_WHERE
constexpr int OPTION_COUNT = static_cast<int>(std::size(OPTIONS));

// The options of attention() come first in the table.
constexpr int attention_options() {
  int count = 0;
  while (count < OPTION_COUNT && OPTIONS[count].of_attention) ++count;
  return count;
}
constexpr int ATTENTION_OPTION_COUNT = attention_options();
constexpr int CACHE_OPTION_COUNT = static_cast<int>(std::count_if(
    std::begin(OPTIONS), std::end(OPTIONS), [](const Option& o) { return o.of_cache; }));

// Whether a value of this kind is or may be a tensor.
constexpr bool may_be_tensor(OptionKind kind) {
  return kind == OptionKind::Tensor || kind == OptionKind::IntegerOrTensor ||
         kind == OptionKind::Output;
}

// How a folder that serves an option lists it among its features.
constexpr const char* feature_of(const Option& option) {
  return option.feature == nullptr ? option.name : option.feature;
}

// Whether a call gives an option, as far as its problem says.
inline bool is_given(const Option& option, const Problem& problem) {
  return option.flag ? problem.*option.flag : option.given && option.given(problem);
}

// The name of a flag's field in Problem.
const char* flag_field(const Option& option);

// Why an implementation with these features cannot serve a problem: a sentence for each option that
// is given and that it does not list. Of tensors and numbers a folder says so itself where it knows
// more: `flags_alone` leaves them out.
Reasons refused_options(bool flags_alone, const Problem& problem, const Description& description);

}  // namespace archflash
