#include "runtime/recorded_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/kept_object.h"
#include "runtime/reading/reading.h"
#include "torch_operators/node.h"

namespace archflash {
namespace {

constexpr auto record = kept_object<[] {}>;

// _gradients.asks_for_deterministic
constexpr auto asks_for_deterministic = kept_object<[] {}>;

// The options of a call as its backward pass is told them: with None for tensors, which autograd
// keeps, and a window that its owner cannot change.
struct OptionsToKeep {
  nb::object values;  // the tuple that was given, where it can stay as it is
  nb::list places, tensors;
};
OptionsToKeep options_to_keep(const Arguments& a) {
  OptionsToKeep kept{nb::borrow(a.options), {}, {}};
  const Py_ssize_t count = PyTuple_Size(a.options.ptr());
  const auto put = [&](int place, nb::object value) {
    if (kept.values.is(a.options)) {
      kept.values = nb::steal(PyTuple_New(count));
      for (Py_ssize_t i = 0; i < count; ++i)
        PyTuple_SetItem(kept.values.ptr(), i, Py_NewRef(PyTuple_GetItem(a.options.ptr(), i)));
    }
    PyTuple_SetItem(kept.values.ptr(), place, value.release().ptr());
  };
  for (int i = 0; i < ATTENTION_OPTION_COUNT; ++i) {
    const nb::handle value = a.*ARGUMENTS[i];
    if (OPTIONS[i].kind == OptionKind::Window && PyList_Check(value.ptr())) {
      put(i, nb::steal(PyList_AsTuple(value.ptr())));
    } else if (may_be_tensor(OPTIONS[i].kind) && !value.is_none() && is_tensor(value)) {
      kept.places.append(i);
      kept.tensors.append(value);
      put(i, nb::none());
    }
  }
  return kept;
}

// What the backward pass is told of a call.
nb::tuple told_of_call(const OptionsToKeep& kept, const LaunchPlan& plan,
                       nb::handle implementation) {
  return nb::make_tuple(kept.values, nb::tuple(kept.places), plan.implementation,
                        implementation.is_none());
}

// Whether a tensor among the options can be the one that a node in C++ keeps beside q, k and v.
bool can_be_of_node(nb::handle tensor, int place) {
  constexpr Operand KNOWN[] = {Operand::Mask,        Operand::CuSeqlensQ, Operand::CuSeqlensK,
                               Operand::AlibiSlopes, Operand::BlockMask,  Operand::RngState,
                               Operand::Sinks};
  constexpr int MOST_DIMENSIONS_READ = 4;
  TensorView view;
  read_tensor(tensor, OPTIONS[place].name, view);
  return view.device_kind == DeviceKind::Cuda && view.ndim <= MOST_DIMENSIONS_READ &&
         OPTIONS[place].operand && std::ranges::count(KNOWN, *OPTIONS[place].operand) > 0;
}

// The node that was looked up last. Calls that differ in their lengths alone have the same one.
struct LastNode {
  nb::object options;  // null: there is none
  std::string kernel;
  bool or_others, deterministic;
  NodesOfCalls::Node node;

