// What every access is checked against, and the accesses of threads.
#include "sim/memory/race.h"

#include <algorithm>
#include <bit>

#include "sim/memory/memory.h"

namespace archflash::sim {
namespace {

// A race that only ldmatrix or stmatrix makes is looked beyond: it must not hide another one.
bool is_settled(const Race& race) { return race.found && !race.by_matrix; }
void keep_worst(Race& race, const Race& other) {
  if (!race.found || (other.found && !other.by_matrix)) race = other;
}

}  // namespace

RaceDetector::RaceDetector(int warps, int warps_of_cta, uint64_t shared_bytes, int granule_log2,
                           bool matrix_reads, int32_t cluster, GlobalOrder& global)
    : warps_(warps),
      warps_of_cta_(warps_of_cta),
      agents_(3 * warps),
      shift_(granule_log2),
      cluster_(cluster),
      global_(global),
      shared_variables_(granule_log2, false),
      known_(static_cast<size_t>(warps)),
      lanes_synced_(static_cast<size_t>(warps), 1),
      returned_(static_cast<size_t>(warps)),
      copies_synced_(static_cast<size_t>(warps)),
      fenced_(static_cast<size_t>(warps)),
      pending_(static_cast<size_t>(warps)),
      writes_((shared_bytes >> granule_log2) + 1),
      reads_(((shared_bytes >> granule_log2) + 1) * static_cast<size_t>(warps)),
      readers_((shared_bytes >> granule_log2) + 1),
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
    // Without a fence a relaxed release tells its cluster no more than that the warp has started.
    auto& fenced = fenced_[static_cast<size_t>(w)];
    fenced[0] = fenced[1] = std::make_shared<const Knowledge>(knowledge);
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
  race.by_scope = is_executed(who, last.agent, last.clock);
  race.other_agent = last.agent;
  race.other_lane = last.lane & ~FOR_OTHERS;
  race.other_pc = last.pc;
  return race;
}

// Whether an access that is not in order has happened before all the same: what is missing is a
// scope.
bool RaceDetector::is_executed(const Accessor& who, int agent, Clock clock) const {
  const std::vector<Clock>& executed = known_[static_cast<size_t>(who.agent)].executed;
  return agent != who.agent && static_cast<size_t>(agent) < executed.size() &&
         clock <= executed[static_cast<size_t>(agent)];
}

// Inlined because most reads are none, or are in order.
void RaceDetector::check_reader(const Accessor& who, int w, uint32_t read, bool strong,
                                Race& race) const {
  if (read == 0 || (strong && (read & STRONG))) return;
  const Knowledge& known = known_[static_cast<size_t>(who.agent)];
  const auto mine = static_cast<uint32_t>(who.lane & ~FOR_OTHERS);
  const Clock clock = read >> LANE_BITS;
  const uint32_t lane = read & (STRONG - 1);
  const bool ordered =
      w == who.agent ? (lane == mine && who.lane < FOR_OTHERS) || before_in_warp(w, clock, lane)
                     : known_of(known, w, clock, lane);
  // What has read needs no scope: the value was there before the release.
  if (ordered || is_executed(who, w, clock)) return;
  race.found = true;
  race.same_warp = w == who.agent;
  race.by_matrix = race.same_warp
                       ? lane == BY_MATRIX || lane == mine
                       : lane == BY_MATRIX && clock <= known.general[static_cast<size_t>(w)];
  race.other_agent = w;
  race.other_lane = lane >= LANES_OF_WARP ? -1 : static_cast<int>(lane);
}

