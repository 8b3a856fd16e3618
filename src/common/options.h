// The options of a call as data: the table common/options.inc as an array.
#pragma once

#include <iterator>

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
  // How a folder that serves the option lists it among its features; the option's name if null. Of
  // kind Flag only: the folders themselves refuse the other options.
  const char* feature = nullptr;
  const char* default_text = nullptr;  // the default of a Text
  bool differentiable = false;         // whether autograd may want its gradient
  // Whether the exact result is the same without it: `torch` and the float64 reference ignore it.
  bool advice = false;
  bool of_attention = true;  // whether attention() has it
  bool of_cache = true;      // whether attention_with_kvcache() has it
  bool built = true;  // false: the name is taken, and every call that gives the option is refused
  const char* doc = "";  // how the option's entry in the docstring of attention() begins
};

constexpr Option OPTIONS[] = {
#define ARCHFLASH_OPTION(option, ...) Option{.name = #option, __VA_ARGS__},
#include "common/options.inc"
#undef ARCHFLASH_OPTION
};
constexpr int OPTION_COUNT = static_cast<int>(std::size(OPTIONS));

// The options of attention() come first in the table.
constexpr int attention_options() {
  int count = 0;
  while (count < OPTION_COUNT && OPTIONS[count].of_attention) ++count;
  return count;
}
constexpr int ATTENTION_OPTION_COUNT = attention_options();

// Whether a value of this kind is or may be a tensor.
constexpr bool may_be_tensor(OptionKind kind) {
  return kind == OptionKind::Tensor || kind == OptionKind::IntegerOrTensor ||
         kind == OptionKind::Output;
}

// How a folder that serves an option lists it among its features.
constexpr const char* feature_of(const Option& option) {
  return option.feature == nullptr ? option.name : option.feature;
}

// The name of a flag's field in Problem.
const char* flag_field(const Option& option);

// Why an implementation with these features cannot serve a problem: a sentence for each Flag that
// is set and that it does not list.
Reasons refused_flags(const Problem& problem, const Description& description);

}  // namespace archflash
