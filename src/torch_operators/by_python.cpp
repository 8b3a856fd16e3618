#include "torch_operators/by_python.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/kept_object.h"
#include "torch_operators/torch_functions.h"

namespace torch {

// A copy of the class of this name in PyTorch's torch/csrc/Exceptions.h. C++ recognizes a thrown
// class by its name, so PyTorch takes this one for its own: where it returns to Python, it raises
// an exception of the Python type that python_type() gives. The members must be in the same order.
struct PyTorchError : public std::exception {
  explicit PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual PyObject* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};

}  // namespace torch

namespace archflash::torch_operators {

nb::object& tensor_of() {
  return kept_object<[] {}>();
}
nb::object& handles_of() {
  return kept_object<[] {}>();
}

namespace {

// Carries a Python exception through PyTorch's C++ code, which does not know nanobind's exceptions.
// The type and the text arrive in Python, the traceback and the cause do not.
class PythonException final : public torch::PyTorchError {
 public:
  explicit PythonException(const nb::python_error& error)
      : torch::PyTorchError(nb::str(error.value()).c_str()),
        type_(nb::borrow(error.type()).release()) {}
  PyObject* python_type() override { return type_.ptr(); }

 private:
  // A reference that is never given back: where the exception is destroyed, the thread may not hold
  // Python's lock.
  nb::handle type_;
};

void* pointer_of(nb::handle capsule) {
  return PyCapsule_GetPointer(capsule.ptr(), PyCapsule_GetName(capsule.ptr()));
}

nb::object python_argument(char type, const Argument& a) {
  if (!a.given) return nb::none();
  if (type == 'T' || type == 't') {
    HeldTensor copy;  // PyTorch may empty it, but does not delete it
    check(torch_functions()->new_tensor_handle(a.tensor.get(), copy.out()));
    const nb::object capsule = nb::steal(PyCapsule_New(copy.get(), nullptr, nullptr));
    return tensor_of()(capsule);
  }
  if (type == 'b') return nb::bool_(a.bits != 0);
  if (type == 'f' || type == 'g') return nb::float_(as_double(a.bits));
  return nb::int_(static_cast<int64_t>(a.bits));
}

// Describes a result, so that later calls make the same. `may_share`: it is the state of a random
// generator, for which all calls like this one may get the same tensor.
Result describe(TensorHandle tensor, bool may_share) {
  const TorchFunctions& f = *torch_functions();
  Result r;
  int64_t *sizes = nullptr, *strides = nullptr, count = 1;
  int32_t device = TORCH_CPU;
  check(f.get_dim(tensor, &r.dims));
  if (r.dims > static_cast<int64_t>(r.sizes.size())) throw TryInPython{};
  check(f.get_sizes(tensor, &sizes));
  check(f.get_strides(tensor, &strides));
  check(f.get_dtype(tensor, &r.dtype));
  check(f.get_device_type(tensor, &device));
  for (int64_t d = 0; d < r.dims; ++d) {
    r.sizes[d] = sizes[d], r.strides[d] = strides[d];
    count *= sizes[d];
  }
  const bool is_new = device == TORCH_CUDA && count > 0 && !may_share;
  r.kind = is_new ? Result::Kind::New : Result::Kind::Shared;
  if (!is_new) {
    r.shared = std::make_shared<HeldTensor>();
    check(f.new_tensor_handle(tensor, r.shared->out()));
  }
  return r;
}

// Calls the function in Python and puts its results on the stack.
std::vector<Result> call_python(const Operator& op, const OperatorArguments& arguments,
                                bool share_state, Word* stack) {
  nb::list given;
  for (size_t i = 0; i < op.types.size(); ++i)
    given.append(python_argument(op.types[i], arguments[i]));
  const nb::object function = op.by_python;  // another thread may install another one meanwhile
  nb::object answer = function(*given);
  nb::list tensors;
  for (const nb::handle x : answer) {
    if (!x.is_none() && !PyLong_Check(x.ptr())) tensors.append(x);
  }
  nb::object handles = handles_of()(tensors);
  std::vector<HeldTensor> held;
  for (const nb::handle capsule : handles) held.emplace_back(pointer_of(capsule));
  auto next = held.begin();
  std::vector<Result> results;
  std::vector<HeldTensor> made;
  const size_t first_state = op.known == Known::Efficient || op.known == Known::Packed ? 2 : 6;
  for (const nb::handle x : answer) {
    const size_t at = results.size();
    Result& r = results.emplace_back();
    HeldTensor& tensor = made.emplace_back();
    if (PyLong_Check(x.ptr())) {
      r.kind = Result::Kind::Number;
      r.number = static_cast<Word>(nb::cast<int64_t>(x));
    } else if (x.is_none()) {
      check(torch_functions()->new_uninitialized_tensor(tensor.out()));
    } else {
      tensor = std::move(*next++);
      r = describe(tensor.get(), share_state && (at == first_state || at == first_state + 1));
    }
  }
  give(results, made, stack);
  return results;
}

// PyTorch's memory-efficient kernel pads its log-sum-exp to a multiple of 32 query rows, and so
// does the function in Python. Later calls let the kernel write a log-sum-exp of the call's own
// rows, and pad that.
void part_padding(const OperatorKey& key, Result& lse) {
  const int64_t nq = key.size(0, 2);
  if (lse.kind != Result::Kind::New || lse.dims != 3 || lse.sizes[2] <= nq) return;
  lse.padding = lse.sizes[2] - nq;
  lse.sizes[2] = nq;
  lse.strides[1] = nq, lse.strides[0] = nq * lse.sizes[1];
}

// Keeps what later calls like this one are to do, where that is the same for all of them.
void keep_answer(Operator& op, const OperatorKey& key, const OperatorAnswer& answer,
                 std::vector<Result> results) {
  if (!answer.keep) return;
  KeptAnswer kept;
  if (!answer.declined.empty()) {
    kept.count = &declined().of(answer.declined);
  } else if (answer.plan) {
    kept.plan = answer.plan;
    kept.count = &served().of(answer.plan->plan->implementation);
    kept.results = std::move(results);
    if (op.known == Known::Efficient && kept.results.size() > 1) part_padding(key, kept.results[1]);
  } else {
    return;
  }
  op.keep(key, std::move(kept));
}

// Empties operator_answer() for a call, and restores it at the end of the call: one of PyTorch's
// kernels may call another operator, and each of the two calls has an answer of its own.
class AnswerOfThisCall {
 public:
  AnswerOfThisCall() : outer_(std::exchange(operator_answer(), {})) {}
  AnswerOfThisCall(const AnswerOfThisCall&) = delete;
  AnswerOfThisCall& operator=(const AnswerOfThisCall&) = delete;
  ~AnswerOfThisCall() { operator_answer() = std::move(outer_); }

 private:
  OperatorAnswer outer_;
};

}  // namespace

void by_python(Operator& op, const OperatorArguments& arguments, const OperatorCall* call,
               Word* stack) {
  const nb::gil_scoped_acquire lock;
  // The state of the random generator is shared by calls in which gradients are enabled
  // (_overrides.py), unless it was allocated in the capture of a CUDA graph, which owns its memory.
  bool share_state = false;
  if (call != nullptr && !is_backward(op.known) && (call->key.given() & 1) != 0) {
    void* stream = nullptr;
    share_state = torch_functions()->get_current_cuda_stream(call->device_index, &stream) == 0 &&
                  !is_capturing(stream);
  }
  const AnswerOfThisCall own;
  std::vector<Result> results;
  try {
    results = call_python(op, arguments, share_state, stack);
  } catch (const nb::python_error& error) {
    throw PythonException(error);
  } catch (const TryInPython&) {
    throw std::runtime_error("PyTorch gave no handle of a tensor of an attention operator");
  }
  if (call != nullptr) keep_answer(op, call->key, operator_answer(), std::move(results));
}

}  // namespace archflash::torch_operators
