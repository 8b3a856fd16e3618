#include "runtime/call_path.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/gradient_path.h"
#include "runtime/kept_object.h"
#include "runtime/orders.h"
#include "runtime/plan_cache.h"
#include "runtime/prepared_call.h"
#include "runtime/reading/reading.h"
#include "runtime/registry.h"
#include "runtime/run_plan.h"
#include "runtime/text.h"
#include "torch_operators/node.h"
#include "torch_operators/operators.h"

namespace archflash {
namespace {

// The caches and the other objects of this module that functions return by
// reference are never destroyed: they hold Python objects and CUDA handles,
// which must outlive static destruction.

// What is known of nodes that run_as_node() makes for calls that are alike.
struct NodesInCpp {
  struct Node {
    double number;
    std::vector<int> tensors;  // the places of options that are
  };
  // By where the rows of q are, and whether the gradients must be
  // deterministic.
  std::optional<Node> nodes[2][2];
  bool are_none = false;        // such a call needs a node in Python
  ExpectedGradients gradients;  // until the first one is made
  Templates like;               // of calls with a node in Python, made for the first one
};

struct CachedCall {
  // Null: `torch` serves the problem. Where gradients are needed, the plan also
  // writes the log-sum-exp, which the backward pass reads.
  std::shared_ptr<PreparedPlan> plan;
  // Without a plan: a function of (q, k, v, rows_first) that calls PyTorch's
  // own, for calls without `out`; None where `torch` has more to do.
  nb::object pytorchs = nb::none();
  Templates like;
  // The shape and strides of like.out: a problem does not say in which order
  // the dimensions come.
  int out_ndim = 0;
  int64_t out_shape[4]{}, out_strides[4]{};
  // Where gradients are needed.
  std::shared_ptr<NodesInCpp> nodes;

