#include "torch_operators/node.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "runtime/kept_object.h"
#include "runtime/loaded_libraries.h"
#include "runtime/reading/reading.h"
#include "torch_operators/arguments.h"
#include "torch_operators/by_python.h"
#include "torch_operators/kept_answers.h"
#include "torch_operators/operators.h"
#include "torch_operators/serve.h"
#include "torch_operators/torch_functions.h"

namespace archflash {

using namespace torch_operators;

namespace {

constexpr char FORWARD_TYPES[] = "TTTfbtg", BACKWARD_TYPES[] = "TTTTTTfbtg";
constexpr int32_t TORCH_FLOAT32 = 6;  // a dtype

// The function of torch that calls the operator, once it has our kernels.
constexpr auto forward_function = kept_object<[] {}>;
// What backward passes are told, by number, and the numbers by that.
constexpr auto told = kept_object<[] {}>;
constexpr auto numbers = kept_object<[] {}>;

// The numbers of nodes begin where no probability of dropout lies, which others give the operator.
constexpr size_t FIRST_NUMBER = 2;
// So many kinds of calls have nodes in C++, because what their backward passes are told is kept.
constexpr size_t MOST_NUMBERS = 4096;

size_t place_of(double number) {
  if (!(number >= FIRST_NUMBER)) {
    throw std::runtime_error(
        "_scaled_dot_product_flash_attention_for_cpu_backward with CUDA tensors serves "
        "archflash.attention alone: call that");
  }
  return static_cast<size_t>(number) - FIRST_NUMBER;
}

// What the tensor beside q, k and v is to the plans of a number's backward passes, which threads
// without Python's lock read.
class OtherTensors {
 public:
  void add(const std::vector<Operand>& operands) {
    const std::lock_guard guard(lock_);
    of_number_.push_back(operands);
  }
  const std::vector<Operand>& of(double number) {
    const std::lock_guard guard(lock_);
    return of_number_.at(place_of(number));  // it stays where it is
  }

