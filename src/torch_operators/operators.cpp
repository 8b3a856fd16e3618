#include "torch_operators/operators.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <array>
#include <bit>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/text.h"
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

namespace {

// --- the arguments of a call ---

using Word = uint64_t;  // an argument or result of an operator on its stack

// Thrown where one of PyTorch's C functions fails. The function in Python then serves the call, and
// raises the exception that tells the cause.
struct TryInPython {};

void check(int status) {
  if (status != 0) throw TryInPython{};
}

// One argument: a tensor, a number, or one of the two that may be None.
struct Argument {
  HeldTensor tensor;
  Word bits = 0;      // the value of a number: an int64_t, a double, or 0 or 1
  bool given = true;  // false where it is None
};

double as_double(Word bits) { return std::bit_cast<double>(bits); }

constexpr size_t MAX_ARGUMENTS = 17;
using OperatorArguments = std::array<Argument, MAX_ARGUMENTS>;

// Takes the arguments off the stack. An optional one is a pointer to its word, allocated by
// PyTorch, and null for None.
//
// Args:
//   types: a letter for each: T tensor, f float, b bool, i int, and t, g, j for those of T, f, i
//   that may be None.
void take(std::string_view types, const Word* stack, OperatorArguments& arguments) {
  for (size_t i = 0; i < types.size(); ++i) {
    Word word = stack[i];
    Argument& a = arguments[i];
    char type = types[i];
    if (type == 't' || type == 'g' || type == 'j') {
      a.given = word != 0;
      if (!a.given) continue;
      const auto* boxed = reinterpret_cast<const Word*>(word);
      word = *boxed;
      delete boxed;
      type = type == 't' ? 'T' : type;
    }
    if (type == 'T') {
      a.tensor = HeldTensor(reinterpret_cast<TensorHandle>(word));
    } else {
      a.bits = type == 'b' ? (word & 0xff) != 0 : word;
    }
  }
}

// Marks the tensors that PyTorch leaves undefined, which are None in Python.
void find_undefined(std::string_view types, OperatorArguments& arguments) {
  if (torch_functions()->is_defined == nullptr) return;
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == 'T')
      check(torch_functions()->is_defined(arguments[i].tensor.get(), &arguments[i].given));
  }
}

// What a call has to have in common with an earlier one to be treated like it: `given`, then the
// tensors that are given, q, k and v first, then the numbers. Of the addresses of its tensors that
// is only the alignment.
constexpr size_t MAX_TENSORS = 8;  // at most eight of an operator's tensors are read
constexpr size_t TENSOR_WORDS = 9, MAX_NUMBERS = 9;
// The places of cum_seq_q and cum_seq_k among the tensors of _flash_attention_forward.
constexpr size_t LENGTHS_OF_QUERIES = 3, LENGTHS_OF_KEYS = 4;
struct OperatorKey {
  size_t count = 1;
  std::array<Word, 1 + MAX_TENSORS * TENSOR_WORDS + MAX_NUMBERS> words;

  std::string_view bytes() const {
    return {reinterpret_cast<const char*>(words.data()), count * sizeof(Word)};
  }
  bool operator==(const OperatorKey& other) const { return bytes() == other.bytes(); }
  // Bit 0: whether gradients are enabled; bit 1: whether PyTorch asks for deterministic algorithms,
  // in a backward pass; bit 2: whether packed queries and keys have the same tensor of lengths;
  // then a bit for each argument: whether it is not None.
  Word given() const { return words[0]; }
  int64_t size(size_t tensor, size_t dim) const {
    return static_cast<int64_t>(words[1 + tensor * TENSOR_WORDS + dim]);
  }
};
struct OperatorKeyHash {
  size_t operator()(const OperatorKey& key) const {
    return std::hash<std::string_view>()(key.bytes());
  }
};

struct OperatorCall {
  OperatorKey key;
  // By the place of a tensor among the operator's tensors, those included that are not given.
  std::array<void*, MAX_TENSORS> addresses{};
  int32_t device_index = -1;
};

// Where the storage of a tensor was resized to nothing, as FSDP does, the address that PyTorch
// gives is null plus the tensor's offset. Addresses below this limit may be of that kind, so the
// size of the storage is asked for; tensors with memory seldom have such an address.
constexpr uintptr_t SUSPICIOUS_ADDRESS = uintptr_t{1} << 40;

