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
#include "runtime/operator_path.h"
#include "runtime/orders.h"
#include "runtime/plan_cache.h"
#include "runtime/prepared_call.h"
#include "runtime/reading/reading.h"
#include "runtime/recorded_call.h"
#include "runtime/registry.h"
#include "runtime/run_plan.h"

namespace archflash {
namespace {

// The cache is never destroyed: it holds Python objects and CUDA handles, which must outlive static
// destruction.

struct CachedCall {
  // Null: `torch` serves the problem. Where gradients are needed, the plan also writes the
  // log-sum-exp, which the backward pass reads.
  std::shared_ptr<PreparedPlan> plan;
  // Without a plan: a function of (q, k, v, rows_first) that calls PyTorch's own, for calls without
  // `out`; None where `torch` has more to do.
  nb::object pytorchs = nb::none();
  Templates like;
  // The shape and strides of like.out: a problem does not say in which order the dimensions come.
  int out_ndim = 0;
  int64_t out_shape[4]{}, out_strides[4]{};
  // Where gradients are needed.
  std::shared_ptr<NodesOfCalls> nodes;

  bool has_out_of(const Call& call) const {
    const size_t bytes = out_ndim * sizeof(int64_t);
    return call.out_ndim == out_ndim && std::memcmp(call.out_shape, out_shape, bytes) == 0 &&
           std::memcmp(call.out_strides, out_strides, bytes) == 0;
  }
  // The templates that fit a call: that of the output only if it has the same strides.
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
  // `torch` has a place of its own; an unknown name finds nothing there: decide() refuses it.
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

// On a cached decision this is the whole way: read, look up, allocate, bind, launch.
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
        decision.nodes = std::make_shared<NodesOfCalls>();
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
    return run_and_record(found->plan, found->nodes, found->has_out_of(call), arguments, call,
                          implementation);
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

void set_decide(nb::object function, nb::object order) {
  torch();  // filled before a second thread can come
  decide() = std::move(function);
  set_order(std::move(order));
}

void set_decide_pytorchs(nb::object function) { decide_pytorchs() = std::move(function); }

std::pair<int64_t, int64_t> hits_and_misses() { return {cache().hits, cache().misses}; }

size_t cached_calls() { return cache().size(); }

void clear_cached_calls() {
  cache().clear();
  clear_cached_gradients();
  clear_orders();
  clear_cached_operators();
}

}  // namespace archflash
