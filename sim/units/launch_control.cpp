#include "sim/units/launch_control.h"

#include <cstring>

namespace archflash::sim {
namespace {

// The upper half of `high` marks a response, and its lowest bit says whether the request succeeded.
// `low` has the coordinates x and y of the CTA, and the lower half of `high` has z.
constexpr uint64_t MARK = 0xC1C5A2B6ull << 32;
constexpr uint64_t SUCCESS = uint64_t{1} << 32;
constexpr uint64_t HALF = 0xFFFFFFFF;

Response response(Cluster& cluster) {
  const int64_t index = cluster.take_unstarted();
  if (index < 0) return {0, MARK};
  const Dim3 first = first_cta(cluster.launch(), index);
  return {static_cast<uint64_t>(first.x) | static_cast<uint64_t>(first.y) << 32,
          static_cast<uint64_t>(first.z) | MARK | SUCCESS};
}

}  // namespace

bool Response::is_valid() const { return (high & ~HALF & ~SUCCESS) == MARK; }
bool Response::is_canceled() const { return (high & SUCCESS) != 0; }
Dim3 Response::first_cta() const {
  return {static_cast<int64_t>(low & HALF), static_cast<int64_t>(low >> 32),
          static_cast<int64_t>(high & HALF)};
}

void start_launch_request(Warp& warp, int lane, std::vector<BulkTarget> targets) {
  Cluster& cluster = warp.cta().cluster();
  const auto make = [&cluster] {
    const Response made = response(cluster);
    std::vector<uint8_t> bytes(RESPONSE_BYTES);
    std::memcpy(bytes.data(), &made, RESPONSE_BYTES);
    return bytes;
  };
  start_bulk_delivery(warp, lane, RESPONSE_BYTES, make, std::move(targets), "launch request");
}

}  // namespace archflash::sim
