#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "common/mask_params.h"
#include "runtime/call.h"
#include "runtime/checks.h"
#include "runtime/text.h"

namespace archflash {
namespace {

template <class... Parts>
[[noreturn]] void wrong_value(const Parts&... parts) {
  throw nb::value_error(join(parts...).c_str());
}
template <class... Parts>
[[noreturn]] void wrong_type(const Parts&... parts) {
  throw nb::type_error(join(parts...).c_str());
}

// Where a dimension lies in a tensor of the call.
struct Axes {
  int batch, head, row, inner;  // batch is -1 with cu_seqlens
};
constexpr Axes BHND{0, 1, 2, 3}, BNHD{0, 2, 1, 3}, PACKED{-1, 1, 0, 2};

Axes axes_of(const Arguments& a, bool varlen) {
  const bool is_text = PyUnicode_Check(a.layout.ptr());
  if (is_text && PyUnicode_CompareWithASCIIString(a.layout.ptr(), "bhnd") == 0)
    return varlen ? PACKED : BHND;
  if (is_text && PyUnicode_CompareWithASCIIString(a.layout.ptr(), "bnhd") == 0)
    return varlen ? PACKED : BNHD;
  wrong_value(
      "layout is ", given(a.layout),
      ": it must be 'bhnd' for (batch, heads, rows, dim) or 'bnhd' for (batch, rows, heads, dim)");
}

// The numbers of an array (torch, CuPy, JAX) may lie on a GPU: asking for one would wait for it.
bool is_array(nb::handle value) { return is_tensor(value) || nb::hasattr(value, "__dlpack__"); }

bool is_bool(nb::handle value) {
  if (PyBool_Check(value.ptr())) return true;
  const std::string type = nb::cast<std::string>(nb::str(value.type().attr("__name__")));
  return type == "bool" || type == "bool_";  // numpy's
}

// Clears the TypeError or OverflowError of a conversion; passes every other error on.
void clear_refusal() {
  if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_OverflowError))
    PyErr_Clear();
  else
    throw nb::python_error();
}

double number(nb::handle value, const char* name) {
  const bool is_plain = PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr());
  const bool takes = is_plain || !(is_bool(value) || is_array(value));
  const double result = takes ? PyFloat_AsDouble(value.ptr()) : -1.0;
  const bool refused = result == -1.0 && PyErr_Occurred();
  if (refused) clear_refusal();
  if (!takes || refused) wrong_type(name, " is ", given(value), ": it must be a number or None");
  if (!std::isfinite(result)) wrong_value(name, " is ", result, ": it must be finite");
  return result;
}

// An int or whatever stands for one (numpy's integers do), but no bool and no array.
int64_t integer(nb::handle value, const char* name, const char* allowed = "an int or None") {
  nb::object index;
  if (PyLong_CheckExact(value.ptr())) {
    index = nb::borrow(value);
  } else if (PyIndex_Check(value.ptr()) && !is_bool(value) && !is_array(value)) {
    index = nb::steal(PyNumber_Index(value.ptr()));
    if (!index.is_valid()) clear_refusal();
  }
  if (!index.is_valid()) wrong_type(name, " is ", given(value), ": it must be ", allowed);
  int overflow = 0;
  const int64_t result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || result >= INTEGER_LIMIT || result <= -INTEGER_LIMIT)
    wrong_value(name, " is ", given(index), ": it must lie between -2^60 and 2^60");
  return result;
}

int64_t longest(nb::handle value, const char* name) {
  if (value.is_none()) return UNKNOWN;
  const int64_t result = integer(value, name);
  if (result < 0) wrong_value(name, " is ", result, ": it must be >= 0, or None");
  return result;
}

bool flag(nb::handle value, const char* name) {
  if (!PyBool_Check(value.ptr())) wrong_type(name, " is ", given(value), ": it must be a bool");
  return value.is(Py_True);
}

void read_window(nb::handle window, Problem& p) {
  if (window.is_none()) return;
  if (!(nb::isinstance<nb::tuple>(window) || nb::isinstance<nb::list>(window)) ||
      nb::len(window) != 2) {
    wrong_type("window is ", given(window),
               ": it must be a pair (left, right) of ints, None or -1 for an unbounded side");
  }
  for (int side = 0; side < 2; ++side) {
    nb::object value = window[side];
    if (value.is_none()) continue;
    const char* name = side == 0 ? "window left" : "window right";
    const int64_t limit = integer(value, name);
    if (limit < 0) continue;  // unbounded, as in flash-attn
    (side == 0 ? p.window_left : p.window_right) = limit;
  }
}

bool requires_grad(nb::handle tensor) { return tensor.attr("requires_grad").is(Py_True); }

void read(nb::handle object, const char* name, Call& call, TensorView& view) {
  read_tensor(object, name, view);
  if (view.lazy && !call.lazy) call.lazy = name;
  if (!view.has_storage && !call.without_storage) call.without_storage = name;
}

int64_t stride_of(const TensorView& t, int axis) {
  return axis < 0 || t.shape[axis] == 1 ? 0 : t.strides[axis];
}

Strides strides_of(const TensorView& t, const Axes& x) {
  return {stride_of(t, x.batch), stride_of(t, x.head), stride_of(t, x.row)};
}

int64_t column_of(const TensorView& t, const Axes& x) {
  return t.shape[x.inner] <= 1 ? 1 : t.strides[x.inner];
}

bool has_unit_inner(const TensorView& t, const Axes& x) { return column_of(t, x) == 1; }