// Reads one tensor. False where no call with it is served here: one that is not on a CUDA device,
// has other than four dimensions (fewer are allowed with `any_dims`) or no memory.
bool read(TensorHandle tensor, size_t i, bool any_dims, OperatorCall& call) {
  const TorchFunctions& f = *torch_functions();
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device = TORCH_CPU, index = -1;
  check(f.get_device_type(tensor, &device));
  check(f.get_dim(tensor, &dims));
  if (device != TORCH_CUDA || dims > 4 || (dims != 4 && !any_dims)) return false;
  check(f.get_sizes(tensor, &sizes));
  check(f.get_strides(tensor, &strides));
  check(f.get_dtype(tensor, &dtype));
  check(f.get_device_index(tensor, &index));
  check(f.get_data_ptr(tensor, &call.addresses[i]));
  const auto address = reinterpret_cast<uintptr_t>(call.addresses[i]);
  if (address == 0) return false;
  if (address < SUSPICIOUS_ADDRESS) {
    int64_t bytes = 0;
    check(f.get_storage_size(tensor, &bytes));
    if (bytes == 0) return false;
  }
  Word* words = &call.key.words[call.key.count];
  call.key.count += TENSOR_WORDS;
  for (int d = 0; d < 4; ++d) words[d] = d < dims ? static_cast<Word>(sizes[d]) : 0;
  for (int d = 0; d < 4; ++d) words[4 + d] = d < dims ? static_cast<Word>(strides[d]) : 0;
  words[8] = static_cast<Word>(dtype) << 32 | static_cast<Word>(index & 0xffff) << 8 |
             static_cast<Word>(dims) << 4 | static_cast<Word>(address % 16);
  if (i > 0 && index != call.device_index) return false;
  call.device_index = index;
  return true;
}

// Reads a call.
//
// Args:
//   tensors_read: of the operator's tensors so many are read: what the others hold changes nothing.
//   any_dims: whether tensors may have fewer than four dimensions.
bool read(std::string_view types, size_t tensors_read, bool any_dims,
          const OperatorArguments& arguments, OperatorCall& call) {
  const TorchFunctions& f = *torch_functions();
  Word given = f.grad_mode_is_enabled();
  if (f.deterministic_algorithms != nullptr && f.deterministic_algorithms(f.global_context()))
    given |= 2;
  size_t tensors = 0, numbers = 0;
  const auto is_tensor = [&](size_t i) { return types[i] == 'T' || types[i] == 't'; };
  for (size_t i = 0; i < types.size(); ++i) {
    if (arguments[i].given) given |= Word{8} << i;
    if (!is_tensor(i)) continue;
    const size_t place = tensors++;
    if (place >= tensors_read || !arguments[i].given) continue;
    if (!read(arguments[i].tensor.get(), place, any_dims, call)) return false;
  }
  for (size_t i = 0; i < types.size(); ++i) {
    if (is_tensor(i)) continue;
    if (++numbers > MAX_NUMBERS) return false;
    call.key.words[call.key.count++] = arguments[i].bits;
  }
  if (call.addresses[LENGTHS_OF_QUERIES] == call.addresses[LENGTHS_OF_KEYS]) given |= 4;
  call.key.words[0] = given;
  return true;
}

// --- what was decided for calls of a kind ---

// How one result is made: a number, no tensor, a new tensor, or one tensor for all calls, whose
// values nothing reads.
struct Result {
  enum class Kind { Number, None, New, Shared } kind = Kind::None;
  Word number = 0;
  int64_t dims = 0;
  std::array<int64_t, 5> sizes{}, strides{};
  int64_t padding = 0;  // columns of infinity, appended to the last dimension of a new tensor
  int32_t dtype = 0;
  std::shared_ptr<HeldTensor> shared;
};

constexpr size_t MAX_RESULTS = 9;

struct KeptAnswer {
  std::shared_ptr<PreparedPlan> plan;  // null: PyTorch's own kernel serves the call
  Counts::Counter* count = nullptr;
  std::vector<Result> results;  // of the plan, those that it writes first
};

constexpr size_t MOST_ANSWERS = 1024;

// The arguments of _flash_attention_forward, without and with block_table and num_splits.
constexpr std::string_view PACKED = "TTTttiifbbgjjtt", PACKED_WITH_PAGES = "TTTttiifbbgjjtttj";

