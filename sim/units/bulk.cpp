#include "sim/units/bulk.h"

#include <algorithm>
#include <cstring>

#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

constexpr uint16_t NAN_FILL = 0x7FF7;  // for both 16-bit floating-point types, as on an H200

// The runs of bytes in shared memory that a shape touches, as offsets from the box's start. A
// swizzle only permutes bytes within a row's span, so that rows which fill the span form one run.
template <class F>
void for_each_run(const BulkShape& shape, uint32_t start_address, F f) {
  if (shape.pitch == shape.piece_bytes) {
    f(0, shape.pitch * static_cast<uint32_t>(shape.pieces.size()));
    return;
  }
  for (const BulkShape::Piece& piece : shape.pieces) {
    for (uint32_t b = 0; b < shape.piece_bytes; b += SWIZZLE_UNIT) {
      const uint32_t address = start_address + piece.place + b;
      f(swizzled(address, shape.swizzle) - start_address, SWIZZLE_UNIT);
    }
  }
}

// Calls f(shared bytes, bytes of the piece, count) for the runs of a piece that stay together.
template <class F>
void for_each_unit(const BulkShape& shape, const BulkShape::Piece& piece, SharedPlace at, F f) {
  if (shape.swizzle == 0) {
    f(at.bytes() + piece.place, 0u, shape.piece_bytes);
    return;
  }
  for (uint32_t b = 0; b < shape.piece_bytes; b += SWIZZLE_UNIT) {
    const uint32_t address = swizzled(at.address() + piece.place + b, shape.swizzle);
    f(at.bytes() + (address - at.address()), b, SWIZZLE_UNIT);
  }
}

uint32_t shared_extent(const BulkShape& shape) {
  return shape.pitch * static_cast<uint32_t>(shape.pieces.size());
}

std::string what(const char* kind, uint64_t bytes, SharedPlace at) {
  return std::to_string(bytes) + " bytes of shared memory at offset " + std::to_string(at.offset) +
         " by " + kind;
}

void check_extent(int lane, uint64_t extent, SharedPlace at) {
  if (extent <= at.cta->shared_bytes() - at.offset) return;
  throw Fault{"out-of-bounds",
              "a box of " + std::to_string(extent) + " bytes at shared offset " +
                  std::to_string(at.offset) + " of " + std::to_string(at.cta->shared_bytes()),
              lane, at.address()};
}

void trace(AsyncOperation& by, uint64_t issued, uint64_t bytes, const char* label) {
  Cta& cta = by.warp().cta();
  if (!cta.traced()) return;
  TraceEvent event;
  event.begin = issued;
  event.end = event.seen = cta.time() + 1;
  event.pc = by.pc();
  event.bytes = bytes;
  event.label = label;
  cta.trace().add_async(BULK_TRACK, std::move(event));
}

// Checks the destination of a copy and marks it as in flight.
void open_destination(Warp& warp, int lane, const BulkShape& shape, const BulkTarget& target) {
  Cta& owner = *target.data.cta;
  check_extent(lane, shared_extent(shape), target.data);
  TileLine tile;
  if (shape.is_box) {
    tile = {target.data.offset, shape.pitch,        static_cast<uint32_t>(shape.pieces.size()),
            shape.slab_pieces,  shape.group_pieces, shape.swizzle == 0 ? 0 : shape.pitch};
  }
  owner.set_tile(target.data.offset, shared_extent(shape), tile);
  for_each_run(shape, target.data.address(), [&](uint32_t offset, uint32_t bytes) {
    uint8_t* const state = target.data.state() + offset;
    if (owner.mbarriers().any() && std::memchr(state, MBARRIER, bytes) != nullptr) {
      throw Fault{"mbarrier", "a bulk copy overwrites an mbarrier object", lane,
                  target.data.address() + offset};
    }
    std::memset(state, IN_FLIGHT, bytes);
    RaceDetector* races = owner.races();
    if (races == nullptr) return;
    const Accessor who{warp.agent(), lane, warp.pc()};
    const Race race =
        races->async_write(who, target.unit, target.data.race_offset() + offset, bytes);
    if (race.found) {
      warp.cta().report_race(warp, lane, race, true, false,
                             what("a bulk copy", bytes, {&owner, target.data.offset + offset}),
                             target.data.address() + offset);
    }
  });
}

void open_targets(Warp& warp, int lane, const BulkShape& shape, std::vector<BulkTarget>& targets) {
  for (BulkTarget& target : targets) {
    target.unit = target.barrier.cta->mbarriers().subscribe(warp, lane, target.barrier.offset);
    open_destination(warp, lane, shape, target);
  }
}

