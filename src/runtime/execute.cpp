#include "runtime/execute.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "runtime/registry.h"
#include "runtime/text.h"

namespace archflash {

struct Kernel {
  struct OnDevice {
    cudaKernel_t handle = nullptr;
    int32_t shared_limit = 0;  // the dynamic shared memory set so far
  };
  std::string image, entry;
  std::map<int, OnDevice> on;  // by device
};

namespace {

std::mutex loading;  // guards the tables of loaded code; launches of a ready kernel do not take it

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that the next caller does not see it
  throw LaunchFailure(join(what, ": ", cudaGetErrorName(status), " (", cudaGetErrorString(status),
                           ")", advice_on(status)));
}

// Lets code be loaded during a CUDA graph capture, without becoming part of the graph.
class OutsideCapture {
 public:
  OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes a device current until the end of a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index) {
    previous_ = current_device();
    changed_ = previous_ != device_index;
    if (changed_) check(cudaSetDevice(device_index), join("cudaSetDevice(", device_index, ")"));
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

Kernel* find_kernel(std::string_view image_name, std::string_view entry) {
  using Name = std::pair<std::string_view, std::string_view>;
  struct HashOfEntry {
    size_t operator()(const Name& name) const { return std::hash<std::string_view>()(name.second); }
  };
  // A key points to the names inside its own kernel, which is never destroyed.
  static auto& kernels = *new std::unordered_map<Name, std::unique_ptr<Kernel>, HashOfEntry>;
  if (const auto found = kernels.find({image_name, entry}); found != kernels.end()) {
    return found->second.get();
  }
  auto kernel = std::make_unique<Kernel>();
  kernel->image = image_name;
  kernel->entry = entry;
  const Name name{kernel->image, kernel->entry};
  return kernels.emplace(name, std::move(kernel)).first->second.get();
}

// The compute capability of a device, 10 * major + minor.
int capability_of(int device_index) {
  int major = 0, minor = 0;
  const std::string what = join("asking device ", device_index, " for its compute capability");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index), what);
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index), what);
  return 10 * major + minor;
}

// The code of an image for a device. It is unpacked by Python, whose lock is never waited for with
// the other one held.
cudaLibrary_t find_library(const std::string& image, int device_index,
                           std::unique_lock<std::mutex>& lock) {
  static auto& libraries = *new std::map<std::pair<std::string, std::string>, cudaLibrary_t>;
  const int capability = capability_of(device_index);
  const std::string target = target_for(image, capability);
  cudaLibrary_t& library = libraries[{image, target}];
  if (library != nullptr) return library;
  lock.unlock();
  const std::string code = code_of(image, target);
  lock.lock();
  if (code.empty()) {
    throw LaunchFailure(target.empty()
                            ? join("this build has no code of ", image, " for compute capability ",
                                   capability / 10, '.', capability % 10)
                            : join(image, ": ", no_machine_code(target)));
  }
  if (library == nullptr) {  // CUDA keeps a copy of the code
    check(cudaLibraryLoadData(&library, code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0),
          join("loading ", image, " for ", target));
  }
  return library;
}

// The kernel as a device launches it, with so much dynamic shared memory.
cudaKernel_t make_ready(Kernel& kernel, int device_index, int32_t shared_bytes) {
  std::unique_lock lock(loading);
  auto& [handle, shared_limit] = kernel.on[device_index];
  if (handle && shared_bytes <= shared_limit) return handle;
  const OutsideCapture guard;
  if (!handle) {
    const cudaLibrary_t library = find_library(kernel.image, device_index, lock);
    check(cudaLibraryGetKernel(&handle, library, kernel.entry.c_str()),
          join("finding kernel ", kernel.entry, " in ", kernel.image));
  }
  if (shared_bytes > shared_limit) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(handle),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          join("allowing ", shared_bytes, " bytes of shared memory for ", kernel.entry));
    shared_limit = shared_bytes;
  }
  return handle;
}

