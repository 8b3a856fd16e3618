// clusterlaunchcontrol: a running cluster asks that one which has not started never starts, so that
// it can do that one's work too. The answer is 16 bytes in shared memory that only
// clusterlaunchcontrol.query_cancel understands.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/units/bulk.h"

namespace archflash::sim {

constexpr uint32_t RESPONSE_BYTES = 16;

struct Response {
  uint64_t low = 0, high = 0;

  bool is_valid() const;     // whether a request wrote these bytes
  bool is_canceled() const;  // whether the request succeeded
  Dim3 first_cta() const;    // of the cluster that will not start
};

// Starts a request, whose response lands at each target by the async proxy.
void start_launch_request(Warp& warp, int lane, std::vector<BulkTarget> targets);

}  // namespace archflash::sim
