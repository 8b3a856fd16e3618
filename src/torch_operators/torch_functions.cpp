#include "torch_operators/torch_functions.h"

#include <string>

#include "runtime/loaded_libraries.h"

namespace archflash {
namespace {

template <class Function>
bool find_symbol(void* library, const char* name, Function& function) {
  if (library == nullptr) return false;
  function = reinterpret_cast<Function>(exported(library, name));
  return function != nullptr;
}

template <class Function>
bool find(void* library, const std::string& name, Function& function) {
  return find_symbol(library, ("aoti_torch_" + name).c_str(), function);
}

const TorchFunctions* find_functions() {
  static auto& f = *new TorchFunctions{};
  void* cpu = loaded_library("torch_cpu");
  void* cuda = loaded_library("torch_cuda");
  const bool all =
      find(cpu, "delete_tensor_object", f.delete_tensor_object) &&
      find(cpu, "new_tensor_handle", f.new_tensor_handle) &&
      find(cpu, "new_uninitialized_tensor", f.new_uninitialized_tensor) &&
      find(cpu, "get_data_ptr", f.get_data_ptr) &&
      find(cpu, "get_storage_size", f.get_storage_size) && find(cpu, "get_dim", f.get_dim) &&
      find(cpu, "get_sizes", f.get_sizes) && find(cpu, "get_strides", f.get_strides) &&
      find(cpu, "get_dtype", f.get_dtype) && find(cpu, "get_device_type", f.get_device_type) &&
      find(cpu, "get_device_index", f.get_device_index) &&
      find(cpu, "empty_strided", f.empty_strided) &&
      find(cpu, "_reinterpret_tensor", f.reinterpret_tensor) && find(cpu, "aten_pad", f.pad) &&
      find(cpu, "grad_mode_is_enabled", f.grad_mode_is_enabled) &&
      find(cpu, "library_init_impl", f.library_init_impl) &&
      find(cpu, "library_impl", f.library_impl) &&
      find(cpu, "delete_library_object", f.delete_library_object);
  find(cpu, "is_defined", f.is_defined);
  find_symbol(cpu, "_ZN2at13globalContextEv", f.global_context);
  find_symbol(cpu, "_ZNK2at7Context23deterministicAlgorithmsEv", f.deterministic_algorithms);
  find(cuda, "get_current_cuda_stream", f.get_current_cuda_stream);
  find(cuda, "cuda__scaled_dot_product_cudnn_attention", f.cudnn);
  find(cuda, "cuda__scaled_dot_product_efficient_attention", f.efficient);
  find(cuda, "cuda__flash_attention_forward", f.flash_forward);
  find(cuda, "cuda__flash_attention_forward_v2", f.flash_forward_v2);
  find(cuda, "cuda__flash_attention_backward", f.flash_backward);
  find(cuda, "cuda__scaled_dot_product_cudnn_attention_backward", f.cudnn_backward);
  return all ? &f : nullptr;
}

}  // namespace

const TorchFunctions* torch_functions() {
  static const TorchFunctions* const found = find_functions();
  return found;
}

}  // namespace archflash
