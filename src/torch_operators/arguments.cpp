#include "torch_operators/arguments.h"

namespace archflash::torch_operators {

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

void find_undefined(std::string_view types, OperatorArguments& arguments) {
  if (torch_functions()->is_defined == nullptr) return;
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == 'T')
      check(torch_functions()->is_defined(arguments[i].tensor.get(), &arguments[i].given));
  }
}

namespace {

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

}  // namespace

bool read(std::string_view types, size_t tensors_read, size_t mask, bool any_dims,
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
    const bool is_mask = mask != 0 && place == mask;
    if ((place >= tensors_read && !is_mask) || !arguments[i].given) continue;
    if (!read(arguments[i].tensor.get(), is_mask ? tensors_read : place, any_dims, call))
      return false;
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

}  // namespace archflash::torch_operators
