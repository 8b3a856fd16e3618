// The C functions that PyTorch exports for code compiled ahead of time (its stable ABI), found in
// the libraries that the process has loaded already, so that nothing links to libtorch.
#pragma once

#include <cstdint>
#include <utility>

namespace archflash {

using TensorHandle = void*;  // a reference to a tensor of PyTorch, which its owner has to delete

constexpr int32_t TORCH_CPU = 0, TORCH_CUDA = 1;  // types of devices
constexpr int32_t TORCH_UINT8 = 0;                // a dtype

// A function that returns an int returns 0 if it succeeds. The names are PyTorch's without the
// prefix aoti_torch_, and those of the attention kernels are shortened.
struct TorchFunctions {
  int (*delete_tensor_object)(TensorHandle);
  int (*new_tensor_handle)(TensorHandle, TensorHandle*);
  int (*new_uninitialized_tensor)(TensorHandle*);
  int (*get_data_ptr)(TensorHandle, void**);
  int (*get_storage_size)(TensorHandle, int64_t*);
  int (*get_dim)(TensorHandle, int64_t*);
  int (*get_sizes)(TensorHandle, int64_t**);
  int (*get_strides)(TensorHandle, int64_t**);
  int (*get_dtype)(TensorHandle, int32_t*);
  int (*get_device_type)(TensorHandle, int32_t*);
  int (*get_device_index)(TensorHandle, int32_t*);
  int (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                       TensorHandle*);
  int (*reinterpret_tensor)(TensorHandle, int64_t, const int64_t*, const int64_t*, int64_t,
                            TensorHandle*);
  int (*pad)(TensorHandle, const int64_t*, int64_t, const char*, double*, TensorHandle*);
  bool (*grad_mode_is_enabled)();
  int (*library_init_impl)(const char*, const char*, const char*, uint32_t, void**);
  int (*library_impl)(void*, const char*, void (*)(uint64_t*, uint64_t, uint64_t));
  int (*delete_library_object)(void*);
  // The three functions below serve gradients alone, and may be null. The last two are no part of
  // the stable ABI: at::globalContext() and at::Context::deterministicAlgorithms().
  int (*is_defined)(TensorHandle, bool*);
  const void* (*global_context)();
  bool (*deterministic_algorithms)(const void*);
  // The functions from here on are in libtorch_cuda. One is null where that library is not loaded
  // or does not have it.
  int (*get_current_cuda_stream)(int32_t, void**);
  int (*cudnn)(TensorHandle, TensorHandle, TensorHandle, TensorHandle*, int32_t, double, int32_t,
               int32_t, double*, TensorHandle*, TensorHandle*, TensorHandle*, TensorHandle*,
               int64_t*, int64_t*, TensorHandle*, TensorHandle*, TensorHandle*);
  int (*efficient)(TensorHandle, TensorHandle, TensorHandle, TensorHandle*, int32_t, double,
                   int32_t, double*, TensorHandle*, TensorHandle*, TensorHandle*, TensorHandle*);
  int (*flash_forward)(TensorHandle, TensorHandle, TensorHandle, TensorHandle*, TensorHandle*,
                       int64_t, int64_t, double, int32_t, int32_t, double*, int64_t*, int64_t*,
                       TensorHandle*, TensorHandle*, TensorHandle*, TensorHandle*, TensorHandle*,
                       TensorHandle*, TensorHandle*);
  // flash_forward with a block table and a number of splits before the results.
  int (*flash_forward_v2)(TensorHandle, TensorHandle, TensorHandle, TensorHandle*, TensorHandle*,
                          int64_t, int64_t, double, int32_t, int32_t, double*, int64_t*, int64_t*,
                          TensorHandle*, TensorHandle*, TensorHandle*, int64_t*, TensorHandle*,
                          TensorHandle*, TensorHandle*, TensorHandle*, TensorHandle*);
  int (*flash_backward)(TensorHandle, TensorHandle, TensorHandle, TensorHandle, TensorHandle,
                        TensorHandle, TensorHandle, TensorHandle, int64_t, int64_t, double, int32_t,
                        TensorHandle, TensorHandle, double*, int64_t*, int64_t*, TensorHandle*,
                        TensorHandle*, TensorHandle*);
  int (*cudnn_backward)(TensorHandle, TensorHandle, TensorHandle, TensorHandle, TensorHandle,
                        TensorHandle, TensorHandle, TensorHandle, TensorHandle, TensorHandle,
                        TensorHandle, int64_t, int64_t, double, int32_t, double*, TensorHandle*,
                        TensorHandle*, TensorHandle*);
};

// Null where this PyTorch lacks one of the functions that are in libtorch_cpu.
const TorchFunctions* torch_functions();

// Owns a handle of a tensor of PyTorch, or none.
class HeldTensor {
 public:
  HeldTensor() = default;
  explicit HeldTensor(TensorHandle handle) : handle_(handle) {}
  HeldTensor(HeldTensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  HeldTensor& operator=(HeldTensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~HeldTensor() {
    if (handle_ != nullptr) torch_functions()->delete_tensor_object(handle_);
  }
  TensorHandle get() const { return handle_; }
  TensorHandle release() { return std::exchange(handle_, nullptr); }
  TensorHandle* out() { return &handle_; }  // for a function that fills in an empty holder

 private:
  TensorHandle handle_ = nullptr;
};

}  // namespace archflash
