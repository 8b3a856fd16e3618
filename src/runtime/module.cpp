// The extension module archflash._archflash: reads tensors, keeps plans, launches. No policy: which
// implementation serves a problem is decided in python/archflash/_dispatch.py, which is asked once
// per new Problem.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/mask_params.h"
#include "common/planning/makespan.h"
#include "common/planning/order.h"
#include "runtime/call.h"
#include "runtime/execute.h"
#include "runtime/known_devices.h"
#include "runtime/operators.h"
#include "runtime/plan_cache.h"
#include "runtime/registry.h"
#include "runtime/serialize.h"
#include "runtime/text.h"

namespace archflash {
namespace {

// The caches and the other objects of this module that functions return by reference are never
// destroyed: they hold Python objects and CUDA handles, which must outlive static destruction.

// From which make_result makes the results of a call. Null where no template was prepared.
struct Templates {
  nb::object out, lse;
};
struct Decision {
  std::shared_ptr<PreparedPlan> plan;  // null: `torch` serves the problem
  Templates like;
  // The shape and strides of like.out: a problem does not say in which order the dimensions come.
  int out_ndim = 0;
  int64_t out_shape[4]{}, out_strides[4]{};

  // The templates that fit a call: that of the output only if it has the same strides.
  Templates like_of(const Call& call) const {
    const size_t bytes = out_ndim * sizeof(int64_t);
    const bool same = call.out_ndim == out_ndim &&
                      std::memcmp(call.out_shape, out_shape, bytes) == 0 &&
                      std::memcmp(call.out_strides, out_strides, bytes) == 0;
    return {same ? like.out : nb::object(), like.lse};
  }
};
PlanCache<Decision>& cache() {
  static auto& instance = *new PlanCache<Decision>;
  return instance;
}
nb::object&
decide() {  // _dispatch.decide(problem, device_index, forced) -> LaunchPlan, or None for `torch`
  static auto& instance = *new nb::object;
  return instance;
}

// The calls of PyTorch's operators have decisions of their own: who serves them is decided without
// the log-sum-exp, which PyTorch's kernels give at no cost, and a refusal has its reason.
struct OperatorDecision {
  // What serves a call whose packed keys have the same tensor of lengths as the queries, or that
  // has none; and any other call. Null: PyTorch's own kernel does.
  std::shared_ptr<PreparedPlan> of_self_attention, plan;
  std::string reason;  // why PyTorch's own kernel serves a call
  Templates like;
  nb::object lse_column;  // as like.lse, with one more dimension, of size 1
};
PlanCache<OperatorDecision>& operator_cache() {
  static auto& instance = *new PlanCache<OperatorDecision>;
  return instance;
}
// _overrides._decide(problem, device_index, forced) -> LaunchPlan, or a str: the reason why
// PyTorch's own kernel serves the problem.
nb::object& decide_operator() {
  static auto& instance = *new nb::object;
  return instance;
}

nb::object& simulate() {  // archflash.sim runs a plan on the CPU: (LaunchPlan, {operand: tensor})
  static auto& instance = *new nb::object;
  return instance;
}

using Capability = std::pair<int, int>;  // as Python has it: (major, minor)
Capability capability_pair(int number) { return {number / 10, number % 10}; }
int number_of(Capability capability) { return 10 * capability.first + capability.second; }

int64_t forced_index(nb::handle name) {
  if (name.is_none()) return -1;
  const std::string text =
      nb::isinstance<nb::str>(name) ? nb::cast<std::string>(name) : std::string();
  const std::vector<std::string>& names = folder_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == text) return static_cast<int64_t>(i);
  }
  // `torch` has a place of its own; an unknown name finds nothing there: decide() refuses it.
  return static_cast<int64_t>(names.size()) + (text == "torch" ? 0 : 1);
}

// What functions of PyTorch that allocate an output take: (shape, strides, dtype).
nb::tuple strided_out(const Call& call) {
  nb::list shape, strides;
  for (int i = 0; i < call.out_ndim; ++i) {
    shape.append(call.out_shape[i]);
    strides.append(call.out_strides[i]);
  }
  return nb::make_tuple(nb::tuple(shape), nb::tuple(strides),
                        torch().dtypes[static_cast<int>(call.problem.out_dtype)]);
}

// A tensor on q's device. strided: (shape, strides, dtype).
nb::object new_empty_strided(nb::handle q, nb::handle strided) {
  return q.attr("new_empty_strided")(strided[0], strided[1], nb::arg("dtype") = strided[2]);
}

nb::object allocate_out(nb::handle q, const Call& call) {
  return call.out_like_q ? torch().empty_like(q) : new_empty_strided(q, strided_out(call));
}

nb::object allocate_lse(nb::handle q, const Problem& p) {
  nb::tuple shape =
      p.varlen ? nb::make_tuple(p.heads_q, p.nq) : nb::make_tuple(p.batch, p.heads_q, p.nq);
  return q.attr("new_empty")(shape, nb::arg("dtype") = torch().float32);
}

// A tensor for torch.empty_like alone: what is allocated during the capture of a CUDA graph must
// not outlive it.
nb::object without_memory(nb::object tensor) {
  tensor.attr("untyped_storage")().attr("resize_")(0);
  return tensor;
}

// Whether templates are the arguments (shape, strides, dtype) of the function with which PyTorch's
// compiled graphs allocate on a GPU. It takes half of the time of torch.empty_like, for which
// templates are tensors elsewhere.
bool templates_are_strides(const Call& call) {
  return call.device_index >= 0 && torch().empty_strided_cuda.is_valid();
}

// The template of an output.
nb::object template_of_out(nb::handle q, const Call& call) {
  if (templates_are_strides(call)) return strided_out(call);
  return without_memory(allocate_out(q, call));
}

// The template of a log-sum-exp. `column`: the log-sum-exp has a last dimension of size 1.
nb::object template_of_lse(nb::handle q, const Call& call, bool column) {
  const Problem& p = call.problem;
  if (!templates_are_strides(call)) {
    nb::object lse = allocate_lse(q, p);
    return without_memory(column ? lse.attr("unsqueeze")(-1) : lse);
  }
  nb::list shape, strides;
  if (!p.varlen) shape.append(p.batch), strides.append(p.heads_q * p.nq);
  shape.append(p.heads_q), strides.append(p.nq);
  shape.append(p.nq), strides.append(1);
  if (column) shape.append(1), strides.append(1);
  return nb::make_tuple(nb::tuple(shape), nb::tuple(strides), torch().float32);
}