Race RaceDetector::check_readers(const Accessor& who, uint32_t granule, bool strong) const {
  Race race;
  const uint32_t* const reads = &reads_[static_cast<size_t>(granule) * static_cast<size_t>(warps_)];
  for (uint32_t left = readers_[granule]; left != 0 && !is_settled(race); left &= left - 1) {
    const int w = std::countr_zero(left);
    check_reader(who, w, reads[w], strong, race);
  }
  for (int w = 32; w < warps_ && !is_settled(race); ++w) {
    check_reader(who, w, reads[w], strong, race);
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
  const uint32_t bit = warp < 32 ? 1U << warp : 0;
  uint32_t* reader =
      &reads_[static_cast<size_t>(offset >> shift_) * static_cast<size_t>(warps_) + warp];
  for (uint32_t g = offset >> shift_; g <= last; ++g, reader += warps_) {
    const Write& write = writes_[g];
    const bool no_conflict = (lane & STRONG) != 0 && write.atomic;
    if (!no_conflict && !is_settled(race) && !ordered_for_every_lane(who, write)) {
      keep_worst(race, check_write(who, write));
    }
    mark(*reader, now, lane);
    readers_[g] |= bit;
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
      keep_worst(race, check_readers(who, g));
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
    if (!race.found) race = check_readers(who, g, true);
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
    if (!race.found) race = check_readers(who, g);
    writes_[g] = {sequence, static_cast<uint16_t>(copy_agent(warp)), static_cast<uint8_t>(lane), 0,
                  pc};
  }
  return race;
}

// ---- Global memory ----

Race RaceDetector::check_global_write(const Accessor& who, const GlobalOrder::Place& last,
                                      bool async) const {
  if (last.cluster == cluster_ || last.write.clock == 0) return check_write(who, last.write);
  Race race;
  const Knowledge& known = known_[static_cast<size_t>(who.agent)];
  const int agent = last.write.agent;
  if (known.others.covers(last.cluster, agent, last.write.clock)) {
    if (!async || known.others_async.covers(last.cluster, agent, last.write.clock)) return race;
    race.proxy = true;
  }
  race.found = race.other_wrote = true;
  race.other_cluster = last.cluster;
  race.other_agent = agent;
  race.other_lane = last.write.lane & ~FOR_OTHERS;
  race.other_pc = last.write.pc;
  return race;
}

Race RaceDetector::check_global_readers(const Accessor& who, const GlobalOrder::Cell& cell,
                                        bool strong) const {
  Race race;
  if (cell.readers == nullptr) return race;
  for (const GlobalOrder::Reader& reader : *cell.readers) {
    if (reader.cluster == cluster_) {
      check_reader(who, reader.warp, reader.read, strong, race);
    } else if (!strong || !(reader.read & STRONG)) {
      const OtherClusters& others = known_[static_cast<size_t>(who.agent)].others;
      if (others.covers(reader.cluster, reader.warp, reader.read >> LANE_BITS)) continue;
      race.found = true;
      race.other_cluster = reader.cluster;
      race.other_agent = reader.warp;
      race.other_lane = -1;
    }
    if (is_settled(race)) break;
  }
  return race;
}

bool RaceDetector::has_seen(int warp, const GlobalOrder::Place& last) const {
  const auto& pending = pending_[static_cast<size_t>(warp)];
  const size_t agent = last.write.agent;
  if (last.cluster != cluster_)
    return pending.back().others.covers(last.cluster, last.write.agent, last.write.clock);
  return std::any_of(pending.begin(), pending.end(), [&](const Knowledge& knowledge) {
    return agent < knowledge.general.size() && last.write.clock <= knowledge.general[agent];
  });
}

Race RaceDetector::write_global(const Accessor& who, const Write& write, uint64_t address,
                                uint32_t bytes, bool async) {
  Race race;
  const bool atomic = write.atomic != 0;
  global_.for_each_cell(address, bytes, [&](GlobalOrder::Cell& cell) {
    if (!race.found) {
      race = check_global_write(who, cell.plain, async);
      race.by_dependency = race.found && atomic && !async && has_seen(who.agent, cell.plain);
    }
    if (!race.found && !atomic) race = check_global_write(who, cell.atomic, async);
    if (!race.found) race = check_global_readers(who, cell, atomic);
    if (atomic) {
      cell.atomic = {write, cluster_};
      return;
    }
    cell.plain = {write, cluster_};
    cell.atomic = {};
    cell.readers.reset();
  });
  return race;
}

Race RaceDetector::global_write(const Accessor& who, uint64_t address, uint32_t bytes) {
  const auto warp = static_cast<size_t>(who.agent);
  const Write write{known_[warp].general[warp], static_cast<uint16_t>(who.agent),
                    static_cast<uint8_t>(who.lane), 0, who.pc};
  return write_global(who, write, address, bytes, false);
}

Race RaceDetector::global_atomic(const Accessor& who, uint64_t address, uint32_t bytes) {
  const auto warp = static_cast<size_t>(who.agent);
  const Write write{known_[warp].general[warp], static_cast<uint16_t>(who.agent),
                    static_cast<uint8_t>(who.lane), 1, who.pc};
  return write_global(who, write, address, bytes, false);
}

Race RaceDetector::global_async_write(const Accessor& who, int unit, Clock clock, uint64_t address,
                                      uint32_t bytes, bool updates) {
  const Write write{clock, static_cast<uint16_t>(unit), static_cast<uint8_t>(who.lane), updates,
                    who.pc};
  return write_global(who, write, address, bytes, true);
}

Race RaceDetector::global_read(const Accessor& who, uint64_t address, uint32_t bytes) {
  return global_mark_read(who, address, bytes, static_cast<uint32_t>(who.lane), false);
}

Race RaceDetector::global_async_read(const Accessor& who, uint64_t address, uint32_t bytes) {
  return global_mark_read(who, address, bytes, static_cast<uint32_t>(who.lane), true);
}

Race RaceDetector::global_strong_read(const Accessor& who, uint64_t address, uint32_t bytes) {
  return global_mark_read(who, address, bytes, static_cast<uint32_t>(who.lane) | STRONG, false);
}

Race RaceDetector::global_mark_read(const Accessor& who, uint64_t address, uint32_t bytes,
                                    uint32_t lane, bool async) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  global_.for_each_cell(address, bytes, [&](GlobalOrder::Cell& cell) {
    if (!race.found) race = check_global_write(who, cell.plain, async);
    if (!race.found && (lane & STRONG) == 0) race = check_global_write(who, cell.atomic, async);
    if (cell.readers == nullptr)
      cell.readers = std::make_unique<std::vector<GlobalOrder::Reader>>();
    for (GlobalOrder::Reader& reader : *cell.readers) {
      if (reader.cluster != cluster_ || reader.warp != who.agent) continue;
      mark(reader.read, now, lane);
      return;
    }
    cell.readers->push_back({cluster_, who.agent, now << LANE_BITS | lane});
  });
  return race;
}

}  // namespace archflash::sim
