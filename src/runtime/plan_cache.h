// The plan cache: the last 1,024 decisions. The key is the bytes of the problem, the device and
// what is forced; addresses are not part of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
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

// A hash of `count` bytes, a multiple of 8. Keys have about a hundred words of 8 bytes, so that
// four are mixed at the same time.
inline size_t hash_of_words(const void* bytes, size_t count) {
  constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15;
  uint64_t lanes[] = {1, 2, 3, 4}, words[4];
  const char* const start = static_cast<const char*>(bytes);
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * FACTOR;
    return lane ^ lane >> 29;
  };
  size_t i = 0;
  for (; i + sizeof words <= count; i += sizeof words) {
    std::memcpy(words, start + i, sizeof words);
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  for (; i < count; i += sizeof(uint64_t)) {
    std::memcpy(words, start + i, sizeof(uint64_t));
    lanes[0] = mix(lanes[0], words[0]);
  }
  return mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

template <class Asked, class Value>
class PlanCache {
 public:
  using Key = CacheKey<Asked>;
  static_assert(sizeof(Key) % sizeof(uint64_t) == 0);

  // The value, if it is cached. It stays where it is until the next insert() or clear().
  const Value* find(const Key& key) {
    // The layers of a model ask for the same problem again and again, which needs no hash.
    if (!order_.empty() && order_.front().known->first.key == key) {
      ++hits;
      return &order_.front().value;
    }
    asked_ = Hashed(key);
    const auto found = entries_.find(asked_);
    if (found == entries_.end()) {
      ++misses;
      return nullptr;
    }
    ++hits;
    order_.splice(order_.begin(), order_, found->second);
    return &found->second->value;
  }

  // Values hold Python objects, whose destruction may let other threads in. So nothing is
  // destroyed while the table changes, nor before the caller has used what it was given: what is
  // dropped waits for the next insert() or clear().
  const Value* insert(const Key& key, Value value) {
    {
      Order dropped;
      dropped.swap(dropped_);
    }
    if (!(asked_.key == key)) asked_ = Hashed(key);
    if (const auto found = entries_.find(asked_); found != entries_.end()) {
      Entry& entry = *found->second;
      std::swap(entry.value, value);
      dropped_.push_back({nullptr, std::move(value)});
      return &entry.value;
    }
    Order made;
    made.push_front({nullptr, std::move(value)});
    typename Entries::iterator known;
    if (entries_.size() == PLAN_CACHE_CAPACITY) {  // in the place of the one used longest ago
      auto node = entries_.extract(entries_.find(order_.back().known->first));
      dropped_.splice(dropped_.end(), order_, std::prev(order_.end()));
      node.key() = asked_, node.mapped() = made.begin();
      known = entries_.insert(std::move(node)).position;
    } else {
      known = entries_.try_emplace(asked_, made.begin()).first;
    }
    made.front().known = &*known;
    order_.splice(order_.begin(), made);
    return &order_.front().value;
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
  struct Hashed {
    Hashed() { std::memset(static_cast<void*>(this), 0, sizeof *this); }
    explicit Hashed(const Key& key) : key(key), hash(hash_of_words(&key, sizeof key)) {}
    bool operator==(const Hashed& other) const {
      return this == &other || (hash == other.hash && key == other.key);
    }

    Key key;
    size_t hash;
  };
  struct Hash {
    size_t operator()(const Hashed& key) const { return key.hash; }
  };
  struct Entry;
  using Order = std::list<Entry>;
  using Entries = std::unordered_map<Hashed, typename Order::iterator, Hash>;
  struct Entry {
    typename Entries::value_type* known;  // null in dropped_
    Value value;
  };
  Order order_;    // most recently used first
  Order dropped_;  // no longer in the table
  Entries entries_;
  Hashed asked_;  // what was looked up last and not at the front: it may be inserted next
};

}  // namespace archflash
