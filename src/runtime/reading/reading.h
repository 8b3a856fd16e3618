// The parts of build_call (runtime/call.h): each reads one argument, or a few that belong together,
// into the problem and the addresses of the call. A wrong one is refused with what was given, what
// is allowed and what to do.
#pragma once

#include <utility>

#include "runtime/call.h"
#include "runtime/checks.h"
#include "runtime/wrong.h"

namespace archflash::reading {

// --- values.cpp: numbers and words ---

double number(nb::handle value, const char* name);  // finite
// An int or whatever stands for one (numpy's integers do), but no bool and no array.
int64_t integer(nb::handle value, const char* name, const char* allowed = "an int or None");
int64_t longest(nb::handle value, const char* name);  // UNKNOWN for None
void read_flags(const Arguments& a, Problem& p);      // each option of kind Flag
void read_window(nb::handle window, Problem& p);
void read_softcap(const Arguments& a, Problem& p);
void read_approximate(const Arguments& a, Problem& p);
void read_num_splits(const Arguments& a, Problem& p);
void read_attention_chunk(const Arguments& a, Problem& p);

// --- tensors.cpp: what tensors of a call have in common ---

// Where a dimension lies in a tensor of the call.
struct Axes {
  int batch, head, row, inner;  // batch is -1 with cu_seqlens
};
Axes axes_of(const Arguments& a, bool varlen);

inline bool requires_grad(nb::handle tensor) {
  return tensor.attr(torch().requires_grad).is(Py_True);
}

// Reads a tensor and notes in the call if it is lazy or has no memory.
void read(nb::handle object, const char* name, Call& call, TensorView& view);
// A 1-D int32 tensor beside q, of a length (any for -1), with the words around its shape.
void read_int32(nb::handle object, const char* name, int64_t length, const char* before,
                const char* behind, const TensorView& q, Call& call, TensorView& view);

inline int64_t stride_of(const TensorView& t, int axis) {
  return axis < 0 || t.shape[axis] == 1 ? 0 : t.strides[axis];
}
inline Strides strides_of(const TensorView& t, const Axes& x) {
  return {stride_of(t, x.batch), stride_of(t, x.head), stride_of(t, x.row)};
}
inline int64_t column_of(const TensorView& t, const Axes& x) {
  return t.shape[x.inner] <= 1 ? 1 : t.strides[x.inner];
}
inline bool has_unit_inner(const TensorView& t, const Axes& x) { return column_of(t, x) == 1; }

void check_same_device(const TensorView& t, const char* name, const TensorView& q);
void check_rank(const TensorView& t, const char* name, int rank, bool varlen);
void check_size(int64_t given, int64_t expected, const TensorView& t, const char* name,
                const char* what, const char* other);

// Dense strides for a shape of `ndim` dimensions, at most 4, that nest in the order of given
// strides, the last innermost; a dimension of stride 0 (expanded) says nothing about the order and
// goes outermost.
void nest_as(const int64_t* given, int ndim, const int64_t* shape, int64_t* strides);

// The address of a tensor of the call.
inline void set_address(Call& call, Operand operand, const TensorView& view) {
  call.addresses[static_cast<int>(operand)] = view.data;
}

// --- masks.cpp: what changes the scores or the weights, and the tensors beside q, k and v ---

void read_masks(const Arguments& a, const TensorView& q, Call& call);  // masks as data
void read_key_indices(const Arguments& a, const TensorView& q, Call& call);
void read_sinks(const Arguments& a, const TensorView& q, Call& call);
void read_q_offset(const Arguments& a, const TensorView& q, Call& call);
void read_dropout(const Arguments& a, const TensorView& q, Call& call);
void read_descales(const Arguments& a, const TensorView& q, Call& call);

// --- cache.cpp ---

// What a call with a cache must not give, and what belongs to such a call only.
void check_cache_options(const Arguments& a, bool kv_cache);
// How the caches hold the sequences, and what is appended to them. p.batch and the sizes of the
// caches are known.
void read_cache(const Arguments& a, const Axes& x, const TensorView& q, const TensorView& k,
                Call& call);
// Latent rows whose format packed_rows names: k and v both are their bytes.
void read_packed_rows(const Arguments& a, const Axes& x, const TensorView& k, const TensorView& v,
                      Problem& p);
// A second query, whose product with the rows of V is added to the scores.
void read_qv(const Arguments& a, const Axes& x, const TensorView& q, Call& call);

// --- output.cpp ---

void read_out_dtype(const Arguments& a, Problem& p);
// The output that the call gives, or the one to allocate.
void read_output(const Arguments& a, const TensorView& q, const Axes& x, Call& call);
// For calls that write their output. A backward pass reads it.
void refuse_shared_output(const Call& call);

}  // namespace archflash::reading