// The arguments of the backward operators of SDPA's flash and cuDNN kernels, and of
// _flash_attention_backward.
constexpr std::string_view FLASH_BACKWARD = "TTTTTTTTiifbTTg", CUDNN_BACKWARD = "TTTTTTTTTTTiifbg",
                           PACKED_BACKWARD = "TTTTTTTTiifbTTgjj";

// The operators that this module knows: how PyTorch's own kernel is called.
enum class Known {
  None,
  Flash,
  Cudnn,
  Efficient,
  Packed,
  FlashBackward,
  CudnnBackward,
  PackedBackward
};

bool is_backward(Known known) { return known >= Known::FlashBackward; }

// What a tensor of an operator is to a plan, by its place among the operator's tensors. No plan
// takes the slopes of packed sequences. What comes behind these tensors is not read: the state of a
// random generator, and tensors that are None where a plan serves.
constexpr std::array OF_SDPA{Operand::Q, Operand::K, Operand::V, Operand::Mask};
constexpr std::array OF_PACKED{Operand::Q,           Operand::K,          Operand::V,
                               Operand::CuSeqlensQ,  Operand::CuSeqlensK, Operand::CacheSeqlens,
                               Operand::AlibiSlopes, Operand::PageTable};
constexpr std::array OF_BACKWARD{Operand::DOut, Operand::Q,   Operand::K,
                                 Operand::V,    Operand::Out, Operand::Lse};
constexpr std::array OF_PACKED_BACKWARD{Operand::DOut,       Operand::Q,         Operand::K,
                                        Operand::V,          Operand::Out,       Operand::Lse,
                                        Operand::CuSeqlensQ, Operand::CuSeqlensK};
std::span<const Operand> operands_of(Known known) {
  switch (known) {
    case Known::Packed:
      return OF_PACKED;
    case Known::FlashBackward:
    case Known::CudnnBackward:
      return OF_BACKWARD;
    case Known::PackedBackward:
      return OF_PACKED_BACKWARD;
    default:
      return OF_SDPA;
  }
}

// What a plan of an operator writes: its results in their order.
constexpr std::array OUTPUTS{Operand::Out, Operand::Lse};
constexpr std::array GRADIENTS{Operand::DQ, Operand::DK, Operand::DV};
std::span<const Operand> outputs_of(Known known, const LaunchPlan& plan) {
  if (is_backward(known)) return GRADIENTS;
  return std::span<const Operand>(OUTPUTS).first(plan.problem.want_lse ? 2 : 1);
}

struct Operator {
  std::string types;
  Known known = Known::None;
  nb::object by_python;
  using KeptAnswers =
      std::unordered_map<OperatorKey, std::shared_ptr<const KeptAnswer>, OperatorKeyHash>;
  // Guards the answers. None is destroyed under it: that may run Python, for whose lock the
  // thread would wait, while another one that holds Python's lock waits for this.
  std::mutex lock;
  KeptAnswers answers;

  std::shared_ptr<const KeptAnswer> find(const OperatorKey& key) {
    const std::lock_guard guard(lock);
    const auto found = answers.find(key);
    return found == answers.end() ? nullptr : found->second;
  }
  void keep(const OperatorKey& key, KeptAnswer answer) {
    auto kept = std::make_shared<const KeptAnswer>(std::move(answer));
    KeptAnswers replaced;
    const std::lock_guard guard(lock);
    if (answers.size() >= MOST_ANSWERS) answers.swap(replaced);
    answers[key].swap(kept);  // with an earlier answer for such a call, or null
  }
  void forget() {
    KeptAnswers replaced;
    const std::lock_guard guard(lock);
    answers.swap(replaced);
  }
};

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
nb::object& forced() {
  static auto& instance = *new nb::object;
  return instance;
}
bool is_forced() {
  if (!anything_forced.load(std::memory_order_relaxed)) return false;
  const nb::gil_scoped_acquire lock;
  return !forced()().is_none();
}

// Whether this thread is inside a kernel of PyTorch's that the function in Python called. Operators
// that such a kernel calls are no calls of their own.
thread_local bool inside_pytorch = false;

// Two functions of torch._C._aoti. tensor_of() makes a Python tensor of a handle, and handles_of()
// makes handles of a list of Python tensors. The caller has to delete the handles of both.
nb::object& tensor_of() {
  static auto& instance = *new nb::object;
  return instance;
}
nb::object& handles_of() {
  static auto& instance = *new nb::object;
  return instance;
}