 private:
  std::mutex lock_;
  std::deque<std::vector<Operand>> of_number_;
};
OtherTensors& other_tensors() {
  static auto& instance = *new OtherTensors;
  return instance;
}

// The backward operator and what was decided for its calls.
Operator& backward_operator() {
  static auto& instance = *new Operator;
  return instance;
}

// Functions of PyTorch that are no part of its stable ABI: how many dispatch modes watch this
// thread, the tangent of a tensor at a level of forward-mode autograd, whether a tensor means the
// negative of what its memory holds, and whether a subclass handles operators on it.
int64_t (*count_of_modes)() = nullptr;
TensorHandle (*tangent_of)(void* implementation, uint64_t level, TensorHandle tensor) = nullptr;
bool (*is_negative)(TensorHandle tensor) = nullptr;
bool (*is_handled_by_subclass)(TensorHandle tensor) = nullptr;
// A function of torch: how many function modes watch this thread. They would see the operator.
constexpr auto count_of_function_modes = kept_object<[] {}>;

// --- the forward pass ---

// The places of arguments of the backward operator, and of the other tensor among its tensors.
constexpr size_t NUMBER = 6, OTHER = 8, OTHER_TENSOR = 6;

struct Forward {
  const PreparedPlan& prepared;
  Call& call;
  double number;
  bool deterministic;
  const ExpectedGradients& gradients;
  std::exception_ptr failure = nullptr;
};
thread_local Forward* forward_of_thread = nullptr;

// A new gradient of a tensor, which nests in memory as that does.
Result gradient_of(TensorHandle input) {
  const TorchFunctions& f = *torch_functions();
  int64_t *sizes = nullptr, *strides = nullptr;
  Result r{.kind = Result::Kind::New};
  check(f.get_dim(input, &r.dims));
  check(f.get_sizes(input, &sizes));
  check(f.get_strides(input, &strides));
  check(f.get_dtype(input, &r.dtype));
  std::copy_n(sizes, r.dims, r.sizes.begin());
  reading::nest_as(strides, static_cast<int>(r.dims), sizes, r.strides.data());
  return r;
}

// Keeps how the gradients are computed for a gradient of the output that lies as the output does.
void keep_gradients(const Forward& forward, const HeldTensor& out, const HeldTensor& lse,
                    const OperatorArguments& given) try {
  const TorchFunctions& f = *torch_functions();
  const bool deterministic =
      forward.deterministic || f.deterministic_algorithms(f.global_context());
  const ExpectedGradients& expected = forward.gradients;
  if (expected.dlse || expected.dsinks || expected.deterministic != deterministic) return;
  const TensorHandle tensors[] = {
      out.get(), given[0].tensor.get(), given[1].tensor.get(), given[2].tensor.get(), out.get(),
      lse.get()};
  struct Borrowed : OperatorArguments {
    ~Borrowed() {
      for (Argument& a : *this) a.tensor.release();
    }
  } backward;
  for (size_t i = 0; i < std::size(tensors); ++i) *backward[i].tensor.out() = tensors[i];
  backward[NUMBER].bits = std::bit_cast<Word>(forward.number);
  backward[OTHER].given = given[5].given;
  *backward[OTHER].tensor.out() = given[5].tensor.get();
  backward.at(9).given = false;  // a scale
  OperatorCall call;
  if (!read(BACKWARD_TYPES, OF_BACKWARD.size(), OTHER_TENSOR, true, backward, call)) return;
  call.key.words[0] &= ~Word{1};  // gradients are not enabled then
  KeptAnswer kept{.plan = forward.gradients.plan};
  kept.results.reserve(3);
  for (int i = 0; i < 3; ++i) kept.results.push_back(gradient_of(given[i].tensor.get()));
  backward_operator().keep(call.key, std::move(kept));
} catch (const TryInPython&) {  // nothing is kept
}

void launch(Forward& forward, const OperatorArguments& given, Word* stack) {
  const TorchFunctions& f = *torch_functions();
  Call& call = forward.call;
  const Problem& p = call.problem;
  const LaunchPlan& plan = *forward.prepared.plan;
  const auto address = [&](Operand operand) { return &call.addresses[static_cast<int>(operand)]; };
  const auto allocate = [&](int64_t dims, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype, Operand operand) {
    HeldTensor made;
    check(f.empty_strided(dims, sizes, strides, dtype, TORCH_CUDA, call.device_index, made.out()));
    check(f.get_data_ptr(made.get(), address(operand)));
    return made;
  };
  int32_t dtype = 0;
  check(f.get_dtype(given[0].tensor.get(), &dtype));
  HeldTensor out = allocate(call.out_ndim, call.out_shape, call.out_strides, dtype, Operand::Out);
  const int64_t rows[] = {p.batch, p.heads_q, p.nq}, steps[] = {p.heads_q * p.nq, p.nq, 1};
  const int skipped = p.varlen ? 1 : 0;
  HeldTensor lse =
      allocate(3 - skipped, rows + skipped, steps + skipped, TORCH_FLOAT32, Operand::Lse);
  HeldTensor workspace;
  if (const int64_t bytes = plan.workspace_bytes, one = 1; bytes > 0)
    workspace = allocate(1, &bytes, &one, TORCH_UINT8, Operand::Workspace);
  void* stream = nullptr;
  check(f.get_current_cuda_stream(call.device_index, &stream));
  execute(forward.prepared, call.addresses, call.device_index, stream);
  if (forward.gradients.plan) keep_gradients(forward, out, lse, given);
  stack[0] = reinterpret_cast<Word>(out.release());
  stack[1] = reinterpret_cast<Word>(lse.release());
}

void forward_kernel(Word* stack, uint64_t count, uint64_t) {
  OperatorArguments given;
  if (count != sizeof FORWARD_TYPES - 1) throw std::runtime_error("an operator has changed");
  take(FORWARD_TYPES, stack, given);
  Forward* const forward = std::exchange(forward_of_thread, nullptr);
  if (forward == nullptr) {
    throw std::runtime_error(
        "_scaled_dot_product_flash_attention_for_cpu with CUDA tensors serves archflash.attention "
        "alone: call that");
  }
  try {
    launch(*forward, given, stack);
  } catch (...) {
    forward->failure = std::current_exception();
    throw std::runtime_error("archflash.attention could not launch");
  }
}

// --- the backward pass ---

// Whether a tensor's memory holds what it means. Autograd's key comes before those of subclasses
// and of negated tensors.
bool holds_values(const Argument& a) {
  return !is_handled_by_subclass(a.tensor.get()) && !is_negative(a.tensor.get());
}

// Whether nobody but autograd watches a call: no dispatch mode, no gradient of the gradients, no
// tangent of the gradient of the output, and no tensor whose memory does not hold its values, as
// that gradient may be one, and what a hook gives for a saved tensor.
bool is_plain(const OperatorArguments& given) {
  const TorchFunctions& f = *torch_functions();
  if (f.grad_mode_is_enabled() || count_of_modes() > 0) return false;
  const TensorHandle dout = given[0].tensor.get();
  bool is_given = false, has_tangent = false;
  check(f.is_defined(dout, &is_given));
  if (!is_given || !std::all_of(given.begin(), given.begin() + NUMBER, holds_values)) return false;
  if (given[OTHER].given && !holds_values(given[OTHER])) return false;
  check(f.is_defined(tangent_of(*static_cast<void**>(dout), 0, dout), &has_tangent));
  return !has_tangent;
}

void backward_kernel(Word* stack, uint64_t count, uint64_t) {
  Operator& op = backward_operator();
  if (count != op.types.size()) throw std::runtime_error("an operator has changed");
  const TorchFunctions& f = *torch_functions();
  OperatorArguments given;
  take(op.types, stack, given);
  OperatorCall call;
  bool readable = false;
  try {
    // PyTorch gives a tensor that is undefined where there is none.
    if (given[OTHER].given) check(f.is_defined(given[OTHER].tensor.get(), &given[OTHER].given));
    readable =
        is_plain(given) && read(op.types, OF_BACKWARD.size(), OTHER_TENSOR, true, given, call);
    if (const auto kept = readable ? op.find(call.key) : nullptr) {
      serve(op.known, *kept, call, stack, other_tensors().of(as_double(given[NUMBER].bits)));
      return;
    }
  } catch (const TryInPython&) {
    readable = false;
  }
  by_python(op, given, readable ? &call : nullptr, stack);
}

// --- what is set up ---

void* open_library(const char* key) {
  void* library = nullptr;
  if (torch_functions()->library_init_impl("aten", key, "archflash", 0, &library) != 0)
    throw std::runtime_error("PyTorch opened no library of operators");
  return library;
}

// Gives the operators their kernels, for as long as the process runs. False where this PyTorch
// lacks a function for that.
bool install_kernels(nb::object forward, nb::object backward, nb::object make_tensor,
                     nb::object make_handles) {
  const TorchFunctions* f = torch_functions();
  if (f == nullptr || f->get_current_cuda_stream == nullptr || f->is_defined == nullptr ||
      f->global_context == nullptr || f->deterministic_algorithms == nullptr)
    return false;
  void* const core = loaded_library("c10");
  if (core == nullptr) return false;
  count_of_modes = reinterpret_cast<decltype(count_of_modes)>(
      exported(core, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"));
  tangent_of = reinterpret_cast<decltype(tangent_of)>(
      exported(core, "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE"));
  if (void* const cpu = loaded_library("torch_cpu"); cpu != nullptr) {
    is_negative = reinterpret_cast<decltype(is_negative)>(
        exported(cpu, "_ZN2at4_ops6is_neg4callERKNS_6TensorE"));
    is_handled_by_subclass = reinterpret_cast<decltype(is_handled_by_subclass)>(
        exported(cpu, "_ZN2at4impl19tensor_has_dispatchERKNS_6TensorE"));
  }
  if (count_of_modes == nullptr || tangent_of == nullptr || is_negative == nullptr ||
      is_handled_by_subclass == nullptr)
    return false;
  count_of_function_modes() = nb::module_::import_("torch._C").attr("_len_torch_function_stack");
  tensor_of() = std::move(make_tensor);
  handles_of() = std::move(make_handles);
  Operator& op = backward_operator();
  op.types = BACKWARD_TYPES;
  op.known = Known::Node;
  op.by_python = std::move(backward);
  told() = nb::list();
  numbers() = nb::dict();
  const std::string name = "_scaled_dot_product_flash_attention_for_cpu";
  static void* const kernels = open_library("CUDA");
  static void* const derivatives = open_library("AutogradCUDA");
  if (f->library_impl(kernels, name.c_str(), forward_kernel) != 0 ||
      f->library_impl(kernels, (name + "_backward").c_str(), backward_kernel) != 0 ||
      f->library_impl(derivatives, (name + "_backward").c_str(), backward_kernel) != 0)
    throw std::runtime_error("PyTorch took no kernel of " + name);
  forward_function() = std::move(forward);
  return true;
}

}  // namespace

std::optional<double> number_of_node(nb::handle of_call, const std::vector<Operand>& other) {
  if (!forward_function().is_valid()) return std::nullopt;
  PyObject* const known = PyDict_GetItemWithError(numbers().ptr(), of_call.ptr());
  if (known != nullptr) return PyFloat_AsDouble(known);
  if (PyErr_Occurred() != nullptr) {  // what cannot be hashed
    PyErr_Clear();
    return std::nullopt;
  }
  if (nb::len(told()) >= MOST_NUMBERS) return std::nullopt;
  const auto number = static_cast<double>(nb::len(told()) + FIRST_NUMBER);
  if (PyList_Append(told().ptr(), of_call.ptr()) != 0 ||
      PyDict_SetItem(numbers().ptr(), of_call.ptr(), nb::float_(number).ptr()) != 0)
    throw nb::python_error();
  other_tensors().add(other);
  return number;
}

nb::object run_as_node(const PreparedPlan& prepared, const Arguments& a, Call& call,
                       nb::handle other, double number, bool deterministic,
                       const ExpectedGradients& gradients) {
  if (nb::cast<int64_t>(count_of_function_modes()()) > 0) return {};
  Forward forward{prepared, call, number, deterministic, gradients};
  // Hooks for the tensors that autograd saves run in between, and may make calls themselves.
  Forward* const outer = std::exchange(forward_of_thread, &forward);
  const nb::object arguments = nb::make_tuple(a.q, a.k, a.v, number, false);
  nb::object named;
  if (!other.is_none()) {
    named = nb::dict();
    named["attn_mask"] = other;
  }
  const nb::object results =
      nb::steal(PyObject_Call(forward_function().ptr(), arguments.ptr(), named.ptr()));
  forward_of_thread = outer;
  if (results.is_valid()) {
    PyObject* const out = PyTuple_GetItem(results.ptr(), 0);
    if (out == nullptr) throw nb::python_error();
    return nb::borrow(out);
  }
  if (forward.failure == nullptr) throw nb::python_error();
  PyErr_Clear();
  try {
    std::rethrow_exception(forward.failure);
  } catch (const TryInPython&) {  // for want of memory, for example: let PyTorch say it
    return {};
  }
}

void forget_gradients_of_nodes() { backward_operator().forget(); }

void bind_node(nb::module_& m) {
  using namespace nb::literals;
  m.def("install_node", &install_kernels, "forward"_a, "backward"_a, "tensor_of"_a, "handles_of"_a,
        nb::sig("def install_node(forward: typing.Callable[..., typing.Any], backward: "
                "typing.Callable[..., typing.Any], tensor_of: typing.Callable[..., typing.Any], "
                "handles_of: typing.Callable[..., typing.Any]) -> bool"),
        "Lets eager calls be nodes of autograd in C++. False where this PyTorch cannot have them.");
  m.def(
      "told_to_node", [](double number) { return told()[place_of(number)]; }, "number"_a,
      nb::sig("def told_to_node(number: float) -> tuple[typing.Any, ...]"),
      "What the backward pass of a node of this number was told.");
}

}  // namespace archflash
