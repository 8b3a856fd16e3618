#include "runtime/bind.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "runtime/text.h"

namespace archflash {
namespace {

CUtensorMapDataType map_dtype(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::F16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::BF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::F64:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    case DType::E4M3:
    case DType::E5M2:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;  // how TMA moves float8
}

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
  static const auto encode =
      reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled", 12000));
  return encode;
}

using Replace = decltype(&cuTensorMapReplaceAddress);

Replace replacer() {
  static const auto replace =
      reinterpret_cast<Replace>(driver_function("cuTensorMapReplaceAddress", 12000));
  return replace;
}

[[noreturn]] void refused(const TensorMapSpec& spec, CUresult status) {
  throw LaunchFailure(join("the driver refused the tensor map of ", operand_name(spec.operand),
                           ": ", describe(status)));
}

}  // namespace

void make_context_current() {
  int device_index = 0;
  cudaError_t status = cudaGetDevice(&device_index);
  if (status == cudaSuccess) status = cudaSetDevice(device_index);
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw LaunchFailure(join("making the context of device ", device_index,
                             " current: ", cudaGetErrorString(status), advice_on(status)));
  }
}

std::string describe(CUresult status) {
  static const auto get_name =
      reinterpret_cast<decltype(&cuGetErrorName)>(driver_function("cuGetErrorName", 6000));
  static const auto get_text =
      reinterpret_cast<decltype(&cuGetErrorString)>(driver_function("cuGetErrorString", 6000));
  const char *name = nullptr, *text = nullptr;
  if (get_name(status, &name) != CUDA_SUCCESS || get_text(status, &text) != CUDA_SUCCESS)
    return join("CUresult ", static_cast<int>(status));
  return join(name, " (", text, ")", advice_on(status));
}

std::string advice_on(int status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return "; a kernel that was launched earlier may be at fault, also another library's: "
             "CUDA_LAUNCH_BLOCKING=1 in the environment shows which call launches it";
    default:
      return "";
  }
}

void* driver_function(const char* name, int cuda_version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, cuda_version, cudaEnableDefault, &found);
  if (status != cudaSuccess || !function) {
    cudaGetLastError();
    throw LaunchFailure(join("the NVIDIA driver offers no ", name, ": it needs CUDA ",
                             cuda_version / 1000, '.', cuda_version % 1000 / 10, " or newer"));
  }
  return function;
}

void encode_tensor_map(const TensorMapSpec& spec, void* address, void* map) {
  constexpr size_t MAX_RANK = Extents<int64_t>::MOST;
  cuuint64_t dims[MAX_RANK], strides[MAX_RANK];
  cuuint32_t box[MAX_RANK], steps[MAX_RANK];
  const size_t rank = spec.dims.size();
  if (rank < 1 || spec.box.size() != rank || spec.strides.size() + 1 != rank) {
    throw LaunchFailure(
        join("tensor map of ", operand_name(spec.operand), ": ", rank, " dims, ", spec.box.size(),
             " box sizes and ", spec.strides.size(),
             " strides; it takes 1 to 5 dims, a box size each and one stride fewer"));
  }
  for (size_t i = 0; i < rank; ++i) {
    dims[i] = spec.dims[i];
    box[i] = spec.box[i];
    steps[i] = 1;
    if (i + 1 < rank) strides[i] = spec.strides[i];
  }
  const auto encode = [&] {
    return encoder()(static_cast<CUtensorMap*>(map), map_dtype(spec.dtype), rank,
                     static_cast<char*>(address) + spec.addend, dims, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(spec.swizzle),
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     spec.nan_fill ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
                                   : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  const CUresult status = in_context(encode);
  if (status != CUDA_SUCCESS) refused(spec, status);
}

void bind_addresses(const Launch& launch, const std::array<void*, OPERAND_COUNT>& addresses,
                    unsigned char* block, const Counters& counters) {
  std::memcpy(block, launch.params.data(), launch.params.size());
  for (const PointerSlot& slot : launch.pointers) {
    char* base = static_cast<char*>(addresses[static_cast<int>(slot.operand)]);
    if (slot.operand == Operand::Workspace && slot.addend < counters.bytes) base = counters.data;
    const char* address = base ? base + slot.addend : nullptr;  // an absent operand stays null
    std::memcpy(block + slot.offset, &address, sizeof(address));
  }
}

void bind(const Launch& launch, const std::array<void*, OPERAND_COUNT>& addresses,
          unsigned char* block, EncodedMaps& known, const Counters& counters) {
  bind_addresses(launch, addresses, block, counters);
  const auto address = [&](const TensorMapSpec& spec) {
    return static_cast<char*>(addresses[static_cast<int>(spec.operand)]);
  };
  std::call_once(known.encoded, [&] {
    known.maps.resize(launch.tensor_maps.size());
    for (size_t i = 0; i < known.maps.size(); ++i)
      encode_tensor_map(launch.tensor_maps[i], address(launch.tensor_maps[i]), &known.maps[i]);
  });
  for (size_t i = 0; i < known.maps.size(); ++i) {
    const TensorMapSpec& spec = launch.tensor_maps[i];
    unsigned char* map = block + spec.offset;
    std::memcpy(map, &known.maps[i], sizeof(TensorMap));
    const CUresult status = in_context([&] {
      return replacer()(reinterpret_cast<CUtensorMap*>(map), address(spec) + spec.addend);
    });
    if (status != CUDA_SUCCESS) refused(spec, status);
  }
}

}  // namespace archflash