// A view of a tensor (B, H, N, D) as (B, N, H, D), or the other way round.
HeldTensor with_heads_swapped(TensorHandle tensor) {
  const TorchFunctions& f = *torch_functions();
  int64_t *sizes = nullptr, *strides = nullptr;
  check(f.get_sizes(tensor, &sizes));
  check(f.get_strides(tensor, &strides));
  const int64_t shape[] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  const int64_t steps[] = {strides[0], strides[2], strides[1], strides[3]};
  HeldTensor swapped;
  check(f.reinterpret_tensor(tensor, 4, shape, steps, 0, swapped.out()));
  return swapped;
}

// Calls PyTorch's own kernel for packed sequences, _flash_attention_forward.
void call_original_packed(const Operator& op, const OperatorArguments& a, Word* stack) {
  const TorchFunctions& f = *torch_functions();
  std::array<HeldTensor, 5> r;
  std::array<TensorHandle, MAX_ARGUMENTS> handles{};
  std::array<Word, MAX_ARGUMENTS> numbers{};
  for (size_t i = 0; i < op.types.size(); ++i)
    handles[i] = a[i].tensor.get(), numbers[i] = a[i].bits;
  const auto tensor = [&](size_t i) { return a[i].given ? &handles[i] : nullptr; };
  const auto integer = [&](size_t i) {
    return a[i].given ? reinterpret_cast<int64_t*>(&numbers[i]) : nullptr;
  };
  const auto max_q = static_cast<int64_t>(a[5].bits), max_k = static_cast<int64_t>(a[6].bits);
  const double dropout = as_double(a[7].bits);
  const auto causal = static_cast<int32_t>(a[8].bits), debug = static_cast<int32_t>(a[9].bits);
  double scale = as_double(a[10].bits);
  double* const scale_if_given = a[10].given ? &scale : nullptr;
  if (op.types.size() == PACKED_WITH_PAGES.size()) {
    check(f.flash_forward_v2(handles[0], handles[1], handles[2], tensor(3), tensor(4), max_q, max_k,
                             dropout, causal, debug, scale_if_given, integer(11), integer(12),
                             tensor(13), tensor(14), tensor(15), integer(16), r[0].out(),
                             r[1].out(), r[2].out(), r[3].out(), r[4].out()));
  } else {
    check(f.flash_forward(handles[0], handles[1], handles[2], tensor(3), tensor(4), max_q, max_k,
                          dropout, causal, debug, scale_if_given, integer(11), integer(12),
                          tensor(13), tensor(14), r[0].out(), r[1].out(), r[2].out(), r[3].out(),
                          r[4].out()));
  }
  for (size_t i = 0; i < r.size(); ++i) stack[i] = reinterpret_cast<Word>(r[i].release());
}

// Calls PyTorch's own kernel of a backward operator.
void call_original_backward(const Operator& op, const OperatorArguments& a, Word* stack) {
  const TorchFunctions& f = *torch_functions();
  std::array<HeldTensor, 3> r;
  std::array<TensorHandle, MAX_ARGUMENTS> t{};
  for (size_t i = 0; i < op.types.size(); ++i) t[i] = a[i].tensor.get();
  const auto integer = [&](size_t i) { return static_cast<int64_t>(a[i].bits); };
  const bool cudnn = op.known == Known::CudnnBackward, swaps = op.known == Known::FlashBackward;
  const size_t scale_at = cudnn ? 15 : 14;
  double scale = as_double(a[scale_at].bits);
  double* const scale_if_given = a[scale_at].given ? &scale : nullptr;
  if (cudnn) {
    check(f.cudnn_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10],
                           integer(11), integer(12), as_double(a[13].bits),
                           static_cast<int32_t>(a[14].bits), scale_if_given, r[0].out(), r[1].out(),
                           r[2].out()));
  } else {
    // As in the forward pass, PyTorch's kernel for SDPA swaps heads and rows and calls
    // _flash_attention_backward, whose kernel is called directly here.
    std::array<HeldTensor, 5> swapped;
    for (size_t i = 0; swaps && i < swapped.size(); ++i) {
      swapped[i] = with_heads_swapped(t[i]);
      t[i] = swapped[i].get();
    }
    std::array<int64_t, 2> window{};
    std::array<int64_t*, 2> window_if_given{};
    for (size_t i = 0; !swaps && i < 2; ++i) {
      window[i] = integer(15 + i);
      if (a[15 + i].given) window_if_given[i] = &window[i];
    }
    check(f.flash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], integer(8), integer(9),
                           as_double(a[10].bits), static_cast<int32_t>(a[11].bits), t[12], t[13],
                           scale_if_given, window_if_given[0], window_if_given[1], r[0].out(),
                           r[1].out(), r[2].out()));
    for (size_t i = 0; swaps && i < r.size(); ++i) r[i] = with_heads_swapped(r[i].get());
  }
  for (size_t i = 0; i < r.size(); ++i) stack[i] = reinterpret_cast<Word>(r[i].release());
}