  bool has_out_of(const Call& call) const {
    const size_t bytes = out_ndim * sizeof(int64_t);
    return call.out_ndim == out_ndim && std::memcmp(call.out_shape, out_shape, bytes) == 0 &&
           std::memcmp(call.out_strides, out_strides, bytes) == 0;
  }
  // The templates that fit a call: that of the output only if it has the same
  // strides.
  Templates like_of(const Call& call) const {
    return {has_out_of(call) ? like.out : nb::object(), like.lse};
  }
};

PlanCache<Problem, CachedCall>& cache() {
  static auto& instance = *new PlanCache<Problem, CachedCall>;
  return instance;
}

// _dispatch.decide(problem, device_index, forced) -> LaunchPlan, or None for `torch`
constexpr auto decide = kept_object<[] {}>;

// _ops.pytorchs_call(q, k, v, options, forced) -> CachedCall::pytorchs
constexpr auto decide_pytorchs = kept_object<[] {}>;

constexpr auto record = kept_object<[] {}>;

// _gradients.asks_for_deterministic
constexpr auto asks_for_deterministic = kept_object<[] {}>;

// The calls of PyTorch's operators have decisions of their own: who serves them
// is decided without the log-sum-exp, which PyTorch's kernels give at no cost,
// and a refusal has its reason.
struct CachedOperator {
  // What serves a call whose packed keys have the same tensor of lengths as the
  // queries, or that has none; and any other call. Null: PyTorch's own kernel
  // does.
  std::shared_ptr<PreparedPlan> of_self_attention, plan;
  std::string reason;  // why PyTorch's own kernel serves a call
  Templates like;
  nb::object lse_column;  // as like.lse, with one more dimension, of size 1
};

PlanCache<Problem, CachedOperator>& operator_cache() {
  static auto& instance = *new PlanCache<Problem, CachedOperator>;
  return instance;
}

// _overrides._decide(problem, device_index, forced) -> LaunchPlan, or a str:
// the reason why PyTorch's own kernel serves the problem.
constexpr auto decide_operator = kept_object<[] {}>;

// The plan of a new problem of PyTorch's operators. Who serves it is decided without the
// log-sum-exp. Null: that is decided in Python, and so is who reads a dense mask faster.
std::shared_ptr<LaunchPlan> plan_of_operator(const Problem& problem, int device_index,
                                             nb::handle implementation) {
  const auto sizes = {problem.heads_q, problem.heads_kv, problem.nq, problem.nk, problem.batch};
  if (problem.mask != 0 || std::min(sizes) == 0) return nullptr;
  const auto plan_by = [&](const std::string& kernel, const Device& device) {
    Problem asked = problem;
    asked.on_cuda = true;  // the simulator stands for a GPU
    return plan(kernel, asked, device);
  };
  Problem without_lse = problem;
  without_lse.want_lse = false;
  return plan_in_order(without_lse, device_index, implementation, plan_by).value_or(nullptr);
}

// Whether a row of q is repeated. The output of PyTorch's operators then has
// the memory layout that torch.empty_like chooses, which is not the runtime's.
bool repeats_rows(const Problem& p) {
  return (p.batch > 1 && p.q.batch == 0) || (p.heads_q > 1 && p.q.head == 0) ||
         (p.nq > 1 && p.q.row == 0);
}

// Adds what serves a call by a plan, or the reason why not all calls like it
// can be.
void add_plans(const Call& call, const LaunchPlan& plan, CachedOperator& decision) {
  for (const bool self_attention : {true, false}) {
    const PlanResult result = with_lse_for_pytorch(plan, self_attention);
    if (const auto* reasons = std::get_if<Reasons>(&result)) {
      decision.reason = join(plan.implementation, ": ", reasons->front());
      return;
    }
    const auto longer = std::make_shared<LaunchPlan>(std::get<LaunchPlan>(result));
    auto& place = self_attention ? decision.of_self_attention : decision.plan;
    place = prepare_for(call, longer);
  }
}

// What serves a new problem: a plan, null for `torch`. With `recorded` it is that of the forward
// pass of a call whose gradients are needed, which also gives the log-sum-exp; nothing if the
// kernel that was chosen does not, and Python refuses the call.
std::optional<std::shared_ptr<LaunchPlan>> choose(const Arguments& a, const Call& call,
                                                  nb::handle implementation, bool recorded,
                                                  ExpectedGradients& gradients) {
  const Problem& problem = call.problem;
  const int device_index = call.device_index;
  if (recorded) gradients = expect_gradients(a, call, implementation);
  const std::string differentiates =
      gradients.plan ? gradients.plan->plan->implementation : std::string();
  const auto plan_by = [&](const std::string& kernel, const Device& device) {
    Problem asked = problem;
    asked.on_cuda = true;  // the simulator stands for a GPU
    if (recorded) asked.want_lse = true;
    if (kernel == differentiates) asked.needs_grad = false;  // it was asked before
    return plan(kernel, asked, device);
  };
  auto chosen = plan_in_order(problem, device_index, implementation, plan_by);
  if (!chosen) {
    const nb::object told = decide()(problem, device_index, implementation);
    chosen.emplace();
    if (!told.is_none()) *chosen = nb::cast<std::shared_ptr<LaunchPlan>>(told);
    if (*chosen && recorded) {
      const LaunchPlan& of_output = **chosen;
      Problem asked = of_output.problem;
      asked.needs_grad = false;
      asked.want_lse = true;
      PlanResult result = plan(of_output.implementation, asked, of_output.device);
      if (std::holds_alternative<Reasons>(result)) return std::nullopt;
      *chosen = std::make_shared<LaunchPlan>(std::get<LaunchPlan>(std::move(result)));
    }
  }
  if (*chosen && recorded) (*chosen)->problem.needs_grad = false;
  return chosen;
}

// Whether autograd is to record a call by record(): gradients are wanted of q,
// k, v, sinks and attn_mask alone, and nothing is written to a given tensor.
bool can_be_recorded(const Arguments& a, const Problem& problem) {
  return !problem.slopes_need_grad && a.out.is_none() && a.q_descale.is_none() &&
         a.k_descale.is_none() && a.v_descale.is_none();
}

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
  NodesInCpp::Node node;

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
std::optional<NodesInCpp::Node> node_of(const Arguments& a, const Call& call,
                                        const LaunchPlan& plan, nb::handle implementation,
                                        bool deterministic) {
  const Problem& p = call.problem;
  if (call.device_index < 0 || p.want_lse || p.out_dtype != p.dtype ||
      plan.problem.approximate != 0 || plan.launches.empty())
    return {};
  if (last_node().is_of(a, plan, implementation, deterministic)) return last_node().node;
  const OptionsToKeep kept = options_to_keep(a);
  NodesInCpp::Node node{};
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
nb::object run_with_node(NodesInCpp& known, const PreparedPlan& prepared, const Arguments& a,
                         Call& call, nb::handle implementation) {
  if (known.are_none) return {};
  const bool deterministic = asks_for_deterministic()().is(Py_True);
  const bool rows_first = reading::axes_of(a, false).row == 1;
  std::optional<NodesInCpp::Node>& node = known.nodes[rows_first][deterministic];
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

// A call whose gradients are needed, by a plan that gives its log-sum-exp. Unless a kernel is
// forced others may compute the gradients: those that are to be deterministic, for example.
nb::object run_and_record(const CachedCall& found, const Arguments& a, Call& call,
                          nb::handle implementation) {
  const std::shared_ptr<PreparedPlan> plan = found.plan;
  const bool has_template = found.has_out_of(call);
  const std::shared_ptr<NodesInCpp> nodes = found.nodes;
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

}  // namespace

bool needs_dispatcher(nb::handle object) {
  return !object.is_none() && !is_plain_tensor(object) && is_tensor(object);
}

int64_t forced_index(nb::handle name) {
  if (name.is_none()) return -1;
  return forced_index(nb::isinstance<nb::str>(name) ? nb::cast<std::string>(name) : std::string());
}

int64_t forced_index(const std::string& text) {
  const std::vector<std::string>& names = folder_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == text) return static_cast<int64_t>(i);
  }
  // `torch` has a place of its own; an unknown name finds nothing there:
  // decide() refuses it.
  return static_cast<int64_t>(names.size()) + (text == "torch" ? 0 : 1);
}

bool needs_dispatcher(const Arguments& a) {
  if (needs_dispatcher(a.q) || needs_dispatcher(a.k) || needs_dispatcher(a.v)) return true;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const nb::handle value = a.*ARGUMENTS[i];
    if (may_be_tensor(OPTIONS[i].kind) && needs_dispatcher(value)) return true;
  }
  return false;
}

void forget_other_simulated_devices() {
  static std::string last;
  const char* given = std::getenv("ARCHFLASH_SIM_DEVICE");
  const std::string_view now = given == nullptr ? "" : given;
  if (now == last) return;
  last = now;
  clear_cached_calls();
}

// The eager call. On a cached decision this is the whole way: read, look up,
// allocate, bind, launch.
nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad,
                     nb::handle implementation) {
  const Arguments arguments = arguments_of(q, k, v, options, grad);
  if (needs_dispatcher(arguments)) return nb::borrow(Py_NotImplemented);
  Call call;
  build_call(arguments, call);
  if (!arguments.out.is_none()) reading::refuse_shared_output(call);
  if (call.device_kind == DeviceKind::Meta || call.without_storage || call.lazy)
    return nb::borrow(Py_NotImplemented);
  if (call.device_index < 0) forget_other_simulated_devices();
  const CacheKey<Problem> key{call.problem, call.device_index, forced_index(implementation)};
  const CachedCall* found = cache().find(key);
  if (found == nullptr) {
    CachedCall decision;
    const bool needs_grad = call.problem.needs_grad;
    const bool recorded = needs_grad && can_be_recorded(arguments, call.problem);
    ExpectedGradients gradients;
    const auto chosen = choose(arguments, call, implementation, recorded, gradients);
    if (!chosen || (*chosen && needs_grad && !recorded)) return nb::borrow(Py_NotImplemented);
    if (*chosen) {
      decision.plan = prepare_for(call, *chosen);
      if (recorded) {
        decision.nodes = std::make_shared<NodesInCpp>();
        decision.nodes->gradients = std::move(gradients);
      }
      decision.out_ndim = call.out_ndim;
      std::memcpy(decision.out_shape, call.out_shape, sizeof call.out_shape);
      std::memcpy(decision.out_strides, call.out_strides, sizeof call.out_strides);
      if (!recorded) {
        decision.like.out = template_of_out(q, call);
        if (decision.plan->plan->problem.want_lse)
          decision.like.lse = template_of_lse(q, call, false);
      }
    } else if (decide_pytorchs().is_valid()) {
      decision.pytorchs = decide_pytorchs()(q, k, v, options, implementation);
    }
    found = cache().insert(key, std::move(decision));
  }
  if (!found->plan) {
    const nb::object pytorchs = found->pytorchs;  // a copy: it may let other threads insert
    if (pytorchs.is_none() || !arguments.out.is_none()) return nb::none();
    const bool rows_first = reading::axes_of(arguments, false).row == 1;
    return pytorchs(q, k, v, rows_first);
  }
  if (call.problem.needs_grad) {
    if (!can_be_recorded(arguments, call.problem)) return nb::borrow(Py_NotImplemented);
    return run_and_record(*found, arguments, call, implementation);
  }
  // Copies: allocating may let other threads insert.
  const std::shared_ptr<PreparedPlan> plan = found->plan;
  const Templates like = found->like_of(call);
  return run(*plan, arguments, call, like);
}

