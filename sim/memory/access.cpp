#include "sim/memory/access.h"

#include <bit>
#include <cstdio>
#include <cstring>

#include "sim/memory/transactions.h"
#include "sim/run/cluster.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

constexpr const char* ACCESSES = "accesses shared memory of";

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

bool is_read(Access access) {
  return access == Access::Read || access == Access::StrongRead || access == Access::MatrixLoad;
}

const char* verb(Access access) {
  return is_read(access) ? "reads" : access == Access::Atomic ? "updates" : "writes";
}

[[noreturn]] void misaligned(int lane, Access access, uint32_t bytes, uint64_t address) {
  throw Fault{"misaligned",
              std::string(verb(access)) + " " + std::to_string(bytes) + " bytes at " +
                  hex(address) + ", which is not a multiple of " + std::to_string(bytes),
              lane, address};
}

// Reports the first of these bytes that does not hold a value, unless nothing reads what is loaded
// from it.
void report_state(Warp& warp, int lane, const uint8_t* state, uint32_t bytes,
                  const std::string& what, uint64_t address) {
  const Instruction& instruction = warp.cta().kernel().code[warp.pc()];
  uint32_t at = 0;
  while (at < bytes && (state[at] == VALID || (instruction.unused != 0 &&
                                               instruction.unused >> (at / instruction.bytes) & 1)))
    ++at;
  if (at == bytes) return;
  if (state[at] == MBARRIER) {
    warp.cta().report(Severity::Error, warp, lane, "mbarrier",
                      "reads " + what + ", which are part of an mbarrier object", address + at);
  } else if (state[at] == IN_FLIGHT) {
    warp.cta().report(
        Severity::Error, warp, lane, "in-flight",
        "reads " + what + ", which an asynchronous copy that has not been waited for is writing",
        address + at);
  } else {
    warp.cta().report(Severity::Error, warp, lane, "uninitialised",
                      "reads " + what + ", which nothing has written", address + at);
  }
}

std::string shared_name(uint64_t address, uint32_t bytes) {
  const uint64_t in_window = address & ((uint64_t{1} << CLUSTER_RANK_SHIFT) - 1);
  return std::to_string(bytes) + " bytes of shared memory at offset " +
         std::to_string(in_window - SHARED_START);
}

// The CTA in whose shared memory an address lies: the lane's own or, with `cluster`, another one.
Cta& shared_owner(Warp& warp, int lane, uint64_t address, bool cluster) {
  Cta& cta = warp.cta();
  const uint64_t rank = address >> CLUSTER_RANK_SHIFT;
  if (rank == static_cast<uint64_t>(cta.rank())) return cta;
  if (!cluster || rank >= static_cast<uint64_t>(cta.cluster().size())) {
    if (cta.cluster().size() == 1) return cta;  // the caller finds it out of bounds there
    throw Fault{"out-of-bounds",
                "the shared address " + hex(address) +
                    (cluster ? " is in no CTA of the cluster" : " is not in this CTA"),
                lane, address};
  }
  Cta& owner = cta.cluster().cta(static_cast<int>(rank));
  cta.cluster().lifetimes().check_use(warp, lane, owner, ACCESSES, address);
  return owner;
}

uint8_t* locate_shared(Warp& warp, int lane, uint64_t address, uint32_t bytes, Access access,
                       bool cluster) {
  Cta& cta = warp.cta();
  Cta& owner = shared_owner(warp, lane, address, cluster);
  const uint64_t offset = address - owner.shared_base();
  if (offset >= owner.shared_bytes() || bytes > owner.shared_bytes() - offset) {
    throw Fault{"out-of-bounds",
                std::string(verb(access)) + " " + std::to_string(bytes) +
                    " bytes of shared memory at offset " +
                    std::to_string(static_cast<int64_t>(offset)) + " of " +
                    std::to_string(owner.shared_bytes()),
                lane, address};
  }
  if (address % bytes != 0) misaligned(lane, access, bytes, address);
  if (&owner != &cta) cta.cluster().lifetimes().note_access(warp, lane, owner, ACCESSES, address);
  const auto at = static_cast<uint32_t>(offset);
  if (access != Access::Write && access != Access::Copy) {
    if (!all_valid(owner.shared_state() + at, bytes)) [[unlikely]] {
      report_state(warp, lane, owner.shared_state() + at, bytes, shared_name(address, bytes),
                   address);
    }
    if (RaceDetector* races = cta.races()) {
      const Accessor who{warp.agent(), lane, warp.pc()};
      const uint32_t place = owner.race_base() + at;
      const Race race = access == Access::Read         ? races->read(who, place, bytes)
                        : access == Access::MatrixLoad ? races->matrix_load(who, place, bytes)
                        : access == Access::StrongRead ? races->strong_load(who, place, bytes)
                                                       : races->atomic(who, place, bytes);
      if (race.found) [[unlikely]] {
        cta.report_race(warp, lane, race, access == Access::Atomic, false,
                        shared_name(address, bytes), address);
      }
    }
  }
  return owner.shared() + at;
}

