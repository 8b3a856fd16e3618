#include "sim/race.h"

#include <algorithm>

namespace archflash::sim {

void Knowledge::join(const Knowledge& other) {
  if (other.empty()) return;
  if (empty()) {
    *this = other;
    return;
  }
  for (size_t i = 0; i < general.size(); ++i) {
    general[i] = std::max(general[i], other.general[i]);
    async[i] = std::max(async[i], other.async[i]);
  }
}

RaceDetector::RaceDetector(int warps, uint64_t shared_bytes, int granule_log2)
    : warps_(warps),
      agents_(2 * warps),
      shift_(granule_log2),
      known_(static_cast<size_t>(warps)),
      copies_synced_(static_cast<size_t>(warps)),
      fenced_(static_cast<size_t>(warps)),
      pending_(static_cast<size_t>(warps)),
      writes_((shared_bytes >> granule_log2) + 1),
      reads_(((shared_bytes >> granule_log2) + 1) * static_cast<size_t>(warps)) {
  for (int w = 0; w < warps; ++w) {
    Knowledge& knowledge = known_[static_cast<size_t>(w)];
    knowledge.general.assign(static_cast<size_t>(agents_), 0);
    knowledge.async.assign(static_cast<size_t>(agents_), 0);
    knowledge.general[static_cast<size_t>(w)] = 1;
    fenced_[static_cast<size_t>(w)] = knowledge;
  }
}

// Agents are warps here. What another lane of the same warp did counts only from before the warp's
// last synchronisation, which is what its clock counts.
bool RaceDetector::ordered_after_write(const Accessor& who, const Write& write) const {
  const auto warp = static_cast<size_t>(who.agent);
  const Clock known = known_[warp].general[write.agent];
  if (write.agent == who.agent) return write.clock < known || write.lane == who.lane;
  if (write.agent == copy_agent(who.agent) && write.lane != who.lane) {
    return write.clock <= copies_synced_[warp];
  }
  return write.clock <= known;
}

Race RaceDetector::check_write(const Accessor& who, const Write& last) const {
  Race race;
  if (last.clock == 0 || ordered_after_write(who, last)) return race;
  race.found = true;
  race.other_wrote = true;
  race.same_warp = warp_of(last.agent) == who.agent;
  race.other_agent = last.agent;
  race.other_lane = last.lane;
  race.other_pc = last.pc;
  return race;
}

Race RaceDetector::check_readers(const Accessor& who, const uint32_t* readers) const {
  Race race;
  const std::vector<Clock>& known = known_[static_cast<size_t>(who.agent)].general;
  for (int w = 0; w < warps_; ++w) {
    const uint32_t read = readers[w];
    if (read == 0) continue;
    const Clock clock = read >> LANE_BITS;
    const uint32_t lane = read & ((1u << LANE_BITS) - 1);
    const bool ordered = w == who.agent
                             ? clock < known[static_cast<size_t>(w)] ||
                                   lane == static_cast<uint32_t>(who.lane) || lane == ALL_TOGETHER
                             : clock <= known[static_cast<size_t>(w)];
    if (ordered) continue;
    race.found = true;
    race.same_warp = w == who.agent;
    race.other_agent = w;
    race.other_lane = lane == MANY_LANES ? -1 : static_cast<int>(lane);
    return race;
  }
  return race;
}

Race RaceDetector::read(const Accessor& who, uint32_t offset, uint32_t bytes) {
  return mark_read(who, offset, bytes, static_cast<uint32_t>(who.lane));
}

Race RaceDetector::collective_read(const Accessor& who, uint32_t offset, uint32_t bytes) {
  return mark_read(who, offset, bytes, ALL_TOGETHER);
}

Race RaceDetector::mark_read(const Accessor& who, uint32_t offset, uint32_t bytes, uint32_t lane) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  const uint32_t mark = now << LANE_BITS | lane;
  const uint32_t last = (offset + bytes - 1) >> shift_;
  uint32_t* reader =
      &reads_[static_cast<size_t>(offset >> shift_) * static_cast<size_t>(warps_) + warp];
  for (uint32_t g = offset >> shift_; g <= last; ++g, reader += warps_) {
    const Write& write = writes_[g];
    if (!ordered_after_write(who, write) && !race.found) race = check_write(who, write);
    const uint32_t earlier = *reader;
    *reader = earlier == mark || earlier >> LANE_BITS != now ||
                      earlier == (now << LANE_BITS | ALL_TOGETHER)
                  ? mark
                  : now << LANE_BITS | MANY_LANES;
  }
  return race;
}

