#include "sim/memory/global_order.h"

#include <algorithm>

namespace archflash::sim {
namespace {

bool covers_all(const std::vector<Clock>& clocks, const std::vector<Clock>& others) {
  return clocks.size() >= others.size() &&
         std::equal(others.begin(), others.end(), clocks.begin(),
                    [](Clock other, Clock clock) { return other <= clock; });
}

}  // namespace

bool OtherClusters::covers(int32_t cluster, int agent, Clock clock) const {
  if (clocks_ == nullptr) return false;
  const auto found = clocks_->find(cluster);
  const auto a = static_cast<size_t>(agent);
  return found != clocks_->end() && a < found->second->size() && (*found->second)[a] >= clock;
}

void OtherClusters::join(const OtherClusters& other) {
  if (other.clocks_ == nullptr || other.clocks_ == clocks_) return;
  if (clocks_ == nullptr) {
    clocks_ = other.clocks_;
    return;
  }
  for (const auto& [cluster, clocks] : *other.clocks_) {
    const auto found = clocks_->find(cluster);
    if (found == clocks_->end() || found->second != clocks) join(cluster, *clocks);
  }
}

void OtherClusters::join(int32_t cluster, const std::vector<Clock>& clocks) {
  auto all = std::make_shared<Clocks>();
  auto result = std::make_shared<std::vector<Clock>>(clocks);
  if (clocks_ != nullptr) {
    const auto found = clocks_->find(cluster);
    if (found != clocks_->end()) {
      const std::vector<Clock>& before = *found->second;
      if (covers_all(before, clocks)) return;
      result->resize(std::max(result->size(), before.size()));
      for (size_t i = 0; i < before.size(); ++i) (*result)[i] = std::max((*result)[i], before[i]);
    }
    *all = *clocks_;
  }
  (*all)[cluster] = std::move(result);
  clocks_ = std::move(all);
}

}  // namespace archflash::sim
