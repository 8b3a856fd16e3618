// The table of GPUs that plans can be made for on a machine without one. docs/known-devices.md says
// where each number comes from.
#pragma once

#include <string_view>
#include <vector>

#include "common/problem.h"

namespace archflash {

struct KnownDevice {
  Device device;  // as planning sees it; device.name is the short public name

  std::vector<std::string_view> aliases;  // the driver's full name, then other spellings

  // These are for estimates and reports only; no plan may depend on them.
  double boost_mhz;       // highest SM clock, by the driver or the data sheet
  double bandwidth_gbps;  // device memory, 1e9 bytes per second
  double fp32_tflops;     // CUDA cores, an FMA counted as two
  double fp16_tflops;     // tensor cores, dense, fp32 accumulation; bf16 too from 8.0 on
  double fp8_tflops;      // tensor cores, dense, fp32 accumulation; 0: no FP8

  std::vector<std::string_view> unconfirmed;  // names of members that no good source confirms
  const char* source;                         // where the numbers of the row come from
};

// The devices in order of compute capability. The table is built on first use and never changes.
const std::vector<KnownDevice>& known_devices();

// The device of that name or alias; nullptr if there is none. Case, spaces and punctuation are
// ignored, and so are a leading "NVIDIA" and "GeForce". Partial matches do not count: an
// "RTX 5090 Laptop GPU" is not an RTX 5090.
const KnownDevice* find_known_device(std::string_view name);

}  // namespace archflash