Race RaceDetector::write(const Accessor& who, uint32_t offset, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found) race = check_write(who, writes_[g]);
    if (!race.found)
      race = check_readers(who, &reads_[static_cast<size_t>(g) * static_cast<size_t>(warps_)]);
    writes_[g] = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 0, who.pc};
  }
  return race;
}

Race RaceDetector::atomic(const Accessor& who, uint32_t offset, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found && !writes_[g].atomic) race = check_write(who, writes_[g]);
    if (!race.found)
      race = check_readers(who, &reads_[static_cast<size_t>(g) * static_cast<size_t>(warps_)]);
    writes_[g] = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 1, who.pc};
  }
  return race;
}

Race RaceDetector::strong_load(const Accessor& who, uint32_t offset, uint32_t bytes) {
  Race race;
  const uint32_t last = (offset + bytes - 1) >> shift_;
  for (uint32_t g = offset >> shift_; g <= last; ++g) {
    if (!race.found && !writes_[g].atomic) race = check_write(who, writes_[g]);
  }
  return race;
}

Race RaceDetector::copy(int warp, int lane, uint32_t pc, Clock sequence, uint32_t offset,
                        uint32_t bytes) {
  Race race;
  const Accessor who{warp, lane, pc};
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

Race RaceDetector::global_write(const Accessor& who, uint64_t address, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  for (uint64_t g = address / 2; g <= (address + bytes - 1) / 2; ++g) {
    GlobalCell& cell = global_[g];
    if (!race.found && cell.written) race = check_write(who, cell.write);
    if (!race.found && !cell.readers.empty()) race = check_readers(who, cell.readers.data());
    cell.written = true;
    cell.write = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 0, who.pc};
  }
  return race;
}

Race RaceDetector::global_read(const Accessor& who, uint64_t address, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  for (uint64_t g = address / 2; g <= (address + bytes - 1) / 2; ++g) {
    GlobalCell& cell = global_[g];
    if (!race.found && cell.written) race = check_write(who, cell.write);
    if (cell.readers.empty()) cell.readers.assign(static_cast<size_t>(warps_), 0);
    uint32_t& reader = cell.readers[warp];
    const uint32_t mark = now << LANE_BITS | static_cast<uint32_t>(who.lane);
    reader = reader == mark || reader >> LANE_BITS != now ? mark : now << LANE_BITS | MANY_LANES;
  }
  return race;
}

Race RaceDetector::global_atomic(const Accessor& who, uint64_t address, uint32_t bytes) {
  Race race;
  const auto warp = static_cast<size_t>(who.agent);
  const Clock now = known_[warp].general[warp];
  for (uint64_t g = address / 2; g <= (address + bytes - 1) / 2; ++g) {
    GlobalCell& cell = global_[g];
    if (!race.found && cell.written && !cell.write.atomic) race = check_write(who, cell.write);
    if (!race.found && !cell.readers.empty()) race = check_readers(who, cell.readers.data());
    cell.written = true;
    cell.write = {now, static_cast<uint16_t>(who.agent), static_cast<uint8_t>(who.lane), 1, who.pc};
  }
  return race;
}

void RaceDetector::warp_sync(int warp) {
  const auto w = static_cast<size_t>(warp);
  ++known_[w].general[w];
  copies_synced_[w] = known_[w].general[static_cast<size_t>(copy_agent(warp))];
}

void RaceDetector::copies_done(int warp, Clock sequence) {
  Clock& known = known_[static_cast<size_t>(warp)].general[static_cast<size_t>(copy_agent(warp))];
  known = std::max(known, sequence);
}

void RaceDetector::release(int warp, Knowledge& into) {
  into.join(known_[static_cast<size_t>(warp)]);
  warp_sync(warp);
}

void RaceDetector::acquire(int warp, const Knowledge& from) {
  known_[static_cast<size_t>(warp)].join(from);
}

void RaceDetector::fence(int warp) {
  const auto w = static_cast<size_t>(warp);
  known_[w].join(pending_[w]);
  pending_[w] = {};
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
  Knowledge& knowledge = known_[static_cast<size_t>(warp)];
  knowledge.async = knowledge.general;
}

}  // namespace archflash::sim
