// Running a plan on a GPU: the only place of the project that launches a kernel.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/bind.h"

namespace archflash {

struct Kernel;  // an entry of a loaded fatbin

// A plan and the kernels it launches, looked up once.
struct PreparedPlan {
  std::shared_ptr<const LaunchPlan> plan;
  std::vector<Kernel*> kernels;  // one per launch
};

std::shared_ptr<PreparedPlan> prepare(std::shared_ptr<const LaunchPlan> plan);

// Launches on `stream` of device `device_index`; asynchronous. Throws LaunchFailure with what was
// tried; no CUDA error is left behind.
void execute(const PreparedPlan& prepared, const std::array<void*, OPERAND_COUNT>& addresses,
             int device_index, void* stream);

// Loads a plan's kernels onto a device now: otherwise CUDA does so at their first launch, which
// then waits for the device. This may wait for it, too. Throws LaunchFailure.
void load_kernels(const PreparedPlan& prepared, int device_index);

struct DriverStatus {
  bool usable = false;
  int device_count = 0;
  int cuda_version = 0;  // the newest CUDA that the driver supports, 13000 for 13.0; 0: no driver
  // Empty when usable; otherwise "no NVIDIA driver ...", "the NVIDIA driver is too old" (which one,
  // and what to do, _dispatch.driver_problem says), "no NVIDIA GPU ..." or CUDA's own error.
  std::string problem;
};
DriverStatus driver_status();
Device query_device(int device_index);

}  // namespace archflash