nb::object prepare_call(nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                        nb::handle batch, nb::handle implementation) {
  Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  set_batch(arguments, batch);
  if (needs_dispatcher(arguments)) return nb::none();
  Call call;
  build_call(arguments, call);
  if (call.without_storage || call.lazy) return nb::none();
  const CacheKey<Problem> key{call.problem, call.device_index, forced_index(implementation)};
  const CachedCall* found = cache().find(key);
  if (found == nullptr || !found->plan) return nb::none();
  return nb::cast(
      PreparedCall(arguments, call, found->plan, found->like_of(call), batch, implementation));
}

nb::object serve_operator(nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                          nb::handle implementation, bool rows_before_heads, bool lse_column) {
  Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  arguments.rows_before_heads = rows_before_heads;
  OperatorAnswer& answer = operator_answer();
  answer.keep = false;  // until it is known that the problem decides
  if (needs_dispatcher(arguments)) return nb::str("a subclass of torch.Tensor");
  Call call;
  build_call(arguments, call);
  if (!arguments.out.is_none()) reading::refuse_shared_output(call);
  if (call.without_storage || call.lazy) return nb::str("a tensor whose memory lacks its values");
  if (arguments.out.is_none() && !rows_before_heads && repeats_rows(call.problem))
    return nb::none();
  if (call.device_index < 0) forget_other_simulated_devices();
  const CacheKey<Problem> key{call.problem, call.device_index, forced_index(implementation)};
  const CachedOperator* found = operator_cache().find(key);
  if (found == nullptr) {
    CachedOperator decision;
    auto chosen = plan_of_operator(call.problem, call.device_index, implementation);
    if (!chosen) {
      const nb::object told = decide_operator()(call.problem, call.device_index, implementation);
      if (nb::isinstance<nb::str>(told))
        decision.reason = nb::cast<std::string>(told);
      else
        chosen = nb::cast<std::shared_ptr<LaunchPlan>>(told);
    }
    if (chosen) {
      add_plans(call, *chosen, decision);
      decision.like.out = template_of_out(q, call);
      if (call.problem.want_lse) {
        decision.like.lse = template_of_lse(q, call, false);
        decision.lse_column = template_of_lse(q, call, true);
      }
    }
    found = operator_cache().insert(key, std::move(decision));
  }
  const auto address = [&](Operand operand) { return call.addresses[static_cast<int>(operand)]; };
  const bool self_attention = address(Operand::CuSeqlensQ) == address(Operand::CuSeqlensK);
  const std::shared_ptr<PreparedPlan> plan =
      self_attention ? found->of_self_attention : found->plan;
  answer.keep = true;
  answer.plan = plan;
  if (!plan) return nb::str(found->reason.c_str(), found->reason.size());
  CachedOperator decision = *found;  // a copy: allocating may let other threads insert
  if (lse_column) decision.like.lse = decision.lse_column;
  nb::object result = run(*plan, arguments, call, decision.like);
  ++served().of(plan->plan->implementation);
  return result;
}

void set_decide(nb::object function, nb::object order) {
  torch();  // filled before a second thread can come
  decide() = std::move(function);
  set_order(std::move(order));
}

void set_decide_pytorchs(nb::object function) { decide_pytorchs() = std::move(function); }

void set_record(nb::object function, nb::object deterministic) {
  record() = std::move(function);
  asks_for_deterministic() = std::move(deterministic);
}

void set_decide_operator(nb::object function) { decide_operator() = std::move(function); }

std::pair<int64_t, int64_t> hits_and_misses() { return {cache().hits, cache().misses}; }

size_t cached_calls() { return cache().size(); }

void clear_cached_calls() {
  cache().clear();
  clear_cached_gradients();
  clear_orders();
  operator_cache().clear();
}

}  // namespace archflash