// Calls PyTorch's own kernel.
void call_original(const Operator& op, const OperatorArguments& a, Word* stack) {
  if (op.known == Known::Packed) return call_original_packed(op, a, stack);
  if (is_backward(op.known)) return call_original_backward(op, a, stack);
  const TorchFunctions& f = *torch_functions();
  const TensorHandle q = a[0].tensor.get(), k = a[1].tensor.get(), v = a[2].tensor.get();
  std::array<HeldTensor, MAX_RESULTS> r;
  int64_t nq = 0, nk = 0;
  const Argument& last = a[op.types.size() - 1];
  double scale = as_double(last.bits);
  double* const scale_if_given = last.given ? &scale : nullptr;
  const auto number = [&](size_t i) { return as_double(a[i].bits); };
  const auto flag = [&](size_t i) { return static_cast<int32_t>(a[i].bits); };
  const auto give = [&](int i) { stack[i] = reinterpret_cast<Word>(r[i].release()); };
  TensorHandle mask = a[3].tensor.get();
  TensorHandle* const mask_if_given = mask == nullptr ? nullptr : &mask;
  if (op.known == Known::Efficient) {
    check(f.efficient(q, k, v, mask_if_given, flag(4), number(5), flag(6), scale_if_given,
                      r[0].out(), r[1].out(), r[2].out(), r[3].out()));
    for (int i = 0; i < 4; ++i) give(i);
    return;
  }
  if (op.known == Known::Flash) {
    // PyTorch's kernel of this operator swaps heads and rows and calls _flash_attention_forward,
    // which archflash replaces too: here its kernel is called directly.
    int64_t *of_q = nullptr, *of_k = nullptr;
    check(f.get_sizes(q, &of_q));
    check(f.get_sizes(k, &of_k));
    nq = of_q[2], nk = of_k[2];
    const HeldTensor rows_q = with_heads_swapped(q), rows_k = with_heads_swapped(k),
                     rows_v = with_heads_swapped(v);
    HeldTensor out;
    check(f.flash_forward(rows_q.get(), rows_k.get(), rows_v.get(), nullptr, nullptr, nq, nk,
                          number(3), flag(4), flag(5), scale_if_given, nullptr, nullptr, nullptr,
                          nullptr, out.out(), r[1].out(), r[6].out(), r[7].out(), r[8].out()));
    r[0] = with_heads_swapped(out.get());
    for (const int i : {2, 3}) check(f.new_uninitialized_tensor(r[i].out()));
  } else {
    check(f.cudnn(q, k, v, mask_if_given, flag(4), number(5), flag(6), flag(7), scale_if_given,
                  r[0].out(), r[1].out(), r[2].out(), r[3].out(), &nq, &nk, r[6].out(), r[7].out(),
                  r[8].out()));
  }
  for (const int i : {0, 1, 2, 3, 6, 7, 8}) give(i);
  stack[4] = static_cast<Word>(nq), stack[5] = static_cast<Word>(nk);
}

// Puts the results of a call on the stack. `made`: a tensor for each result that is not a number.
void give(const std::vector<Result>& results, std::span<HeldTensor> made, Word* stack) {
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    stack[i] =
        r.kind == Result::Kind::Number ? r.number : reinterpret_cast<Word>(made[i].release());
  }
}

// Makes the results of a call and launches its plan.
void serve(Known known, const KeptAnswer& kept, const OperatorCall& call, Word* stack) {
  const TorchFunctions& f = *torch_functions();
  std::array<void*, OPERAND_COUNT> addresses{};
  const std::span<const Operand> operands = operands_of(known);
  for (size_t i = 0; i < operands.size(); ++i)
    addresses[static_cast<int>(operands[i])] = call.addresses[i];
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

// --- the function in Python ---

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
               read(op.types, operands_of(op.known).size(), backward || op.known == Known::Packed,
                    arguments, call);
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