nb::object make_result(nb::handle from, nb::handle q, int device_index) {
  if (!PyTuple_Check(from.ptr())) return torch().empty_like(from);
  if (current_device() != device_index) return new_empty_strided(q, from);
  nb::object made = nb::steal(PyObject_Call(torch().empty_strided_cuda.ptr(), from.ptr(), nullptr));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

void set_address(Call& call, Operand operand, nb::handle tensor) {
  void* const address = address_of(tensor);
  // Under a mode of PyTorch what is allocated may be a fake tensor.
  if (address == nullptr && nb::cast<int64_t>(tensor.attr("numel")()) > 0)
    throw nb::value_error(join(operand_name(operand), HAS_NO_MEMORY).c_str());
  call.addresses[static_cast<int>(operand)] = address;
}

// Packed sequences of which there is none have no plan to launch: every row of q is one of no
// sequence, whose output is 0 and whose log-sum-exp is the sink, or -inf.
void write_rows_of_no_sequence(nb::handle out, nb::handle lse, nb::handle sinks) {
  out.attr("zero_")();
  if (!lse.is_valid()) return;
  if (sinks.is_none()) {
    lse.attr("fill_")(-std::numeric_limits<double>::infinity());
  } else {
    lse.attr("copy_")(sinks.attr("unsqueeze")(1));
  }
}

// What a call writes. Null where nothing is asked for.
struct Outputs {
  nb::object out, lse, workspace;
  DeviceBytes workspace_bytes;  // instead of `workspace`, where no tensor is needed
};

// Allocates what is missing and completes the addresses of the call. all_tensors: the workspace is
// wanted as a tensor.
void allocate(const LaunchPlan& plan, const Arguments& a, Call& call, Outputs& made,
              bool all_tensors, const Templates& like = {}) {
  if (!a.out.is_none()) {
    made.out = nb::borrow(a.out);
  } else {
    made.out = like.out.is_valid() ? make_result(like.out, a.q, call.device_index)
                                   : allocate_out(a.q, call);
  }
  if (a.out.is_none()) {
    set_address(call, Operand::Out, made.out);
  } else if (!nb::cast<bool>(a.out.attr("is_inference")())) {
    torch().increment_version(a.out);  // autograd must see that it was written
  }
  if (call.problem.n_new > 0) {
    for (const nb::handle cache : {a.k, a.v}) {
      if (!nb::cast<bool>(cache.attr("is_inference")())) torch().increment_version(cache);
    }
  }
  if (call.problem.want_lse) {
    made.lse = like.lse.is_valid() ? make_result(like.lse, a.q, call.device_index)
                                   : allocate_lse(a.q, call.problem);
    set_address(call, Operand::Lse, made.lse);
  }
  if (plan.workspace_bytes == 0) return;
  if (!all_tensors && made.workspace_bytes.allocate(call.device_index, plan.workspace_bytes)) {
    call.addresses[static_cast<int>(Operand::Workspace)] = made.workspace_bytes.data();
  } else {
    made.workspace = a.q.attr("new_empty")(plan.workspace_bytes, nb::arg("dtype") = torch().uint8);
    set_address(call, Operand::Workspace, made.workspace);
  }
}

// The tensors of a call by operand name, as the simulator takes them.
nb::dict by_operand(const Arguments& a, const Outputs& outputs, const Call& call) {
  const std::pair<Operand, nb::handle> operands[] = {
      {Operand::Q, a.q},
      {Operand::K, a.k},
      {Operand::V, a.v},
      {Operand::Out, outputs.out},
      {Operand::Lse, outputs.lse},
      {Operand::Sinks, a.sinks},
      {Operand::CuSeqlensQ, a.cu_seqlens_q},
      {Operand::CuSeqlensK, a.cu_seqlens_k},
      {Operand::QOffset, call.problem.q_offset_tensor ? a.q_offset : nb::handle()},
      {Operand::QDescale, a.q_descale},
      {Operand::KDescale, a.k_descale},
      {Operand::VDescale, a.v_descale},
      {Operand::Mask, a.attn_mask},
      {Operand::AlibiSlopes, a.alibi_slopes},
      {Operand::KeyRanges, a.key_ranges},
      {Operand::BlockMask, a.block_mask},
      {Operand::RngState, a.rng_state},
      {Operand::CacheSeqlens, a.cache_seqlens},
      {Operand::PageTable, a.page_table},
      {Operand::KNew, a.k_new},
      {Operand::VNew, a.v_new},
      {Operand::CacheBatchIdx, a.cache_batch_idx},
      {Operand::LeftpadK, a.leftpad_k},
      {Operand::RotaryCos, a.rotary_cos},
      {Operand::RotarySin, a.rotary_sin},
      {Operand::Qv, a.qv},
      {Operand::Workspace, outputs.workspace}};
  nb::dict tensors;
  for (const auto& [operand, tensor] : operands) {
    if (tensor.is_valid() && !tensor.is_none()) tensors[operand_name(operand)] = tensor;
  }
  return tensors;
}

// Allocates what is missing, binds and launches. Returns out, or (out, lse).
nb::object run(const PreparedPlan& prepared, const Arguments& a, Call& call,
               const Templates& like = {}) {
  Outputs outputs;
  allocate(*prepared.plan, a, call, outputs, call.device_index < 0, like);
  if (call.problem.varlen && prepared.plan->launches.empty()) {
    write_rows_of_no_sequence(outputs.out, outputs.lse, a.sinks);
  } else if (call.device_index < 0) {
    simulate()(std::const_pointer_cast<LaunchPlan>(prepared.plan), by_operand(a, outputs, call));
  } else {
    void* stream = current_stream(call.device_index);
    const nb::gil_scoped_release release;
    execute(prepared, call.addresses, call.device_index, stream);
  }
  return call.problem.want_lse ? nb::object(nb::make_tuple(outputs.out, outputs.lse)) : outputs.out;
}

// A tensor of the backward pass: heads before rows, (batch, heads, rows, columns).
BackwardTensor backward_tensor(nb::handle tensor, const char* name) {
  TensorView view;
  read_tensor(tensor, name, view);
  if (view.ndim != 4 || !view.is_float)
    throw nb::value_error(join(name, " must be a floating-point tensor of 4 dimensions").c_str());
  const auto stride = [&](int axis) { return view.shape[axis] > 1 ? view.strides[axis] : 0; };
  return {.strides = {stride(0), stride(1), stride(2)},
          .dtype = view.dtype,
          .column = view.shape[3] <= 1 ? 1 : view.strides[3],
          .align = alignment(view.data)};
}

// Tensor subclasses, fake tensors among them, have a say of their own in what runs.
bool needs_dispatcher(nb::handle object) {
  return !object.is_none() && !is_plain_tensor(object) && is_tensor(object);
}

bool needs_dispatcher(const Arguments& a) {
  if (needs_dispatcher(a.q) || needs_dispatcher(a.k) || needs_dispatcher(a.v)) return true;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const nb::handle value = a.*ARGUMENTS[i];
    if (may_be_tensor(OPTIONS[i].kind) && needs_dispatcher(value)) return true;
  }
  return false;
}

// On the CPU a plan is simulated: no kernel is looked up.
std::shared_ptr<PreparedPlan> prepare_for(const Call& call, nb::handle chosen) {
  auto plan = nb::cast<std::shared_ptr<LaunchPlan>>(chosen);
  if (call.device_index >= 0) return prepare(std::move(plan));
  return std::make_shared<PreparedPlan>(PreparedPlan{std::move(plan), {}});
}

// Plans for the simulator depend on ARCHFLASH_SIM_DEVICE: with another value what is cached is
// stale.
void forget_other_simulated_devices() {
  static std::string last;
  const char* given = std::getenv("ARCHFLASH_SIM_DEVICE");
  const std::string_view now = given == nullptr ? "" : given;
  if (now == last) return;
  last = now;
  cache().clear();
  operator_cache().clear();
}

