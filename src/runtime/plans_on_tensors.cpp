#include "runtime/plans_on_tensors.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <stdexcept>

#include "runtime/registry.h"
#include "runtime/run_plan.h"
#include "runtime/wrong.h"

namespace archflash {
namespace {

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
  if (call.without_storage) wrong_value(call.without_storage, HAS_NO_MEMORY);
  if (call.lazy) wrong_value(call.lazy, IS_LAZY, "pass a clone() of it");
}

// A tensor of the backward pass: heads before rows, (batch, heads, rows, columns).
BackwardTensor backward_tensor(nb::handle tensor, const char* name) {
  TensorView view;
  read_tensor(tensor, name, view);
  if (view.ndim != 4 || !view.is_float)
    wrong_value(name, " must be a floating-point tensor of 4 dimensions");
  const auto stride = [&](int axis) { return view.shape[axis] > 1 ? view.strides[axis] : 0; };
  return {.strides = {stride(0), stride(1), stride(2)},
          .dtype = view.dtype,
          .column = view.shape[3] <= 1 ? 1 : view.strides[3],
          .align = alignment(view.data)};
}

// The strides of (batch, heads, rows) of a tensor that stands as it is.
Strides strides_of(const TensorView& view) {
  return {view.strides[0], view.strides[1], view.strides[2]};
}

}  // namespace

Problem make_problem(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad) {
  Call call;
  build_call(arguments_of(q, k, v, options, grad), call);
  return call.problem;
}

nb::object execute_plan(const LaunchPlan& plan, nb::handle q, nb::handle k, nb::handle v,
                        nb::handle options) {
  const Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  Call call;
  build_call_of(plan, arguments, call);
  return run(*prepare_for(call, std::make_shared<LaunchPlan>(plan)), arguments, call);
}

nb::dict operands_of(const LaunchPlan& plan, nb::handle q, nb::handle k, nb::handle v,
                     nb::handle options) {
  const Arguments arguments = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  Call call;
  build_call_of(plan, arguments, call);
  Outputs outputs;
  allocate(plan, arguments, call, outputs, true);
  if (call.problem.varlen && plan.launches.empty())
    write_rows_of_no_sequence(outputs.out, outputs.lse, arguments.sinks);
  return by_operand(arguments, outputs);
}

void launch_plan(const LaunchPlan& plan, const nb::dict& tensors) {
  std::array<void*, OPERAND_COUNT> addresses{};
  int device_index = -1;
  bool any = false;
  for (int i = 0; i < OPERAND_COUNT; ++i) {
    const char* name = operand_name(static_cast<Operand>(i));
    if (!tensors.contains(name)) continue;
    TensorView view;
    read_tensor(tensors[name], name, view);
    if (view.lazy) wrong_value(name, IS_LAZY, "pass a clone() of it");
    if (!view.has_storage) wrong_value(name, HAS_NO_MEMORY);
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
      wrong_value("the plan has an address of ", name, ": pass that tensor");
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
  EncodedMaps maps;
  if (tensor_maps)
    archflash::bind(plan.launches.at(launch), pointers, block, maps);
  else
    bind_addresses(plan.launches.at(launch), pointers, block);
  return nb::bytes(block, plan.launches[launch].params.size());
}

LaunchPlan plan_quantize_of(const std::string& out_dtype, int per, nb::handle x, nb::handle out,
                            const Device& device) {
  const bool e4m3 = out_dtype == dtype_name(DType::E4M3);
  if (!e4m3 && out_dtype != dtype_name(DType::E5M2)) {
    throw std::invalid_argument(join("out_dtype '", out_dtype, "': it must be ",
                                     dtype_name(DType::E4M3), " or ", dtype_name(DType::E5M2)));
  }
  if (per < 0 || per > static_cast<int>(QuantizePer::Block)) {
    throw std::invalid_argument(
        join("per ", per, ": it must be 0 (tensor), 1 (head) or 2 (block)"));
  }
  TensorView from, to;
  read_tensor(x, "x", from);
  read_tensor(out, "out", to);
  return plan_quantize({.batch = from.shape[0],
                        .heads = from.shape[1],
                        .rows = from.shape[2],
                        .d = from.shape[3],
                        .x = strides_of(from),
                        .out = strides_of(to),
                        .dtype = from.dtype,
                        .out_dtype = e4m3 ? DType::E4M3 : DType::E5M2,
                        .per = static_cast<QuantizePer>(per)},
                       device);
}

LaunchPlan plan_merge_of(const std::vector<nb::object>& outs, const std::vector<nb::object>& lses,
                         nb::handle out, const Device& device) {
  if (outs.empty() || outs.size() > MERGE_PARTS || outs.size() != lses.size())
    wrong_value("plan_merge takes 1 to ", MERGE_PARTS, " parts");
  MergeProblem problem{};
  TensorView view;
  read_tensor(out, "out", view);
  problem.batch = view.shape[0], problem.heads = view.shape[1];
  problem.rows = view.shape[2], problem.dv = view.shape[3];
  problem.out = strides_of(view);
  problem.out_dtype = view.dtype;
  problem.parts = static_cast<int32_t>(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    TensorView part, lse;
    read_tensor(outs[i], "outs", part);
    read_tensor(lses[i], "lses", lse);
    problem.part[i] = {strides_of(part), strides_of(lse), part.dtype};
  }
  return plan_merge(problem, device);
}

PlanResult plan_backward_of(const std::string& name, const Problem& call, const Device& device,
                            const GradientTensors& tensors, bool accumulate, bool dlse, bool dsinks,
                            bool deterministic) {
  BackwardProblem problem{.call = call,
                          .dout = backward_tensor(tensors.dout, "dout"),
                          .dq = backward_tensor(tensors.dq, "dq"),
                          .dk = backward_tensor(tensors.dk, "dk"),
                          .dv = backward_tensor(tensors.dv, "dv"),
                          .accumulate = accumulate,
                          .dlse = dlse,
                          .dsinks = dsinks,
                          .deterministic = deterministic};
  if (!tensors.dmask.is_none()) {
    TensorView view;
    read_tensor(tensors.dmask, "dmask", view);
    if (view.ndim != 4 || !view.is_float || view.dtype != DType::F32) {
      throw nb::value_error("dmask must be a float32 tensor of 4 dimensions");
    }
    const auto stride = [&](int axis) { return view.shape[axis] > 1 ? view.strides[axis] : 0; };
    problem.dmask = true;
    problem.dmask_strides = {stride(0), stride(1), stride(2)};
    problem.dmask_key = stride(3);
  }
  return plan_backward(name, problem, device);
}

}  // namespace archflash