// What launches that overlap do with global memory.
void check_launches(Warp& warp, int lane, Buffer& buffer, uint64_t address, uint64_t bytes,
                    bool reads, bool writes) {
  Cta& cta = warp.cta();
  GlobalMemory& memory = *cta.launch().memory;
  const uint64_t offset = address - buffer.base;
  if (cta.launch().starts_early && cta.races() != nullptr) {
    const bool waited = cta.cluster().has_waited_for_launch(warp);
    if (memory.conflicts(buffer, offset, bytes, writes, waited)) {
      std::string message = (writes ? "writes " : "reads ") + memory.describe(address, bytes);
      message += writes ? ", which an earlier launch may still use"
                        : ", which an earlier launch may still write";
      message += waited
                     ? ": the launch before this one has not waited for it by griddepcontrol.wait"
                     : ": no griddepcontrol.wait comes first";
      cta.report(Severity::Error, warp, lane, "launch-overlap", std::move(message), address);
    }
  }
  if (cta.launch().next_starts_early && buffer.writable) {
    const int use = (reads ? LaunchUse::READ : 0) | (writes ? LaunchUse::WRITTEN : 0);
    GlobalMemory::note_use(buffer, offset, bytes, static_cast<uint8_t>(use));
  }
}

// The buffer that holds these bytes of global memory. `doing` is a verb, for the message.
Buffer& buffer_of(Warp& warp, int lane, uint64_t address, uint64_t bytes, const char* doing) {
  GlobalMemory& memory = *warp.cta().launch().memory;
  Buffer* buffer = memory.find(address);
  if (buffer == nullptr || address - buffer->base >= buffer->bytes ||
      bytes > buffer->bytes - (address - buffer->base)) {
    throw Fault{"out-of-bounds", doing + (' ' + memory.describe(address, bytes)), lane, address};
  }
  return *buffer;
}

// Checks what may be done with bytes of a buffer: an input is not written, and what is read holds
// values.
void check_buffer(Warp& warp, int lane, Buffer& buffer, uint64_t address, uint64_t bytes,
                  bool reads, bool writes, const char* doing) {
  const auto sentence = [&](const char* end) {
    return doing + (' ' + warp.cta().launch().memory->describe(address, bytes)) + end;
  };
  if (writes && !buffer.writable) {
    throw Fault{"read-only", sentence(", which is an input"), lane, address};
  }
  if (!buffer.state.empty()) {
    const uint8_t* const state = buffer.state.data() + (address - buffer.base);
    if (std::memchr(state, GAP, bytes) != nullptr) {
      throw Fault{"out-of-bounds", sentence(", which lies between the tensor's rows"), lane,
                  address};
    }
    const auto count = static_cast<uint32_t>(bytes);
    if (reads && !all_valid(state, count)) {
      report_state(warp, lane, state, count, warp.cta().launch().memory->describe(address, bytes),
                   address);
    }
  }
  if (warp.cta().launch().overlaps) [[unlikely]] {
    check_launches(warp, lane, buffer, address, bytes, reads, writes);
  }
}

uint8_t* locate_global(Warp& warp, int lane, uint64_t address, uint32_t bytes, Access access) {
  Cta& cta = warp.cta();
  Buffer& buffer = buffer_of(warp, lane, address, bytes, verb(access));
  if (address % bytes != 0) misaligned(lane, access, bytes, address);
  check_buffer(warp, lane, buffer, address, bytes, access != Access::Write, !is_read(access),
               verb(access));
  if (buffer.writable && cta.races() != nullptr && access != Access::Write) {
    const Accessor who{warp.agent(), lane, warp.pc()};
    if (is_read(access)) cta.log_access(who, address, bytes, false);
    Race race;
    if (access == Access::Read) race = cta.races()->global_read(who, address, bytes);
    if (access == Access::StrongRead) {
      race = cta.races()->global_strong_read(who, address, bytes);
    }
    if (access == Access::Atomic) race = cta.races()->global_atomic(who, address, bytes);
    if (race.found) {
      cta.report_race(warp, lane, race, access == Access::Atomic, false,
                      cta.launch().memory->describe(address, bytes), address);
    }
  }
  return buffer.host + (address - buffer.base);
}

