#include "runtime/tensors.h"

#include "runtime/wrong.h"

namespace archflash {
namespace {

// The parts of DLPack's C ABI (dlpack.h 1.x) that are used here.
struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  uint32_t version_major, version_minor;
  void* context;
  void (*free)(DLManagedTensor* self);
  uint64_t flags;
  DLTensor tensor;
};
struct ExchangeTable {
  uint32_t version_major, version_minor;
  ExchangeTable* previous;
  // Makes a tensor of the dtype, shape and device of `prototype`. A failure calls set_error and
  // returns another number than 0.
  int (*allocate)(DLTensor* prototype, DLManagedTensor** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  void *from_python, *to_python;
  int (*view)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};
constexpr int32_t DL_CPU = 1, DL_CUDA = 2;
constexpr uint8_t DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6, DL_E4M3FN = 10,
                  DL_E5M2 = 12, DL_E8M0FNU = 14;

bool exchange_enabled = true;
// Whether the table refused the last tensor. A refusal takes PyTorch 10 ms, and meta tensors come
// together: behind one the others are not tried.
thread_local bool refused_last = false;

const ExchangeTable* exchange_table() {
  return exchange_enabled ? static_cast<const ExchangeTable*>(torch().exchange) : nullptr;
}

const void* find_exchange_table(nb::handle tensor_type) {
  if (!nb::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return nullptr;
  nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!table) {
    PyErr_Clear();
    return nullptr;
  }
  return table->version_major == 1 && table->view && table->current_stream ? table : nullptr;
}

void set_dtype(DLDataType type, TensorView& view) {
  view.is_int32 = type.code == DL_INT && type.bits == 32;
  view.is_bool = type.code == DL_BOOL;
  view.is_int64 = type.code == DL_INT && type.bits == 64;
  view.is_int8 = type.code == DL_INT && type.bits == 8;
  view.is_e8m0 = type.code == DL_E8M0FNU;
  view.is_float = true;
  if (type.code == DL_FLOAT && type.bits == 32) {
    view.dtype = DType::F32;
  } else if (type.code == DL_FLOAT && type.bits == 16) {
    view.dtype = DType::F16;
  } else if (type.code == DL_BFLOAT) {
    view.dtype = DType::BF16;
  } else if (type.code == DL_FLOAT && type.bits == 64) {
    view.dtype = DType::F64;
  } else if (type.code == DL_E4M3FN) {
    view.dtype = DType::E4M3;
  } else if (type.code == DL_E5M2) {
    view.dtype = DType::E5M2;
  } else {
    view.is_float = false;
  }
}

bool read_through_table(nb::handle object, TensorView& view) {
  const ExchangeTable* table = exchange_table();
  if (!table || !is_plain_tensor(object)) return false;
  if (refused_last) {
    if (nb::cast<bool>(object.attr("is_meta"))) return false;
    refused_last = false;
  }
  DLTensor raw;
  if (table->view(object.ptr(), &raw) != 0) {  // a meta tensor, or one that DLPack cannot describe
    PyErr_Clear();
    refused_last = true;
    return false;
  }
  view.data = static_cast<char*>(raw.data) + raw.byte_offset;
  view.device_kind = raw.device.device_type == DL_CUDA  ? DeviceKind::Cuda
                     : raw.device.device_type == DL_CPU ? DeviceKind::Cpu
                                                        : DeviceKind::Other;
  view.device_index = raw.device.device_type == DL_CUDA ? raw.device.device_id : -1;
  view.ndim = raw.ndim;
  view.shape = raw.shape;
  view.strides = raw.strides;
  set_dtype(raw.dtype, view);
  return true;
}

void read_through_attributes(nb::handle object, TensorView& view) {
  nb::object device = object.attr("device");
  const std::string type = nb::cast<std::string>(device.attr("type"));
  view.device_kind = type == "cuda"   ? DeviceKind::Cuda
                     : type == "cpu"  ? DeviceKind::Cpu
                     : type == "meta" ? DeviceKind::Meta
                                      : DeviceKind::Other;
  view.device_index =
      view.device_kind == DeviceKind::Cuda ? nb::cast<int>(device.attr("index")) : -1;
  view.ndim = nb::cast<int>(object.attr("ndim"));
  nb::object shape = object.attr("shape"), strides = object.attr("stride")();
  for (int i = 0; i < view.ndim && i < MAX_DIMS; ++i) {
    view.own_shape[i] = nb::cast<int64_t>(shape[i]);
    view.own_strides[i] = nb::cast<int64_t>(strides[i]);
  }
  view.shape = view.own_shape;
  view.strides = view.own_strides;
  const std::string dtype = dtype_text(object);
  view.is_int32 = dtype == "torch.int32";
  view.is_bool = dtype == "torch.bool";
  view.is_int64 = dtype == "torch.int64";
  view.is_int8 = dtype == "torch.int8";
  view.is_e8m0 = dtype == "torch.float8_e8m0fnu";
  view.is_float = false;
  for (int i = 0; i < DTYPE_COUNT; ++i) {
    if (dtype == std::string("torch.") + dtype_name(static_cast<DType>(i))) {
      view.dtype = static_cast<DType>(i);
      view.is_float = true;
    }
  }
  view.data = nullptr;
  view.has_storage = is_plain_tensor(object);
  if (view.has_storage &&
      (view.device_kind == DeviceKind::Cpu || view.device_kind == DeviceKind::Cuda)) {
    try {
      view.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
    } catch (const nb::python_error&) {
      view.has_storage = false;
    }
  }
}

}  // namespace

Getter::Getter(nb::handle tensor, const char* name) : method_(tensor.type().attr(name)) {
  const nb::object bound = tensor.attr(name);
  if (PyCFunction_Check(bound.ptr()) && PyCFunction_GetFlags(bound.ptr()) == METH_NOARGS)
    function_ = PyCFunction_GetFunction(bound.ptr());
}

nb::object Getter::operator()(nb::handle tensor) const {
  if (!function_) return method_(tensor);
  nb::object result = nb::steal(function_(tensor.ptr(), nullptr));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

const Torch& torch() {
  // This is never destroyed, because Python objects must not be released after the interpreter
  // ends.
  static Torch* handles = [] {
    auto* t = new Torch;
    nb::module_ module = nb::module_::import_("torch");
    t->tensor_type = module.attr("Tensor");
    t->parameter_type = module.attr("nn").attr("Parameter");
    t->dtype_type = module.attr("dtype");
    const nb::object tensor = module.attr("empty")(0);
    t->is_neg = Getter(tensor, "is_neg");
    t->is_inference = Getter(tensor, "is_inference");
    t->data_ptr = Getter(tensor, "data_ptr");
    t->requires_grad = nb::steal(PyUnicode_InternFromString("requires_grad"));
    t->empty_like = module.attr("empty_like");
    for (int i = 0; i < DTYPE_COUNT; ++i)
      t->dtypes[i] = module.attr(dtype_name(static_cast<DType>(i)));
    t->float32 = t->dtypes[static_cast<int>(DType::F32)];
    t->uint8 = module.attr("uint8");
    t->strided = module.attr("strided");
    t->is_functional = module.attr("_is_functional_tensor");
    t->increment_version = module.attr("autograd").attr("graph").attr("increment_version");
    nb::object core = module.attr("_C");
    const nb::object guards = core.attr("_dynamo").attr("guards");
    if (nb::hasattr(guards, "_empty_strided_cuda") && nb::hasattr(core, "_cuda_getDevice")) {
      t->empty_strided_cuda = guards.attr("_empty_strided_cuda");
      t->current_cuda_device = core.attr("_cuda_getDevice");
    }
    if (nb::hasattr(core, "_cuda_getCurrentRawStream"))
      t->raw_stream = core.attr("_cuda_getCurrentRawStream");
    t->exchange = find_exchange_table(t->tensor_type);
    return t;
  }();
  return *handles;
}

void use_exchange_table(bool enabled) { exchange_enabled = enabled; }

bool is_plain_tensor(nb::handle object) {
  const nb::handle type = object.type();
  return type.is(torch().tensor_type) || type.is(torch().parameter_type);
}

bool is_tensor(nb::handle object) {
  return is_plain_tensor(object) ||
         PyObject_IsInstance(object.ptr(), torch().tensor_type.ptr()) == 1;
}

namespace {

// A tensor whose storage was freed has the address 0 plus its offset in the storage. Nearly all
// memory lies above this address, so that only lower addresses need a closer look.
constexpr uintptr_t SUSPICIOUS_ADDRESS = uintptr_t{1} << 40;

void check_low_address(nb::handle tensor, const char* name, TensorView& view) {
  for (int i = 0; i < view.ndim && i < MAX_DIMS; ++i) {
    if (view.shape[i] == 0) return;
  }
  // This check comes first, because some allocators return low addresses (PyTorch's expandable
  // segments).
  const uintptr_t offset = nb::cast<uintptr_t>(tensor.attr("storage_offset")()) *
                           nb::cast<uintptr_t>(tensor.attr("itemsize"));
  if (view.data != nullptr && reinterpret_cast<uintptr_t>(view.data) != offset) return;
  if (nb::cast<bool>(tensor.attr("_is_zerotensor")())) {
    view.lazy = true;
    return;
  }
  if (nb::cast<bool>(torch().is_functional(tensor))) {
    view.has_storage = false;
    return;
  }
  wrong_value(
      name, " has shape ", describe_shape(view),
      " but no data: its storage is empty, as untyped_storage().resize_(0) leaves it; bring "
      "the data back or pass another tensor");
}

}  // namespace

void read_tensor(nb::handle object, const char* name, TensorView& view, bool known) {
  if (!is_tensor(object)) {
    const std::string found = given(object);
    const bool of_flex = found == "a torch.nn.attention.flex_attention.BlockMask";
    wrong_type(name, " is ", found, ": it must be a torch.Tensor",
               of_flex ? "; archflash.masks.from_flex makes block_mask of it, and PyTorch's "
                         "create_mask attn_mask of its mask_mod"
                       : "");
  }
  if (!read_through_table(object, view)) {
    if (nb::cast<bool>(object.attr("is_nested")) || !object.attr("layout").is(torch().strided)) {
      wrong_type(name,
                 " is a nested or sparse tensor: it must be dense; pack sequences of several "
                 "lengths and pass cu_seqlens");
    }
    read_through_attributes(object, view);
  }
  if (view.ndim > MAX_DIMS) {
    throw nb::value_error(
        (std::string(name) + " has " + std::to_string(view.ndim) + " dimensions").c_str());
  }
  // A subclass is read again, as a plain tensor, after its own dispatcher has handled the call.
  if (!is_plain_tensor(object)) return;
  if (!known) view.lazy = torch().is_neg(object).is(Py_True);
  const bool has_data = view.has_storage && (view.device_kind == DeviceKind::Cpu ||
                                             view.device_kind == DeviceKind::Cuda);
  if (has_data && reinterpret_cast<uintptr_t>(view.data) < SUSPICIOUS_ADDRESS)
    check_low_address(object, name, view);
}

namespace {
std::string describe_numbers(const int64_t* numbers, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + (count == 1 ? ",)" : ")");
}
}  // namespace

std::string describe_shape(const TensorView& view) {
  return describe_numbers(view.shape, view.ndim);
}
std::string describe_strides(const TensorView& view) {
  return describe_numbers(view.strides, view.ndim);
}

std::string dtype_text(nb::handle tensor) {
  const nb::object dtype = tensor.attr("dtype");
  return nb::cast<std::string>(nb::str(dtype));
}

int32_t alignment(const void* address) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(address) | 16;
  return static_cast<int32_t>(value & -value);
}

void* address_of(nb::handle tensor) {
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(torch().data_ptr(tensor)));
}