// Loads a kernel into the current context now. CUDA would load it at its first launch.
void finish_loading(const Kernel& kernel, cudaKernel_t handle) {
  static const auto get_function = reinterpret_cast<decltype(&cuKernelGetFunction)>(
      driver_function("cuKernelGetFunction", 12000));
  static const auto load_function =
      reinterpret_cast<decltype(&cuFuncLoad)>(driver_function("cuFuncLoad", 12040));
  const OutsideCapture guard;
  CUfunction function = nullptr;
  CUresult status = get_function(&function, handle);
  if (status == CUDA_SUCCESS) status = load_function(function);
  if (status != CUDA_SUCCESS) {
    throw LaunchFailure(
        join("loading kernel ", kernel.entry, " of ", kernel.image, ": ", describe(status)));
  }
}

std::string describe_launch(const Launch& launch) {
  return join("launching ", launch.kernel, " with grid (", launch.grid[0], ", ", launch.grid[1],
              ", ", launch.grid[2], "), cluster (", launch.cluster[0], ", ", launch.cluster[1],
              ", ", launch.cluster[2], "), block (", launch.block[0], ", ", launch.block[1], ", ",
              launch.block[2], "), ", launch.shared_bytes, " bytes of shared memory");
}

// By the driver's function, which takes less of the host than the runtime's.
void launch_kernel(const Launch& launch, cudaKernel_t kernel, EncodedMaps& maps,
                   const std::array<void*, OPERAND_COUNT>& addresses, CUstream stream,
                   const Counters& counters, bool starts_early) {
  static const auto launch_function =
      reinterpret_cast<decltype(&cuLaunchKernelEx)>(driver_function("cuLaunchKernelEx", 12000));
  alignas(64) unsigned char block[MAX_PARAMETER_BYTES];
  bind(launch, addresses, block, maps, counters);
  void* parameters[] = {block};
  CUlaunchConfig config{};
  config.gridDimX = launch.grid[0], config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.block[0], config.blockDimY = launch.block[1];
  config.blockDimZ = launch.block[2];
  config.sharedMemBytes = launch.shared_bytes;
  config.hStream = stream;
  CUlaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 1) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = launch.cluster[0];
    attribute.value.clusterDim.y = launch.cluster[1];
    attribute.value.clusterDim.z = launch.cluster[2];
  }
  if (starts_early) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  // The driver takes a kernel of a library in the place of a function of a context.
  const auto function = reinterpret_cast<CUfunction>(kernel);
  const CUresult status =
      in_context([&] { return launch_function(&config, function, parameters, nullptr); });
  if (status != CUDA_SUCCESS)
    throw LaunchFailure(join(describe_launch(launch), ": ", describe(status)));
}

void clear(void* start, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  const cudaError_t status = cudaMemsetAsync(start, 0, bytes, static_cast<cudaStream_t>(stream));
  // The text is made only where it is needed: this runs on every call.
  if (status != cudaSuccess) check(status, join("zeroing ", bytes, " bytes"));
}

// of_batch: also the launches that serve all layers of a batch.
void launch_all(const PreparedPlan& prepared, const std::array<void*, OPERAND_COUNT>& addresses,
                int device_index, void* stream, const Counters& counters, bool of_batch) {
  bool starts_early = true;
  for (size_t i = 0; i < prepared.plan->launches.size(); ++i) {
    const Launch& launch = prepared.plan->launches[i];
    if (launch.of_batch && !of_batch) {
      starts_early = false;  // the next launch knows only how to wait for this one
      continue;
    }
    const cudaKernel_t kernel = make_ready(*prepared.kernels[i], device_index, launch.shared_bytes);
    launch_kernel(launch, kernel, prepared.maps[i], addresses, static_cast<CUstream>(stream),
                  counters, launch.uses_pdl && starts_early);
    starts_early = true;
  }
}

}  // namespace

