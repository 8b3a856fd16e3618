// What the clusters of a launch tell each other, and who used global memory last.
//
// The race detector of a cluster knows its own agents. What it knows of the agents of other
// clusters comes from synchronising variables in global memory that are released and acquired with
// a scope of at least the GPU. A launch whose clusters can tell each other things has one
// GlobalOrder, and its clusters run on one thread; otherwise each cluster has its own.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace archflash::sim {

using Clock = uint32_t;
struct Knowledge;

// How far apart two threads may be that a release, an acquire or a fence puts in order.
enum class SyncScope : uint8_t { Cta, Cluster, Gpu };
constexpr size_t SYNC_SCOPES = 3;

// An access of one granule that wrote it. It has no padding.
struct Write {
  Clock clock = 0;  // 0: there was none
  uint16_t agent = 0;
  uint8_t lane = 0;
  uint8_t atomic = 0;
  uint32_t pc = 0;
  bool operator==(const Write& other) const { return std::memcmp(this, &other, 12) == 0; }
};
static_assert(sizeof(Write) == 12);

// The clocks of the agents of other clusters, as far as they are known. Copies share them.
class OtherClusters {
 public:
  bool covers(int32_t cluster, int agent, Clock clock) const;
  void join(const OtherClusters& other);
  void join(int32_t cluster, const std::vector<Clock>& clocks);

 private:
  using Clocks = std::map<int32_t, std::shared_ptr<const std::vector<Clock>>>;  // by cluster
  std::shared_ptr<const Clocks> clocks_;                                        // nullptr: none
};

class GlobalOrder {
 public:
  // Granules of 1 << `granule_log2` bytes are one cell. `shared`: several clusters use it.
  GlobalOrder(int granule_log2, bool shared) : shift_(granule_log2), shared_(shared) {}

  bool is_shared() const { return shared_; }

  struct Place {
    Write write;
    int32_t cluster = 0;
  };
  struct Reader {
    int32_t cluster;
    int32_t warp;
    uint32_t read;  // as the race detector marks it
  };
  // The last plain write, the last atomic one since then, and the last read of each warp since the
  // plain write.
  struct Cell {
    Place plain, atomic;
    std::unique_ptr<std::vector<Reader>> readers;  // nullptr: none
  };

  template <class F>
  void for_each_cell(uint64_t address, uint32_t bytes, F f) {
    for (uint64_t c = address >> shift_; c <= (address + bytes - 1) >> shift_; ++c) {
      if (c >> PAGE_LOG2 != last_number_ || last_ == nullptr) {
        last_number_ = c >> PAGE_LOG2;
        last_ = &pages_[last_number_];
      }
      f((*last_)[c % PAGE_CELLS]);
    }
  }

  // What the last write to a variable has released, or the atomic operations since then.
  struct Release {
    int32_t cluster;
    int cta;  // its rank in the cluster
    SyncScope scope;
    std::shared_ptr<const Knowledge> knowledge;
    OtherClusters seen;  // by relaxed reads only, before the release
  };
  std::unordered_map<uint64_t, std::vector<Release>> variables;

 private:
  static constexpr int PAGE_LOG2 = 6;
  static constexpr uint64_t PAGE_CELLS = uint64_t{1} << PAGE_LOG2;
  using Page = std::array<Cell, PAGE_CELLS>;

  int shift_;
  bool shared_;
  std::unordered_map<uint64_t, Page> pages_;
  uint64_t last_number_ = 0;
  Page* last_ = nullptr;
};

}  // namespace archflash::sim
