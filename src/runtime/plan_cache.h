// The plan cache: the last 1,024 decisions. The key is the bytes of the problem, the device and
// what is forced; addresses are not part of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"

namespace archflash {

// Compared and hashed as bytes: whoever makes one sets every byte, padding too.
template <class Asked>
struct CacheKey {
  Asked problem;  // Problem or BackwardProblem
  int64_t device_index;
  int64_t forced;  // the folder's index in the registry; -1 if nothing is forced
  // Where a value depends on it: which dimension of q has its rows.
  int64_t row_axis = 0;

  bool operator==(const CacheKey& other) const {
    return std::memcmp(this, &other, sizeof(CacheKey)) == 0;
  }
};
static_assert(sizeof(CacheKey<Problem>) == sizeof(Problem) + 24);
static_assert(sizeof(CacheKey<BackwardProblem>) == sizeof(BackwardProblem) + 24);

constexpr size_t PLAN_CACHE_CAPACITY = 1024;

template <class Asked, class Value>
class PlanCache {
 public:
  using Key = CacheKey<Asked>;

  // The value, if it is cached. It stays where it is until the next insert() or clear().
  const Value* find(const Key& key) {
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
  const Value* insert(const Key& key, Value value) {
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
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof(key)});
    }
  };
  using Entry = std::pair<Key, Value>;
  using Order = std::list<Entry>;
  Order order_;    // most recently used first
  Order dropped_;  // no longer in the table
  std::unordered_map<Key, typename Order::iterator, Hash> entries_;
};

}  // namespace archflash
