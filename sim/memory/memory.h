// The memories of a simulated GPU. A shadow has the state of each byte: whether it exists, may be
// written, holds a value.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "sim/load/program.h"

namespace archflash::sim {

// The state of one byte.
enum ByteState : uint8_t {
  UNINITIALISED = 0,
  VALID = 1,
  IN_FLIGHT = 2,  // an asynchronous copy writes it and has not been waited for
  GAP = 3,        // it lies inside a buffer, but between the tensor's elements
  MBARRIER = 4,   // part of an mbarrier object
};

// Each space has a window of generic addresses; 0 is in none of them.
constexpr uint64_t SHARED_WINDOW = uint64_t{1} << 40;
constexpr uint64_t LOCAL_WINDOW = uint64_t{2} << 40;
constexpr uint64_t PARAM_WINDOW = uint64_t{3} << 40;
constexpr uint64_t CONST_WINDOW = uint64_t{4} << 40;
constexpr uint64_t WINDOW_BYTES = uint64_t{1} << 40;
// Each global buffer has a slot of 64 GB, so that the addresses before and behind it belong to
// none.
constexpr uint64_t GLOBAL_BASE = uint64_t{1} << 45;
constexpr int GLOBAL_SLOT_LOG2 = 36;
constexpr uint64_t GLOBAL_RED_ZONE = uint64_t{1} << 20;
constexpr size_t GLOBAL_SLOTS = 512;

// Shared memory begins here, so that a null pointer lies outside. A card reserves the first KB,
// too.
constexpr uint32_t SHARED_START = 1024;
// In a cluster, shared addresses carry the rank of their CTA from this bit on.
constexpr int CLUSTER_RANK_SHIFT = 24;

struct Buffer {
  std::string name;
  uint8_t* host = nullptr;
  uint64_t base = 0;  // its simulated address
  uint64_t bytes = 0;
  bool writable = false;
  std::vector<uint8_t> state;  // the ByteState of each byte; empty: all are VALID
  // For each 4 bytes of a writable buffer, what launches do there that the next one may overlap
  // with: bits of LaunchUse. Empty: nothing.
  std::vector<uint8_t> uses;
};

// Bits for this launch, the one before it, and those before that one.
struct LaunchUse {
  static constexpr uint8_t READ = 1, WRITTEN = 2;
  static constexpr int BEFORE = 2, LONG_BEFORE = 4;  // shifts
};

// The buffers that a launch may use. They are added before launches; during a launch only their
// bytes change.
class GlobalMemory {
 public:
  // Registers `bytes` bytes at `host` and returns their simulated address, which is congruent to
  // the host's modulo 16. `initialised` says that they hold values. Throws LoadError if there are
  // too many buffers.
  uint64_t add(std::string name, uint8_t* host, uint64_t bytes, bool writable, bool initialised);
  // Registers them in a given slot. The slots from GLOBAL_SLOTS / 2 on belong to a module's own
  // variables.
  uint64_t add_at(size_t slot, std::string name, uint8_t* host, uint64_t bytes, bool writable,
                  bool initialised);
  // forbid makes all bytes of a buffer a GAP. allow takes `length` bytes from each of `starts` on
  // out of it again.
  void forbid(uint64_t base);
  void allow(uint64_t base, const std::vector<uint64_t>& starts, uint64_t length, bool initialised);
  void remove(uint64_t base);

  Buffer* find(uint64_t address) {
    const uint64_t slot = (address - GLOBAL_BASE) >> GLOBAL_SLOT_LOG2;
    return slot < buffers_.size() && buffers_[slot].bytes > 0 ? &buffers_[slot] : nullptr;
  }
  // ---- Launches that overlap ----
  // A launch begins. With `early` it may start while the launch before it still runs, which, for
  // the first one, may have used any byte. Until griddepcontrol.wait nothing tells that it is over.
  void begin_launch(bool early);
  void note_wait() { has_waited_.store(true, std::memory_order_relaxed); }
  // A CTA lets the next launch start, and has not waited for the one before: when the next one
  // starts, that one may still run.
  void note_early_start() { lets_start_unwaited_.store(true, std::memory_order_relaxed); }
  // Whether an access of the launch is in conflict with one of an earlier launch that may still
  // run; `waited`: after griddepcontrol.wait.
  bool conflicts(Buffer& buffer, uint64_t offset, uint64_t bytes, bool writes, bool waited) const;
  // Notes an access of this launch, with which the next one may overlap.
  static void note_use(Buffer& buffer, uint64_t offset, uint64_t bytes, uint8_t use);

  // "16 bytes at q+4096, which has 4096 bytes" and the like, for a report.
  std::string describe(uint64_t address, uint64_t bytes);
  std::vector<Buffer>& buffers() { return buffers_; }

 private:
  std::vector<Buffer> buffers_;
  bool any_launch_ = false;
  // Whether a launch is not known that may run until this one has waited, or even then; whether a
  // CTA of the latest launch has executed griddepcontrol.wait, and launch_dependents before it.
  bool unknown_before_ = false, unknown_long_before_ = false;
  std::atomic<bool> has_waited_{false}, lets_start_unwaited_{false};
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