void check_same_device(const TensorView& t, const char* name, const TensorView& q) {
  if (t.device_kind != q.device_kind || t.device_index != q.device_index) {
    auto text = [](const TensorView& view) {
      return view.device_kind == DeviceKind::Cuda
                 ? join("cuda:", view.device_index)
                 : std::string(view.device_kind == DeviceKind::Cpu ? "cpu" : "another device");
    };
    wrong_type(name, " is on ", text(t), " but q is on ", text(q), ": move them to one device");
  }
}

void check_rank(const TensorView& t, const char* name, int rank, bool varlen) {
  if (t.ndim == rank) return;
  wrong_value(name, " has shape ", describe_shape(t), ": ",
              varlen ? "with cu_seqlens it must have 3 dimensions (tokens, heads, dim)"
                     : "it must have 4 dimensions, (batch, heads, rows, dim) or with layout='bnhd' "
                       "(batch, rows, heads, dim); "
                       "packed (tokens, heads, dim) needs cu_seqlens_q and cu_seqlens_k");
}

void check_size(int64_t given, int64_t expected, const TensorView& t, const char* name,
                const char* what, const char* other) {
  if (given != expected) {
    wrong_value(name, " has shape ", describe_shape(t), ", ", what, " ", given, ": it must be ",
                expected, " as in ", other);
  }
}

// A 1-D int32 tensor beside q.
void read_int32(nb::handle object, const char* name, int64_t length, const char* before,
                const char* behind, const TensorView& q, Call& call, TensorView& view) {
  read(object, name, call, view);
  if (!view.is_int32)
    wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.int32");
  check_same_device(view, name, q);
  if (view.ndim != 1 || (length >= 0 ? view.shape[0] != length : view.shape[0] < 1)) {
    const std::string shape = length >= 0 ? join("(", length, ",)") : "";
    wrong_value(name, " has shape ", describe_shape(view), ": it must be ", before, shape, behind);
  }
  if (view.shape[0] > 1 && view.strides[0] != 1)
    wrong_value(name, " is not contiguous: call .contiguous() on it");
}

// One number for the tensor, each of `heads` (or of `other_heads`), each of those of every batch,
// or each block of SCALE_ROWS of `rows` rows of them.
void read_descale(nb::handle object, const char* name, Operand operand, int bit, int64_t heads,
                  int64_t other_heads, int64_t rows, const TensorView& q, Call& call,
                  Strides& strides) {
  if (object.is_none()) return;
  TensorView view;
  read(object, name, call, view);
  Problem& p = call.problem;
  if (!view.is_float || view.dtype != DType::F32)
    wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.float32");
  check_same_device(view, name, q);
  const DType dtype = bit == 0 ? p.dtype : p.kv_dtype;
  if (!is_fp8(dtype)) {
    wrong_value(name, " is given but ", p.kv_cache && bit > 0 ? "the cache is " : "q is ",
                dtype_name(dtype), ": descales belong to float8 inputs");
  }
  const bool per_tensor = view.ndim == 0 || (view.ndim == 1 && view.shape[0] == 1);
  if (!per_tensor) {
    const int head_axis = view.ndim == 1 ? 0 : 1;
    const int64_t blocks = (rows + SCALE_ROWS - 1) / SCALE_ROWS;
    const bool fits = view.ndim <= 3 && (view.ndim == 1 || view.shape[0] == p.batch) &&
                      (view.shape[head_axis] == heads || view.shape[head_axis] == other_heads) &&
                      (view.ndim < 3 || (!p.varlen && !p.kv_cache && view.shape[2] == blocks));
    if (!fits) {
      const std::string other = other_heads == heads ? "" : join(" (or ", other_heads, ")");
      const std::string in_blocks =
          p.kv_cache ? "; with a cache there are no descales of blocks"
          : p.varlen ? "; packed sequences take no descales of blocks"
                     : join(" or (", p.batch, ", ", heads, ", ", blocks, ")", other,
                            ", the last of these one for each block of ", SCALE_ROWS, " rows");
      wrong_value(name, " has shape ", describe_shape(view), ": it must be (), (1,), (", heads,
                  ",)", other, ", (", p.batch, ", ", heads, ")", other, in_blocks);
    }
    strides.head = stride_of(view, head_axis);
    if (view.ndim > 1) strides.batch = stride_of(view, 0);
    if (view.ndim > 2) strides.row = stride_of(view, 2);
    if (view.shape[head_axis] != heads) p.descale |= 8;
  }
  p.descale |= 1 << bit;
  call.addresses[static_cast<int>(operand)] = view.data;
}

// Packed sequences have no masks whose rows are queries: they would be relative to the sequence.
void refuse_packed(const char* name, const Problem& p) {
  if (!p.varlen) return;
  wrong_value(name,
              " is given with cu_seqlens: packed sequences take no mask; use causal or window");
}

// The stride of a dimension counted from the last one, 1, and 0 where the tensor lacks it.
int64_t stride_from_end(const TensorView& t, int number) {
  return number > t.ndim ? 0 : stride_of(t, t.ndim - number);
}

