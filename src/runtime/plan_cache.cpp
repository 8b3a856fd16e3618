#include "runtime/plan_cache.h"

namespace archflash {

const std::shared_ptr<PreparedPlan>* PlanCache::find(const CacheKey& key) {
  // The layers of a model ask for the same problem again and again, which needs no hash.
  if (!order_.empty() && order_.front().first == key) {
    ++hits;
    return &order_.front().second;
  }
  const auto found = entries_.find(key);
  if (found == entries_.end()) {
    ++misses;
    return nullptr;
  }
  ++hits;
  order_.splice(order_.begin(), order_, found->second);
  return &found->second->second;
}

void PlanCache::insert(const CacheKey& key, std::shared_ptr<PreparedPlan> plan) {
  if (const auto found = entries_.find(key); found != entries_.end()) {
    found->second->second = std::move(plan);
    return;
  }
  if (entries_.size() == CAPACITY) {
    entries_.erase(order_.back().first);
    order_.pop_back();
  }
  order_.emplace_front(key, std::move(plan));
  entries_.emplace(key, order_.begin());
}

void PlanCache::clear() {
  entries_.clear();
  order_.clear();
  hits = misses = 0;
}

}  // namespace archflash
