// The options of a call as data: the table common/options.inc as an array.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>

#include "common/mask_params.h"
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

// The dtypes that a strided tensor may have: a sum of these.
enum Element : uint32_t { ELEMENT_F32 = 1, ELEMENT_BOOL = 2, ELEMENT_INT8 = 4 };

// What the size of a dimension of a strided tensor has to be: sequences, query heads, query rows,
// or blocks of MASK_BLOCK rows or keys. Batch, heads and rows have their strides in Problem;
// elements along keys are neighbours.
enum class Extent { None, Batch, HeadsQ, RowsQ, BlocksQ, BlocksK };
// Whether all share one element along it: where its size is 1, or where it is left out, as leading
// dimensions may be.
enum class Repeats { Never, IfOne, IfLeftOut };
struct Dimension {
  Extent extent = Extent::None;
  Repeats repeats = Repeats::Never;
};
constexpr int MOST_DIMENSIONS = 4;

struct Option {
  const char* name;
  OptionKind kind;
  ::archflash::Flag Problem::* flag = nullptr;  // the field that an option of kind Flag sets
  std::optional<Operand> operand;  // the operand that an option which is a tensor becomes
  // The members below are of a strided tensor: the fields that say that it is given, and how; what
  // it has to be; whether packed sequences take it. They are null for other options.
  ::archflash::Flag Problem::* present = nullptr;
  Strides Problem::* strides = nullptr;
  uint32_t dtypes = 0;
  bool of_packed = false;
  Dimension dimensions[MOST_DIMENSIONS] = {};
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

// The places of strided tensors in the table.
constexpr bool is_strided(const Option& option) { return option.strides != nullptr; }
constexpr auto STRIDED_OPTIONS = [] {
  std::array<int, std::count_if(std::begin(OPTIONS), std::end(OPTIONS), is_strided)> places{};
  size_t count = 0;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    if (is_strided(OPTIONS[i])) places[count++] = i;
  }
  return places;
}();

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
  if (option.flag) return problem.*option.flag;
  if (option.present) return problem.*option.present;
  return option.given && option.given(problem);
}

// The number of dimensions of a strided tensor, including those that may be left out.
constexpr int dimensions_of(const Option& option) {
  int count = 0;
  while (count < MOST_DIMENSIONS && option.dimensions[count].extent != Extent::None) ++count;
  return count;
}

// The elements that a strided tensor has along a dimension where none is shared.
inline int64_t size_of(Extent extent, const Problem& p) {
  const auto blocks = [](int64_t rows) { return rows / MASK_BLOCK + (rows % MASK_BLOCK != 0); };
  switch (extent) {
    case Extent::None:
      return 1;
    case Extent::Batch:
      return p.batch;
    case Extent::HeadsQ:
      return p.heads_q;
    case Extent::RowsQ:
      return p.nq;
    case Extent::BlocksQ:
      return blocks(p.nq);
    case Extent::BlocksK:
      return blocks(p.nk);
  }
  return 1;
}

// The stride of a strided tensor along a dimension; null along keys, where it is 1.
constexpr int64_t* stride_along(Extent extent, Strides& strides) {
  switch (extent) {
    case Extent::Batch:
      return &strides.batch;
    case Extent::HeadsQ:
      return &strides.head;
    case Extent::RowsQ:
    case Extent::BlocksQ:
      return &strides.row;
    default:
      return nullptr;
  }
}

constexpr int64_t element_bytes(const Option& option) {
  return option.dtypes & ELEMENT_F32 ? 4 : 1;
}

// The name of a flag's field in Problem.
const char* flag_field(const Option& option);

// Why an implementation with these features cannot serve a problem: a sentence for each option that
// is given and that it does not list. Of tensors and numbers a folder says so itself where it knows
// more: `flags_alone` leaves them out.
Reasons refused_options(bool flags_alone, const Problem& problem, const Description& description);

}  // namespace archflash
