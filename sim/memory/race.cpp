#include "sim/memory/race.h"

#include <algorithm>
#include <bit>

namespace archflash::sim {
namespace {

constexpr uint32_t ALL_LANES = 0xFFFFFFFF, LANES_OF_WARP = 32;

// A race that only ldmatrix or stmatrix makes is looked beyond: it must not hide another one.
bool is_settled(const Race& race) { return race.found && !race.by_matrix; }
void keep_worst(Race& race, const Race& other) {
  if (!race.found || (other.found && !other.by_matrix)) race = other;
}

}  // namespace

void Knowledge::join(const Knowledge& other) {
  if (other.empty()) return;
  if (empty()) {
    *this = other;
    return;
  }
  if (general.size() < other.general.size()) {  // this was made before a unit was added
    general.resize(other.general.size());
    async.resize(other.async.size());
  }
  if (parts.size() < other.parts.size()) parts.resize(other.parts.size());
  for (size_t w = 0; w < other.parts.size(); ++w) {
    const Part& theirs = other.parts[w];
    Part& part = parts[w];
    if (part.whole >= other.general[w]) continue;
    if (theirs.whole >= general[w]) {
      part = theirs;
      continue;
    }
    part.whole = std::max(part.whole, theirs.whole);
    part.lanes |= theirs.lanes;
    if (part.lanes == ALL_LANES) part.whole = std::max(general[w], other.general[w]);
  }
  for (size_t i = 0; i < other.general.size(); ++i) {
    general[i] = std::max(general[i], other.general[i]);
    async[i] = std::max(async[i], other.async[i]);
  }
}

namespace {

constexpr int UNIT_LOG2 = 4;  // wgmma reads at least 16 bytes

}  // namespace

RaceDetector::RaceDetector(int warps, uint64_t shared_bytes, int granule_log2,
                           int global_granule_log2, bool matrix_reads)
    : warps_(warps),
      agents_(3 * warps),
      shift_(granule_log2),
      global_shift_(global_granule_log2),
      known_(static_cast<size_t>(warps)),
      lanes_synced_(static_cast<size_t>(warps), 1),
      returned_(static_cast<size_t>(warps)),
      copies_synced_(static_cast<size_t>(warps)),
      fenced_(static_cast<size_t>(warps)),
      pending_(static_cast<size_t>(warps)),
      writes_((shared_bytes >> granule_log2) + 1),
      reads_(((shared_bytes >> granule_log2) + 1) * static_cast<size_t>(warps)),
      matrix_reads_(matrix_reads ? ((shared_bytes >> UNIT_LOG2) + 1) * static_cast<size_t>(warps)
                                 : 0),
      passed_(static_cast<size_t>(warps)),
      passed_async_(static_cast<size_t>(warps)) {
  for (int w = 0; w < warps; ++w) {
    Knowledge& knowledge = known_[static_cast<size_t>(w)];
    knowledge.general.assign(static_cast<size_t>(agents_), 0);
    knowledge.async.assign(static_cast<size_t>(agents_), 0);
    knowledge.general[static_cast<size_t>(w)] = 1;
    knowledge.parts.resize(static_cast<size_t>(warps));
    fenced_[static_cast<size_t>(w)] = knowledge;
  }
}

bool RaceDetector::known_of(const Knowledge& knowledge, int warp, Clock clock, uint32_t lane) {
  const auto w = static_cast<size_t>(warp);
  if (clock > knowledge.general[w]) return false;
  const Knowledge::Part& part = knowledge.parts[w];
  if (clock <= part.whole) return true;
  // It is not remembered which lanes there were.
  if (lane >= LANES_OF_WARP) return std::popcount(part.lanes) > 1;
  return (part.lanes >> lane & 1) != 0;
}

bool RaceDetector::before_in_warp(int warp, Clock clock, uint32_t lane) const {
  const auto w = static_cast<size_t>(warp);
  if (clock < lanes_synced_[w]) return true;
  const Returned& returned = returned_[w];
  return clock <= returned.clock && lane < LANES_OF_WARP && (returned.lanes >> lane & 1) != 0;
}

// The accessor is a warp. A write of another lane of the same warp is in order only if it was
// before the warp's last synchronisation.
bool RaceDetector::ordered_after_write(const Accessor& who, const Write& write) const {
  const auto warp = static_cast<size_t>(who.agent);
  const Clock known = known_[warp].general[write.agent];
  const bool same_lane = write.lane == who.lane && who.lane < FOR_OTHERS;
  if (write.agent == who.agent) {
    return same_lane || before_in_warp(who.agent, write.clock, write.lane);
  }
  if (write.agent < warps_) return known_of(known_[warp], write.agent, write.clock, write.lane);
  if (write.agent == copy_agent(who.agent) && !same_lane) {
    return write.clock <= copies_synced_[warp];
  }
  return write.clock <= known;
}

// Like ordered_after_write, but also false where the answer depends on the lane.
bool RaceDetector::ordered_for_every_lane(const Accessor& who, const Write& write) {
  Write& passed = passed_[static_cast<size_t>(who.agent)];
  if (write == passed) return true;
  if (write.agent == who.agent || write.agent == copy_agent(who.agent)) return false;
  if (!ordered_after_write(who, write)) return false;
  passed = write;
  return true;
}

// Whether a write that is not in order would be in order if ldmatrix and stmatrix were accesses of
// the lane that gives the address.
bool RaceDetector::is_ordered_but_for_matrix(const Accessor& who, const Write& last) const {
  const Knowledge& known = known_[static_cast<size_t>(who.agent)];
  const int lane = last.lane & ~FOR_OTHERS;
  if (warp_of(last.agent) == who.agent) {
    return lane == (who.lane & ~FOR_OTHERS) &&
           (last.agent == who.agent || last.clock <= known.general[last.agent]);
  }
  return last.agent < warps_ && lane != last.lane &&
         known_of(known, last.agent, last.clock, static_cast<uint32_t>(lane));
}

Race RaceDetector::check_write(const Accessor& who, const Write& last) const {
  Race race;
  if (last.clock == 0 || ordered_after_write(who, last)) return race;
  race.found = true;
  race.other_wrote = true;
  race.same_warp = warp_of(last.agent) == who.agent;
  race.by_matrix = is_ordered_but_for_matrix(who, last);
  race.other_agent = last.agent;
  race.other_lane = last.lane & ~FOR_OTHERS;
  race.other_pc = last.pc;
  return race;
}

Race RaceDetector::check_readers(const Accessor& who, const uint32_t* readers, bool strong) const {
  Race race;
  const Knowledge& known = known_[static_cast<size_t>(who.agent)];
  const auto mine = static_cast<uint32_t>(who.lane & ~FOR_OTHERS);
  for (int w = 0; w < warps_ && !is_settled(race); ++w) {
    const uint32_t read = readers[w];
    if (read == 0 || (strong && (read & STRONG))) continue;
    const Clock clock = read >> LANE_BITS;
    const uint32_t lane = read & (STRONG - 1);
    const bool ordered =
        w == who.agent ? (lane == mine && who.lane < FOR_OTHERS) || before_in_warp(w, clock, lane)
                       : known_of(known, w, clock, lane);
    if (ordered) continue;
    race.found = true;
    race.same_warp = w == who.agent;
    race.by_matrix = race.same_warp
                         ? lane == BY_MATRIX || lane == mine
                         : lane == BY_MATRIX && clock <= known.general[static_cast<size_t>(w)];
    race.other_agent = w;
    race.other_lane = lane >= LANES_OF_WARP ? -1 : static_cast<int>(lane);
  }
  return race;
}

// Checks a read in the async proxy. Writes of warps must be visible there; units write there
// anyway.
Race RaceDetector::check_async(const Accessor& who, const Write& last) {
  Write& passed = passed_async_[static_cast<size_t>(who.agent)];
  if (last == passed) return {};
  Race race = check_write(who, last);
  if (race.found) return race;
  if (last.clock == 0 || last.agent >= 3 * warps_ ||
      last.clock <= known_[static_cast<size_t>(who.agent)].async[last.agent]) {
    if (last.agent != who.agent && last.agent != copy_agent(who.agent)) passed = last;
    return race;
  }
  race.found = race.other_wrote = race.proxy = true;
  race.same_warp = warp_of(last.agent) == who.agent;
  race.other_agent = last.agent;
  race.other_lane = last.lane;
  race.other_pc = last.pc;
  return race;
}

Race RaceDetector::check_unfenced_readers(const Accessor& who, const uint32_t* readers) const {
  Race race;
  const std::vector<Clock>& fenced = known_[static_cast<size_t>(who.agent)].async;
  for (int w = 0; w < warps_; ++w) {
    const uint32_t lane = readers[w] & (STRONG - 1);
    if (readers[w] >> LANE_BITS <= fenced[static_cast<size_t>(w)]) continue;
    race.found = race.proxy = true;
    race.same_warp = w == who.agent;
    race.other_agent = w;
    race.other_lane = lane >= LANES_OF_WARP ? -1 : static_cast<int>(lane);
    break;
  }
  return race;
}

Race RaceDetector::check_async_reads(const Accessor& who, uint32_t offset, uint32_t bytes) const {
  Race race;
  if (unit_reads_.empty() && matrix_reads_.empty()) return race;
  const std::vector<Clock>& known = known_[static_cast<size_t>(who.agent)].general;
  for (const UnitRead& read : unit_reads_) {
    if (offset >= read.end || offset + bytes <= read.begin) continue;
    if (read.clock <= known[static_cast<size_t>(read.unit)]) continue;
    race.found = true;
    race.other_agent = read.unit;
    race.other_lane = read.lane;
    race.other_pc = read.pc;
    return race;
  }
  if (matrix_reads_.empty()) return race;
  const auto warps = static_cast<size_t>(warps_);
  const Clock* const by_agent = &known[static_cast<size_t>(matrix_agent(0))];
  const Clock* read = &matrix_reads_[(offset >> UNIT_LOG2) * warps];
  for (uint32_t unit = offset >> UNIT_LOG2; unit <= (offset + bytes - 1) >> UNIT_LOG2; ++unit) {
    for (size_t w = 0; w < warps; ++w, ++read) {
      if (*read <= by_agent[w]) continue;
      race.found = true;
      race.other_agent = matrix_agent(static_cast<int>(w));
      race.same_warp = static_cast<int>(w) == who.agent;
      race.other_lane = -1;
      return race;
    }
  }
  return race;
}

Race RaceDetector::read(const Accessor& who, uint32_t offset, uint32_t bytes) {
  return mark_read(who, offset, bytes, static_cast<uint32_t>(who.lane));
}

Race RaceDetector::matrix_load(const Accessor& who, uint32_t offset, uint32_t bytes) {
  return mark_read({who.agent, who.lane | FOR_OTHERS, who.pc}, offset, bytes, BY_MATRIX);
}

Race RaceDetector::matrix_store(const Accessor& who, uint32_t offset, uint32_t bytes) {
  return write({who.agent, who.lane | FOR_OTHERS, who.pc}, offset, bytes);
}

// The mark keeps the lane of a warp's reads since its last step, or that there were several lanes.
void RaceDetector::mark(uint32_t& reader, Clock now, uint32_t lane) {
  const uint32_t mark = now << LANE_BITS | lane;
  const uint32_t earlier = reader;
  if (earlier == mark || earlier >> LANE_BITS != now) {
    reader = mark;
  } else if ((earlier ^ mark) == STRONG) {
    reader = mark & ~STRONG;
  } else {
    reader = now << LANE_BITS | (earlier & mark & STRONG) | MANY_LANES;
  }
}

Race RaceDetector::mark_read(const Accessor& who, uint32_t offset, uint32_t bytes, uint32_t lane) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  const uint32_t last = (offset + bytes - 1) >> shift_;
  uint32_t* reader =
      &reads_[static_cast<size_t>(offset >> shift_) * static_cast<size_t>(warps_) + warp];
  for (uint32_t g = offset >> shift_; g <= last; ++g, reader += warps_) {
    const Write& write = writes_[g];
    const bool no_conflict = (lane & STRONG) != 0 && write.atomic;
    if (!no_conflict && !is_settled(race) && !ordered_for_every_lane(who, write)) {
      keep_worst(race, check_write(who, write));
    }
    mark(*reader, now, lane);
  }
  return race;
}