void close_destination(AsyncOperation& by, const BulkShape& shape, const BulkTarget& target) {
  const Clock clock = target.barrier.cta->mbarriers().landed(by, target.barrier.offset,
                                                             static_cast<int64_t>(shape.bytes));
  for_each_run(shape, target.data.address(), [&](uint32_t offset, uint32_t bytes) {
    std::memset(target.data.state() + offset, VALID, bytes);
    if (RaceDetector* races = target.data.cta->races()) {
      races->landed(target.unit, clock, target.data.race_offset() + offset, bytes);
    }
  });
}

// Checks the source of a copy. `unit` reads it until its clock is `clock`.
void open_source(Warp& warp, int lane, const BulkShape& shape, SharedPlace source, int unit,
                 Clock clock) {
  Cta& cta = *source.cta;
  check_extent(lane, shared_extent(shape), source);
  for_each_run(shape, source.address(), [&](uint32_t offset, uint32_t bytes) {
    const uint8_t* const state = source.state() + offset;
    if (!all_valid(state, bytes)) {
      const uint8_t* const bad =
          std::find_if(state, state + bytes, [](uint8_t s) { return s != VALID; });
      const bool in_flight = *bad == IN_FLIGHT;
      const SharedPlace at{&cta, source.offset + offset + static_cast<uint32_t>(bad - state)};
      cta.report(Severity::Error, warp, lane, in_flight ? "in-flight" : "uninitialised",
                 std::string("a bulk copy reads shared memory at offset ") +
                     std::to_string(at.offset) +
                     (in_flight ? ", which an asynchronous copy is writing"
                                : ", which nothing has written"),
                 at.address());
    }
    RaceDetector* races = cta.races();
    if (races == nullptr) return;
    const Accessor who{warp.agent(), lane, warp.pc()};
    const Race race = races->async_read(who, unit, clock, source.race_offset() + offset, bytes);
    if (race.found) {
      cta.report_race(warp, lane, race, false, false,
                      what("a bulk copy", bytes, {&cta, source.offset + offset}),
                      source.address() + offset);
    }
  });
}

class Load : public AsyncOperation {
 public:
  Load(Warp& warp, int lane, BulkShape shape, std::vector<BulkTarget> targets)
      : AsyncOperation(warp, lane),
        shape_(std::move(shape)),
        targets_(std::move(targets)),
        issued_(warp.cta().time()) {}

  bool step() override {
    const BulkTarget& target = targets_[next_];
    GlobalMemory& memory = *warp().cta().launch().memory;
    std::vector<uint8_t> row(shape_.piece_bytes);
    for (const BulkShape::Piece& piece : shape_.pieces) {
      fill(row, piece);
      if (piece.begin < piece.end) {
        const Buffer* buffer = memory.find(piece.address);
        std::memcpy(row.data() + piece.begin, buffer->host + (piece.address - buffer->base),
                    piece.end - piece.begin);
      }
      for_each_unit(shape_, piece, target.data, [&](uint8_t* at, uint32_t from, uint32_t count) {
        std::memcpy(at, row.data() + from, count);
      });
    }
    close_destination(*this, shape_, target);
    if (next_ == 0) trace(*this, issued_, shape_.bytes, "load");
    return ++next_ == targets_.size();
  }

 private:
  void fill(std::vector<uint8_t>& row, const BulkShape::Piece& piece) const {
    if (piece.begin == 0 && piece.end == shape_.piece_bytes) return;
    if (!shape_.nan_fill) {
      std::fill(row.begin(), row.end(), uint8_t{0});
      return;
    }
    for (size_t i = 0; i < row.size(); i += 2) std::memcpy(&row[i], &NAN_FILL, 2);
  }

  BulkShape shape_;
  std::vector<BulkTarget> targets_;
  uint64_t issued_;
  size_t next_ = 0;
};

class Exchange : public AsyncOperation {
 public:
  Exchange(Warp& warp, int lane, SharedPlace source, BulkShape shape, BulkTarget target)
      : AsyncOperation(warp, lane),
        source_(source),
        shape_(std::move(shape)),
        target_(target),
        issued_(warp.cta().time()) {}

  bool step() override {
    const auto bytes = static_cast<uint32_t>(shape_.bytes);
    std::memcpy(target_.data.bytes(), source_.bytes(), bytes);
    const Clock clock = target_.barrier.cta->mbarriers().serial(target_.barrier.offset);
    close_destination(*this, shape_, target_);
    if (RaceDetector* races = source_.cta->races()) {
      races->reads_landed(target_.unit, clock, source_.race_offset(), bytes);
    }
    trace(*this, issued_, shape_.bytes, "to another CTA");
    return true;
  }

 private:
  SharedPlace source_;
  BulkShape shape_;
  BulkTarget target_;
  uint64_t issued_;
};