// The eager call. On a cached decision this is the whole way: read, look up, allocate, bind,
// launch.
nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad,
                     nb::handle implementation) {
  const Arguments arguments = arguments_of(q, k, v, options, grad);
  if (needs_dispatcher(arguments)) return nb::borrow(Py_NotImplemented);
  Call call;
  build_call(arguments, call);
  if (call.device_kind == DeviceKind::Meta || call.without_storage || call.lazy)
    return nb::borrow(Py_NotImplemented);
  if (call.device_index < 0) forget_other_simulated_devices();
  const CacheKey key{call.problem, call.device_index, forced_index(implementation)};
  const Decision* found = cache().find(key);
  if (found == nullptr) {
    Decision decision;
    nb::object chosen = decide()(call.problem, call.device_index, implementation);
    if (!chosen.is_none()) {
      decision.plan = prepare_for(call, chosen);
      decision.out_ndim = call.out_ndim;
      std::memcpy(decision.out_shape, call.out_shape, sizeof call.out_shape);
      std::memcpy(decision.out_strides, call.out_strides, sizeof call.out_strides);
      decision.like.out = template_of_out(q, call);
      if (call.problem.want_lse) decision.like.lse = template_of_lse(q, call, false);
    }
    found = cache().insert(key, std::move(decision));
  }
  if (!found->plan) return nb::none();
  // A kernel serves a call with gradients through torch's dispatcher, which records it for
  // autograd.
  if (call.problem.needs_grad) return nb::borrow(Py_NotImplemented);
  // Copies: allocating may let other threads insert.
  const std::shared_ptr<PreparedPlan> plan = found->plan;
  const Templates like = found->like_of(call);
  return run(*plan, arguments, call, like);
}

// Whether a row of q is repeated. The output of PyTorch's operators then has the memory layout that
// torch.empty_like chooses, which is not the runtime's.
bool repeats_rows(const Problem& p) {
  return (p.batch > 1 && p.q.batch == 0) || (p.heads_q > 1 && p.q.head == 0) ||
         (p.nq > 1 && p.q.row == 0);
}

// Adds what serves a call by a plan, or the reason why not all calls like it can be.
void add_plans(const Call& call, const LaunchPlan& plan, OperatorDecision& decision) {
  for (const bool self_attention : {true, false}) {
    const PlanResult result = with_lse_for_pytorch(plan, self_attention);
    if (const auto* reasons = std::get_if<Reasons>(&result)) {
      decision.reason = join(plan.implementation, ": ", reasons->front());
      return;
    }
    const auto longer = std::make_shared<LaunchPlan>(std::get<LaunchPlan>(result));
    auto& place = self_attention ? decision.of_self_attention : decision.plan;
    place = prepare_for(call, nb::cast(longer));
  }
}

