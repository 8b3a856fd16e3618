#include "runtime/gradient_path.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "runtime/call_path.h"
#include "runtime/gradient_key.h"
#include "runtime/kept_object.h"
#include "runtime/orders.h"
#include "runtime/plan_cache.h"
#include "runtime/reading/reading.h"
#include "runtime/registry.h"
#include "runtime/run_plan.h"
#include "torch_operators/node.h"
#include "torch_operators/operators.h"

namespace archflash {
namespace {

// That of the last one: what is expected of the next, but for dsinks.
GradientOptions last_options{};

// What serves calls that are alike.
struct CachedGradients {
  std::shared_ptr<PreparedPlan> plan;  // null: `torch` does, or Python refuses them
  nb::object like[GRADIENTS];          // what new gradients are made from; null for given ones
};

PlanCache<BackwardProblem, CachedGradients>& cache() {
  static auto& instance = *new PlanCache<BackwardProblem, CachedGradients>;
  return instance;
}

constexpr auto decide_gradients = kept_object<[] {}>;

// A tensor of a backward pass: new or given. None: there is none.
struct Seen {
  nb::object tensor = nb::none();
  TensorView view;

  void read(nb::object given, const char* name) {
    tensor = std::move(given);
    read_tensor(tensor, name, view);
  }
};

// Whether a tensor is one that a kernel may read or write as it is, beside another of the same
// device.
bool usable(const TensorView& t, const TensorView& beside) {
  return t.has_storage && !t.lazy && t.is_float && t.device_kind == beside.device_kind &&
         t.device_index == beside.device_index;
}

bool same_shape(const TensorView& a, const TensorView& b) {
  return a.ndim == b.ndim && std::memcmp(a.shape, b.shape, a.ndim * sizeof(int64_t)) == 0;
}

bool is_contiguous(const TensorView& t) {
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != stride) return false;
    stride *= t.shape[i];
  }
  return true;
}

// Whether a tensor is a log-sum-exp of a problem, or the gradient of one.
bool fits_lse(const TensorView& t, const Problem& p) {
  const int64_t shape[] = {p.batch, p.heads_q, p.nq};
  const int skipped = p.varlen ? 1 : 0;
  return t.dtype == DType::F32 && t.ndim == 3 - skipped &&
         std::memcmp(t.shape, shape + skipped, t.ndim * sizeof(int64_t)) == 0;
}

bool requires_gradient(nb::handle x) { return is_plain_tensor(x) && reading::requires_grad(x); }

// Reads a gradient that was given. False if no kernel may write it.
bool read_gradient(nb::handle given, const char* name, nb::handle of, Seen& made) {
  TensorView input;
  read_tensor(of, name, input, true);
  made.read(nb::borrow(given), name);
  const TensorView& t = made.view;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] > 1 && t.strides[i] == 0) return false;
  }
  return usable(t, input) && same_shape(t, input) &&
         (t.dtype == input.dtype || t.dtype == DType::F32);
}

// What a backward pass writes.
struct Written {
  Seen gradients[GRADIENTS];
  nb::object dsinks = nb::none(), dmask = nb::none();
  Cleared cleared;  // the gradient of the mask, to which kernels add
};

// Whether a given gradient begins where another tensor of the call does, which Python refuses.
bool shares_memory(const Written& made, const Call& call, const TensorView& dout) {
  const auto of = [&](Operand x) -> const void* { return call.addresses[static_cast<int>(x)]; };
  const void* all[GRADIENTS + 5] = {};
  for (int i = 0; i < GRADIENTS; ++i) all[i] = made.gradients[i].view.data;
  const void* inputs[] = {dout.data, of(Operand::Q), of(Operand::K), of(Operand::V),
                          of(Operand::Out)};
  std::copy(std::begin(inputs), std::end(inputs), all + GRADIENTS);
  for (int i = 0; i < GRADIENTS; ++i) {
    if (all[i] != nullptr && std::count(all + i, std::end(all), all[i]) > 1) return true;
  }
  return false;
}

