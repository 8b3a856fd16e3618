#include "runtime/run_plan.h"

#include <nanobind/stl/shared_ptr.h>

#include <limits>
#include <utility>

#include "runtime/kept_object.h"
#include "runtime/wrong.h"
#include "torch_operators/operators.h"

namespace archflash {
namespace {

nb::object tuple_of(const int64_t* numbers, int count) {
  nb::object made = nb::steal(PyTuple_New(count));
  for (int i = 0; i < count; ++i) PyTuple_SetItem(made.ptr(), i, PyLong_FromLongLong(numbers[i]));
  return made;
}

nb::tuple strided_out(const Call& call) {
  return strided(call.out_ndim, call.out_shape, call.out_strides, call.problem.out_dtype);
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

// Whether torch().empty_strided_cuda allocates on this device. CUDA's current device may be another
// one: PyTorch does not make a device current that the process has not used.
bool allocates_on(int device_index) {
  if (device_index < 0 || !torch().empty_strided_cuda.is_valid()) return false;
  const nb::object index = nb::steal(PyObject_CallNoArgs(torch().current_cuda_device.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  return PyLong_AsLong(index.ptr()) == device_index;
}

}  // namespace

nb::tuple strided(int ndim, const int64_t* shape, const int64_t* strides, DType dtype) {
  return nb::make_tuple(tuple_of(shape, ndim), tuple_of(strides, ndim),
                        torch().dtypes[static_cast<int>(dtype)]);
}

nb::object new_tensor(nb::handle from, nb::handle beside, int device_index) {
  if (!PyTuple_Check(from.ptr())) return torch().empty_like(from);
  if (!allocates_on(device_index)) return new_empty_strided(beside, from);
  nb::object made = nb::steal(PyObject_Call(torch().empty_strided_cuda.ptr(), from.ptr(), nullptr));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

void* address_of_new(nb::handle tensor, const char* name) {
  void* const address = address_of(tensor);
  // Under a mode of PyTorch what is allocated may be a fake tensor.
  if (address == nullptr && nb::cast<int64_t>(tensor.attr("numel")()) > 0)
    wrong_value(name, HAS_NO_MEMORY);
  return address;
}

void set_address(Call& call, Operand operand, nb::handle tensor) {
  call.addresses[static_cast<int>(operand)] = address_of_new(tensor, operand_name(operand));
}

nb::object template_of_out(nb::handle q, const Call& call) {
  if (templates_are_strides(call)) return strided_out(call);
  return without_memory(allocate_out(q, call));
}

nb::object template_of_flat_out(const Call& call) {
  int64_t rows = 1, size = 1;
  const int last = call.out_ndim - 1;
  for (int i = last; i >= 0; --i) {
    if (call.out_shape[i] > 1 && call.out_strides[i] != size) return {};
    size *= call.out_shape[i];
    if (i < last - 1) rows *= call.out_shape[i];
  }
  const int64_t columns = call.out_shape[last - 1] * call.out_shape[last];
  const int64_t shape[] = {rows, columns}, strides[] = {columns, 1};
  return strided(2, shape, strides, call.problem.out_dtype);
}

nb::object template_of_lse(nb::handle q, const Call& call, bool column) {
  const Problem& p = call.problem;
  if (!templates_are_strides(call)) {
    nb::object lse = allocate_lse(q, p);
    return without_memory(column ? lse.attr("unsqueeze")(-1) : lse);
  }
  const int64_t shape[] = {p.batch, p.heads_q, p.nq, 1}, strides[] = {p.heads_q * p.nq, p.nq, 1, 1};
  const int skipped = p.varlen ? 1 : 0;
  return strided(4 - skipped - !column, shape + skipped, strides + skipped, DType::F32);
}

void write_rows_of_no_sequence(nb::handle out, nb::handle lse, nb::handle sinks) {
  out.attr("zero_")();
  if (!lse.is_valid()) return;
  if (sinks.is_none()) {
    lse.attr("fill_")(-std::numeric_limits<double>::infinity());
  } else {
    lse.attr("copy_")(sinks.attr("unsqueeze")(1));
  }
}

void allocate(const LaunchPlan& plan, const Arguments& a, Call& call, Outputs& made,
              bool all_tensors, const Templates& like) {
  allocate_outputs(a, call, made, like);
  allocate_workspace(plan, a.q, call, made, all_tensors);
}

void allocate_outputs(const Arguments& a, Call& call, Outputs& made, const Templates& like) {
  if (!a.out.is_none()) {
    made.out = nb::borrow(a.out);
  } else {
    made.out = like.out.is_valid() ? new_tensor(like.out, a.q, call.device_index)
                                   : allocate_out(a.q, call);
  }
  if (a.out.is_none()) {
    set_address(call, Operand::Out, made.out);
  } else if (torch().is_inference(a.out).is(Py_False)) {
    torch().increment_version(a.out);  // autograd must see that it was written
  }
  if (call.problem.n_new > 0) {
    for (const nb::handle cache : {a.k, a.v}) {
      if (torch().is_inference(cache).is(Py_False)) torch().increment_version(cache);
    }
  }
  if (call.problem.want_lse) {
    made.lse = like.lse.is_valid() ? new_tensor(like.lse, a.q, call.device_index)
                                   : allocate_lse(a.q, call.problem);
    set_address(call, Operand::Lse, made.lse);
  }
}

nb::object results_of(const Outputs& outputs, const Call& call) {
  return call.problem.want_lse ? nb::object(nb::make_tuple(outputs.out, outputs.lse)) : outputs.out;
}

void allocate_workspace(const LaunchPlan& plan, nb::handle q, Call& call, Outputs& made,
                        bool all_tensors) {
  if (plan.workspace_bytes == 0) return;
  if (!all_tensors && made.workspace_bytes.allocate(call.device_index, plan.workspace_bytes)) {
    call.addresses[static_cast<int>(Operand::Workspace)] = made.workspace_bytes.data();
  } else {
    made.workspace = q.attr("new_empty")(plan.workspace_bytes, nb::arg("dtype") = torch().uint8);
    set_address(call, Operand::Workspace, made.workspace);
  }
}

nb::dict by_operand(const Arguments& a, const Outputs& outputs) {
  nb::dict tensors;
  const auto add = [&](Operand operand, nb::handle value) {
    if (value.is_valid() && is_tensor(value)) tensors[operand_name(operand)] = value;
  };
  add(Operand::Q, a.q);
  add(Operand::K, a.k);
  add(Operand::V, a.v);
  for (int i = 0; i < OPTION_COUNT; ++i) {
    if (OPTIONS[i].operand) add(*OPTIONS[i].operand, a.*ARGUMENTS[i]);
  }
  add(Operand::Out, outputs.out);
  add(Operand::Lse, outputs.lse);
  add(Operand::Workspace, outputs.workspace);
  return tensors;
}

nb::object& simulate() {
  return kept_object<[] {}>();
}

std::shared_ptr<PreparedPlan> prepare_for(const Call& call, std::shared_ptr<LaunchPlan> plan) {
  if (call.device_index >= 0) return prepare(std::move(plan));
  auto prepared = std::make_shared<PreparedPlan>();
  prepared->plan = std::move(plan);
  return prepared;
}

nb::object run(const PreparedPlan& prepared, const Arguments& a, Call& call,
               const Templates& like) {
  Outputs outputs;
  allocate(*prepared.plan, a, call, outputs, call.device_index < 0, like);
  const int64_t approximate = prepared.plan->problem.approximate;
  if (approximate != 0) ++approximated().of(approximation(approximate).name);
  if (call.problem.varlen && prepared.plan->launches.empty()) {
    write_rows_of_no_sequence(outputs.out, outputs.lse, a.sinks);
  } else if (call.device_index < 0) {
    simulate()(std::const_pointer_cast<LaunchPlan>(prepared.plan), by_operand(a, outputs));
  } else {
    void* stream = current_stream(call.device_index);
    const nb::gil_scoped_release release;
    execute(prepared, call.addresses, call.device_index, stream);
  }
  return results_of(outputs, call);
}

}  // namespace archflash
