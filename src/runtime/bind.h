// Binding: from a plan and the addresses of tensors to the bytes that a kernel gets as its
// parameter.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/planning/plan.h"
#include "common/tensor_map.h"

namespace archflash {

constexpr size_t MAX_PARAMETER_BYTES = 4096;

// Python sees this as archflash.LaunchError.
struct LaunchFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The tensor maps of a launch as its first call encoded them. The driver puts other addresses into
// them in a fraction of the time.
struct EncodedMaps {
  std::once_flag encoded;
  std::vector<TensorMap> maps;
};

// What a layer has in the place of the first bytes of the workspace (LaunchPlan::counter_bytes).
struct Counters {
  int64_t bytes = 0;
  char* data = nullptr;
};

// Writes launch.params into `block` (64-byte aligned, MAX_PARAMETER_BYTES) with the addresses
// filled in and the tensor maps encoded. `known` belongs to the launch.
void bind(const Launch& launch, const std::array<void*, OPERAND_COUNT>& addresses,
          unsigned char* block, EncodedMaps& known, const Counters& counters = {});

// Writes launch.params into `block` with the addresses filled in, but without tensor maps.
void bind_addresses(const Launch& launch, const std::array<void*, OPERAND_COUNT>& addresses,
                    unsigned char* block, const Counters& counters = {});

// A function of the NVIDIA driver, in its version for a CUDA release (12040 for 12.4). It is looked
// up on first use, because nothing links to libcuda. Throws LaunchFailure if the driver lacks it.
void* driver_function(const char* name, int cuda_version);

std::string describe(CUresult status);  // "CUDA_ERROR_INVALID_VALUE (invalid argument)" and advice

// What to add to an error by which a kernel has failed on the device: it was launched before the
// call that reports it. Empty for other errors.
std::string advice_on(int status);  // CUresult or cudaError_t, which have the same numbers

void make_context_current();  // that of the current device

// What the driver says of a call that needs a current context. A thread that has made no call of
// CUDA has none.
template <class Call>
CUresult in_context(const Call& call) {
  const CUresult status = call();
  if (status != CUDA_ERROR_INVALID_CONTEXT) return status;
  make_context_current();
  return call();
}

// Encodes one tensor map into 128 bytes (64-byte aligned) with the driver's own encoder.
void encode_tensor_map(const TensorMapSpec& spec, void* address, void* map);

}  // namespace archflash