class Delivery : public AsyncOperation {
 public:
  Delivery(Warp& warp, int lane, BulkShape shape, std::function<std::vector<uint8_t>()> make,
           std::vector<BulkTarget> targets, const char* name)
      : AsyncOperation(warp, lane),
        shape_(std::move(shape)),
        make_(std::move(make)),
        targets_(std::move(targets)),
        name_(name),
        issued_(warp.cta().time()) {}

  bool step() override {
    if (next_ == 0) {
      content_ = make_();
      trace(*this, issued_, shape_.bytes, name_);
    }
    const BulkTarget& target = targets_[next_];
    std::memcpy(target.data.bytes(), content_.data(), content_.size());
    close_destination(*this, shape_, target);
    return ++next_ == targets_.size();
  }

 private:
  BulkShape shape_;
  std::function<std::vector<uint8_t>()> make_;
  std::vector<BulkTarget> targets_;
  const char* name_;
  uint64_t issued_;
  size_t next_ = 0;
  std::vector<uint8_t> content_;
};

}  // namespace

void start_bulk_load(Warp& warp, int lane, BulkShape shape, std::vector<BulkTarget> targets) {
  for (const BulkShape::Piece& piece : shape.pieces) {
    if (piece.begin < piece.end) {
      locate_global_range(warp, lane, piece.address, piece.end - piece.begin, false);
    }
  }
  open_targets(warp, lane, shape, targets);
  warp.cta().cluster().start(
      std::make_shared<Load>(warp, lane, std::move(shape), std::move(targets)));
}

void start_bulk_delivery(Warp& warp, int lane, uint32_t bytes,
                         std::function<std::vector<uint8_t>()> make,
                         std::vector<BulkTarget> targets, const char* name) {
  BulkShape shape = flat_shape(0, bytes);
  open_targets(warp, lane, shape, targets);
  warp.cta().cluster().start(std::make_shared<Delivery>(warp, lane, std::move(shape),
                                                        std::move(make), std::move(targets), name));
}

void start_bulk_exchange(Warp& warp, int lane, SharedPlace source, uint32_t bytes,
                         BulkTarget target) {
  BulkShape shape = flat_shape(0, bytes);
  target.unit = target.barrier.cta->mbarriers().subscribe(warp, lane, target.barrier.offset);
  open_source(warp, lane, shape, source, target.unit, RaceDetector::UNFINISHED);
  open_destination(warp, lane, shape, target);
  warp.cta().cluster().start(
      std::make_shared<Exchange>(warp, lane, source, std::move(shape), target));
}

// ---- Stores ----

class BulkQueue::Store : public AsyncOperation {
 public:
  Store(Warp& warp, int lane, BulkShape shape, SharedPlace source,
        std::optional<AtomicUpdate> update, Clock sequence)
      : AsyncOperation(warp, lane),
        shape_(std::move(shape)),
        source_(source),
        update_(update),
        sequence_(sequence),
        issued_(warp.cta().time()) {}

  bool has_read() const { return has_read_; }
  Clock sequence() const { return sequence_; }

  // The first step reads the source, the second writes the destination.
  bool step() override {
    if (!has_read_) {
      staged_.resize(shape_.pieces.size() * shape_.piece_bytes);
      uint8_t* to = staged_.data();
      for (const BulkShape::Piece& piece : shape_.pieces) {
        for_each_unit(shape_, piece, source_, [&](const uint8_t* at, uint32_t from, uint32_t n) {
          std::memcpy(to + from, at, n);
        });
        to += shape_.piece_bytes;
      }
      has_read_ = true;
      return false;
    }
    const uint8_t* from = staged_.data();
    for (const BulkShape::Piece& piece : shape_.pieces) {
      if (piece.begin < piece.end) write(piece, from + piece.begin);
      from += shape_.piece_bytes;
    }
    staged_.clear();
    trace(*this, issued_, shape_.bytes, "store");
    return true;
  }

 private:
  void write(const BulkShape::Piece& piece, const uint8_t* from) {
    Buffer* buffer = warp().cta().launch().memory->find(piece.address);
    const uint64_t offset = piece.address - buffer->base;
    const uint32_t bytes = piece.end - piece.begin;
    uint8_t* const to = buffer->host + offset;
    if (!update_) {
      std::memcpy(to, from, bytes);
    } else {
      for (uint32_t b = 0; b < bytes; b += shape_.element_bytes) {
        uint64_t old = 0, x = 0;
        std::memcpy(&old, to + b, shape_.element_bytes);
        std::memcpy(&x, from + b, shape_.element_bytes);
        const uint64_t result = apply_atomic(*update_, old, x, 0);
        std::memcpy(to + b, &result, shape_.element_bytes);
      }
    }
    if (!buffer->state.empty()) std::memset(buffer->state.data() + offset, VALID, bytes);
  }