void read_mask(const Arguments& a, const TensorView& q, Call& call) {
  if (a.attn_mask.is_none()) return;
  TensorView view;
  read(a.attn_mask, "attn_mask", call, view);
  Problem& p = call.problem;
  refuse_packed("attn_mask", p);
  if (!view.is_bool && !view.is_float) {
    wrong_type("attn_mask has dtype ", dtype_text(a.attn_mask),
               ": it must be torch.bool (True keeps) or a floating dtype (added)");
  }
  check_same_device(view, "attn_mask", q);
  const int64_t full[4] = {p.batch, p.heads_q, p.nq, p.nk};
  bool fits = view.ndim <= 4;
  for (int i = 0; fits && i < view.ndim; ++i) {
    const int64_t size = view.shape[view.ndim - 1 - i];
    fits = size == 1 || size == full[3 - i];
  }
  if (!fits) {
    wrong_value("attn_mask has shape ", describe_shape(view),
                ": it must broadcast to (batch, heads, nq, nk) = (", full[0], ", ", full[1], ", ",
                full[2], ", ", full[3], ")");
  }
  p.mask = view.is_bool ? 1 : 2 + static_cast<int64_t>(view.dtype);
  p.mask_align = alignment(view.data);
  p.mask_strides = {stride_from_end(view, 4), stride_from_end(view, 3), stride_from_end(view, 2)};
  p.mask_key = stride_from_end(view, 1);
  call.addresses[static_cast<int>(Operand::Mask)] = view.data;
}

void read_key_ranges(const Arguments& a, const TensorView& q, Call& call) {
  if (a.key_ranges.is_none()) return;
  TensorView view;
  read(a.key_ranges, "key_ranges", call, view);
  Problem& p = call.problem;
  refuse_packed("key_ranges", p);
  if (!view.is_int32)
    wrong_type("key_ranges has dtype ", dtype_text(a.key_ranges), ": it must be torch.int32");
  check_same_device(view, "key_ranges", q);
  const int64_t full[3] = {p.batch, p.heads_q, p.nq};
  bool fits =
      view.ndim == 5 && view.shape[4] == 2 && view.shape[3] >= 1 && view.shape[3] <= MOST_RANGES;
  for (int i = 0; fits && i < 3; ++i) fits = view.shape[i] == 1 || view.shape[i] == full[i];
  if (!fits) {
    wrong_value("key_ranges has shape ", describe_shape(view), ": it must be (", full[0], " or 1, ",
                full[1], " or 1, ", full[2], " or 1, n, 2), with n from 1 to ", MOST_RANGES,
                " ranges of keys for each query");
  }
  if (view.strides[4] != 1 || (view.shape[3] > 1 && view.strides[3] != 2))
    wrong_value("key_ranges has strided ranges: call .contiguous() on it");
  p.key_ranges = view.shape[3];
  p.range_strides = {stride_of(view, 0), stride_of(view, 1), stride_of(view, 2)};
  call.addresses[static_cast<int>(Operand::KeyRanges)] = view.data;
}

void read_alibi_slopes(const Arguments& a, const TensorView& q, Call& call) {
  if (a.alibi_slopes.is_none()) return;
  TensorView view;
  read(a.alibi_slopes, "alibi_slopes", call, view);
  Problem& p = call.problem;
  if (!view.is_float || view.dtype != DType::F32)
    wrong_type("alibi_slopes has dtype ", dtype_text(a.alibi_slopes), ": it must be torch.float32");
  check_same_device(view, "alibi_slopes", q);
  const bool fits = (view.ndim == 1 || (view.ndim == 2 && view.shape[0] == p.batch)) &&
                    view.shape[view.ndim - 1] == p.heads_q;
  if (!fits) {
    wrong_value("alibi_slopes has shape ", describe_shape(view), ": it must be (", p.heads_q,
                ",) or (", p.batch, ", ", p.heads_q, ")");
  }
  p.alibi_slopes = true;
  p.slope_strides = {stride_from_end(view, 2), stride_from_end(view, 1), 0};
  call.addresses[static_cast<int>(Operand::AlibiSlopes)] = view.data;
}

void read_block_mask(const Arguments& a, const TensorView& q, Call& call) {
  if (a.block_mask.is_none()) return;
  TensorView view;
  read(a.block_mask, "block_mask", call, view);
  Problem& p = call.problem;
  refuse_packed("block_mask", p);
  if (!view.is_bool && !view.is_int8) {
    wrong_type("block_mask has dtype ", dtype_text(a.block_mask),
               ": it must be torch.bool or torch.int8, as archflash.summarize_mask gives it");
  }
  check_same_device(view, "block_mask", q);
  const auto blocks = [](int64_t rows) { return (rows + MASK_BLOCK - 1) / MASK_BLOCK; };
  const int64_t full[4] = {p.batch, p.heads_q, blocks(p.nq), blocks(p.nk)};
  bool fits = view.ndim == 4 && view.shape[2] == full[2] && view.shape[3] == full[3];
  for (int i = 0; fits && i < 2; ++i) fits = view.shape[i] == 1 || view.shape[i] == full[i];
  if (!fits) {
    wrong_value("block_mask has shape ", describe_shape(view), ": it must be (", full[0], " or 1, ",
                full[1], " or 1, ", full[2], ", ", full[3], "), a number for each ", MASK_BLOCK,
                " queries and ", MASK_BLOCK, " keys");
  }
  if (view.shape[3] > 1 && view.strides[3] != 1)
    wrong_value("block_mask has a strided last dimension: call .contiguous() on it");
  p.block_mask = true;
  p.block_strides = {stride_of(view, 0), stride_of(view, 1), stride_of(view, 2)};
  call.addresses[static_cast<int>(Operand::BlockMask)] = view.data;
}

