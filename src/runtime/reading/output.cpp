#include <algorithm>
#include <utility>

#include "runtime/reading/reading.h"

namespace archflash::reading {
namespace {

// Dense strides of shape by an order of dimensions, outermost first.
void dense_in(const int* order, int ndim, const int64_t* shape, int64_t* strides) {
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(shape[order[i]], 1);
  }
}

// Strides for an output of call.out_shape that nests as q does; or rows before heads.
void plan_output(const TensorView& q, bool same_dtype, bool rows_before_heads, Call& call) {
  constexpr int ROWS_BEFORE_HEADS[] = {0, 2, 1, 3};
  if (rows_before_heads) {
    dense_in(ROWS_BEFORE_HEADS, 4, call.out_shape, call.out_strides);
  } else {
    nest_as(q.strides, call.out_ndim, call.out_shape, call.out_strides);
  }
  call.out_like_q = same_dtype && std::equal(q.shape, q.shape + q.ndim, call.out_shape) &&
                    std::equal(q.strides, q.strides + q.ndim, call.out_strides);
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
  set_address(call, Operand::Out, view);
}

}  // namespace

void nest_as(const int64_t* given, int ndim, const int64_t* shape, int64_t* strides) {
  const auto inside = [&](int a, int b) {
    return given[a] != 0 && (given[b] == 0 || given[a] < given[b]);
  };
  int order[4];  // outermost first
  for (int i = 0; i < ndim - 1; ++i) {
    int place = i;
    for (; place > 0 && inside(order[place - 1], i); --place) order[place] = order[place - 1];
    order[place] = i;
  }
  order[ndim - 1] = ndim - 1;
  dense_in(order, ndim, shape, strides);
}

void refuse_shared_output(const Call& call) {
  const Problem& p = call.problem;
  const auto address = [&](Operand x) { return call.addresses[static_cast<int>(x)]; };
  for (const auto [name, operand] : {std::pair{p.kv_cache ? "k_cache" : "k", Operand::K},
                                     std::pair{p.kv_cache ? "v_cache" : "v", Operand::V}}) {
    // Where they share memory otherwise is not looked for: strides may interleave them.
    if (address(Operand::Out) != nullptr && p.nk > 0 && address(Operand::Out) == address(operand)) {
      wrong_value("out begins where ", name, " does: rows are written while others still read ",
                  name, "; pass another tensor, or the memory of q");
    }
  }
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

void read_output(const Arguments& a, const TensorView& q, const Axes& x, Call& call) {
  Problem& p = call.problem;
  call.out_ndim = q.ndim;
  for (int i = 0; i < q.ndim; ++i) call.out_shape[i] = i == x.inner ? p.dv : q.shape[i];
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

}  // namespace archflash::reading