  bool is_of(const Arguments& a, const LaunchPlan& plan, nb::handle implementation,
             bool is_deterministic) const {
    if (!options.is_valid() || kernel != plan.implementation ||
        or_others != implementation.is_none() || deterministic != is_deterministic)
      return false;
    for (int i = 0; i < ATTENTION_OPTION_COUNT; ++i) {
      const nb::handle value = a.*ARGUMENTS[i];
      if (std::ranges::count(node.tensors, i) == 0) {
        if (!value.is(PyTuple_GetItem(options.ptr(), i))) return false;
      } else if (!is_tensor(value) || !can_be_of_node(value, i)) {
        return false;
      }
    }
    return true;
  }
};
LastNode& last_node() {
  static auto& instance = *new LastNode;
  return instance;
}

// The node of calls like this one; nothing where it cannot be in C++.
std::optional<NodesOfCalls::Node> node_of(const Arguments& a, const Call& call,
                                          const LaunchPlan& plan, nb::handle implementation,
                                          bool deterministic) {
  const Problem& p = call.problem;
  if (call.device_index < 0 || p.want_lse || p.out_dtype != p.dtype ||
      plan.problem.approximate != 0 || plan.launches.empty())
    return {};
  if (last_node().is_of(a, plan, implementation, deterministic)) return last_node().node;
  const OptionsToKeep kept = options_to_keep(a);
  NodesOfCalls::Node node{};
  std::vector<Operand> operands;
  for (const nb::handle place : kept.places) {
    const int i = node.tensors.emplace_back(nb::cast<int>(place));
    if (!can_be_of_node(a.*ARGUMENTS[i], i)) return {};
    operands.push_back(*OPTIONS[i].operand);
  }
  const nb::tuple told = nb::make_tuple(told_of_call(kept, plan, implementation), deterministic);
  const std::optional<double> number = number_of_node(told, operands);
  if (!number) return {};
  node.number = *number;
  last_node() = {kept.values, plan.implementation, implementation.is_none(), deterministic, node};
  return node;
}

// The output of a call by a plan with its node in C++; null, with nothing launched, where the call
// needs one in Python.
nb::object run_with_node(NodesOfCalls& known, const PreparedPlan& prepared, const Arguments& a,
                         Call& call, nb::handle implementation) {
  if (known.are_none) return {};
  const bool deterministic = asks_for_deterministic()().is(Py_True);
  const bool rows_first = reading::axes_of(a, false).row == 1;
  std::optional<NodesOfCalls::Node>& node = known.nodes[rows_first][deterministic];
  if (!node) node = node_of(a, call, *prepared.plan, implementation, deterministic);
  known.are_none = !node;
  if (!node) return {};
  nb::handle other = Py_None;
  for (const int place : node->tensors) {
    const nb::handle tensor = a.*ARGUMENTS[place];
    if (!other.is_none() && !other.is(tensor)) return {};
    other = tensor;
  }
  if (!other.is_none() && reading::requires_grad(other)) return {};
  // The backward pass will ask the kernel of the forward pass first.
  const ExpectedGradients expected = std::exchange(known.gradients, {});
  const bool same =
      expected.plan && expected.plan->plan->implementation == prepared.plan->implementation;
  return run_as_node(prepared, a, call, other, node->number, deterministic,
                     same ? expected : ExpectedGradients());
}

}  // namespace

bool can_be_recorded(const Arguments& a, const Problem& problem) {
  return !problem.slopes_need_grad && a.out.is_none() && a.q_descale.is_none() &&
         a.k_descale.is_none() && a.v_descale.is_none();
}

nb::object run_and_record(std::shared_ptr<PreparedPlan> plan, std::shared_ptr<NodesOfCalls> nodes,
                          bool has_template, const Arguments& a, Call& call,
                          nb::handle implementation) {
  if (plan->plan->launches.empty() && call.problem.varlen) return nb::borrow(Py_NotImplemented);
  if (nb::object out = run_with_node(*nodes, *plan, a, call, implementation); out.is_valid())
    return out;
  if (const auto gradients = std::exchange(nodes->gradients, {}); gradients.plan)
    keep_expected_gradients(gradients, a, call, implementation);
  const Flag wants_lse = call.problem.want_lse;
  call.problem.want_lse = true;
  if (!nodes->like.lse.is_valid()) nodes->like.lse = template_of_lse(a.q, call, false);
  if (has_template && !nodes->like.out.is_valid()) nodes->like.out = template_of_out(a.q, call);
  const Templates like{has_template ? nodes->like.out : nb::object(), nodes->like.lse};
  const nb::object results = run(*plan, a, call, like);
  call.problem.want_lse = wants_lse;
  const OptionsToKeep kept = options_to_keep(a);
  const nb::tuple of_call = told_of_call(kept, *plan->plan, implementation);
  const nb::tuple recorded = nb::make_tuple(results[0], results[1], nb::tuple(kept.tensors),
                                            static_cast<bool>(wants_lse), of_call);
  if (a.sinks.is_none() && a.attn_mask.is_none()) return record()(recorded, a.q, a.k, a.v);
  return record()(recorded, a.q, a.k, a.v, a.sinks, a.attn_mask);
}

void set_record(nb::object function, nb::object deterministic) {
  record() = std::move(function);
  asks_for_deterministic() = std::move(deterministic);
}

}  // namespace archflash