// An eager call of one of PyTorch's operators, in which nothing but the kernel's own checks depends
// on gradients: autograd records the operator, not this call.
nb::object serve_operator(nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                          nb::handle implementation, bool rows_before_heads, bool lse_column) {
  Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  arguments.rows_before_heads = rows_before_heads;
  OperatorAnswer& answer = operator_answer();
  answer.keep = false;  // until it is known that the problem decides
  if (needs_dispatcher(arguments)) return nb::str("a subclass of torch.Tensor");
  Call call;
  build_call(arguments, call);
  if (call.without_storage || call.lazy) return nb::str("a tensor whose memory lacks its values");
  if (arguments.out.is_none() && !rows_before_heads && repeats_rows(call.problem))
    return nb::none();
  if (call.device_index < 0) forget_other_simulated_devices();
  const CacheKey key{call.problem, call.device_index, forced_index(implementation)};
  const OperatorDecision* found = operator_cache().find(key);
  if (found == nullptr) {
    OperatorDecision decision;
    nb::object chosen = decide_operator()(call.problem, call.device_index, implementation);
    if (nb::isinstance<nb::str>(chosen)) {
      decision.reason = nb::cast<std::string>(chosen);
    } else {
      add_plans(call, nb::cast<const LaunchPlan&>(chosen), decision);
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
  OperatorDecision decision = *found;  // a copy: allocating may let other threads insert
  if (lse_column) decision.like.lse = decision.lse_column;
  nb::object result = run(*plan, arguments, call, decision.like);
  ++served().of(plan->plan->implementation);
  return result;
}

Problem make_problem(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad) {
  Call call;
  build_call(arguments_of(q, k, v, options, grad), call);
  return call.problem;
}

// Reads the arguments of a call that a given plan is to serve. Tensors on the CPU may make the
// problem of a plan for a GPU: the simulator runs it.
void build_call_of(const LaunchPlan& plan, const Arguments& arguments, Call& call) {
  build_call(arguments, call);
  Problem asked = call.problem;
  asked.on_cuda = plan.problem.on_cuda;
  if (std::memcmp(&asked, &plan.problem, sizeof(Problem)) != 0) {
    throw nb::value_error(
        "these tensors and arguments are not the plan's problem: compare archflash.explain's with "
        "the plan's");
  }
  if (call.device_kind == DeviceKind::Meta) call.without_storage = "q";
  if (call.without_storage)
    throw nb::value_error(join(call.without_storage, HAS_NO_MEMORY).c_str());
  if (call.lazy) throw nb::value_error(join(call.lazy, IS_LAZY, "pass a clone() of it").c_str());
}

// Runs a given plan on given tensors, for replay.
nb::object execute_plan(const LaunchPlan& plan, nb::handle q, nb::handle k, nb::handle v,
                        nb::handle options) {
  const Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  Call call;
  build_call_of(plan, arguments, call);
  return run(*prepare_for(call, nb::cast(std::make_shared<LaunchPlan>(plan))), arguments, call);
}

// Every tensor that a given plan reads and writes, for the simulator.
nb::dict operands_of(const LaunchPlan& plan, nb::handle q, nb::handle k, nb::handle v,
                     nb::handle options) {
  const Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  Call call;
  build_call_of(plan, arguments, call);
  Outputs outputs;
  allocate(plan, arguments, call, outputs, true);
  if (call.problem.varlen && plan.launches.empty())
    write_rows_of_no_sequence(outputs.out, outputs.lse, arguments.sinks);
  return by_operand(arguments, outputs, call);
}

nb::bytes bound_parameters(const LaunchPlan& plan, size_t launch,
                           const std::vector<std::pair<std::string, uintptr_t>>& addresses,
                           bool tensor_maps) {
  std::array<void*, OPERAND_COUNT> pointers{};
  for (const auto& [name, address] : addresses) {
    for (int i = 0; i < OPERAND_COUNT; ++i) {
      if (name == operand_name(static_cast<Operand>(i)))
        pointers[i] = reinterpret_cast<void*>(address);
    }
  }
  alignas(64) unsigned char block[MAX_PARAMETER_BYTES];
  (tensor_maps ? bind : bind_addresses)(plan.launches.at(launch), pointers, block);
  return nb::bytes(block, plan.launches[launch].params.size());
}

// A plan that serves no attention call, on tensors that fit it: of one CUDA device, or of the CPU,
// where it is simulated.
void launch_plan(const LaunchPlan& plan, const nb::dict& tensors) {
  std::array<void*, OPERAND_COUNT> addresses{};
  int device_index = -1;
  bool any = false;
  for (int i = 0; i < OPERAND_COUNT; ++i) {
    const char* name = operand_name(static_cast<Operand>(i));
    if (!tensors.contains(name)) continue;
    TensorView view;
    read_tensor(tensors[name], name, view);
    if (view.lazy) throw nb::value_error(join(name, IS_LAZY, "pass a clone() of it").c_str());
    if (!view.has_storage) throw nb::value_error(join(name, HAS_NO_MEMORY).c_str());
    const bool fits = view.device_kind == DeviceKind::Cuda || view.device_kind == DeviceKind::Cpu;
    if (!fits || (any && view.device_index != device_index))
      throw nb::type_error("launch takes tensors on one CUDA device, or on the CPU");
    addresses[i] = view.data;
    device_index = view.device_index;
    any = true;
  }
  const auto need = [&](Operand operand) {
    const char* name = operand_name(operand);
    if (!tensors.contains(name))
      throw nb::value_error(
          join("the plan has an address of ", name, ": pass that tensor").c_str());
  };
  for (const Launch& launch : plan.launches) {
    for (const PointerSlot& slot : launch.pointers) need(slot.operand);
    for (const TensorMapSpec& spec : launch.tensor_maps) need(spec.operand);
  }
  if (plan.zeroed_bytes > 0) need(Operand::Workspace);
  if (!any) return;
  if (device_index < 0) {
    simulate()(std::make_shared<LaunchPlan>(plan), tensors);
    return;
  }
  const auto prepared = prepare(std::make_shared<LaunchPlan>(plan));
  void* stream = current_stream(device_index);
  const nb::gil_scoped_release release;
  execute(*prepared, addresses, device_index, stream);
}

const char* kind_name(OptionKind kind) {
  switch (kind) {
    case OptionKind::Flag:
      return "flag";
    case OptionKind::Number:
      return "number";
    case OptionKind::Integer:
      return "integer";
    case OptionKind::Tensor:
      return "tensor";
    case OptionKind::IntegerOrTensor:
      return "integer or tensor";
    case OptionKind::Window:
      return "window";
    case OptionKind::Dtype:
      return "dtype";
    case OptionKind::Text:
      return "text";
    case OptionKind::Output:
      return "output";
  }
  return "";
}

nb::object default_of(const Option& option) {
  if (option.kind == OptionKind::Flag) return nb::bool_(false);
  return option.default_text == nullptr ? nb::none() : nb::cast(option.default_text);
}

bool is_default(const Option& option, nb::handle value) {
  if (option.kind == OptionKind::Flag) return value.is(Py_False);
  if (option.default_text == nullptr) return value.is_none();
  return PyUnicode_Check(value.ptr()) &&
         PyUnicode_CompareWithASCIIString(value.ptr(), option.default_text) == 0;
}

// The options on which an exact result depends, but for those at their defaults.
nb::dict options_for_torch(nb::handle options) {
  const Arguments a =
      arguments_of(nb::none(), nb::none(), nb::none(), options, static_cast<int>(Grad::Off));
  nb::dict given;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const Option& option = OPTIONS[i];
    const nb::handle value = a.*ARGUMENTS[i];
    if (option.built && !option.advice && !is_default(option, value)) given[option.name] = value;
  }
  return given;
}

std::vector<const char*> dtype_names() {
  std::vector<const char*> names;
  for (bool fp8 : {false, true}) {
    for (int i = 0; i < DTYPE_COUNT; ++i) {
      const DType dtype = static_cast<DType>(i);
      if (is_fp8(dtype) == fp8) names.push_back(dtype_name(dtype));
    }
  }
  return names;
}

std::vector<std::string> texts(const std::vector<std::string_view>& views) {
  return {views.begin(), views.end()};
}

// Lets a struct be pickled and copied through its to_dict and from_dict.
template <class T>
nb::class_<T> with_pickle(nb::class_<T> type, T (*from_dict)(nb::handle)) {
  type.def(
      "__getstate__", [](const T& value) { return to_dict(value); },
      nb::sig("def __getstate__(self) -> dict[str, typing.Any]"));
  type.def(
      "__setstate__",
      [from_dict](T& value, nb::handle fields) { new (&value) T(from_dict(fields)); },
      nb::sig("def __setstate__(self, fields: dict[str, typing.Any], /) -> None"));
  return type;
}

using Lengths = std::vector<int64_t>;

// Throws std::invalid_argument unless the walk of this plan can be modelled, with these lengths of
// its packed sequences.
void check_walk(const LaunchPlan& plan, const Lengths& q, const Lengths& k) {
  constexpr int64_t MOST_TILES = 1 << 26;  // gigabytes, and seconds
  const Problem& problem = plan.problem;
  if (plan.tile.name.empty())
    throw std::invalid_argument("this plan computes nothing by tiles: it has no walk");
  const int64_t shares = plan.tile.splits * plan.tile.v_slices;
  if (plan.tile.tiles > MOST_TILES / shares) {
    throw std::invalid_argument(join("a walk over ", plan.tile.tiles, " tiles in ", shares,
                                     " shares: the model takes up to ", MOST_TILES, " of them"));
  }
  const size_t sequences = problem.varlen ? static_cast<size_t>(problem.batch) : 0;
  const auto check = [&](const char* name, const Lengths& lengths, int64_t rows) {
    if (lengths.size() != sequences) {
      throw std::invalid_argument(join(name, " has ", lengths.size(), " lengths: this plan has ",
                                       sequences,
                                       " packed sequences, and each of them one length"));
    }
    for (const int64_t length : lengths) {
      if (length < 0 || length > rows) {
        throw std::invalid_argument(join(name, " has the length ", length,
                                         ": all sequences together have up to ", rows, " rows"));
      }
      rows -= length;
    }
  };
  check("q_lengths", q, problem.nq);
  check("k_lengths", k, problem.nk);
}

}  // namespace

