// The plan cache: the last 256 decisions. The key is the bytes of the Problem, the device and what
// is forced; addresses are not part of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "runtime/execute.h"

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

class PlanCache {
 public:
  static constexpr size_t CAPACITY = 256;

  // The decision, if it is cached. A null pointer in it means that `torch` serves the problem.
  const std::shared_ptr<PreparedPlan>* find(const CacheKey& key);
  void insert(const CacheKey& key, std::shared_ptr<PreparedPlan> plan);
  void clear();

  size_t size() const { return entries_.size(); }
  int64_t hits = 0, misses = 0;

 private:
  using Entry = std::pair<CacheKey, std::shared_ptr<PreparedPlan>>;
  std::list<Entry> order_;  // most recently used first
  std::unordered_map<CacheKey, std::list<Entry>::iterator, CacheKeyHash> entries_;
};

}  // namespace archflash