Race RaceDetector::write(const Accessor& who, uint32_t offset, uint32_t bytes) {
  Race race = check_async_reads(who, offset, bytes);
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!is_settled(race)) keep_worst(race, check_write(who, writes_[g]));
    if (!is_settled(race)) {
      keep_worst(race,
                 check_readers(who, &reads_[static_cast<size_t>(g) * static_cast<size_t>(warps_)]));
    }
    writes_[g] = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 0, who.pc};
  }
  return race;
}

Race RaceDetector::atomic(const Accessor& who, uint32_t offset, uint32_t bytes) {
  Race race = check_async_reads(who, offset, bytes);
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found && !writes_[g].atomic) race = check_write(who, writes_[g]);
    if (!race.found)
      race =
          check_readers(who, &reads_[static_cast<size_t>(g) * static_cast<size_t>(warps_)], true);
    writes_[g] = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 1, who.pc};
  }
  return race;
}

Race RaceDetector::strong_load(const Accessor& who, uint32_t offset, uint32_t bytes) {
  return mark_read(who, offset, bytes, static_cast<uint32_t>(who.lane) | STRONG);
}

Race RaceDetector::copy(int warp, int lane, uint32_t pc, Clock sequence, uint32_t offset,
                        uint32_t bytes) {
  const Accessor who{warp, lane, pc};
  Race race = check_async_reads(who, offset, bytes);
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found) race = check_write(who, writes_[g]);
    if (!race.found)
      race = check_readers(who, &reads_[static_cast<size_t>(g) * static_cast<size_t>(warps_)]);
    writes_[g] = {sequence, static_cast<uint16_t>(copy_agent(warp)), static_cast<uint8_t>(lane), 0,
                  pc};
  }
  return race;
}