uint8_t* locate_local(Warp& warp, int lane, uint64_t address, uint32_t bytes, Access access) {
  Cta& cta = warp.cta();
  const uint64_t size = cta.kernel().local_bytes;
  if (address >= size || bytes > size - address) {
    throw Fault{"out-of-bounds",
                std::string(verb(access)) + " " + std::to_string(bytes) +
                    " bytes of local memory at " + std::to_string(address) + " of " +
                    std::to_string(size),
                lane, address};
  }
  if (address % bytes != 0) misaligned(lane, access, bytes, address);
  uint8_t* state = cta.local_state(warp.index(), lane) + address;
  if (access != Access::Write && !all_valid(state, bytes)) {
    report_state(warp, lane, state, bytes,
                 std::to_string(bytes) + " bytes of local memory at " + std::to_string(address),
                 address);
  }
  return cta.local(warp.index(), lane) + address;
}

uint8_t* locate_constant(const uint8_t* bytes_at, uint64_t size, const char* name, int lane,
                         uint64_t address, uint32_t bytes, Access access) {
  if (!is_read(access)) {
    throw Fault{"read-only", std::string("writes to ") + name, lane, address};
  }
  if (address >= size || bytes > size - address) {
    throw Fault{"out-of-bounds",
                "reads " + std::to_string(bytes) + " bytes of " + name + " at " +
                    std::to_string(static_cast<int64_t>(address)) + " of " + std::to_string(size),
                lane, address};
  }
  if (address % bytes != 0) misaligned(lane, access, bytes, address);
  return const_cast<uint8_t*>(bytes_at) + address;
}

Space space_of(uint64_t& address, int lane, Access access, uint32_t bytes) {
  if (address >= GLOBAL_BASE) return Space::Global;
  static const struct {
    uint64_t window;
    Space space;
  } WINDOWS[] = {{SHARED_WINDOW, Space::Shared},
                 {LOCAL_WINDOW, Space::Local},
                 {PARAM_WINDOW, Space::Param},
                 {CONST_WINDOW, Space::Const}};
  for (const auto& row : WINDOWS) {
    if (address - row.window < WINDOW_BYTES) {
      address -= row.window;
      return row.space;
    }
  }
  throw Fault{"out-of-bounds",
              std::string(verb(access)) + " " + std::to_string(bytes) + " bytes at the address " +
                  hex(address) + ", which is in no memory",
              lane, address};
}

// The common case of `locate`, where every lane is in order. Returns false if the lanes must be
// looked at one by one.
bool locate_shared_at_once(Warp& warp, uint32_t mask, const uint32_t* base, uint32_t offset,
                           uint32_t bytes, Access access, Located& located) {
  Cta& cta = warp.cta();
  if (cta.races() != nullptr && access != Access::Write && access != Access::Copy) return false;
  if (bytes > cta.shared_bytes()) return false;
  const auto highest = static_cast<uint32_t>(cta.shared_bytes() - bytes);
  const uint32_t start = cta.shared_base();
  uint32_t addresses[LANES];
  uint32_t wrong = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    addresses[lane] = base[lane] + offset;
    const uint32_t bad = (addresses[lane] - start > highest) | (addresses[lane] & (bytes - 1));
    wrong |= mask >> lane & 1 ? bad : 0;
  }
  if (wrong != 0) return false;
  const bool reads = access != Access::Write && access != Access::Copy;
  uint8_t* const memory = cta.shared();
  const uint8_t* const state = cta.shared_state();
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const uint32_t at = addresses[lane] - start;
    if (reads && !all_valid(state + at, bytes)) return false;
    located.where[lane] = memory + at;
    located.address[lane] = addresses[lane];
    located.space[lane] = Space::Shared;
  }
  count_shared(warp, addresses, mask, bytes);
  return true;
}

}  // namespace

