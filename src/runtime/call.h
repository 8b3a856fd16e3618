// One call's arguments -> Problem. Wrong calls are refused here, before anything is planned or
// launched.
#pragma once

#include <array>
#include <stdexcept>

#include "common/options.h"
#include "common/planning/plan.h"
#include "runtime/tensors.h"

namespace archflash {

// Whether autograd will want gradients: never, if a tensor of the call asks for them, or surely.
enum class Grad : int32_t { Off = 0, IfRequired = 1, Needed = 2 };

// What archflash.attention() or attention_with_kvcache() was given: q, k, v (or the caches) and the
// value of each option of the table (common/options.inc).
struct Arguments {
  nb::handle q, k, v;
#define ARCHFLASH_OPTION(option, ...) nb::handle option;
#include "common/options.inc"
  Grad grad;
  nb::handle options;  // the tuple that they came in
  // The output that is allocated has rows before heads in memory, whatever q has. For q of four
  // dimensions with heads before rows.
  bool rows_before_heads = false;
};

// The members of Arguments that hold the options, in the order of OPTIONS.
constexpr nb::handle Arguments::* ARGUMENTS[] = {
#define ARCHFLASH_OPTION(option, ...) &Arguments::option,
#include "common/options.inc"
};

// The options come in the order of the table: as a tuple of all or of those of attention() alone,
// or as a list of those of attention_with_kvcache() alone. The others are at their defaults. Throws
// nb::type_error for anything else.
Arguments arguments_of(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad);

// The options that all layers of a server's batch have in common.
constexpr nb::handle Arguments::* BATCH[] = {&Arguments::cu_seqlens_q, &Arguments::max_seqlen_q,
                                             &Arguments::cache_seqlens, &Arguments::page_table};
// Takes them from a tuple. Throws nb::type_error for anything else.
void set_batch(Arguments& arguments, nb::handle batch);

// A call that archflash refuses by its contract: UnsupportedError in Python.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Call {
  Problem problem;                             // every byte set
  std::array<void*, OPERAND_COUNT> addresses;  // by Operand; null where absent or not yet allocated
  const char* without_storage;                 // name of an input without has_storage, or null
  const char* lazy;                            // name of a lazy input (TensorView), null: none is
  DeviceKind device_kind;                      // of every tensor
  int device_index;                            // -1 when the tensors are not on a CUDA device
  int64_t out_shape[4], out_strides[4];        // of the output to allocate, in elements
  int out_ndim;
  bool out_like_q;  // torch.empty_like(q) makes exactly that output
};

// What is wrong with a lazy tensor where it cannot be resolved: "out" IS_LAZY "pass a new tensor".
constexpr char IS_LAZY[] =
    " has the negative bit or is a zero tensor, so that its memory does not hold its values: ";

// Throws nb::value_error (shapes, values), nb::type_error (types, dtypes, devices) or Unsupported:
// what was given, what is allowed, what to do.
void build_call(const Arguments& arguments, Call& call);

}  // namespace archflash