int RaceDetector::add_unit() {
  for (auto* all : {&known_, &fenced_}) {
    for (Knowledge& knowledge : *all) {
      knowledge.general.push_back(0);
      knowledge.async.push_back(0);
    }
  }
  return agents_++;
}

Race RaceDetector::async_write(const Accessor& who, int unit, uint32_t offset, uint32_t bytes,
                               AsyncWrite kind) {
  Race race = check_async_reads(who, offset, bytes);
  const uint32_t last = (offset + bytes - 1) >> shift_;
  const auto columns = static_cast<size_t>(warps_);
  const uint32_t* passed = nullptr;
  const bool updates = kind == AsyncWrite::Update;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found && !(updates && writes_[g].atomic)) {
      race =
          kind == AsyncWrite::Proxy ? check_async(who, writes_[g]) : check_write(who, writes_[g]);
    }
    const uint32_t* const readers = &reads_[g * columns];
    if (!race.found && (passed == nullptr || !std::equal(readers, readers + columns, passed))) {
      race = check_readers(who, readers, updates);
      if (!race.found && kind == AsyncWrite::Proxy) race = check_unfenced_readers(who, readers);
      passed = readers;
    }
    writes_[g] = {UNFINISHED, static_cast<uint16_t>(unit), static_cast<uint8_t>(who.lane), updates,
                  who.pc};
  }
  return race;
}

