// The race detector's part for units in the async proxy and for reads of matrix agents.
#include <algorithm>
#include <cstring>

#include "sim/memory/race.h"

namespace archflash::sim {

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

int RaceDetector::add_unit() {
  for (Knowledge& knowledge : known_) {
    knowledge.general.push_back(0);
    knowledge.async.push_back(0);
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
      race = check_readers(who, g, updates);
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

void RaceDetector::reads_landed(int unit, Clock clock, uint32_t offset, uint32_t bytes) {
  for (UnitRead& read : unit_reads_) {
    if (read.unit == unit && read.clock == UNFINISHED && read.begin >= offset &&
        read.end <= offset + bytes) {
      read.clock = clock;
    }
  }
}

}  // namespace archflash::sim