// The state says on the device which weights are dropped: only tensors can change in a CUDA graph.
void read_dropout(const Arguments& a, const TensorView& q, Call& call) {
  Problem& p = call.problem;
  if (!a.dropout_p.is_none()) {
    p.dropout_p = number(a.dropout_p, "dropout_p");
    if (p.dropout_p < 0 || p.dropout_p >= 1)
      wrong_value("dropout_p is ", p.dropout_p, ": it must be at least 0 and less than 1");
  }
  if (p.dropout_p != 0 && p.batch_invariant) {
    wrong_value("dropout_p is ", p.dropout_p,
                " with batch_invariant=True: what is dropped depends on the place in the batch");
  }
  if (a.rng_state.is_none()) {
    if (p.dropout_p != 0) {
      wrong_value("dropout_p is ", p.dropout_p,
                  " and rng_state is None: pass the state that archflash.dropout_state gives");
    }
    return;
  }
  TensorView view;
  read(a.rng_state, "rng_state", call, view);
  if (!view.is_int64)
    wrong_type("rng_state has dtype ", dtype_text(a.rng_state), ": it must be torch.int64");
  check_same_device(view, "rng_state", q);
  if (view.ndim != 1 || view.shape[0] != 2 || view.strides[0] != 1) {
    wrong_value("rng_state has shape ", describe_shape(view),
                ": it must be (2,), contiguous, seed and offset");
  }
  call.addresses[static_cast<int>(Operand::RngState)] = view.data;
}

// Dense strides for an output of call.out_shape whose dimensions nest in the order of q's own
// strides, the last innermost; or rows before heads.
void plan_output(const TensorView& q, bool same_dtype, bool rows_before_heads, Call& call) {
  const int n = call.out_ndim;
  int order[4];  // outermost first
  for (int i = 0; i < n - 1; ++i) {
    int place = i;
    // A stride of 0 (expanded) says nothing about order: such a dimension goes outermost.
    auto inside = [&](int a, int b) {
      return q.strides[a] != 0 && (q.strides[b] == 0 || q.strides[a] < q.strides[b]);
    };
    for (; place > 0 && inside(order[place - 1], i); --place) order[place] = order[place - 1];
    order[place] = i;
  }
  order[n - 1] = n - 1;
  if (rows_before_heads) order[0] = 0, order[1] = 2, order[2] = 1;
  int64_t stride = 1;
  call.out_like_q = same_dtype;
  for (int i = n - 1; i >= 0; --i) {
    const int axis = order[i];
    call.out_strides[axis] = stride;
    stride *= call.out_shape[axis] > 0 ? call.out_shape[axis] : 1;
    call.out_like_q &=
        call.out_shape[axis] == q.shape[axis] && call.out_strides[axis] == q.strides[axis];
  }
}

void read_out(const Arguments& a, const TensorView& q, const Axes& x, Call& call) {
  Problem& p = call.problem;
  TensorView view;
  read_tensor(a.out, "out", view);
  if (!view.has_storage && !call.without_storage) call.without_storage = "out";
  if (view.lazy) wrong_value("out", IS_LAZY, "pass a new tensor");
  if (!view.is_float || view.dtype != p.out_dtype) {
    wrong_type("out has dtype ", dtype_text(a.out), ": it must be torch.", dtype_name(p.out_dtype));
  }
  check_same_device(view, "out", q);
  bool fits = view.ndim == call.out_ndim;
  for (int i = 0; fits && i < view.ndim; ++i) fits = view.shape[i] == call.out_shape[i];
  if (!fits) {
    TensorView expected = view;
    expected.ndim = call.out_ndim;
    expected.shape = call.out_shape;
    wrong_value("out has shape ", describe_shape(view), ": it must be ", describe_shape(expected));
  }
  if (overlaps_itself(view.shape, view.strides, view.ndim)) {
    wrong_value("out has strides ", describe_strides(view),
                ": its elements overlap; pass a tensor that holds each of them once");
  }
  if (a.grad != Grad::Off && requires_grad(a.out)) {
    wrong_value("out requires a gradient: pass a tensor that does not, or call under no_grad()");
  }
  p.out = strides_of(view, x);
  p.out_column = column_of(view, x);
  p.out_align = alignment(view.data);
  call.addresses[static_cast<int>(Operand::Out)] = view.data;
}

void read_out_dtype(const Arguments& a, Problem& p) {
  p.out_dtype = is_fp8(p.dtype) ? DType::BF16 : p.dtype;
  if (a.out_dtype.is_none()) return;
  for (DType type : {DType::F32, DType::F16, DType::BF16, DType::F64}) {
    if (a.out_dtype.is(torch().dtypes[static_cast<int>(type)])) {
      p.out_dtype = type;
      return;
    }
  }
  wrong_type("out_dtype is ", given(a.out_dtype),
             ": it must be torch.float32, torch.float16, torch.bfloat16 or torch.float64");
}

void read_approximate(const Arguments& a, Problem& p) {
  if (a.approximate.is_none()) return;
  const bool is_text = PyUnicode_Check(a.approximate.ptr());
  if (!is_text || PyUnicode_CompareWithASCIIString(a.approximate.ptr(), "int8_qk") != 0)
    wrong_value("approximate is ", given(a.approximate), ": it must be 'int8_qk' or None");
  p.approximate = static_cast<int64_t>(Approximate::Int8Qk);
}

void read_num_splits(const Arguments& a, Problem& p) {
  if (a.num_splits.is_none()) return;
  if (p.batch_invariant) {
    wrong_value(
        "num_splits is given with batch_invariant=True, which splits keys by their "
        "position: leave num_splits at None");
  }
  p.num_splits = integer(a.num_splits, "num_splits");
  if (p.num_splits < 1) {
    wrong_value("num_splits is ", p.num_splits,
                ": it must be at least 1, or None for the plan to choose");
  }
}