namespace {

constexpr size_t LONGEST_VALUE = 100;   // characters of a value that a message shows
constexpr size_t LONGEST_SEQUENCE = 4;  // elements of a sequence that a message shows

std::string kind_of(nb::handle value) {
  const nb::handle type = value.type();
  const std::string module = nb::cast<std::string>(nb::str(type.attr("__module__")));
  const std::string name = nb::cast<std::string>(nb::str(type.attr("__qualname__")));
  return module == "builtins" ? name : module + "." + name;
}

std::string given_tensor(nb::handle tensor) {
  const std::string kind = "a " + kind_of(tensor);
  try {
    const nb::object shape = nb::steal(PySequence_Tuple(tensor.attr("shape").ptr()));
    if (!shape.is_valid()) throw nb::python_error();
    return join(kind, " of dtype ", dtype_text(tensor), " and shape ", nb::str(shape).c_str(),
                " on ", nb::str(nb::object(tensor.attr("device"))).c_str());
  } catch (const nb::python_error&) {  // a nested tensor, or a subclass that refuses to tell
    return kind;
  }
}

std::string given_sequence(nb::handle value, const char* begin, const char* end) {
  std::string text;
  for (nb::handle element : value) text += (text.empty() ? "" : ", ") + given(element);
  return begin + text + end;
}

}  // namespace

