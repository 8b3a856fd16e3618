// Reading a torch tensor without linking to torch: through the DLPack exchange table that
// torch.Tensor carries (0.6 us for four tensors), or, where it is missing or refuses, through the
// tensor's Python attributes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "common/dtype.h"

namespace archflash {

namespace nb = nanobind;

enum class DeviceKind : int32_t { Cpu, Cuda, Meta, Other };

struct TensorView {
  void* data = nullptr;
  DeviceKind device_kind = DeviceKind::Other;
  int32_t device_index = 0;  // -1 on the CPU
  int32_t ndim = 0;
  const int64_t* shape = nullptr;    // borrowed from the tensor, or own_shape
  const int64_t* strides = nullptr;  // in elements
  DType dtype = DType::F32;          // when is_float
  bool is_float = false;             // one of archflash's dtypes
  bool is_int32 = false;
  bool is_bool = false;
  bool is_int64 = false;
  bool is_int8 = false;
  bool is_e8m0 = false;  // float8_e8m0fnu: scales
  // False where there is no address: subclasses (fake tensors, DTensor), tensors inside transforms
  // such as vmap, functional ones. Their own dispatcher finds the real tensors.
  bool has_storage = true;
  bool lazy = false;  // it has the negative bit or is a zero tensor: memory lacks its values
  int64_t own_shape[8], own_strides[8];
};

constexpr int MAX_DIMS = 8;

// A method of torch.Tensor without arguments. If it is a C function, that is called directly, which
// saves a third of the time.
class Getter {
 public:
  Getter() = default;
  Getter(nb::handle tensor, const char* name);
  nb::object operator()(nb::handle tensor) const;

 private:
  nb::object method_;  // torch.Tensor.name
  PyCFunction function_ = nullptr;
};

// The objects of torch that the module uses, filled at the first call that sees a tensor.
struct Torch {
  nb::object tensor_type, parameter_type, dtype_type, empty_like, float32, uint8, strided;
  nb::object increment_version, is_functional;
  // torch's function of (sizes, strides, dtype), and that of the device it allocates on; null
  // without
  nb::object empty_strided_cuda, current_cuda_device;
  Getter is_neg, is_inference, data_ptr;
  nb::object dtypes[DTYPE_COUNT];  // by DType
  nb::object raw_stream;  // torch._C._cuda_getCurrentRawStream, where the exchange table is missing
  const void* exchange = nullptr;  // DLPackExchangeAPI
  nb::object requires_grad;        // the name of the attribute
};
const Torch& torch();
void use_exchange_table(bool enabled);  // tests switch to the fallback with it

bool is_plain_tensor(
    nb::handle object);  // exactly torch.Tensor or torch.nn.Parameter: no subclass, no fake tensor
bool is_tensor(nb::handle object);

// Throws nb::type_error with `name` in its text if `object` is not a dense tensor of at most
// MAX_DIMS dimensions, and nb::value_error if it has elements but no data. known: this tensor was
// read before and was not lazy, which never changes.
void read_tensor(nb::handle object, const char* name, TensorView& view, bool known = false);
std::string describe_shape(const TensorView& view);  // "(4, 16, 512, 64)"
std::string describe_strides(const TensorView& view);
std::string dtype_text(nb::handle tensor);  // "torch.int64"

// The largest power of two, at most 16, that divides an address in bytes.
int32_t alignment(const void* address);

// The address of a tensor that the runtime itself has allocated.
void* address_of(nb::handle tensor);

// Why no kernel can run on a tensor without has_storage: "q" HAS_NO_MEMORY.
constexpr char HAS_NO_MEMORY[] =
    " is a tensor without memory of its own, as fake tensors, wrapper subclasses and tensors "
    "inside transforms are: pass a plain tensor that has its data";

// Describes what a caller gave, for an error message: text, numbers, dtypes and short sequences of
// them by value, a tensor by its dtype, shape and device, and everything else by its type. repr()
// is not used, because it may read a tensor, which waits for the GPU and breaks a graph capture.
std::string given(nb::handle value);

// Bytes of a CUDA device, allocated by torch in the order of its current stream and given back at
// the end of a scope, without a tensor object (0.6 us where a tensor takes 2 to 3).
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes();

  // False where torch has no exchange table or refuses, for example for want of memory: a tensor
  // must be made then, or its error told.
  bool allocate(int device_index, int64_t bytes);
  void* data() const;

 private:
  void* owner_ = nullptr;  // DLManagedTensorVersioned
};

void* current_stream(int device_index);  // torch's current stream on that device, as cudaStream_t

}  // namespace archflash