// What a call with a cache must not give, and what belongs to such a call only.
void check_cache_options(const Arguments& a, bool kv_cache) {
  if (!kv_cache) {
    for (int i = ATTENTION_OPTION_COUNT; i < OPTION_COUNT; ++i) {
      const nb::handle value = a.*ARGUMENTS[i];
      if (value.is_none() || value.is(Py_False)) continue;
      wrong_value(OPTIONS[i].name,
                  " is given without cache_seqlens: it belongs to attention_with_kvcache");
    }
    return;
  }
  for (int i = 0; i < OPTION_COUNT; ++i) {
    if (OPTIONS[i].of_cache || (a.*ARGUMENTS[i]).is_none()) continue;
    wrong_value(OPTIONS[i].name,
                " is given with cache_seqlens: attention_with_kvcache has no such option");
  }
  const auto both = [](const char* one, nb::handle a, const char* other, nb::handle b) {
    if (a.is_none() != b.is_none()) {
      wrong_value(a.is_none() ? one : other, " is missing: ", one, " and ", other,
                  " are given together");
    }
  };
  both("k_new", a.k_new, "v_new", a.v_new);
  both("rotary_cos", a.rotary_cos, "rotary_sin", a.rotary_sin);
  if (!a.rotary_cos.is_none() && a.k_new.is_none())
    wrong_value("rotary_cos is given without k_new: a call rotates q and the keys that it appends");
  if (a.rotary_interleaved.is(Py_True) && a.rotary_cos.is_none())
    wrong_value("rotary_interleaved is True without rotary_cos and rotary_sin: pass them");
  if (!a.page_table.is_none() && !a.cache_batch_idx.is_none()) {
    wrong_value(
        "cache_batch_idx is given with page_table: the page table says where each sequence is");
  }
}

// The rows that a call appends to a cache.
void read_new_rows(nb::handle object, const char* name, Operand operand, const Axes& x, int64_t dim,
                   const TensorView& q, Call& call, Strides& strides) {
  Problem& p = call.problem;
  TensorView view;
  read(object, name, call, view);
  check_same_device(view, name, q);
  if (!view.is_float || view.dtype != p.kv_dtype) {
    wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.",
               dtype_name(p.kv_dtype), " as the cache is");
  }
  const bool has_rows = view.ndim == 4;
  if (operand == Operand::KNew && has_rows) p.n_new = view.shape[x.row];
  if (!has_rows || view.shape[x.batch] != p.batch || view.shape[x.head] != p.heads_kv ||
      view.shape[x.row] != p.n_new || view.shape[x.inner] != dim) {
    TensorView expected = view;
    expected.ndim = 4;
    int64_t shape[4];
    shape[x.batch] = p.batch, shape[x.head] = p.heads_kv, shape[x.inner] = dim;
    shape[x.row] = has_rows ? p.n_new : 1;
    expected.shape = shape;
    wrong_value(name, " has shape ", describe_shape(view), ": it must be ",
                describe_shape(expected), ", with as many new rows as k_new");
  }
  if (!has_unit_inner(view, x))
    wrong_value(name, " has a strided last dimension: call .contiguous() on it");
  strides = strides_of(view, x);
  call.addresses[static_cast<int>(operand)] = view.data;
}

void read_rotary(const Arguments& a, const TensorView& q, Call& call) {
  if (a.rotary_cos.is_none()) return;
  Problem& p = call.problem;
  TensorView cos, sin;
  read(a.rotary_cos, "rotary_cos", call, cos);
  read(a.rotary_sin, "rotary_sin", call, sin);
  const std::tuple<const char*, nb::handle, const TensorView&> tables[] = {
      {"rotary_cos", a.rotary_cos, cos}, {"rotary_sin", a.rotary_sin, sin}};
  for (const auto& [name, object, view] : tables) {
    check_same_device(view, name, q);
    if (!view.is_float || view.dtype != cos.dtype ||
        (view.dtype != DType::F32 && (view.dtype != q.dtype || is_fp8(q.dtype)))) {
      wrong_type(name, " has dtype ", dtype_text(object),
                 ": rotary_cos and rotary_sin must both be float32 or of q's dtype, not float8");
    }
    if (view.ndim != 2 || view.shape[0] < 1 || view.shape[1] < 1 || 2 * view.shape[1] > p.d ||
        view.shape[0] != cos.shape[0] || view.shape[1] != cos.shape[1]) {
      wrong_value(name, " has shape ", describe_shape(view),
                  ": rotary_cos and rotary_sin must both be (positions, rotary_dim / 2), with at "
                  "least one position and rotary_dim at most the head dim ",
                  p.d);
    }
    if ((view.shape[1] > 1 && view.strides[1] != 1) ||
        (view.shape[0] > 1 && view.strides[0] != view.shape[1]))
      wrong_value(name, " is not contiguous: call .contiguous() on it");
  }
  p.rotary_dim = 2 * cos.shape[1];
  p.rotary_rows = cos.shape[0];
  p.rotary_dtype = 1 + static_cast<int32_t>(cos.dtype);
  call.addresses[static_cast<int>(Operand::RotaryCos)] = cos.data;
  call.addresses[static_cast<int>(Operand::RotarySin)] = sin.data;
}