void RaceDetector::landed(int unit, Clock clock, uint32_t offset, uint32_t bytes) {
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (writes_[g].agent == unit) writes_[g].clock = clock;
  }
}

Race RaceDetector::async_read(const Accessor& who, int unit, Clock clock, uint32_t offset,
                              uint32_t bytes) {
  Race race;
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last && !race.found; ++g) {
    race = check_async(who, writes_[g]);
  }
  if (unit_reads_.size() >= next_prune_) {
    std::erase_if(unit_reads_, [&](const UnitRead& read) {
      return std::all_of(known_.begin(), known_.end(), [&](const Knowledge& k) {
        return k.general[static_cast<size_t>(read.unit)] >= read.clock;
      });
    });
    next_prune_ = std::max(MIN_UNIT_READS, 2 * unit_reads_.size());
  }
  if (!unit_reads_.empty()) {  // rows of one box that follow one another are one read
    UnitRead& before = unit_reads_.back();
    if (before.unit == unit && before.clock == clock && before.end == offset) {
      before.end = offset + bytes;
      return race;
    }
  }
  unit_reads_.push_back({unit, clock, offset, offset + bytes, who.lane, who.pc});
  return race;
}

Race RaceDetector::matrix_read(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes) {
  Race race;
  const uint32_t last = (offset + bytes - 1) >> shift_;
  const Write& passed = passed_async_[static_cast<size_t>(who.agent)];
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found && !(writes_[g] == passed)) race = check_async(who, writes_[g]);
  }
  note_matrix_read(who, clock, offset, bytes);
  return race;
}

