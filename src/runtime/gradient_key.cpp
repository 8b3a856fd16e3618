#include "runtime/gradient_key.h"

#include <cstring>

#include "runtime/run_plan.h"

namespace archflash {
namespace {

// Describes a new gradient, which nests in memory as its input does. like: gets what it is made
// from, where that is wanted.
void describe_new(nb::handle of, const reading::Axes& axes, BackwardTensor& to, nb::object* like) {
  TensorView input;
  read_tensor(of, "q, k or v", input, true);
  int64_t strides[MAX_DIMS];
  reading::nest_as(input.strides, input.ndim, input.shape, strides);
  if (like != nullptr) *like = strided(input.ndim, input.shape, strides, input.dtype);
  input.strides = strides;
  input.data = nullptr;  // new memory is aligned
  describe(input, axes, to);
}

// Whether k has the shape, strides and dtype of q (i = 1), or v those of k (i = 2).
bool is_as_the_one_before(const Problem& p, int i) {
  const auto same = [](const Strides& a, const Strides& b) {
    return a.batch == b.batch && a.head == b.head && a.row == b.row;
  };
  if (i == 1)
    return p.nq == p.nk && p.heads_q == p.heads_kv && same(p.q, p.k) && p.q_column == p.k_column;
  return i == 2 && p.d == p.dv && same(p.k, p.v) && p.k_column == p.v_column;
}

}  // namespace

void describe(const TensorView& t, const reading::Axes& x, BackwardTensor& to) {
  to.strides = reading::strides_of(t, x);
  to.dtype = t.dtype;
  to.column = reading::column_of(t, x);
  to.align = alignment(t.data);
}

void start_key(const Arguments& a, const Problem& call, const GradientOptions& options,
               GradientKey& key) {
  std::memset(static_cast<void*>(&key), 0, sizeof key);
  std::memcpy(static_cast<void*>(&key.problem.call), &call, sizeof(Problem));
  key.problem.dlse = options.dlse;
  key.problem.deterministic = options.deterministic;
  key.problem.dsinks = options.dsinks;
  key.row_axis = reading::axes_of(a, call.varlen).row;
}

GradientKey expected_key(const Arguments& a, const Call& call, const GradientOptions& options) {
  Problem of_call = call.problem;
  of_call.needs_grad = false;
  of_call.want_lse = true;
  of_call.approximate = of_call.num_splits = 0;
  of_call.approximate_if_served = false;
  GradientKey key;
  start_key(a, of_call, options, key);
  BackwardTensor& dout = key.problem.dout;  // no padding is written: it is part of the key
  dout.strides = of_call.out, dout.dtype = of_call.out_dtype;
  dout.column = 1, dout.align = 16;
  key.device_index = call.device_index;
  return key;
}

BackwardProblem asked_of(const GradientKey& key, const nb::handle (&inputs)[GRADIENTS],
                         const nb::handle (&targets)[GRADIENTS], const reading::Axes& axes,
                         nb::object* like) {
  BackwardProblem asked = key.problem;
  asked.call.on_cuda = true;  // the simulator stands for a GPU
  for (int i = 0; i < GRADIENTS; ++i) {
    if (!targets[i].is_none()) continue;
    BackwardTensor& gradient = asked.*GRADIENTS_OF[i];
    if (is_as_the_one_before(asked.call, i) && targets[i - 1].is_none()) {
      if (like != nullptr) like[i] = like[i - 1];
      gradient = asked.*GRADIENTS_OF[i - 1];
    } else {
      describe_new(inputs[i], axes, gradient, like == nullptr ? nullptr : &like[i]);
    }
  }
  return asked;
}

BackwardProblem asked_of(const GradientKey& key, const Arguments& a, nb::object* like) {
  const nb::handle inputs[GRADIENTS] = {a.q, a.k, a.v};
  const nb::handle targets[GRADIENTS] = {nb::none(), nb::none(), nb::none()};
  return asked_of(key, inputs, targets, reading::axes_of(a, key.problem.call.varlen), like);
}

}  // namespace archflash
