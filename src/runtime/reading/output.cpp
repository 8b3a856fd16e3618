#include "runtime/reading/reading.h"

namespace archflash::reading {
namespace {

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
  set_address(call, Operand::Out, view);
}

}  // namespace

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