// The gradients of sinks and mask, and what the problem says of them.
void make_other_gradients(const Arguments& a, bool mask_gradient, const Call& call, Written& made,
                          BackwardProblem& problem) {
  if (problem.dsinks) {
    const int64_t heads = call.problem.heads_q, one = 1;
    made.dsinks = new_tensor(strided(1, &heads, &one, DType::F32), a.q, call.device_index);
  }
  if (!mask_gradient) return;
  TensorView mask;
  read_tensor(a.attn_mask, "attn_mask", mask);
  // Dense in the mask's own shape; the problem has four dimensions, those of size 1 with stride 0.
  int64_t dense[4], strides[4] = {0, 0, 0, 0}, size = 1;
  for (int i = mask.ndim - 1; i >= 0; --i) {
    dense[i] = size;
    if (mask.shape[i] > 1) strides[4 - mask.ndim + i] = size;
    size *= mask.shape[i];
  }
  made.dmask =
      new_tensor(strided(mask.ndim, mask.shape, dense, DType::F32), a.attn_mask, call.device_index);
  if (call.device_index < 0) {
    made.dmask.attr("zero_")();
  } else {
    made.cleared = {address_of_new(made.dmask, "dmask"), size * int64_t{sizeof(float)}};
  }
  problem.dmask = true;
  problem.dmask_strides = {strides[0], strides[1], strides[2]};
  problem.dmask_key = strides[3];
}

// Whether a plan for gradients that must be deterministic adds up that of the mask in any order.
bool sums_in_any_order(const BackwardProblem& problem, const LaunchPlan& plan) {
  const Problem& call = problem.call;
  const Strides& dmask = problem.dmask_strides;
  const auto shared = [](int64_t size, int64_t stride) { return size > 1 && stride == 0; };
  const bool sums = shared(call.batch, dmask.batch) || shared(call.heads_q, dmask.head) ||
                    shared(call.nq, dmask.row) || shared(call.nk, problem.dmask_key);
  return problem.deterministic && problem.dmask && sums && plan.kept_bytes == 0;
}

void launch(const PreparedPlan& prepared, const Arguments& a, Call& call, const Seen& lse,
            const Seen& dlse, const Seen& dout, const Written& made) {
  Outputs outputs;
  outputs.out = nb::borrow(a.out);
  outputs.lse = lse.tensor;
  const bool simulated = call.device_index < 0;
  allocate_workspace(*prepared.plan, a.q, call, outputs, simulated);
  const std::pair<Operand, const Seen*> seen[] = {{Operand::DOut, &dout},
                                                  {Operand::Lse, &lse},
                                                  {Operand::DLse, &dlse},
                                                  {Operand::DQ, &made.gradients[0]},
                                                  {Operand::DK, &made.gradients[1]},
                                                  {Operand::DV, &made.gradients[2]}};
  const std::pair<Operand, const nb::object*> others[] = {{Operand::DSinks, &made.dsinks},
                                                          {Operand::DMask, &made.dmask}};
  if (simulated) {
    nb::dict tensors = by_operand(a, outputs);
    for (const auto& [operand, x] : seen) {
      if (!x->tensor.is_none()) tensors[operand_name(operand)] = x->tensor;
    }
    for (const auto& [operand, tensor] : others) {
      if (!tensor->is_none()) tensors[operand_name(operand)] = *tensor;
    }
    simulate()(std::const_pointer_cast<LaunchPlan>(prepared.plan), tensors);
    return;
  }
  for (const auto& [operand, x] : seen) reading::set_address(call, operand, x->view);
  for (const auto& [operand, tensor] : others) {
    if (!tensor->is_none()) set_address(call, operand, *tensor);
  }
  void* stream = current_stream(call.device_index);
  const nb::gil_scoped_release release;
  execute(prepared, call.addresses, call.device_index, stream,
          prepared.plan->writes_dmask ? decltype(made.cleared){} : made.cleared);
}

}  // namespace

