// One kernel launch: its checks, its CTAs on the host's cores, its report.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/run/cta.h"

namespace archflash::sim {

struct LaunchRequest {
  std::string kernel;
  Dim3 grid, cluster, block;
  uint64_t dynamic_shared = 0;
  int capability = 0;  // of the device, 10 * major + minor; 0: that of the module's target
  uint64_t shared_limit = 227 * 1024;  // of one CTA, static and dynamic together
  // It may start while the launch before it in the same memory still runs; so may the next one.
  bool starts_early = false, next_starts_early = false;
  std::vector<uint8_t> parameters;
  Options options;
  std::vector<int64_t> traced_ctas;  // the CTAs that record what they do
  // Whether to give up. The launching thread asks this several times a second. It may be empty.
  std::function<bool()> wants_to_stop;
};

struct LaunchReport {
  Findings findings;
  Counts counts{0};
  bool complete = true;             // no CTA stopped early
  bool overlaps_checked = true;     // the log of global writes did not overflow
  std::map<int64_t, Trace> traces;  // by CTA
};

// Runs a kernel. Throws LoadError for a launch that a driver would refuse, and Interrupted if
// `wants_to_stop` says so; the report says what is wrong inside the kernel. The same seed gives the
// same report, whatever the number of threads. `globals` has one buffer for each of the module's
// .global variables.
LaunchReport launch(const Module& module, const LaunchRequest& request, GlobalMemory& memory,
                    std::vector<std::vector<uint8_t>>& globals);

}  // namespace archflash::sim