// A second query, whose product with the rows of V is added to the scores.
void read_qv(const Arguments& a, const Axes& x, const TensorView& q, Call& call) {
  if (a.qv.is_none()) return;
  Problem& p = call.problem;
  TensorView view;
  read(a.qv, "qv", call, view);
  check_same_device(view, "qv", q);
  if (!view.is_float || view.dtype != p.dtype)
    wrong_type("qv has dtype ", dtype_text(a.qv), ": it must be torch.", dtype_name(p.dtype),
               " as q is");
  if (is_fp8(p.dtype))
    throw Unsupported("qv with float8 q: not built yet; convert both or leave qv at None");
  bool fits = view.ndim == q.ndim;
  for (int i = 0; fits && i < q.ndim; ++i)
    fits = view.shape[i] == (i == x.inner ? p.dv : q.shape[i]);
  if (!fits) {
    TensorView expected = q;
    int64_t shape[4];
    for (int i = 0; i < q.ndim; ++i) shape[i] = i == x.inner ? p.dv : q.shape[i];
    expected.shape = shape;
    wrong_value("qv has shape ", describe_shape(view), ": it must be ", describe_shape(expected),
                ", as q with the head dim of v_cache");
  }
  p.qv = strides_of(view, x);
  p.qv_unit = has_unit_inner(view, x);
  p.qv_align = alignment(view.data);
  call.addresses[static_cast<int>(Operand::Qv)] = view.data;
}

void read_attention_chunk(const Arguments& a, Problem& p) {
  if (a.attention_chunk.is_none()) return;
  p.attention_chunk = integer(a.attention_chunk, "attention_chunk");
  if (p.attention_chunk < 1) {
    wrong_value("attention_chunk is ", p.attention_chunk,
                ": it must be at least 1, or None for no chunks");
  }
}

// How the caches hold the sequences, and what is appended to them. p.batch and the sizes of the
// caches are known.
void read_cache(const Arguments& a, const Axes& x, const TensorView& q, const TensorView& k,
                Call& call) {
  Problem& p = call.problem;
  const auto read_numbers = [&](nb::handle object, const char* name, Operand operand) {
    TensorView view;
    read_int32(object, name, p.batch, "", ", one number for each sequence", q, call, view);
    call.addresses[static_cast<int>(operand)] = view.data;
  };
  read_numbers(a.cache_seqlens, "cache_seqlens", Operand::CacheSeqlens);
  p.cache_batch = k.shape[x.batch];
  if (!a.page_table.is_none()) {
    TensorView table;
    read(a.page_table, "page_table", call, table);
    if (!table.is_int32)
      wrong_type("page_table has dtype ", dtype_text(a.page_table), ": it must be torch.int32");
    check_same_device(table, "page_table", q);
    if (table.ndim != 2 || table.shape[0] != p.batch) {
      wrong_value("page_table has shape ", describe_shape(table), ": it must be (", p.batch,
                  ", pages of a sequence)");
    }
    if (table.shape[1] > 1 && table.strides[1] != 1)
      wrong_value("page_table has a strided last dimension: call .contiguous() on it");
    p.page_size = k.shape[x.row];
    if (p.page_size < 1) {
      wrong_value("k_cache has shape ", describe_shape(k),
                  ", pages of no rows: a page must have at least one");
    }
    if (__builtin_mul_overflow(table.shape[1], p.page_size, &p.nk) || p.nk >= INTEGER_LIMIT) {
      wrong_value("page_table has shape ", describe_shape(table), " for pages of ", p.page_size,
                  " rows: a sequence must have fewer than 2^60");
    }
    p.page_table_row = stride_of(table, 0);
    call.addresses[static_cast<int>(Operand::PageTable)] = table.data;
  } else if (!a.cache_batch_idx.is_none()) {
    read_numbers(a.cache_batch_idx, "cache_batch_idx", Operand::CacheBatchIdx);
    p.cache_batch_idx = true;
  } else if (p.cache_batch != p.batch) {
    wrong_value("k_cache has ", p.cache_batch, " sequences and cache_seqlens is for ", p.batch,
                ": pass k_cache[:", p.batch, "] and v_cache[:", p.batch, "], or cache_batch_idx");
  }
  if (p.cache_batch == 0) p.nk = 0;  // there is no row that a page table could name
  if (!a.leftpad_k.is_none()) {
    read_numbers(a.leftpad_k, "leftpad_k", Operand::LeftpadK);
    p.leftpad_k = true;
  }
  if (!a.k_new.is_none()) {
    read_new_rows(a.k_new, "k_new", Operand::KNew, x, p.d, q, call, p.k_new);
    read_new_rows(a.v_new, "v_new", Operand::VNew, x, p.dv, q, call, p.v_new);
  }
  read_rotary(a, q, call);
}

// Each option of kind Flag goes into its field of the Problem.
void read_flags(const Arguments& a, Problem& p) {
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const Option& option = OPTIONS[i];
    if (option.flag != nullptr) p.*option.flag = flag(a.*ARGUMENTS[i], option.name);
  }
}

bool wants_gradient(const Arguments& a) {
  if (a.grad != Grad::IfRequired) return a.grad == Grad::Needed;
  if (requires_grad(a.q) || requires_grad(a.k) || requires_grad(a.v)) return true;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const nb::handle value = a.*ARGUMENTS[i];
    if (OPTIONS[i].differentiable && !value.is_none() && requires_grad(value)) return true;
  }
  return false;
}

void refuse_unbuilt(const Arguments& a) {
  for (int i = 0; i < OPTION_COUNT; ++i) {
    if (!OPTIONS[i].built && !(a.*ARGUMENTS[i]).is_none())
      throw Unsupported(join(OPTIONS[i].name, ": not built yet; leave it at None"));
  }
}

}  // namespace

Arguments arguments_of(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad) {
  const Py_ssize_t count = PyTuple_CheckExact(options.ptr()) ? PyTuple_Size(options.ptr()) : 0;
  if (count != OPTION_COUNT && count != ATTENTION_OPTION_COUNT) {
    wrong_type("options is ", given(options), ": it must be a tuple of ", OPTION_COUNT,
               " values, or of ", ATTENTION_OPTION_COUNT, " without those of a cache");
  }
  Arguments a{.q = q, .k = k, .v = v, .grad = static_cast<Grad>(grad)};
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const bool is_flag = OPTIONS[i].kind == OptionKind::Flag;
    a.*ARGUMENTS[i] = i < count ? PyTuple_GetItem(options.ptr(), i) : is_flag ? Py_False : Py_None;
  }
  return a;
}