  BulkShape shape_;
  SharedPlace source_;
  std::optional<AtomicUpdate> update_;
  Clock sequence_;
  uint64_t issued_;
  bool has_read_ = false;
  std::vector<uint8_t> staged_;
};

void start_bulk_store(Warp& warp, int lane, BulkShape shape, SharedPlace source,
                      std::optional<AtomicUpdate> update) {
  BulkQueue& queue = warp.bulk();
  Cta& cta = warp.cta();
  RaceDetector* races = cta.races();
  const Clock sequence = queue.next_sequence();
  const bool again = !update && queue.repeats(shape, source);
  for (const BulkShape::Piece& piece : shape.pieces) {
    const uint32_t bytes = piece.end - piece.begin;
    if (bytes == 0) continue;
    locate_global_range(warp, lane, piece.address, bytes, true);
    if (races == nullptr) continue;
    const Accessor who{warp.agent(), lane, warp.pc()};
    const Race race = races->global_async_write(who, queue.write_unit(), sequence, piece.address,
                                                bytes, update.has_value());
    if (race.found) {
      // Lanes that all start the same store write the same bytes.
      const bool benign = again && race.other_wrote && race.other_cluster < 0 &&
                          race.other_agent == queue.write_unit();
      cta.report_race(warp, lane, race, true, benign,
                      cta.launch().memory->describe(piece.address, bytes), piece.address);
    }
    if (!update) cta.log_access(who, piece.address, bytes, true);
  }
  open_source(warp, lane, shape, source, races != nullptr ? queue.read_unit() : -1, sequence);
  auto store =
      std::make_shared<BulkQueue::Store>(warp, lane, std::move(shape), source, update, sequence);
  queue.add(store);
  cta.cluster().start(store);
}

BulkQueue::~BulkQueue() = default;

bool BulkQueue::repeats(const BulkShape& shape, SharedPlace source) {
  Latest issued{warp_.pc(), warp_.cta().time(), source.offset, shape.pieces};
  const bool same = issued.pc == latest_.pc && issued.time == latest_.time &&
                    issued.source == latest_.source && issued.pieces == latest_.pieces;
  latest_ = std::move(issued);
  return same;
}

int BulkQueue::read_unit() {
  if (read_unit_ < 0) read_unit_ = warp_.cta().races()->add_unit();
  return read_unit_;
}

int BulkQueue::write_unit() {
  if (write_unit_ < 0) write_unit_ = warp_.cta().races()->add_unit();
  return write_unit_;
}

void BulkQueue::add(std::shared_ptr<Store> store) { entries_.push_back({std::move(store)}); }

void BulkQueue::commit(uint32_t mask) {
  for (Entry& entry : entries_) {
    if (!(mask >> entry.store->lane() & 1)) continue;
    if (entry.committed) ++entry.age;
    entry.committed = true;
  }
}

void BulkQueue::wait(uint32_t mask, uint32_t groups, bool read_only) {
  Cluster& cluster = warp_.cta().cluster();
  for (Entry& entry : entries_) {
    if (!(mask >> entry.store->lane() & 1) || !entry.committed || entry.age < groups) continue;
    if (!entry.store->has_read()) cluster.advance(*entry.store);
    if (!read_only) cluster.finish(*entry.store);
    entry.read_known = true;
  }
  if (RaceDetector* races = warp_.cta().races(); races != nullptr && !entries_.empty()) {
    Clock read = sequence_;
    for (const Entry& entry : entries_) {
      if (!entry.read_known) read = std::min(read, entry.store->sequence() - 1);
    }
    races->unit_done(read_unit(), read, warp_.agent());
  }
  if (read_only) return;
  std::erase_if(entries_, [&](const Entry& entry) {
    return (mask >> entry.store->lane() & 1) && entry.committed && entry.age >= groups;
  });
  if (RaceDetector* races = warp_.cta().races(); races != nullptr && write_unit_ >= 0) {
    Clock written = sequence_;
    for (const Entry& entry : entries_) written = std::min(written, entry.store->sequence() - 1);
    races->unit_done(write_unit_, written, warp_.agent());
  }
}

void BulkQueue::check_exit(uint32_t mask) {
  for (Entry& entry : entries_) {
    if (entry.read_known || !(mask >> entry.store->lane() & 1)) continue;
    warp_.cta().report_at(
        entry.store->pc(), Severity::Error, warp_, entry.store->lane(), "pending-copy",
        entry.committed ? "a bulk copy still reads shared memory at the thread's exit: no "
                          "cp.async.bulk.wait_group covers it"
                        : "a bulk copy is in no group at the thread's exit: no "
                          "cp.async.bulk.commit_group and wait_group follow it");
    entry.read_known = true;
  }
}

}  // namespace archflash::sim
