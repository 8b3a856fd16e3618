// The memories of a simulated GPU with a shadow: which bytes exist, may be written, hold a value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/load/program.h"

namespace archflash::sim {

// What the shadow knows of one byte.
enum ByteState : uint8_t {
  UNINITIALISED = 0,
  VALID = 1,
  IN_FLIGHT = 2,  // an asynchronous copy that has not been waited for
  GAP = 3,        // inside a buffer's extent, but no element of the tensor
  MBARRIER = 4,   // part of an mbarrier object
};

// Generic addresses: each space has a window of its own; 0 is in none of them.
constexpr uint64_t SHARED_WINDOW = uint64_t{1} << 40;
constexpr uint64_t LOCAL_WINDOW = uint64_t{2} << 40;
constexpr uint64_t PARAM_WINDOW = uint64_t{3} << 40;
constexpr uint64_t CONST_WINDOW = uint64_t{4} << 40;
constexpr uint64_t WINDOW_BYTES = uint64_t{1} << 40;
// Global buffers: one slot of 64 GB each, so that what lies before and behind a buffer is nobody's.
constexpr uint64_t GLOBAL_BASE = uint64_t{1} << 45;
constexpr int GLOBAL_SLOT_LOG2 = 36;
constexpr uint64_t GLOBAL_RED_ZONE = uint64_t{1} << 20;
constexpr size_t GLOBAL_SLOTS = 512;

// Shared memory begins here: a null pointer is outside, as on a card, whose first KB is reserved.
constexpr uint32_t SHARED_START = 1024;
// In a cluster, shared addresses carry the rank of their CTA from this bit on.
constexpr int CLUSTER_RANK_SHIFT = 24;

struct Buffer {
  std::string name;
  uint8_t* host = nullptr;
  uint64_t base = 0;  // its simulated address
  uint64_t bytes = 0;
  bool writable = false;
  std::vector<uint8_t> state;  // ByteState of each byte; empty: all VALID
};

// The buffers that a launch may touch. Filled before launches; during one only bytes change.
class GlobalMemory {
 public:
  // Registers `bytes` bytes at `host`; returns their simulated address, which is congruent to the
  // host's modulo 16. `initialised`: they hold values. Throws LoadError when there are too many.
  uint64_t add(std::string name, uint8_t* host, uint64_t bytes, bool writable, bool initialised);
  // Likewise in a given slot: those from GLOBAL_SLOTS / 2 on belong to a module's own variables.
  uint64_t add_at(size_t slot, std::string name, uint8_t* host, uint64_t bytes, bool writable,
                  bool initialised);
  // Forbids all bytes of a buffer, and allows some again: `length` bytes from each of `starts` on.
  void forbid(uint64_t base);
  void allow(uint64_t base, const std::vector<uint64_t>& starts, uint64_t length, bool initialised);
  void remove(uint64_t base);

  Buffer* find(uint64_t address) {
    const uint64_t slot = (address - GLOBAL_BASE) >> GLOBAL_SLOT_LOG2;
    return slot < buffers_.size() && buffers_[slot].bytes > 0 ? &buffers_[slot] : nullptr;
  }
  // "16 bytes at q+4096, which has 4096 bytes" and the like, for a report.
  std::string describe(uint64_t address, uint64_t bytes);
  std::vector<Buffer>& buffers() { return buffers_; }

 private:
  std::vector<Buffer> buffers_;
};

// Whether all of `bytes` bytes hold a value.
inline bool all_valid(const uint8_t* state, uint32_t bytes) {
  for (; bytes >= 8; bytes -= 8, state += 8) {
    uint64_t word;
    __builtin_memcpy(&word, state, 8);
    if (word != 0x0101010101010101u) return false;
  }
  for (uint32_t i = 0; i < bytes; ++i) {
    if (state[i] != VALID) return false;
  }
  return true;
}

}  // namespace archflash::sim