std::shared_ptr<PreparedPlan> prepare(std::shared_ptr<const LaunchPlan> plan) {
  auto prepared = std::make_shared<PreparedPlan>();
  prepared->plan = std::move(plan);
  prepared->maps = std::make_unique<EncodedMaps[]>(prepared->plan->launches.size());
  prepared->kernels.reserve(prepared->plan->launches.size());
  const std::lock_guard lock(loading);
  for (const Launch& launch : prepared->plan->launches) {
    if (launch.params.size() > MAX_PARAMETER_BYTES) {
      throw LaunchFailure(join(launch.kernel, " takes ", launch.params.size(),
                               " bytes of parameters: at most ", MAX_PARAMETER_BYTES));
    }
    prepared->kernels.push_back(find_kernel(launch.image, launch.kernel));
  }
  return prepared;
}

void execute(const PreparedPlan& prepared, const std::array<void*, OPERAND_COUNT>& addresses,
             int device_index, void* stream, const Cleared& cleared) {
  if (prepared.plan->launches.empty() && cleared.bytes == 0) return;
  const DeviceGuard guard(device_index);
  clear(cleared.start, cleared.bytes, stream);
  clear(addresses[static_cast<int>(Operand::Workspace)], prepared.plan->zeroed_bytes, stream);
  launch_all(prepared, addresses, device_index, stream, {}, true);
}

void execute_layer(const PreparedPlan& prepared, const std::array<void*, OPERAND_COUNT>& addresses,
                   int device_index, void* stream, char* counters, bool first,
                   int64_t cleared_bytes) {
  const DeviceGuard guard(device_index);
  clear(counters, cleared_bytes, stream);
  launch_all(prepared, addresses, device_index, stream, {counters_of(*prepared.plan), counters},
             first);
}

void load_kernels(const PreparedPlan& prepared, int device_index) {
  const DeviceGuard guard(device_index);
  // This is called even if the device is current: a process's first call creates the context.
  check(cudaSetDevice(device_index), join("cudaSetDevice(", device_index, ")"));
  for (size_t i = 0; i < prepared.plan->launches.size(); ++i) {
    Kernel& kernel = *prepared.kernels[i];
    finish_loading(kernel,
                   make_ready(kernel, device_index, prepared.plan->launches[i].shared_bytes));
  }
}

int current_device() {
  int index = -1;
  check(cudaGetDevice(&index), "cudaGetDevice");
  return index;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  // The query fails for the legacy default stream while a stream that synchronizes with it is being
  // captured. That counts as a capture, and no later call is to see the error.
  if (error != cudaSuccess) cudaGetLastError();
  return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

std::optional<uint64_t> capture_of(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  const cudaError_t error =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &number);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return std::nullopt;
  }
  if (status == cudaStreamCaptureStatusNone) return 0;
  if (status == cudaStreamCaptureStatusActive) return number + 1;
  return std::nullopt;
}

DriverStatus driver_status() {
  DriverStatus status;
  cudaDriverGetVersion(&status.cuda_version);
  const cudaError_t error = cudaGetDeviceCount(&status.device_count);
  cudaGetLastError();
  if (error == cudaSuccess && status.device_count > 0) {
    status.usable = true;
  } else if (status.cuda_version == 0) {
    status.problem = "no NVIDIA driver on this machine";
  } else if (error == cudaErrorInsufficientDriver) {
    status.problem = "the NVIDIA driver is too old";
  } else if (error == cudaErrorNoDevice || error == cudaSuccess) {
    status.problem = "no NVIDIA GPU on this machine";
  } else {
    status.problem = join(cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
  }
  if (!status.usable) status.device_count = 0;
  return status;
}

Device query_device(int device_index) {
  auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device_index),
          join("asking device ", device_index, " for attribute ", which));
    return value;
  };
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device_index),
        join("asking for device ", device_index));
  Device device;
  device.present = true;
  device.name = properties.name;
  device.major = attribute(cudaDevAttrComputeCapabilityMajor);
  device.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  device.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.shared_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  device.registers_per_sm = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  device.threads_per_sm = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  return device;
}

}  // namespace archflash