void build_call(const Arguments& a, Call& call) {
  std::memset(static_cast<void*>(&call), 0, sizeof(call));
  refuse_unbuilt(a);
  Problem& p = call.problem;
  p.kv_cache = !a.cache_seqlens.is_none();
  const char* const k_name = p.kv_cache ? "k_cache" : "k";
  const char* const v_name = p.kv_cache ? "v_cache" : "v";
  TensorView q, k, v;
  read(a.q, "q", call, q);
  read(a.k, k_name, call, k);
  read(a.v, v_name, call, v);

  check_cache_options(a, p.kv_cache);
  p.varlen = !a.cu_seqlens_q.is_none();
  if (!p.kv_cache && p.varlen != !a.cu_seqlens_k.is_none()) {
    wrong_value(p.varlen ? "cu_seqlens_k" : "cu_seqlens_q",
                " is missing: packed sequences need both cu_seqlens_q and cu_seqlens_k");
  }
  const bool packed_keys = p.varlen && !p.kv_cache;
  const Axes x = axes_of(a, p.varlen), of_keys = axes_of(a, packed_keys);
  const int rank = p.varlen ? 3 : 4;
  check_rank(q, "q", rank, p.varlen);
  check_rank(k, k_name, packed_keys ? 3 : 4, packed_keys);
  check_rank(v, v_name, packed_keys ? 3 : 4, packed_keys);

  if (!q.is_float) {
    wrong_type(
        "q has dtype ", dtype_text(a.q),
        ": attention takes float32, float16, bfloat16, float64, float8_e4m3fn and float8_e5m2");
  }
  const bool fp8_cache = p.kv_cache && k.is_float && v.is_float && is_fp8(k.dtype);
  if (fp8_cache && k.dtype != v.dtype) {
    wrong_type("k_cache and v_cache have dtypes ", dtype_text(a.k), " and ", dtype_text(a.v),
               ": they must be the same");
  }
  if (!fp8_cache && (!k.is_float || k.dtype != q.dtype || !v.is_float || v.dtype != q.dtype)) {
    wrong_type("q, ", k_name, " and ", v_name, " have dtypes ", dtype_text(a.q), ", ",
               dtype_text(a.k), " and ", dtype_text(a.v),
               ": they must be the same; convert them with .to(q.dtype)");
  }
  check_same_device(k, k_name, q);
  check_same_device(v, v_name, q);
  p.dtype = q.dtype;
  p.kv_dtype = k.dtype;
  p.on_cuda = q.device_kind == DeviceKind::Cuda;
  call.device_kind = q.device_kind;
  call.device_index = p.on_cuda ? q.device_index : -1;

  p.heads_q = q.shape[x.head];
  p.heads_kv = k.shape[of_keys.head];
  p.nq = q.shape[x.row];
  p.nk = k.shape[of_keys.row];
  p.d = q.shape[x.inner];
  p.dv = v.shape[of_keys.inner];
  check_size(k.shape[of_keys.inner], p.d, k, k_name, "head dim", "q");
  check_size(v.shape[of_keys.head], p.heads_kv, v, v_name, "heads", k_name);
  check_size(v.shape[of_keys.row], p.nk, v, v_name, "rows", k_name);
  if (p.d < 1 || p.dv < 1)
    wrong_value("the head dim is ", p.d, " for q and k and ", p.dv,
                " for v: it must be at least 1");
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    wrong_value("q has ", p.heads_q, " heads and k has ", p.heads_kv,
                ": the heads of q must be a multiple of those of k and v");
  }

  p.max_seqlen_q = p.max_seqlen_k = UNKNOWN;
  if (p.kv_cache) {
    p.batch = p.varlen ? 0 : q.shape[x.batch];
    if (p.varlen) {
      TensorView cu_q;
      read_int32(a.cu_seqlens_q, "cu_seqlens_q", -1, "(sequences + 1,)", "", q, call, cu_q);
      p.batch = cu_q.shape[0] - 1;
      call.addresses[static_cast<int>(Operand::CuSeqlensQ)] = cu_q.data;
      p.max_seqlen_q = longest(a.max_seqlen_q, "max_seqlen_q");
    } else if (!a.max_seqlen_q.is_none()) {
      wrong_value("max_seqlen_q is given without cu_seqlens_q: it belongs to packed sequences");
    }
    check_size(v.shape[of_keys.batch], k.shape[of_keys.batch], v, v_name, "batch", k_name);
    read_cache(a, of_keys, q, k, call);
    read_qv(a, x, q, call);
    read_attention_chunk(a, p);
  } else if (p.varlen) {
    TensorView cu_q, cu_k;
    read_int32(a.cu_seqlens_q, "cu_seqlens_q", -1, "(sequences + 1,)", "", q, call, cu_q);
    read_int32(a.cu_seqlens_k, "cu_seqlens_k", -1, "(sequences + 1,)", "", q, call, cu_k);
    if (cu_q.shape[0] != cu_k.shape[0]) {
      wrong_value("cu_seqlens_q has ", cu_q.shape[0], " entries and cu_seqlens_k ", cu_k.shape[0],
                  ": both must have one more entry than there are sequences");
    }
    p.batch = cu_q.shape[0] - 1;
    call.addresses[static_cast<int>(Operand::CuSeqlensQ)] = cu_q.data;
    call.addresses[static_cast<int>(Operand::CuSeqlensK)] = cu_k.data;
    p.max_seqlen_q = longest(a.max_seqlen_q, "max_seqlen_q");
    p.max_seqlen_k = longest(a.max_seqlen_k, "max_seqlen_k");
  } else {
    p.batch = q.shape[x.batch];
    check_size(k.shape[x.batch], p.batch, k, "k", "batch", "q");
    check_size(v.shape[x.batch], p.batch, v, "v", "batch", "q");
    if (!a.max_seqlen_q.is_none() || !a.max_seqlen_k.is_none()) {
      wrong_value(
          "max_seqlen_q or max_seqlen_k is given without cu_seqlens: they belong to packed "
          "sequences");
    }
  }

  p.q = strides_of(q, x);
  p.k = strides_of(k, of_keys);
  p.v = strides_of(v, of_keys);
  p.q_column = column_of(q, x);
  p.k_column = column_of(k, of_keys);
  p.v_column = column_of(v, of_keys);
  p.q_align = alignment(q.data);
  p.k_align = alignment(k.data);
  p.v_align = alignment(v.data);
  call.addresses[static_cast<int>(Operand::Q)] = q.data;
  call.addresses[static_cast<int>(Operand::K)] = k.data;
  call.addresses[static_cast<int>(Operand::V)] = v.data;

  read_flags(a, p);
  p.window_left = p.window_right = UNBOUNDED;
  read_window(a.window, p);
  if (p.causal) p.window_right = 0;  // a right side >= 0 adds nothing to causal
  const int64_t multiplied = p.d + (p.qv_align > 0 ? p.dv : 0);  // columns of a score
  p.scale = a.scale.is_none() ? 1.0 / std::sqrt(static_cast<double>(multiplied))
                              : number(a.scale, "scale");
  if (!a.softcap.is_none()) {
    p.softcap = number(a.softcap, "softcap");
    if (p.softcap < 0)
      wrong_value("softcap is ", p.softcap, ": it must be > 0, or None for no cap");
  }

  p.q_offset_default = a.q_offset.is_none();
  p.q_offset = p.varlen ? 0 : p.nk - p.nq;
  if (!p.q_offset_default) {
    if (PyLong_CheckExact(a.q_offset.ptr()) || !is_tensor(a.q_offset)) {
      p.q_offset = integer(a.q_offset, "q_offset", "an int, an int32 tensor (batch,) or None");
    } else {
      TensorView offset;
      read_int32(a.q_offset, "q_offset", p.batch, "an int or ", "", q, call, offset);
      p.q_offset = 0;
      p.q_offset_tensor = true;
      call.addresses[static_cast<int>(Operand::QOffset)] = offset.data;
    }
  }

  if (!a.sinks.is_none()) {
    TensorView sinks;
    read(a.sinks, "sinks", call, sinks);
    const bool allowed = sinks.dtype == DType::F32 || sinks.dtype == DType::F16 ||
                         sinks.dtype == DType::BF16 || sinks.dtype == q.dtype;
    if (!sinks.is_float || !allowed || dtype_bytes(sinks.dtype) == 1) {
      wrong_type("sinks has dtype ", dtype_text(a.sinks),
                 ": it must be float32, float16, bfloat16 or q's own dtype, not float8");
    }
    check_same_device(sinks, "sinks", q);
    if (sinks.ndim != 1 || sinks.shape[0] != p.heads_q) {
      wrong_value("sinks has shape ", describe_shape(sinks), ": it must be (", p.heads_q,
                  ",), one per query head");
    }
    if (p.heads_q > 1 && sinks.strides[0] != 1)
      wrong_value("sinks is not contiguous: call .contiguous() on it");
    p.sinks = 1 + static_cast<int32_t>(sinks.dtype);
    call.addresses[static_cast<int>(Operand::Sinks)] = sinks.data;
  }
  read_mask(a, q, call);
  read_alibi_slopes(a, q, call);
  read_key_ranges(a, q, call);
  read_block_mask(a, q, call);
  read_dropout(a, q, call);
  read_descale(a.q_descale, "q_descale", Operand::QDescale, 0, p.heads_q, p.heads_kv, p.nq, q, call,
               p.q_descale);
  read_descale(a.k_descale, "k_descale", Operand::KDescale, 1, p.heads_kv, p.heads_kv, p.nk, q,
               call, p.k_descale);
  read_descale(a.v_descale, "v_descale", Operand::VDescale, 2, p.heads_kv, p.heads_kv, p.nk, q,
               call, p.v_descale);
  p.needs_grad = wants_gradient(a);
  p.slopes_need_grad =
      a.grad != Grad::Off && !a.alibi_slopes.is_none() && requires_grad(a.alibi_slopes);
  if (p.kv_cache && p.needs_grad) {
    throw Unsupported(
        "attention_with_kvcache has no backward and a tensor of the call requires a gradient: call "
        "it under torch.no_grad(), or detach() the tensors");
  }

  read_out_dtype(a, p);
  read_approximate(a, p);
  read_num_splits(a, p);
  call.out_ndim = rank;
  for (int i = 0; i < rank; ++i) call.out_shape[i] = i == x.inner ? p.dv : q.shape[i];
  plan_output(q, p.out_dtype == p.dtype, a.rows_before_heads, call);
  if (a.out.is_none()) {
    TensorView planned;
    planned.shape = call.out_shape;
    planned.strides = call.out_strides;
    p.out = strides_of(planned, x);
    p.out_column = 1;
    p.out_align = 16;  // torch allocates to at least 64 bytes
  } else {
    read_out(a, q, x, call);
  }
}

}  // namespace archflash