namespace {

// What a backward pass has written; nothing where Python serves the call, or refuses it.
std::optional<Written> compute(const GradientCall& given) {
  constexpr std::nullopt_t unserved = std::nullopt;
  Arguments a = arguments_of(given.q, given.k, given.v, given.options, static_cast<int>(Grad::Off));
  for (const auto& [member, tensor] : given.tensors) a.*member = tensor;
  // The output is the call's own, and how it was computed does not matter.
  a.out = given.out;
  a.return_lse = Py_True;
  a.approximate = a.num_splits = Py_None;
  for (const nb::handle x : {given.dout, given.out, given.lse, given.dlse}) {
    if (!is_plain_tensor(x) && !(x.is(given.dlse) && x.is_none())) return unserved;
  }
  for (const nb::handle x : {given.dq, given.dk, given.dv}) {
    if (x.is_none() ? given.accumulate : !is_plain_tensor(x)) return unserved;
  }
  if (needs_dispatcher(a)) return unserved;
  if (given.refuse_recorded) {
    for (const nb::handle x :
         {given.dout, a.q, a.k, a.v, a.out, given.lse, given.dlse, given.dq, given.dk, given.dv}) {
      if (requires_gradient(x)) return unserved;
    }
    for (int i = 0; i < OPTION_COUNT; ++i) {
      if (OPTIONS[i].differentiable && requires_gradient(a.*ARGUMENTS[i])) return unserved;
    }
  }
  Seen dout, lse, dlse;
  dout.read(nb::borrow(given.dout), "dout");
  TensorView out;
  read_tensor(a.out, "out", out);
  if (out.lazy) return unserved;
  Call call;
  build_call(a, call);
  const Problem& p = call.problem;
  if (call.device_kind != DeviceKind::Cuda && call.device_kind != DeviceKind::Cpu) return unserved;
  if (call.without_storage || call.lazy || is_fp8(p.dtype)) return unserved;
  if (!usable(dout.view, out) || dout.view.dtype != out.dtype || !same_shape(dout.view, out))
    return unserved;
  lse.read(nb::borrow(given.lse), "lse");
  if (!usable(lse.view, out) || !fits_lse(lse.view, p)) return unserved;
  if (!is_contiguous(lse.view)) lse.read(lse.tensor.attr("contiguous")(), "lse");
  if (!given.dlse.is_none()) {
    dlse.read(nb::borrow(given.dlse), "dlse");
    if (!usable(dlse.view, out) || !fits_lse(dlse.view, p)) return unserved;
    if (!is_contiguous(dlse.view)) dlse.read(dlse.tensor.attr("contiguous")(), "dlse");
  }
  if (given.mask_gradient && p.mask < 2) return unserved;  // only an added mask has a gradient

  Written made;
  const nb::handle inputs[GRADIENTS] = {a.q, a.k, a.v};
  const nb::handle targets[GRADIENTS] = {given.dq, given.dk, given.dv};
  for (int i = 0; i < GRADIENTS; ++i) {
    if (!targets[i].is_none() &&
        !read_gradient(targets[i], GRADIENT_NAMES[i], inputs[i], made.gradients[i]))
      return unserved;
  }
  if (shares_memory(made, call, dout.view)) return unserved;
  last_options = {!given.dlse.is_none(), given.deterministic,
                  given.sinks_gradient && !a.sinks.is_none()};
  GradientKey key;
  start_key(a, p, last_options, key);
  BackwardProblem& problem = key.problem;
  const reading::Axes axes = reading::axes_of(a, p.varlen);
  describe(dout.view, axes, problem.dout);
  for (int i = 0; i < GRADIENTS; ++i) {
    if (!targets[i].is_none()) describe(made.gradients[i].view, axes, problem.*GRADIENTS_OF[i]);
  }
  problem.accumulate = given.accumulate;
  make_other_gradients(a, given.mask_gradient, call, made, problem);
  key.device_index = call.device_index;
  key.forced = forced_index(given.implementation);
  if (given.or_others) key.forced = asked_first(key.forced);

  if (call.device_index < 0) forget_other_simulated_devices();
  const CachedGradients* found = cache().find(key);
  if (found == nullptr) {
    CachedGradients decision;
    const BackwardProblem asked = asked_of(key, inputs, targets, axes, decision.like);
    const auto plan_by = [asked](const std::string& kernel, const Device& device) {
      return plan_backward(kernel, asked, device);
    };
    const PlanBy asking = std::cref(plan_by);
    const nb::handle none = Py_None;
    auto chosen = plan_gradients_in_order(call.device_index, given.implementation, asking);
    if (!chosen && given.or_others)
      chosen = plan_gradients_in_order(call.device_index, none, asking);
    if (!chosen && p.key_indices == 0) {  // Python makes a mask of lists
      const nb::handle forced = given.or_others ? none : given.implementation;
      const nb::object told =
          decide_gradients()(p, call.device_index, forced, nb::cpp_function(plan_by));
      if (!told.is_none()) chosen = nb::cast<std::shared_ptr<LaunchPlan>>(told);
    }
    // Kernels that add up a mask's gradient in any order get a number for each score from Python.
    if (chosen && sums_in_any_order(asked, *chosen)) chosen = nullptr;
    if (chosen) decision.plan = prepare_for(call, std::move(chosen));
    found = cache().insert(key, std::move(decision));
  }
  const CachedGradients decision = *found;  // a copy: allocating may let other threads insert
  if (!decision.plan) return unserved;
  if (given.keep) operator_answer().plan = decision.plan;
  for (int i = 0; i < GRADIENTS; ++i) {
    if (!decision.like[i].is_valid()) continue;
    Seen& gradient = made.gradients[i];
    gradient.tensor = new_tensor(decision.like[i], inputs[i], call.device_index);
    gradient.view.data = address_of_new(gradient.tensor, GRADIENT_NAMES[i]);
  }
  launch(*decision.plan, a, call, lse, dlse, dout, made);
  for (const nb::handle x : targets) {
    // Autograd must see that it was written.
    if (!x.is_none() && !nb::cast<bool>(x.attr("is_inference")())) torch().increment_version(x);
  }
  return made;
}

}  // namespace

