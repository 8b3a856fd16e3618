// The plan cache: the last 256 decisions. The key is the bytes of the Problem, the device and what
// is forced; addresses are not part of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "common/planning/plan.h"

namespace archflash {

struct CacheKey {
  Problem problem;
  int64_t device_index;
  int64_t forced;  // the folder's index in the registry; -1 if nothing is forced
};
static_assert(sizeof(CacheKey) == sizeof(Problem) + 16, "hashed as bytes: no padding");

inline bool operator==(const CacheKey& a, const CacheKey& b) {
  return std::memcmp(&a, &b, sizeof(CacheKey)) == 0;
}

struct CacheKeyHash {
  size_t operator()(const CacheKey& key) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof(key)});
  }
};

constexpr size_t PLAN_CACHE_CAPACITY = 256;

template <class Value>
class PlanCache {
 public:
  // The value, if it is cached. It stays where it is until the next insert() or clear().
  const Value* find(const CacheKey& key) {
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

  // Values hold Python objects, whose destruction may let other threads in. So nothing is
  // destroyed while the table changes, nor before the caller has used what it was given: what is
  // dropped waits for the next insert() or clear().
  const Value* insert(const CacheKey& key, Value value) {
    {
      Order dropped;
      dropped.swap(dropped_);
    }
    if (const auto found = entries_.find(key); found != entries_.end()) {
      std::swap(found->second->second, value);
      dropped_.emplace_back(key, std::move(value));
      return &found->second->second;
    }
    if (entries_.size() == PLAN_CACHE_CAPACITY) {
      entries_.erase(order_.back().first);
      dropped_.splice(dropped_.end(), order_, std::prev(order_.end()));
    }
    order_.emplace_front(key, std::move(value));
    entries_.emplace(key, order_.begin());
    return &order_.front().second;
  }

  // Values are destroyed at the end: that may run Python, and with it other threads.
  void clear() {
    Order order, dropped;
    entries_.clear();
    order.swap(order_);
    dropped.swap(dropped_);
    hits = misses = 0;
  }

  size_t size() const { return entries_.size(); }
  int64_t hits = 0, misses = 0;

 private:
  using Entry = std::pair<CacheKey, Value>;
  using Order = std::list<Entry>;
  Order order_;    // most recently used first
  Order dropped_;  // no longer in the table
  std::unordered_map<CacheKey, typename Order::iterator, CacheKeyHash> entries_;
};

}  // namespace archflash
