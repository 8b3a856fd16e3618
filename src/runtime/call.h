// One call's arguments -> Problem. Wrong calls are refused here, before anything is planned or
// launched.
#pragma once

#include <array>

#include "common/plan.h"
#include "runtime/tensors.h"

namespace archflash {

// Whether autograd will want gradients: never, if a tensor of the call asks for them, or surely.
enum class Grad : int32_t { Off = 0, IfRequired = 1, Needed = 2 };

// What archflash.attention() was given; None where the caller left the default.
struct Arguments {
  nb::handle q, k, v;
  nb::handle causal, window, softcap, sinks, scale, q_offset;
  nb::handle cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k;
  nb::handle attn_mask, q_descale, k_descale, v_descale, out_dtype, approximate, num_splits;
  nb::handle layout, out;
  nb::handle want_lse;
  Grad grad;
};

struct Call {
  Problem problem;                             // every byte set
  std::array<void*, OPERAND_COUNT> addresses;  // by Operand; null where absent or not yet allocated
  bool has_storage;                            // of q, k and v: they have addresses
  const char* lazy;                            // name of a lazy input (TensorView), null: none is
  Place place;                                 // of every tensor
  int device_index;                            // -1 when the tensors are not on a CUDA device
  int64_t out_shape[4], out_strides[4];        // of the output to allocate, in elements
  int out_ndim;
  bool out_like_q;  // torch.empty_like(q) makes exactly that output
};

// What is wrong with a lazy tensor where it cannot be resolved: "out" IS_LAZY "pass a new tensor".
constexpr char IS_LAZY[] =
    " has the negative bit or is a zero tensor, so that its memory does not hold its values: ";

// Throws nb::value_error (shapes, values) or nb::type_error (types, dtypes, devices): what was
// given, what is allowed, what to do.
void build_call(const Arguments& arguments, Call& call);

}  // namespace archflash