bool RaceDetector::matrix_read_in_order(const Accessor& who, Clock clock, uint32_t offset,
                                        uint32_t bytes) {
  const uint32_t first = offset >> shift_, last = (offset + bytes - 1) >> shift_;
  if (!(writes_[first] == passed_async_[static_cast<size_t>(who.agent)])) return false;
  // All granules must have the same write: each equals the one before it.
  if (std::memcmp(&writes_[first], &writes_[first] + 1, (last - first) * sizeof(Write)) != 0) {
    return false;
  }
  note_matrix_read(who, clock, offset, bytes);
  return true;
}

void RaceDetector::note_matrix_read(const Accessor& who, Clock clock, uint32_t offset,
                                    uint32_t bytes) {
  const auto warps = static_cast<size_t>(warps_), warp = static_cast<size_t>(who.agent);
  for (uint32_t u = offset >> UNIT_LOG2; u <= (offset + bytes - 1) >> UNIT_LOG2; ++u) {
    matrix_reads_[u * warps + warp] = clock;
  }
}

Race RaceDetector::global_async_write(const Accessor& who, int unit, Clock clock, uint64_t address,
                                      uint32_t bytes) {
  const Race race = global_write(who, address, bytes);
  for (uint64_t g = address >> global_shift_; g <= (address + bytes - 1) >> global_shift_; ++g) {
    Write& write = global_[g].write;
    write.clock = clock;
    write.agent = static_cast<uint16_t>(unit);
  }
  return race;
}

void RaceDetector::reads_landed(int unit, Clock clock, uint32_t offset, uint32_t bytes) {
  for (UnitRead& read : unit_reads_) {
    if (read.unit == unit && read.clock == UNFINISHED && read.begin >= offset &&
        read.end <= offset + bytes) {
      read.clock = clock;
    }
  }
}

void RaceDetector::unit_release(int unit, Clock clock, Knowledge& into) {
  const auto u = static_cast<size_t>(unit);
  if (into.general.size() <= u) {
    into.general.resize(static_cast<size_t>(agents_));
    into.async.resize(static_cast<size_t>(agents_));
  }
  into.general[u] = std::max(into.general[u], clock);
  into.async[u] = into.general[u];
}

void RaceDetector::unit_done(int unit, Clock clock, int warp) {
  Knowledge& knowledge = known_[static_cast<size_t>(warp)];
  const auto u = static_cast<size_t>(unit);
  knowledge.general[u] = std::max(knowledge.general[u], clock);
  knowledge.async[u] = knowledge.general[u];
}

Knowledge RaceDetector::known_of_others(int warp) const {
  const auto w = static_cast<size_t>(warp);
  Knowledge knowledge = known_[w];
  knowledge.general[w] = knowledge.async[w] = 0;
  return knowledge;
}

bool RaceDetector::known(int unit, Clock clock) const {
  return std::any_of(known_.begin(), known_.end(), [&](const Knowledge& k) {
    return k.general[static_cast<size_t>(unit)] >= clock;
  });
}

Race RaceDetector::global_write(const Accessor& who, uint64_t address, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  for (uint64_t g = address >> global_shift_; g <= (address + bytes - 1) >> global_shift_; ++g) {
    GlobalCell& cell = global_[g];
    if (!race.found && cell.written) race = check_write(who, cell.write);
    if (!race.found && !cell.readers.empty()) race = check_readers(who, cell.readers.data());
    cell.written = true;
    cell.write = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 0, who.pc};
  }
  return race;
}

Race RaceDetector::global_read(const Accessor& who, uint64_t address, uint32_t bytes) {
  return global_mark_read(who, address, bytes, static_cast<uint32_t>(who.lane));
}

Race RaceDetector::global_strong_read(const Accessor& who, uint64_t address, uint32_t bytes) {
  return global_mark_read(who, address, bytes, static_cast<uint32_t>(who.lane) | STRONG);
}

