// The arguments of a call of one of PyTorch's operators: taken off the stack on which PyTorch
// passes them, and read as far as they say how the call is served.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/plan_cache.h"
#include "torch_operators/torch_functions.h"

namespace archflash::torch_operators {

using Word = uint64_t;  // an argument or result of an operator on its stack

// Thrown where one of PyTorch's C functions fails. The function in Python then serves the call, and
// raises the exception that tells the cause.
struct TryInPython {};

inline void check(int status) {
  if (status != 0) throw TryInPython{};
}

// One argument: a tensor, a number, or one of the two that may be None.
struct Argument {
  HeldTensor tensor;
  Word bits = 0;      // the value of a number: an int64_t, a double, or 0 or 1
  bool given = true;  // false where it is None
};

inline double as_double(Word bits) { return std::bit_cast<double>(bits); }

constexpr size_t MAX_ARGUMENTS = 17;
using OperatorArguments = std::array<Argument, MAX_ARGUMENTS>;

// Takes the arguments off the stack. An optional one is a pointer to its word, allocated by
// PyTorch, and null for None.
//
// Args:
//   types: a letter for each: T tensor, f float, b bool, i int, and t, g, j for those of T, f, i
//   that may be None.
void take(std::string_view types, const Word* stack, OperatorArguments& arguments);

// Marks the tensors that PyTorch leaves undefined, which are None in Python.
void find_undefined(std::string_view types, OperatorArguments& arguments);

// What a call has to have in common with an earlier one to be treated like it: `given`, then the
// tensors that are given, q, k and v first, then the numbers. Of the addresses of its tensors that
// is only the alignment.
constexpr size_t MAX_TENSORS = 8;  // at most eight of an operator's tensors are read
constexpr size_t TENSOR_WORDS = 9, MAX_NUMBERS = 9;
// The places of cum_seq_q and cum_seq_k among the tensors of _flash_attention_forward.
constexpr size_t LENGTHS_OF_QUERIES = 3, LENGTHS_OF_KEYS = 4;
struct OperatorKey {
  size_t count = 1;
  std::array<Word, 1 + MAX_TENSORS * TENSOR_WORDS + MAX_NUMBERS> words;

  std::string_view bytes() const {
    return {reinterpret_cast<const char*>(words.data()), count * sizeof(Word)};
  }
  bool operator==(const OperatorKey& other) const { return bytes() == other.bytes(); }
  // Bit 0: whether gradients are enabled; bit 1: whether PyTorch asks for deterministic algorithms,
  // in a backward pass; bit 2: whether packed queries and keys have the same tensor of lengths;
  // then a bit for each argument: whether it is not None.
  Word given() const { return words[0]; }
  int64_t size(size_t tensor, size_t dim) const {
    return static_cast<int64_t>(words[1 + tensor * TENSOR_WORDS + dim]);
  }
};
struct OperatorKeyHash {
  size_t operator()(const OperatorKey& key) const {
    return hash_of_words(key.words.data(), key.count * sizeof(Word));
  }
};

struct OperatorCall {
  OperatorKey key;
  // By the place of a tensor among the operator's tensors, those included that are not given.
  std::array<void*, MAX_TENSORS> addresses{};
  int32_t device_index = -1;
};

// Reads a call. False where no such call is served here.
//
// Args:
//   tensors_read: of the operator's tensors so many are read: what the others hold changes nothing.
//   mask: the place of one more that is read; 0: none.
//   any_dims: whether tensors may have fewer than four dimensions.
bool read(std::string_view types, size_t tensors_read, size_t mask, bool any_dims,
          const OperatorArguments& arguments, OperatorCall& call);

}  // namespace archflash::torch_operators