nb::object attention_backward(const GradientCall& given) {
  const auto made = compute(given);
  if (!made) return nb::borrow(Py_NotImplemented);
  const Seen* const g = made->gradients;
  return nb::make_tuple(g[0].tensor, g[1].tensor, g[2].tensor, made->dsinks, made->dmask);
}

nb::object recorded_backward(nb::handle dout, nb::handle dlse, const nb::tuple& saved,
                             const nb::tuple& call, const nb::tuple& needed, bool deterministic,
                             bool keep) {
  constexpr size_t INPUTS = 1 + GRADIENTS;  // of a node without sinks and attn_mask
  constexpr size_t TENSORS = 5;             // q, k, v, out and lse, before those of options
  const auto item = [](const nb::tuple& of, size_t i) {
    return nb::handle(PyTuple_GetItem(of.ptr(), static_cast<Py_ssize_t>(i)));
  };
  GradientCall given{.dout = dout,
                     .q = item(saved, 0),
                     .k = item(saved, 1),
                     .v = item(saved, 2),
                     .out = item(saved, 3),
                     .lse = item(saved, 4),
                     .dlse = dlse,
                     .options = item(call, 0),
                     .implementation = item(call, 2),
                     .dq = nb::none(),
                     .dk = nb::none(),
                     .dv = nb::none(),
                     .deterministic = deterministic,
                     .or_others = item(call, 3).is(Py_True),
                     .keep = keep};
  const auto places = nb::borrow<nb::tuple>(item(call, 1));
  nb::handle sinks, mask;
  for (size_t i = 0; i < nb::len(places); ++i) {
    const auto member = ARGUMENTS[nb::cast<int>(item(places, i))];
    const nb::handle tensor = item(saved, TENSORS + i);
    given.tensors.emplace_back(member, tensor);
    if (member == &Arguments::sinks) sinks = tensor;
    if (member == &Arguments::attn_mask) mask = tensor;
  }
  const bool has_more = nb::len(needed) > INPUTS;
  given.mask_gradient = has_more && item(needed, INPUTS + 1).is(Py_True);
  given.sinks_gradient = has_more && item(needed, INPUTS).is(Py_True);
  auto made = compute(given);
  if (!made) return nb::borrow(Py_NotImplemented);
  const Seen* const g = made->gradients;
  if (!has_more) return nb::make_tuple(nb::none(), g[0].tensor, g[1].tensor, g[2].tensor);
  const auto as = [](nb::object& gradient, nb::handle input) {
    if (gradient.is_none()) return;
    const nb::object dtype = input.attr("dtype");
    if (!dtype.is(torch().float32)) gradient = gradient.attr("to")(dtype);
  };
  as(made->dsinks, sinks);
  as(made->dmask, mask);
  return nb::make_tuple(nb::none(), g[0].tensor, g[1].tensor, g[2].tensor, made->dsinks,
                        made->dmask);
}

ExpectedGradients expect_gradients(const Arguments& a, const Call& call,
                                   nb::handle implementation) {
  if (!a.attn_mask.is_none() && reading::requires_grad(a.attn_mask)) return {};
  GradientOptions options = last_options;
  options.dsinks = !a.sinks.is_none() && reading::requires_grad(a.sinks);
  const BackwardProblem asked = asked_of(expected_key(a, call, options), a, nullptr);
  const PlanBy plan_by = [&asked](const std::string& kernel, const Device& device) {
    return plan_backward(kernel, asked, device);
  };
  auto chosen = plan_gradients_in_order(call.device_index, implementation, plan_by);
  if (!chosen) return {};
  return {prepare_for(call, std::move(chosen)), options.dlse, options.deterministic,
          options.dsinks};
}

void keep_expected_gradients(const ExpectedGradients& expected, const Arguments& a,
                             const Call& call, nb::handle implementation) {
  GradientKey key = expected_key(a, call, {expected.dlse, expected.deterministic, expected.dsinks});
  CachedGradients decision{.plan = expected.plan};
  asked_of(key, a, decision.like);
  // As the backward pass will ask (run_and_record() in call_path.cpp), if the forward pass takes
  // this kernel.
  key.forced = forced_index(expected.plan->plan->implementation);
  if (implementation.is_none()) key.forced = asked_first(key.forced);
  cache().insert(key, std::move(decision));
}

void set_decide_gradients(nb::object function, nb::object order) {
  decide_gradients() = std::move(function);
  set_order_of_gradients(std::move(order));
}

void clear_cached_gradients() {
  cache().clear();
  forget_gradients_of_nodes();
}

}  // namespace archflash