NB_MODULE(_archflash, m) {
  using namespace nb::literals;
  m.doc() =
      "archflash's runtime: plans, bound launches and the kernels themselves, without torch or a "
      "GPU at import.";
  m.attr("version") = ARCHFLASH_VERSION;
  m.attr("SCALE_ROWS") = SCALE_ROWS;
  m.attr("MASK_BLOCK") = MASK_BLOCK;
  m.attr("MOST_RANGES") = MOST_RANGES;
  m.attr("IS_LAZY") = IS_LAZY;
  nb::set_leak_warnings(false);  // what the caches hold lives as long as the process

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const LaunchFailure& failure) {
      PyErr_SetString(nb::module_::import_("archflash._errors").attr("LaunchError").ptr(),
                      failure.what());
    } catch (const Unsupported& refusal) {
      PyErr_SetString(nb::module_::import_("archflash._errors").attr("UnsupportedError").ptr(),
                      refusal.what());
    }
  });

  nb::class_<Option>(m, "Option",
                     "A row of the table of a call's options (src/common/options.inc).")
      .def_ro("name", &Option::name)
      .def_prop_ro("kind", [](const Option& o) { return kind_name(o.kind); })
      .def_prop_ro("default", &default_of, nb::sig("def default(self) -> typing.Any"))
      .def_prop_ro("may_be_tensor", [](const Option& o) { return may_be_tensor(o.kind); })
      .def_ro("differentiable", &Option::differentiable)
      .def_ro("advice", &Option::advice, "Whether the exact result is the same without it.")
      .def_ro("of_attention", &Option::of_attention, "Whether attention has it.")
      .def_ro("of_cache", &Option::of_cache, "Whether attention_with_kvcache has it.")
      .def_ro("built", &Option::built)
      .def_prop_ro(
          "field",
          [](const Option& o) { return o.flag ? std::optional(flag_field(o)) : std::nullopt; },
          "The attribute of a Problem that a flag sets; None for options of other kinds.")
      .def_prop_ro(
          "feature", [](const Option& o) { return feature_of(o); },
          "How a folder that serves a flag lists it among its features.")
      .def_ro("doc", &Option::doc, "How its entry in the docstring of attention() begins.");
  m.def("dtypes", &dtype_names, "Those that q, k and v may have, as torch spells them; FP8 last.");
  m.def(
      "call_options", [] { return std::vector<Option>(std::begin(OPTIONS), std::end(OPTIONS)); },
      "The options of a call beside q, k, v and implementation, in the order in which "
      "`attention`, `make_problem`, `execute` and `operands` take their values: all, or those "
      "before the first of a cache.");

  auto problem = nb::class_<Problem>(
      m, "Problem", "What one call asks for: shapes, strides, options. No addresses.");
  with_pickle(problem, &problem_from_dict)
      .def_static("from_dict", &problem_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> Problem"))
      .def(
          "to_dict", [](const Problem& p) { return to_dict(p); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def(
          "__eq__",
          [](const Problem& a, const Problem& b) {
            return std::memcmp(&a, &b, sizeof(Problem)) == 0;
          },
          nb::is_operator(), nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__hash__",
           [](const Problem& p) {
             const std::string_view bytes(reinterpret_cast<const char*>(&p), sizeof(p));
             return static_cast<int64_t>(std::hash<std::string_view>()(bytes) >> 1);
           })
      .def_prop_ro("dtype", [](const Problem& p) { return dtype_name(p.dtype); })
      .def_prop_ro("kv_dtype", [](const Problem& p) { return dtype_name(p.kv_dtype); })
      .def_prop_ro("out_dtype", [](const Problem& p) { return dtype_name(p.out_dtype); })
      .def_ro("page_size", &Problem::page_size)
      .def_ro("n_new", &Problem::n_new)
      .def_ro("rotary_dim", &Problem::rotary_dim)
      .def_ro("qv_align", &Problem::qv_align)
      .def_ro("attention_chunk", &Problem::attention_chunk)
      .def_ro("batch", &Problem::batch)
      .def_ro("heads_q", &Problem::heads_q)
      .def_ro("heads_kv", &Problem::heads_kv)
      .def_ro("nq", &Problem::nq)
      .def_ro("nk", &Problem::nk)
      .def_ro("d", &Problem::d)
      .def_ro("dv", &Problem::dv)
      .def_prop_ro("window",
                   [](const Problem& p) {
                     return p.window_left != UNBOUNDED ||
                            (!p.causal && p.window_right != UNBOUNDED);
                   })
      .def_ro("scale", &Problem::scale)
      .def_ro("softcap", &Problem::softcap)
      .def_ro("dropout_p", &Problem::dropout_p)
      .def_prop_ro("approximate",
                   [](const Problem& p) -> std::optional<std::string> {
                     if (p.approximate == static_cast<int64_t>(Approximate::Int8Qk))
                       return "int8_qk";
                     return std::nullopt;
                   })
      .def_prop_ro("num_splits",
                   [](const Problem& p) -> std::optional<int64_t> {
                     if (p.num_splits == 0) return std::nullopt;
                     return p.num_splits;
                   })
      .def_prop_ro("q_offset_given", [](const Problem& p) { return !p.q_offset_default; })
      .def_prop_ro("sinks", [](const Problem& p) { return p.sinks != 0; })
      .def_prop_ro("attn_mask", [](const Problem& p) { return p.mask != 0; })
      .def_prop_ro("bool_mask", [](const Problem& p) { return p.mask == 1; })
      .def_prop_ro("key_ranges", [](const Problem& p) { return p.key_ranges != 0; })
      .def_prop_ro(
          "masked", [](const Problem& p) { return is_masked(p); },
          "Whether attn_mask, key_ranges, alibi_slopes or block_mask is given.")
      .def(
          "as_if_on_cuda",
          [](Problem p) {
            p.on_cuda = true;
            return p;
          },
          "The same problem with its tensors on a GPU.");
  const Problem fields{};
  for_each_field(fields, [&](const char* name, const auto& field) {
    if constexpr (std::is_same_v<decltype(field), const Flag&>) {
      const size_t offset =
          reinterpret_cast<const char*>(&field) - reinterpret_cast<const char*>(&fields);
      problem.def_prop_ro(name, [offset](const Problem& p) {
        Flag flag;
        std::memcpy(&flag, reinterpret_cast<const char*>(&p) + offset, sizeof flag);
        return static_cast<bool>(flag);
      });
    }
  });

  with_pickle(nb::class_<Device>(m, "Device", "A GPU as planning sees it."), &device_from_dict)
      .def_static("from_dict", &device_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> Device"))
      .def(
          "to_dict", [](const Device& d) { return to_dict(d); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def_ro("name", &Device::name)
      .def_prop_ro("capability", [](const Device& d) { return Capability(d.major, d.minor); })
      .def_ro("sm_count", &Device::sm_count)
      .def_ro("shared_per_block", &Device::shared_per_block)
      .def_ro("shared_per_sm", &Device::shared_per_sm)
      .def_ro("l2_bytes", &Device::l2_bytes)
      .def_ro("registers_per_sm", &Device::registers_per_sm)
      .def_ro("threads_per_sm", &Device::threads_per_sm);

  nb::class_<TileChoice>(m, "TileChoice", "The tile that a plan took, and how it is used.")
      .def_ro("name", &TileChoice::name, "The last word of the kernel's name, as d128_large.")
      .def_ro("reason", &TileChoice::reason, "Why the implementation has this tile; may be empty.")
      .def_ro("head_dim", &TileChoice::head_dim, "The largest d that it takes, in elements.")
      .def_ro("head_dim_v", &TileChoice::head_dim_v, "The largest dv that it takes, in elements.")
      .def_ro("block_q", &TileChoice::block_q, "Query rows of the tile, of each packed head.")
      .def_ro("block_k", &TileChoice::block_k, "Keys that it takes at a time.")
      .def_ro("warps", &TileChoice::warps, "Warps of a CTA that compute rows.")
      .def_ro("rows_per_warp", &TileChoice::rows_per_warp)
      .def_ro("k_stages", &TileChoice::k_stages, "Buffers for blocks of K; 0: it has no stages.")
      .def_ro("v_stages", &TileChoice::v_stages,
              "Buffers for blocks of V; 0: they share those of K.")
      .def_ro("cluster", &TileChoice::cluster, "CTAs that compute one tile together.")
      .def_ro("packed_heads", &TileChoice::packed_heads,
              "Query heads that share a head of K and lie in one tile; 1: none do.")
      .def_ro("ctas_per_sm", &TileChoice::ctas_per_sm, "CTAs that an SM has room for.")
      .def_ro("ctas", &TileChoice::ctas, "CTAs of the launch.")
      .def_ro("tiles", &TileChoice::tiles, "Row tiles of all heads.")
      .def_ro("splits", &TileChoice::splits,
              "Shares into which the keys of each tile are split; 1: they are not.")
      .def_ro("v_slices", &TileChoice::v_slices,
              "Slices of the columns of V, each computed by CTAs of its own; 1: there are none.")
      .def_ro("heads_per_group", &TileChoice::heads_per_group,
              "Heads whose tiles follow one another; 0: there are no groups.")
      .def_ro("turned_begin", &TileChoice::turned_begin,
              "The tiles of a head come from the last to the first, but those at these places come "
              "in the opposite direction.")
      .def_ro("turned_end", &TileChoice::turned_end)
      .def_ro("row_step", &TileChoice::row_step,
              "The tiles of a sequence end with it, as far as whole steps of so many rows take "
              "them there; 0: they begin with it.");

  with_pickle(nb::class_<LaunchPlan>(m, "LaunchPlan",
                                     "Everything a launch needs but the addresses of the tensors."),
              &plan_from_dict)
      .def_static("from_dict", &plan_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> LaunchPlan"),
                  "Plans anew what `to_dict` gave: for the problem, device and implementation "
                  "that it names. Raises ValueError with the differences where it says anything "
                  "else than this version plans.")
      .def_static("unchecked_from_dict", &unchecked_plan_from_dict, "fields"_a.none(),
                  nb::sig("def unchecked_from_dict(fields: dict[str, typing.Any]) -> LaunchPlan"),
                  "Unsafe, for tests and tools of this project only: a plan made by hand, which "
                  "may launch any kernel with any parameters and so read and write any address. "
                  "Files go through `from_dict`.")
      .def(
          "to_dict", [](const LaunchPlan& p) { return to_dict(p); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def_ro("implementation", &LaunchPlan::implementation)
      .def_ro("problem", &LaunchPlan::problem)
      .def_ro("device", &LaunchPlan::device)
      .def_prop_ro(
          "tile",
          [](const LaunchPlan& p) {
            return p.tile.name.empty() ? std::nullopt : std::optional(p.tile);
          },
          "None for a plan that computes nothing by tiles.")
      .def_ro("workspace_bytes", &LaunchPlan::workspace_bytes)
      .def_ro("zeroed_bytes", &LaunchPlan::zeroed_bytes)
      .def_ro("accumulates", &LaunchPlan::accumulates,
              "Whether the gradients that it writes are added to what is there.")
      .def_prop_ro("kernels",
                   [](const LaunchPlan& p) {
                     std::vector<std::string> names;
                     for (const Launch& launch : p.launches) names.push_back(launch.kernel);
                     return names;
                   })
      .def_ro("code", &LaunchPlan::code)
      .def_prop_ro("notes", &notes);

  nb::class_<core::Makespan>(m, "Makespan",
                             "How evenly a walk over row tiles fills a GPU: a model.")
      .def_ro("workers", &core::Makespan::workers, "CTAs, or pairs of them, that run at a time.")
      .def_ro("time", &core::Makespan::time, "Until the last one is done, in keys.")
      .def_ro("ideal", &core::Makespan::ideal,
              "If the work were shared out evenly; at least the longest tile.")
      .def_prop_ro("share", &core::Makespan::share, "ideal / time.");
  m.def(
      "makespan",
      [](const LaunchPlan& plan, const Lengths& q, const Lengths& k) {
        check_walk(plan, q, k);
        return core::makespan(plan, {q, k});
      },
      "plan"_a, "q_lengths"_a = Lengths(), "k_lengths"_a = Lengths(),
      "The model of a plan's first launch; with cu_seqlens for sequences of these lengths.");
  m.def(
      "makespan_of",
      [](const std::vector<double>& times, int64_t workers, bool rounds) {
        constexpr int64_t MOST_WORKERS = int64_t{1} << 32;
        if (workers < 1 || workers > MOST_WORKERS) {
          throw std::invalid_argument(
              join(workers, " workers: a walk has from 1 to ", MOST_WORKERS));
        }
        for (const double time : times) {
          if (!std::isfinite(time) || time < 0)
            throw std::invalid_argument(
                join("a tile that takes ", time, ": times are finite and not negative"));
        }
        return core::makespan(times, workers, rounds ? core::Walk::Rounds : core::Walk::Queue);
      },
      "times"_a, "workers"_a, "rounds"_a,
      "The model of tiles in this order. 'rounds': workers take one tile each, every second time "
      "in reverse order; otherwise whoever is free first takes the next tile.");
  m.def(
      "tile_times",
      [](const LaunchPlan& plan, const Lengths& q, const Lengths& k) {
        check_walk(plan, q, k);
        std::vector<std::pair<int64_t, double>> tiles;
        for (const core::TileTime& tile : core::tile_times(plan, {q, k}))
          tiles.emplace_back(tile.kv_head, tile.time);
        return tiles;
      },
      "plan"_a, "q_lengths"_a = Lengths(), "k_lengths"_a = Lengths(),
      "The tiles of a plan's first launch in their order: (head of k, time in keys).");
  m.attr("TILE_KEYS") = core::TILE_KEYS;
  m.def(
      "reads_of_keys",
      [](const LaunchPlan& plan) {
        if (plan.problem.varlen)
          throw std::invalid_argument("packed sequences: there is no model of what they read");
        check_walk(plan, {}, {});
        return core::reads_of_keys(plan);
      },
      "plan"_a, "How often K and V come from memory, on average: a model.");

  nb::class_<Description>(m, "Description", "What an implementation says of itself.")
      .def_ro("name", &Description::name)
      .def_ro("summary", &Description::summary)
      .def_ro("home_device", &Description::home_device)
      .def_prop_ro("dtypes",
                   [](const Description& d) {
                     std::vector<std::string> names;
                     for (DType dtype : d.dtypes) names.emplace_back(dtype_name(dtype));
                     return names;
                   })
      .def_ro("head_dims", &Description::head_dims)
      .def_ro("largest_head_dim", &Description::largest_head_dim)
      .def_ro("features", &Description::features)
      .def_prop_ro("needs_capability",
                   [](const Description& d) { return capability_pair(d.needs_capability); })
      .def_ro("uses_tensor_cores", &Description::uses_tensor_cores)
      .def_prop_ro(
          "sixteen_bits_made_for",
          [](const Description& d) {
            return d.sixteen_bits_made_for == 0
                       ? std::nullopt
                       : std::optional(capability_pair(d.sixteen_bits_made_for));
          },
          "The capability that the tiles for 16-bit inputs are made for; None: every one.")
      .def_ro("only_forced_on_majors", &Description::only_forced_on_majors);

  nb::class_<Target>(m, "Target",
                     "Code of an implementation and the compute capabilities that it loads on.")
      .def_ro("name", &Target::name)
      .def_prop_ro("first", [](const Target& t) { return capability_pair(t.first); })
      .def_prop_ro(
          "last",
          [](const Target& t) {
            return t.last == ANY_NEWER ? std::nullopt : std::optional(capability_pair(t.last));
          },
          "None: every newer GPU.")
      .def(
          "loads_on", [](const Target& t, Capability on) { return t.loads_on(number_of(on)); },
          "capability"_a);

  nb::class_<DriverStatus>(m, "DriverStatus", "Whether CUDA works here, and if not, why.")
      .def_ro("usable", &DriverStatus::usable)
      .def_ro("device_count", &DriverStatus::device_count)
      .def_ro("cuda_version", &DriverStatus::cuda_version)
      .def_ro("problem", &DriverStatus::problem);

  nb::class_<KnownDevice>(m, "KnownDevice", "A row of the table of known GPUs.")
      .def_ro("device", &KnownDevice::device)
      .def_ro("boost_mhz", &KnownDevice::boost_mhz)
      .def_ro("bandwidth_gbps", &KnownDevice::bandwidth_gbps)
      .def_ro("fp32_tflops", &KnownDevice::fp32_tflops)
      .def_ro("fp16_tflops", &KnownDevice::fp16_tflops)
      .def_ro("fp8_tflops", &KnownDevice::fp8_tflops)
      .def_prop_ro("aliases", [](const KnownDevice& d) { return texts(d.aliases); })
      .def_prop_ro("unconfirmed", [](const KnownDevice& d) { return texts(d.unconfirmed); })
      .def_prop_ro("source", [](const KnownDevice& d) { return std::string(d.source); });

  m.def("folder_names", &folder_names,
        "Names of the architecture folders, compiled or not; newer instructions first.");
  m.def("describe", [](const std::string& name) { return describe(name); }, "name"_a);
  m.def(
      "targets", [](const std::string& name) { return targets(name); }, "name"_a,
      "What the folder is built for; empty when it was left out of this build.");
  m.def(
      "has_code",
      [](const std::string& name, Capability on) { return has_code(name, number_of(on)); },
      "name"_a, "capability"_a, "Whether code of the folder loads on a GPU of that capability.");
  m.def(
      "target", [](const std::string& name) { return target(name); }, "name"_a,
      "The target that a compiler calls by that name (sm_90a, compute_80). Raises ValueError for "
      "any other name.");
  m.def(
      "pick_target",
      [](const std::vector<std::string>& names, Capability on) -> std::optional<std::string> {
        std::vector<Target> targets;
        for (const std::string& name : names) targets.push_back(target(name));
        const Target* picked = pick_target(targets, number_of(on));
        return picked == nullptr ? std::nullopt : std::optional(picked->name);
      },
      "names"_a, "capability"_a,
      "The name among those of targets whose code a GPU of that capability runs: machine code "
      "before PTX, then the newest. None where none loads.");
  m.def(
      "plan",
      [](const std::string& name, const Problem& problem, const Device& device) {
        return plan(name, problem, device);
      },
      "name"_a, "problem"_a, "device"_a, "A LaunchPlan, or the list of reasons why not.");
  m.def("with_lse_for_pytorch", &with_lse_for_pytorch, "plan"_a, "self_attention"_a,
        "The plan, with a launch behind the others that gives +infinity to rows of the log-sum-exp "
        "that see no key, where there may be any; or the list of reasons why not. With "
        "self_attention the sequences of packed keys are those of the queries.");
  m.def(
      "image",
      [](const std::string& name) {
        const Bytes bytes = image(name);
        return nb::bytes(bytes.begin, bytes.end - bytes.begin);
      },
      "name"_a, "The fatbin `<folder>/<file stem>`; empty when not compiled in.");
  m.def("image_names", &image_names, "The images of this build.");
  m.def(
      "add_image",
      [](const std::string& name, const nb::bytes& code) {
        add_image(name, {code.c_str(), code.size()});
      },
      "name"_a, "code"_a,
      "Adds a cubin or fatbin that is not in this build, for plans whose launches name it.");
  m.def("known_devices", [] { return known_devices(); });
  m.def(
      "find_known_device",
      [](const std::string& name) -> std::optional<KnownDevice> {
        const KnownDevice* found = find_known_device(name);
        return found ? std::optional(*found) : std::nullopt;
      },
      "name"_a);
  m.def("driver_status", &driver_status);
  m.def("query_device", &query_device, "device_index"_a);

  m.def(
      "set_decide",
      [](nb::object function) {
        torch();  // filled before a second thread can come
        decide() = std::move(function);
      },
      "function"_a);
  m.def(
      "set_simulate", [](nb::object function) { simulate() = std::move(function); }, "function"_a);
  m.def("attention", &attention, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a, "grad"_a,
        "implementation"_a.none(),
        "Serves an eager call from a kernel. None when `torch` is to serve it; NotImplemented for "
        "torch's dispatcher, and for lazy tensors, which must be resolved first.");
  m.def(
      "set_decide_operator", [](nb::object function) { decide_operator() = std::move(function); },
      "function"_a);
  m.def("serve_operator", &serve_operator, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a,
        "implementation"_a.none(), "rows_before_heads"_a = false, "lse_column"_a = false,
        nb::sig("def serve_operator(q: typing.Any, k: typing.Any, v: typing.Any, options: "
                "tuple[typing.Any, ...], implementation: str | None, rows_before_heads: bool = "
                "False, lse_column: bool = False) -> typing.Any"),
        "Serves a call of one of PyTorch's operators from a kernel; what `attention` would return. "
        "Or the reason why PyTorch's own kernel is to serve it, a str; or None where `out` has to "
        "be given, because q repeats rows. With lse_column the log-sum-exp has a last dimension of "
        "size 1.");
  bind_operators(m);
  m.def("make_problem", &make_problem, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a,
        "grad"_a, "What a call asks for.");
  m.def("options_for_torch", &options_for_torch, "options"_a,
        nb::sig("def options_for_torch(options: tuple[typing.Any, ...]) -> dict[str, typing.Any]"),
        "The options that the implementation `torch` takes, without those at their defaults.");
  m.def("execute", &execute_plan, "plan"_a, "q"_a, "k"_a, "v"_a, "options"_a,
        "Runs a plan on tensors that make exactly its problem; what `attention` would return.");
  m.def("operands", &operands_of, "plan"_a, "q"_a, "k"_a, "v"_a, "options"_a,
        nb::sig("def operands(plan: LaunchPlan, q: typing.Any, k: typing.Any, v: typing.Any, "
                "options: tuple[typing.Any, ...]) -> dict[str, typing.Any]"),
        "The tensors that a plan reads and writes, by operand name: those given, which must make "
        "exactly its problem, and newly allocated outputs and workspace.");
  m.def("quantizer_names", &quantizer_names, "The names that quantize_fp8 has for its kernels.");
  m.def(
      "has_quantizer", [](Capability on) { return has_quantizer(number_of(on)); }, "capability"_a,
      "Whether kernels of quantize_fp8 run on a GPU of that capability.");
  m.def(
      "plan_quantize",
      [](const std::string& out_dtype, int per, nb::handle x, nb::handle out,
         const Device& device) {
        const bool e4m3 = out_dtype == dtype_name(DType::E4M3);
        if (!e4m3 && out_dtype != dtype_name(DType::E5M2)) {
          throw std::invalid_argument(join("out_dtype '", out_dtype, "': it must be ",
                                           dtype_name(DType::E4M3), " or ",
                                           dtype_name(DType::E5M2)));
        }
        if (per < 0 || per > static_cast<int>(QuantizePer::Block)) {
          throw std::invalid_argument(
              join("per ", per, ": it must be 0 (tensor), 1 (head) or 2 (block)"));
        }
        TensorView from, to;
        read_tensor(x, "x", from);
        read_tensor(out, "out", to);
        const auto strides = [](const TensorView& view) {
          return Strides{view.strides[0], view.strides[1], view.strides[2]};
        };
        return plan_quantize({.batch = from.shape[0],
                              .heads = from.shape[1],
                              .rows = from.shape[2],
                              .d = from.shape[3],
                              .x = strides(from),
                              .out = strides(to),
                              .dtype = from.dtype,
                              .out_dtype = e4m3 ? DType::E4M3 : DType::E5M2,
                              .per = static_cast<QuantizePer>(per)},
                             device);
      },
      "out_dtype"_a, "per"_a, "x"_a, "out"_a, "device"_a,
      "The plan that makes 8-bit numbers of x (batch, heads, rows, d); 'per' counts tensor, head, "
      "block.");
  m.attr("MERGE_PARTS") = MERGE_PARTS;
  m.def("merger_names", &merger_names, "The names that merge_attention has for its kernels.");
  m.def(
      "has_merger", [](Capability on) { return has_merger(number_of(on)); }, "capability"_a,
      "Whether a kernel of merge_attention runs on a GPU of that capability.");
  m.def(
      "plan_merge",
      [](const std::vector<nb::object>& outs, const std::vector<nb::object>& lses, nb::handle out,
         const Device& device) {
        if (outs.empty() || outs.size() > MERGE_PARTS || outs.size() != lses.size())
          throw nb::value_error(join("plan_merge takes 1 to ", MERGE_PARTS, " parts").c_str());
        const auto strides = [](const TensorView& view) {
          return Strides{view.strides[0], view.strides[1], view.strides[2]};
        };
        MergeProblem problem{};
        TensorView view;
        read_tensor(out, "out", view);
        problem.batch = view.shape[0], problem.heads = view.shape[1];
        problem.rows = view.shape[2], problem.dv = view.shape[3];
        problem.out = strides(view);
        problem.out_dtype = view.dtype;
        problem.parts = static_cast<int32_t>(outs.size());
        for (size_t i = 0; i < outs.size(); ++i) {
          TensorView part, lse;
          read_tensor(outs[i], "outs", part);
          read_tensor(lses[i], "lses", lse);
          problem.part[i] = {strides(part), strides(lse), part.dtype};
        }
        return plan_merge(problem, device);
      },
      "outs"_a, "lses"_a, "out"_a, "device"_a,
      nb::sig("def plan_merge(outs: list[typing.Any], lses: list[typing.Any], out: typing.Any, "
              "device: Device) -> LaunchPlan"),
      "The plan that merges outs (batch, heads, rows, dv) with lses (batch, heads, rows) into "
      "out.");
  m.def(
      "has_backward", [](const std::string& name) { return has_backward(name); }, "name"_a,
      "Whether a folder has a backward pass.");
  m.def(
      "plan_backward",
      [](const std::string& name, const Problem& call, const Device& device, nb::handle dout,
         nb::handle dq, nb::handle dk, nb::handle dv, bool accumulate, bool dlse, bool dsinks,
         bool deterministic, nb::handle dmask) {
        BackwardProblem problem{.call = call,
                                .dout = backward_tensor(dout, "dout"),
                                .dq = backward_tensor(dq, "dq"),
                                .dk = backward_tensor(dk, "dk"),
                                .dv = backward_tensor(dv, "dv"),
                                .accumulate = accumulate,
                                .dlse = dlse,
                                .dsinks = dsinks,
                                .deterministic = deterministic};
        if (!dmask.is_none()) {
          TensorView view;
          read_tensor(dmask, "dmask", view);
          if (view.ndim != 4 || !view.is_float || view.dtype != DType::F32) {
            throw nb::value_error("dmask must be a float32 tensor of 4 dimensions");
          }
          const auto stride = [&](int axis) {
            return view.shape[axis] > 1 ? view.strides[axis] : 0;
          };
          problem.dmask = true;
          problem.dmask_strides = {stride(0), stride(1), stride(2)};
          problem.dmask_key = stride(3);
        }
        return plan_backward(name, problem, device);
      },
      "name"_a, "call"_a, "device"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a, "accumulate"_a, "dlse"_a,
      "dsinks"_a, "deterministic"_a, "dmask"_a.none() = nb::none(),
      "The plan of a folder for the gradients of a call, or the list of reasons why not. The "
      "tensors "
      "have heads before rows whatever the call's layout; packed ones have a batch of 1. "
      "'accumulate': gradients are added to what dq, dk and dv hold; 'dlse': the log-sum-exp has a "
      "gradient, too; 'dsinks': that of the sinks is wanted; 'deterministic': the same inputs must "
      "always give the same bits; 'dmask': what the gradient of attn_mask is added to, float32 "
      "(batch or 1, heads or 1, nq or 1, nk or 1), None if it is not wanted.");
  m.def("launch", &launch_plan, "plan"_a, "tensors"_a,
        nb::sig("def launch(plan: LaunchPlan, tensors: dict[str, typing.Any]) -> None"),
        "Launches a plan on tensors by operand name: each that the plan has an address of. On the "
        "CPU the simulator runs it. "
        "Their shapes and strides must be those that it was made for.");
  m.def(
      "load_kernels",
      [](const LaunchPlan& plan, int device_index) {
        const auto prepared = prepare(std::make_shared<LaunchPlan>(plan));
        const nb::gil_scoped_release release;
        load_kernels(*prepared, device_index);
      },
      "plan"_a, "device_index"_a,
      "Loads the kernels of a plan onto a CUDA device before their first launch would.");
  m.def(
      "bound_parameters", &bound_parameters, "plan"_a, "launch"_a, "addresses"_a,
      "tensor_maps"_a = true,
      "The parameter bytes of one launch with (operand, address) pairs filled in, and tensor maps "
      "encoded by the driver where they are wanted.");
  m.def(
      "cache_info",
      [] {
        return nb::make_tuple(cache().hits, cache().misses, cache().size(), PLAN_CACHE_CAPACITY);
      },
      nb::sig("def cache_info() -> tuple[int, int, int, int]"),
      "(hits, misses, entries, capacity) of the plan cache.");
  m.def("clear_cache", [] {
    cache().clear();
    operator_cache().clear();
    forget_operator_calls();
  });
  m.def("use_exchange_table", &use_exchange_table, "enabled"_a,
        "Reads tensors through torch's DLPack exchange table (default), or through their Python "
        "attributes.");
  m.def("has_exchange_table", [] { return torch().exchange != nullptr; });
  m.def("is_plain_tensor", [](nb::handle object) { return is_plain_tensor(object); }, "object"_a);
  m.def(
      "all_plain",
      [](const nb::args& objects) {
        for (const nb::handle object : objects) {
          if (needs_dispatcher(object)) return false;
        }
        return true;
      },
      nb::sig("def all_plain(*objects: typing.Any) -> bool"),
      "Whether no argument is a subclass of torch.Tensor (but torch.nn.Parameter).");
  m.def(
      "check_data",
      [](nb::handle tensor, const std::string& name) {
        TensorView view;
        read_tensor(tensor, name.c_str(), view);
      },
      "tensor"_a.none(), "name"_a, "Refuses what is no dense tensor, or has elements but no data.");
  m.def(
      "given", [](nb::handle value) { return given(value); }, "value"_a.none(),
      "What a caller gave, for an error message: never the values of a tensor.");
}

}  // namespace archflash
