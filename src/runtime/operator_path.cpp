#include "runtime/operator_path.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "runtime/call_path.h"
#include "runtime/kept_object.h"
#include "runtime/orders.h"
#include "runtime/plan_cache.h"
#include "runtime/reading/reading.h"
#include "runtime/registry.h"
#include "runtime/run_plan.h"
#include "runtime/text.h"
#include "torch_operators/operators.h"

namespace archflash {
namespace {

// The calls of PyTorch's operators have decisions of their own: who serves them is decided without
// the log-sum-exp, which PyTorch's kernels give at no cost, and a refusal has its reason.
struct CachedOperator {
  // What serves a call whose packed keys have the same tensor of lengths as the queries, or that
  // has none; and any other call. Null: PyTorch's own kernel does.
  std::shared_ptr<PreparedPlan> of_self_attention, plan;
  std::string reason;  // why PyTorch's own kernel serves a call
  Templates like;
  nb::object lse_column;  // as like.lse, with one more dimension, of size 1
};

PlanCache<Problem, CachedOperator>& cache() {
  static auto& instance = *new PlanCache<Problem, CachedOperator>;
  return instance;
}

// _overrides._decide(problem, device_index, forced) -> LaunchPlan, or a str: the reason why
// PyTorch's own kernel serves the problem.
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

// Whether a row of q is repeated. The output of PyTorch's operators then has the memory layout that
// torch.empty_like chooses, which is not the runtime's.
bool repeats_rows(const Problem& p) {
  return (p.batch > 1 && p.q.batch == 0) || (p.heads_q > 1 && p.q.head == 0) ||
         (p.nq > 1 && p.q.row == 0);
}

// Adds what serves a call by a plan, or the reason why not all calls like it can be.
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

}  // namespace

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
  const CachedOperator* found = cache().find(key);
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
    found = cache().insert(key, std::move(decision));
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

void set_decide_operator(nb::object function) { decide_operator() = std::move(function); }

void clear_cached_operators() { cache().clear(); }

}  // namespace archflash