Race RaceDetector::global_mark_read(const Accessor& who, uint64_t address, uint32_t bytes,
                                    uint32_t lane) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  for (uint64_t g = address >> global_shift_; g <= (address + bytes - 1) >> global_shift_; ++g) {
    GlobalCell& cell = global_[g];
    const bool no_conflict = (lane & STRONG) != 0 && cell.write.atomic;
    if (!race.found && cell.written && !no_conflict) race = check_write(who, cell.write);
    if (cell.readers.empty()) cell.readers.assign(static_cast<size_t>(warps_), 0);
    mark(cell.readers[warp], now, lane);
  }
  return race;
}

Race RaceDetector::global_atomic(const Accessor& who, uint64_t address, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  for (uint64_t g = address >> global_shift_; g <= (address + bytes - 1) >> global_shift_; ++g) {
    GlobalCell& cell = global_[g];
    if (!race.found && cell.written && !cell.write.atomic) race = check_write(who, cell.write);
    if (!race.found && !cell.readers.empty()) race = check_readers(who, cell.readers.data(), true);
    cell.written = true;
    cell.write = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 1, who.pc};
  }
  return race;
}

void RaceDetector::warp_sync(int warp) {
  const auto w = static_cast<size_t>(warp);
  lanes_synced_[w] = ++known_[w].general[w];
  copies_synced_[w] = known_[w].general[static_cast<size_t>(copy_agent(warp))];
}

void RaceDetector::copies_done(int warp, Clock sequence) {
  Clock& known = known_[static_cast<size_t>(warp)].general[static_cast<size_t>(copy_agent(warp))];
  known = std::max(known, sequence);
}

void RaceDetector::release(int warp, Knowledge& into) {
  release_lanes(warp, ALL_LANES, ALL_LANES, into);
}

void RaceDetector::release_lanes(int warp, uint32_t lanes, uint32_t live, Knowledge& into) {
  const auto w = static_cast<size_t>(warp);
  Knowledge& knowledge = known_[w];
  const bool all = (live & ~lanes) == 0;
  knowledge.parts[w] = {all ? knowledge.general[w] : lanes_synced_[w] - 1, lanes | ~live};
  into.join(knowledge);
  if (all)
    warp_sync(warp);
  else
    ++knowledge.general[w];
}

void RaceDetector::acquire(int warp, const Knowledge& from) {
  const auto w = static_cast<size_t>(warp);
  known_[w].join(from);
  const auto copies = static_cast<size_t>(copy_agent(warp));
  if (from.empty()) return;
  copies_synced_[w] = std::max(copies_synced_[w], from.general[copies]);
  // Where the warp's own releases come back to it, its lanes are in order up to those.
  if (from.parts.size() <= w) return;
  const Knowledge::Part& part = from.parts[w];
  lanes_synced_[w] = std::max(lanes_synced_[w], part.whole + 1);
  Returned& returned = returned_[w];
  if (returned.clock < lanes_synced_[w]) returned.lanes = 0;
  if (from.general[w] > part.whole) {
    returned.lanes |= part.lanes;
    returned.clock = std::max(returned.clock, from.general[w]);
  }
}

void RaceDetector::release_fenced(int warp, Knowledge& into) {
  into.join(fenced_[static_cast<size_t>(warp)]);
}

void RaceDetector::acquire_relaxed(int warp, const Knowledge& from) {
  pending_[static_cast<size_t>(warp)].join(from);
}

void RaceDetector::fence(int warp) {
  const auto w = static_cast<size_t>(warp);
  known_[w].join(pending_[w]);
  pending_[w] = {};
  known_[w].parts[w].whole = known_[w].general[w];
  fenced_[w] = known_[w];
  ++known_[w].general[w];
}

void RaceDetector::strong_read(int warp, uint64_t address, bool acquires) {
  const auto found = variables_.find(address);
  if (found == variables_.end()) return;
  const auto w = static_cast<size_t>(warp);
  (acquires ? known_[w] : pending_[w]).join(found->second);
}

void RaceDetector::strong_write(int warp, uint64_t address, bool releases) {
  const auto w = static_cast<size_t>(warp);
  Knowledge& variable = variables_[address];
  if (releases) {
    release(warp, variable);
  } else {
    variable.join(fenced_[w]);
  }
}

void RaceDetector::proxy_fence(int warp) {
  const auto w = static_cast<size_t>(warp);
  known_[w].async = known_[w].general;
  ++known_[w].general[w];  // the fence does not cover later writes
}

}  // namespace archflash::sim
