// Bulk copies between global and shared memory: boxes that TMA moves, and plain runs of bytes. They
// run beside the warps, in the async proxy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "sim/memory/access.h"
#include "sim/numerics/atomic.h"
#include "sim/run/cluster.h"
#include "sim/units/bulk_shape.h"

namespace archflash::sim {

// The place where a load lands, and the mbarrier on which it completes.
struct BulkTarget {
  SharedPlace data, barrier;
  int unit = -1;
};

// Starts a copy from global memory to the shared memory of one or several CTAs.
void start_bulk_load(Warp& warp, int lane, BulkShape shape, std::vector<BulkTarget> targets);
// Starts a copy from shared memory to that of a CTA of the cluster.
void start_bulk_exchange(Warp& warp, int lane, SharedPlace source, uint32_t bytes,
                         BulkTarget target);
// Starts the delivery of `bytes` bytes that a unit makes when the first of them land. `name` is
// what a trace calls it.
void start_bulk_delivery(Warp& warp, int lane, uint32_t bytes,
                         std::function<std::vector<uint8_t>()> make,
                         std::vector<BulkTarget> targets, const char* name);
// Starts a copy from shared to global memory, in the lane's current bulk group. With `update` each
// element is combined with what is there.
void start_bulk_store(Warp& warp, int lane, BulkShape shape, SharedPlace source,
                      std::optional<AtomicUpdate> update);

// The bulk groups of a warp's lanes.
class BulkQueue {
 public:
  class Store;

  explicit BulkQueue(Warp& warp) : warp_(warp) {}
  ~BulkQueue();

  void add(std::shared_ptr<Store> store);
  void commit(uint32_t mask);
  // Waits until at most `groups` of the newest groups of these lanes are pending. With `read_only`
  // it waits only until the others have read their sources.
  void wait(uint32_t mask, uint32_t groups, bool read_only);
  void check_exit(uint32_t mask);

  Clock next_sequence() { return ++sequence_; }
  // Whether another lane has just started the same store by the same instruction.
  bool repeats(const BulkShape& shape, SharedPlace source);
  int read_unit();
  int write_unit();

 private:
  struct Entry {
    std::shared_ptr<Store> store;
    uint32_t age = 0;  // how many groups were committed after its own, once it is committed
    bool committed = false;
    bool read_known = false;  // a wait has covered its reads
  };

  Warp& warp_;
  std::vector<Entry> entries_;
  Clock sequence_ = 0;
  struct Latest {
    uint32_t pc = 0;
    uint64_t time = 0;
    uint32_t source = 0;
    std::vector<BulkShape::Piece> pieces;
  } latest_;
  int read_unit_ = -1, write_unit_ = -1;
};

}  // namespace archflash::sim