std::string given(nb::handle value) {
  if (is_tensor(value)) return given_tensor(value);
  PyObject* object = value.ptr();
  const bool has_plain_repr = value.is_none() || PyBool_Check(object) ||
                              PyUnicode_CheckExact(object) || PyLong_CheckExact(object) ||
                              PyFloat_CheckExact(object) || value.type().is(torch().dtype_type);
  if (has_plain_repr) {
    try {
      const std::string text = nb::cast<std::string>(nb::repr(value));
      if (text.size() <= LONGEST_VALUE) return text;
    } catch (const nb::python_error&) {  // Python does not print an int of thousands of digits
    }
    return join("a very long ", kind_of(value));
  }
  const bool is_list = PyList_CheckExact(object), is_tuple = PyTuple_CheckExact(object);
  if (!is_list && !is_tuple) return "a " + kind_of(value);
  if (nb::len(value) > LONGEST_SEQUENCE)
    return join("a ", kind_of(value), " of ", nb::len(value), " elements");
  return is_list ? given_sequence(value, "[", "]") : given_sequence(value, "(", ")");
}

DeviceBytes::~DeviceBytes() {
  auto* owner = static_cast<DLManagedTensor*>(owner_);
  if (owner && owner->free) owner->free(owner);
}

bool DeviceBytes::allocate(int device_index, int64_t bytes) {
  const ExchangeTable* table = exchange_table();
  if (!table || !table->allocate) return false;
  DLTensor prototype{};
  prototype.device = {DL_CUDA, device_index};
  prototype.ndim = 1;
  prototype.dtype = {DL_UINT, 8, 1};
  prototype.shape = &bytes;
  DLManagedTensor* made = nullptr;
  const auto ignore = [](void*, const char*, const char*) {};
  if (table->allocate(&prototype, &made, nullptr, ignore) != 0) {
    PyErr_Clear();
    return false;
  }
  owner_ = made;
  return true;
}

void* DeviceBytes::data() const {
  const DLTensor& tensor = static_cast<const DLManagedTensor*>(owner_)->tensor;
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

void* current_stream(int device_index) {
  if (const ExchangeTable* table = exchange_table()) {
    void* stream = nullptr;
    if (table->current_stream(DL_CUDA, device_index, &stream) == 0) return stream;
    PyErr_Clear();
  }
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(torch().raw_stream(device_index)));
}

}  // namespace archflash