void locate(Warp& warp, uint32_t mask, const Address& operand, uint32_t bytes, Access access,
            Located& located) {
  uint32_t shared_lanes = 0, global_lanes = 0, local_lanes = 0;
  uint32_t shared_offsets[LANES];
  const Space space = operand.space;
  if (space == Space::Shared && !operand.wide &&
      locate_shared_at_once(warp, mask, warp.lanes<const uint32_t>(operand.base),
                            static_cast<uint32_t>(operand.offset), bytes, access, located)) {
    return;
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    uint64_t address = operand.of_lane(warp, lane);
    const Space actual = space == Space::Generic ? space_of(address, lane, access, bytes) : space;
    located.address[lane] = address;
    located.space[lane] = actual;
    switch (actual) {
      case Space::SharedCluster:
      case Space::Shared:
        located.space[lane] = Space::Shared;
        located.where[lane] =
            locate_shared(warp, lane, address, bytes, access, space != Space::Shared);
        shared_lanes |= 1u << lane;
        shared_offsets[lane] = static_cast<uint32_t>(address);
        break;
      case Space::Global:
      case Space::Generic:
        located.where[lane] = locate_global(warp, lane, address, bytes, access);
        global_lanes |= 1u << lane;
        break;
      case Space::Local:
        located.where[lane] = locate_local(warp, lane, address, bytes, access);
        local_lanes |= 1u << lane;
        break;
      case Space::Param: {
        const auto& parameters = warp.cta().launch().parameters;
        located.where[lane] = locate_constant(parameters.data(), parameters.size(),
                                              "the parameters", lane, address, bytes, access);
        break;
      }
      case Space::Const: {
        const auto& memory = warp.cta().launch().module->const_memory;
        located.where[lane] = locate_constant(memory.data(), memory.size(), "constant memory", lane,
                                              address, bytes, access);
        break;
      }
    }
  }
  if (shared_lanes != 0) count_shared(warp, shared_offsets, shared_lanes, bytes);
  if (local_lanes != 0) count_local(warp, local_lanes, bytes);
  if (global_lanes != 0) count_global(warp, located.address, global_lanes, bytes);
}

namespace {

// The CTA of a shared address that has been located.
Cta& owner_of(Cta& cta, uint64_t address) {
  const auto rank = static_cast<int>(address >> CLUSTER_RANK_SHIFT);
  return rank == cta.rank() ? cta : cta.cluster().cta(rank);
}

void mark_valid(Warp& warp, int lane, Cta& owner, uint32_t offset, uint32_t bytes,
                uint64_t address) {
  uint8_t* const state = owner.shared_state() + offset;
  if (owner.mbarriers().any() && std::memchr(state, MBARRIER, bytes) != nullptr) [[unlikely]] {
    warp.cta().report(Severity::Error, warp, lane, "mbarrier",
                      "writes " + shared_name(address, bytes) +
                          ", which are part of an mbarrier object: it must be invalidated first",
                      address);
  }
  std::memset(state, VALID, bytes);
  if (owner.has_tiles()) owner.set_tile(offset, bytes, {});
}

}  // namespace

SharedPlace locate_object(Warp& warp, int lane, const Address& operand, uint32_t bytes,
                          uint32_t align) {
  const Space space = operand.space;
  uint64_t address = operand.of_lane(warp, lane);
  if (space == Space::Generic && space_of(address, lane, Access::Read, bytes) != Space::Shared) {
    throw Fault{"out-of-bounds", "the address " + hex(address) + " is not in shared memory", lane,
                address};
  }
  Cta& owner = shared_owner(warp, lane, address, space != Space::Shared);
  const uint64_t at = address - owner.shared_base();
  if (at >= owner.shared_bytes() || bytes > owner.shared_bytes() - at) {
    throw Fault{"out-of-bounds",
                std::to_string(bytes) + " bytes of shared memory at offset " +
                    std::to_string(static_cast<int64_t>(at)) + " of " +
                    std::to_string(owner.shared_bytes()),
                lane, address};
  }
  if (address % align != 0) {
    throw Fault{
        "misaligned",
        "the shared address " + hex(address) + " is not a multiple of " + std::to_string(align),
        lane, address};
  }
  return {&owner, static_cast<uint32_t>(at)};
}

