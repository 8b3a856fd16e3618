#include "torch_operators/operators.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cmath>
#include <span>
#include <stdexcept>
#include <utility>

#include "runtime/kept_object.h"
#include "runtime/text.h"
#include "torch_operators/arguments.h"
#include "torch_operators/by_python.h"
#include "torch_operators/kept_answers.h"
#include "torch_operators/pytorchs_kernels.h"
#include "torch_operators/serve.h"
#include "torch_operators/torch_functions.h"

namespace archflash {

Counts::Counter& Counts::of(const std::string& name) {
  const std::lock_guard guard(lock_);
  return counts_[name];
}

std::map<std::string, int64_t> Counts::read(bool reset) {
  const std::lock_guard guard(lock_);
  std::map<std::string, int64_t> found;
  for (auto& [name, counter] : counts_) {
    const int64_t count = reset ? counter.exchange(0) : counter.load();
    if (count > 0) found.emplace(name, count);
  }
  return found;
}

Counts& served() {
  static auto& instance = *new Counts;
  return instance;
}
Counts& declined() {
  static auto& instance = *new Counts;
  return instance;
}

Counts& approximated() {
  static auto& instance = *new Counts;
  return instance;
}

OperatorAnswer& operator_answer() {
  static thread_local OperatorAnswer instance;
  return instance;
}

using namespace torch_operators;

namespace {

constexpr size_t MOST_OPERATORS = 7;
std::array<Operator, MOST_OPERATORS>& operators() {
  static auto& instance = *new std::array<Operator, MOST_OPERATORS>;
  return instance;
}
size_t installed = 0;
void* library = nullptr;

// What is forced or asked for, or None: _dispatch.steered. It is asked once something was
// in this process.
std::atomic<bool> anything_forced{false};
constexpr auto forced = kept_object<[] {}>;
bool is_forced() {
  if (!anything_forced.load(std::memory_order_relaxed)) return false;
  const nb::gil_scoped_acquire lock;
  return !forced()().is_none();
}

// Whether this thread is inside a kernel of PyTorch's that the function in Python called. Operators
// that such a kernel calls are no calls of their own.
thread_local bool inside_pytorch = false;

}  // namespace

void torch_operators::serve(Known known, const KeptAnswer& kept, const OperatorCall& call,
                            Word* stack, std::span<const Operand> of_last) {
  const TorchFunctions& f = *torch_functions();
  std::array<void*, OPERAND_COUNT> addresses{};
  const std::span<const Operand> operands = operands_of(known);
  for (size_t i = 0; i < operands.size(); ++i)
    addresses[static_cast<int>(operands[i])] = call.addresses[i];
  for (const Operand operand : of_last)
    addresses[static_cast<int>(operand)] = call.addresses[operands.size()];
  std::array<HeldTensor, MAX_RESULTS> made;
  for (size_t i = 0; i < kept.results.size(); ++i) {
    const Result& r = kept.results[i];
    if (r.kind == Result::Kind::New) {
      check(f.empty_strided(r.dims, r.sizes.data(), r.strides.data(), r.dtype, TORCH_CUDA,
                            call.device_index, made[i].out()));
    } else if (r.kind == Result::Kind::Shared) {
      check(f.new_tensor_handle(r.shared->get(), made[i].out()));
    } else if (r.kind == Result::Kind::None) {
      check(f.new_uninitialized_tensor(made[i].out()));
    }
  }
  const LaunchPlan& plan = *kept.plan->plan;
  const std::span<const Operand> outputs = outputs_of(known, plan);
  for (size_t i = 0; i < outputs.size(); ++i)
    check(f.get_data_ptr(made[i].get(), &addresses[static_cast<int>(outputs[i])]));
  HeldTensor workspace;
  if (const int64_t bytes = plan.workspace_bytes; bytes > 0) {
    const int64_t one = 1;
    check(f.empty_strided(1, &bytes, &one, TORCH_UINT8, TORCH_CUDA, call.device_index,
                          workspace.out()));
    check(f.get_data_ptr(workspace.get(), &addresses[static_cast<int>(Operand::Workspace)]));
  }
  void* stream = nullptr;
  check(f.get_current_cuda_stream(call.device_index, &stream));
  try {
    execute(*kept.plan, addresses, call.device_index, stream);
  } catch (const LaunchFailure&) {
    throw TryInPython{};
  }
  for (size_t i = 0; i < kept.results.size(); ++i) {
    const Result& r = kept.results[i];
    if (r.padding > 0) {
      const int64_t ends[] = {0, r.padding};
      double infinity = INFINITY;
      HeldTensor padded;
      check(f.pad(made[i].get(), ends, 2, "constant", &infinity, padded.out()));
      made[i] = std::move(padded);
    }
  }
  give(kept.results, made, stack);
}

namespace {

// --- a call ---

void run(Operator& op, Word* stack, uint64_t count) {
  if (op.types.size() != count)
    throw std::runtime_error("an attention operator of this PyTorch has other arguments");
  OperatorArguments arguments;
  take(op.types, stack, arguments);
  OperatorCall call;
  bool readable = false;
  try {
    const bool backward = is_backward(op.known);
    if (backward || op.known == Known::None) find_undefined(op.types, arguments);
    readable = op.known != Known::None && !inside_pytorch && !is_forced() &&
               read(op.types, operands_of(op.known).size(), mask_of(op.known),
                    backward || op.known == Known::Packed, arguments, call);
    if (const auto kept = readable ? op.find(call.key) : nullptr) {
      if (kept->plan) {
        serve(op.known, *kept, call, stack);
      } else {
        call_original(op, arguments, stack);
      }
      kept->count->fetch_add(1, std::memory_order_relaxed);
      return;
    }
  } catch (const TryInPython&) {
    readable = false;
  }
  by_python(op, arguments, readable ? &call : nullptr, stack);
}

template <size_t I>
void kernel(Word* stack, uint64_t arguments, uint64_t) {
  run(operators()[I], stack, arguments);
}
constexpr void (*KERNELS[MOST_OPERATORS])(Word*, uint64_t, uint64_t) = {
    kernel<0>, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>};

// Which operator this is, if PyTorch's own kernel can be called and the operator has the arguments
// that this module knows.
Known known(const std::string& name, const std::string& types) {
  const TorchFunctions& f = *torch_functions();
  if (f.get_current_cuda_stream == nullptr) return Known::None;
  if (name == "_scaled_dot_product_flash_attention" && types == "TTTfbbg" && f.flash_forward)
    return Known::Flash;
  if (name == "_scaled_dot_product_cudnn_attention" && types == "TTTtbfbbg" && f.cudnn)
    return Known::Cudnn;
  if (name == "_scaled_dot_product_efficient_attention" && types == "TTTtbfbg" && f.efficient)
    return Known::Efficient;
  if (name == "_flash_attention_forward" &&
      ((types == PACKED && f.flash_forward) || (types == PACKED_WITH_PAGES && f.flash_forward_v2)))
    return Known::Packed;
  if (f.is_defined == nullptr || f.global_context == nullptr ||
      f.deterministic_algorithms == nullptr)
    return Known::None;
  if (name == "_scaled_dot_product_flash_attention_backward" && types == FLASH_BACKWARD &&
      f.flash_backward)
    return Known::FlashBackward;
  if (name == "_scaled_dot_product_cudnn_attention_backward" && types == CUDNN_BACKWARD &&
      f.cudnn_backward)
    return Known::CudnnBackward;
  if (name == "_flash_attention_backward" && types == PACKED_BACKWARD && f.flash_backward)
    return Known::PackedBackward;
  return Known::None;
}

// Puts a kernel in the place of PyTorch's for one of its operators. Nothing happens for an operator
// on CUDA that this module does not know: each call would ask Python, which PyTorch does faster
// itself. On the CPU, where tests run, all calls ask Python.
void install(const std::string& name, const std::string& types, const std::string& key,
             nb::object by_python, nb::object forced_now, nb::object make_tensor,
             nb::object make_handles) {
  const TorchFunctions* f = torch_functions();
  if (f == nullptr || installed == MOST_OPERATORS || types.size() > MAX_ARGUMENTS)
    throw std::runtime_error("this PyTorch has no C functions for operators");
  const Known found = key == "CUDA" ? known(name, types) : Known::None;
  if (key == "CUDA" && found == Known::None) return;
  forced() = std::move(forced_now);
  tensor_of() = std::move(make_tensor);
  handles_of() = std::move(make_handles);
  if (library == nullptr &&
      f->library_init_impl("aten", key.c_str(), "archflash", 0, &library) != 0)
    throw std::runtime_error("PyTorch opened no library of operators");
  Operator& op = operators()[installed];
  // A thread without Python's lock may still be in a call that began before the operators were
  // removed, and read these two: they are written only if they change.
  if (op.types != types) op.types = types;
  if (op.known != found) op.known = found;
  op.by_python = std::move(by_python);
  op.forget();
  if (f->library_impl(library, name.c_str(), KERNELS[installed]) != 0)
    throw std::runtime_error(join("PyTorch took no kernel of ", name));
  ++installed;
}

void remove_all() {
  if (library != nullptr) torch_functions()->delete_library_object(library);
  library = nullptr;
  forget_operator_calls();
  installed = 0;
}

}  // namespace

void forget_operator_calls() {
  for (Operator& op : operators()) op.forget();
}

void bind_operators(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "has_torch_functions", [] { return torch_functions() != nullptr; },
      "Whether this PyTorch has the C functions that the kernels of its operators need.");
  m.def("install_operator", &install, "name"_a, "types"_a, "key"_a, "by_python"_a, "forced"_a,
        "tensor_of"_a, "handles_of"_a,
        nb::sig("def install_operator(name: str, types: str, key: str, by_python: "
                "typing.Callable[..., typing.Any], forced: typing.Callable[[], str | None], "
                "tensor_of: typing.Callable[..., typing.Any], handles_of: typing.Callable[..., "
                "typing.Any]) -> None"),
        "Serves one of PyTorch's operators: as an earlier call like it was served, else by the "
        "function in Python.");
  m.def("remove_operators", &remove_all, "Gives PyTorch its operators back.");
  m.def(
      "note_declined", [](std::string reason) { operator_answer().declined = std::move(reason); },
      "reason"_a, "The call that is being served goes to PyTorch's own kernel.");
  m.def(
      "note_inside_pytorch", [](bool inside) { inside_pytorch = inside; }, "inside"_a,
      "This thread enters a kernel of PyTorch's, whose calls of operators ask Python, or leaves "
      "it.");
  m.def(
      "note_forced", [] { anything_forced = true; },
      "From now on each call asks whether something is forced or asked for.");
  m.def(
      "note_served",
      [](const LaunchPlan& plan, bool keep) {
        ++served().of(plan.implementation);
        if (keep) operator_answer().plan = prepare(std::make_shared<LaunchPlan>(plan));
      },
      "plan"_a, "keep"_a,
      "The call that is being served was served by this plan; 'keep': so are all that are like it, "
      "on a GPU.");
  m.def(
      "operators_served", [](bool reset) { return served().read(reset); }, "reset"_a,
      "The number of calls of PyTorch's operators that each implementation served.");
  m.def(
      "calls_approximated", [](bool reset) { return approximated().read(reset); }, "reset"_a,
      "The number of calls that kernels served approximately, by what was asked for.");
  m.def(
      "operators_declined", [](bool reset) { return declined().read(reset); }, "reset"_a,
      "The number of calls that were handed to PyTorch's own kernels without Python, by reason.");
}

}  // namespace archflash
