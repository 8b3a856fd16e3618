// Runs plans on a GPU. Nothing else in the project launches a kernel there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/bind.h"

namespace archflash {

struct Kernel;  // an entry of an image

// A plan and the kernels it launches, looked up once.
struct PreparedPlan {
  std::shared_ptr<const LaunchPlan> plan;
  std::vector<Kernel*> kernels;                 // one per launch
  mutable std::unique_ptr<EncodedMaps[]> maps;  // likewise
};

std::shared_ptr<PreparedPlan> prepare(std::shared_ptr<const LaunchPlan> plan);

// Memory that is set to 0 before the launches of a plan, on their stream.
struct Cleared {
  void* start = nullptr;
  int64_t bytes = 0;
};

// Launches on `stream` of device `device_index`, asynchronously. Throws LaunchFailure, which says
// what was tried; no CUDA error remains set.
void execute(const PreparedPlan& prepared, const std::array<void*, OPERAND_COUNT>& addresses,
             int device_index, void* stream, const Cleared& cleared = {});

// Runs one layer of a batch whose layers share the workspace. counters: the layer's own, of
// counters_of(plan) bytes. first: this layer makes the launches that serve all layers.
// cleared_bytes: so many bytes from its counters on are cleared before.
void execute_layer(const PreparedPlan& prepared, const std::array<void*, OPERAND_COUNT>& addresses,
                   int device_index, void* stream, char* counters, bool first,
                   int64_t cleared_bytes);
// Bytes at the start of a plan's workspace that layers do not have in common.
inline int64_t counters_of(const LaunchPlan& plan) {
  return std::max(plan.zeroed_bytes, plan.counter_bytes);
}

// Loads a plan's kernels onto a device now. Otherwise CUDA loads each at its first launch, which
// then waits for the device. This call may wait for the device, too. Throws LaunchFailure.
void load_kernels(const PreparedPlan& prepared, int device_index);

int current_device();  // the index of the CUDA device that is current in this thread

// Whether a CUDA graph is being captured on a stream.
bool is_capturing(void* stream);
// The number of the capture that a stream is in, 0 if it is in none; nothing if CUDA does not say.
std::optional<uint64_t> capture_of(void* stream);

struct DriverStatus {
  bool usable = false;
  int device_count = 0;
  int cuda_version = 0;  // the newest CUDA that the driver supports, 13000 for 13.0; 0: no driver
  // Empty if CUDA can be used; otherwise "no NVIDIA driver ...", "the NVIDIA driver is too old",
  // "no NVIDIA GPU ..." or CUDA's own error. _dispatch.driver_problem adds what to do.
  std::string problem;
};
DriverStatus driver_status();
Device query_device(int device_index);

}  // namespace archflash