const uint8_t* locate_generic(Warp& warp, int lane, uint64_t address, uint32_t bytes,
                              uint32_t align) {
  const Space space = space_of(address, lane, Access::Read, bytes);
  if (space != Space::Global && space != Space::Param && space != Space::Const) {
    throw Fault{
        "out-of-bounds",
        "the address " + hex(address) + " is in none of global, constant and parameter memory",
        lane, address};
  }
  const auto piece = [&](uint64_t at) -> const uint8_t* {
    if (space == Space::Global) return locate_global(warp, lane, at, align, Access::Read);
    const bool param = space == Space::Param;
    const auto& memory =
        param ? warp.cta().launch().parameters : warp.cta().launch().module->const_memory;
    return locate_constant(memory.data(), memory.size(),
                           param ? "the parameters" : "constant memory", lane, at, align,
                           Access::Read);
  };
  const uint8_t* const first = piece(address);
  for (uint32_t at = align; at < bytes; at += align) piece(address + at);
  return first;
}

uint8_t* locate_global_range(Warp& warp, int lane, uint64_t address, uint64_t bytes, bool writes) {
  Cta& cta = warp.cta();
  const char* const doing = writes ? "writes" : "reads";
  Buffer& buffer = buffer_of(warp, lane, address, bytes, doing);
  check_buffer(warp, lane, buffer, address, bytes, !writes, writes, doing);
  if (!writes && buffer.writable && cta.races() != nullptr) {
    const Accessor who{warp.agent(), lane, warp.pc()};
    const auto count = static_cast<uint32_t>(bytes);
    cta.log_access(who, address, count, false);
    const Race race = cta.races()->global_async_read(who, address, count);
    if (race.found) {
      cta.report_race(warp, lane, race, false, false, cta.launch().memory->describe(address, bytes),
                      address);
    }
  }
  return buffer.host + (address - buffer.base);
}

void note_write(Warp& warp, const Located& located, int lane, uint32_t bytes, const uint8_t* data,
                Writing writing) {
  Cta& cta = warp.cta();
  const uint64_t address = located.address[lane];
  if (located.space[lane] == Space::Local) {
    std::memset(cta.local_state(warp.index(), lane) + address, VALID, bytes);
    return;
  }
  RaceDetector* races = cta.races();
  const Accessor who{warp.agent(), lane, warp.pc()};
  const bool strong = writing == Writing::Strong;
  // Two plain writes of the same value do no harm.
  const auto is_benign = [&](const Race& race) {
    return !strong && race.other_wrote && std::memcmp(located.where[lane], data, bytes) == 0;
  };
  if (located.space[lane] == Space::Shared) {
    Cta& owner = owner_of(cta, address);
    const auto offset = static_cast<uint32_t>(address - owner.shared_base());
    if (races != nullptr) {
      const uint32_t place = owner.race_base() + offset;
      const Race race = strong                         ? races->atomic(who, place, bytes)
                        : writing == Writing::ByMatrix ? races->matrix_store(who, place, bytes)
                                                       : races->write(who, place, bytes);
      if (race.found) [[unlikely]] {
        cta.report_race(warp, lane, race, true, is_benign(race), shared_name(address, bytes),
                        address);
      }
    }
    mark_valid(warp, lane, owner, offset, bytes, address);
    return;
  }
  GlobalMemory& memory = *cta.launch().memory;
  Buffer* buffer = memory.find(address);
  if (!buffer->state.empty())
    std::memset(buffer->state.data() + (address - buffer->base), VALID, bytes);
  if (races == nullptr) return;
  const Race race =
      strong ? races->global_atomic(who, address, bytes) : races->global_write(who, address, bytes);
  if (race.found) [[unlikely]] {
    cta.report_race(warp, lane, race, true, is_benign(race), memory.describe(address, bytes),
                    address);
  }
  if (!strong) cta.log_access(who, address, bytes, true);
}

const uint8_t* locate_part(Warp& warp, int lane, const Address& operand, uint32_t align,
                           uint32_t bytes) {
  const uint64_t address = operand.of_lane(warp, lane);
  if (address % align != 0) misaligned(lane, Access::Read, align, address);
  // The length may be no power of two, so that each byte is looked up.
  const uint8_t* first = locate_global(warp, lane, address, 1, Access::Read);
  for (uint32_t i = 1; i < bytes; ++i) locate_global(warp, lane, address + i, 1, Access::Read);
  return first;
}

}  // namespace archflash::sim
