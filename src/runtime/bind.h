// A plan plus addresses -> the bytes that a kernel receives as its parameter.
#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>

#include "common/plan.h"

namespace archflash {

constexpr size_t MAX_PARAMETER_BYTES = 4096;

// Raised as archflash.LaunchError.
struct LaunchFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Writes launch.params into `block` (64-byte aligned, MAX_PARAMETER_BYTES) with the addresses
// filled in and the tensor maps encoded.
void bind(const Launch& launch, const std::array<void*, OPERAND_COUNT>& addresses,
          unsigned char* block);

// Likewise without the tensor maps.
void bind_addresses(const Launch& launch, const std::array<void*, OPERAND_COUNT>& addresses,
                    unsigned char* block);

// A function of the NVIDIA driver as of a CUDA version (12040 for 12.4), found on first use:
// nothing links to libcuda. Throws LaunchFailure where the driver has none.
void* driver_function(const char* name, int cuda_version);

// Encodes one tensor map into 128 bytes (64-byte aligned) with the driver's own encoder.
void encode_tensor_map(const TensorMapSpec& spec, void* address, void* map);

}  // namespace archflash
