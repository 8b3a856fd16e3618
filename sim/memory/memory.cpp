#include "sim/memory/memory.h"

#include <algorithm>
#include <cstring>

namespace archflash::sim {
namespace {

constexpr uint64_t USE_BYTES = 4;  // of a buffer, for which `uses` has one byte

}  // namespace

uint64_t GlobalMemory::add(std::string name, uint8_t* host, uint64_t bytes, bool writable,
                           bool initialised) {
  size_t slot = 0;
  while (slot < buffers_.size() && buffers_[slot].base != 0) ++slot;
  if (slot >= GLOBAL_SLOTS / 2) throw LoadError("too many global buffers are registered");
  add_at(slot, std::move(name), host, bytes, writable, initialised);
  return buffers_[slot].base;
}

uint64_t GlobalMemory::add_at(size_t slot, std::string name, uint8_t* host, uint64_t bytes,
                              bool writable, bool initialised) {
  if (bytes >= (uint64_t{1} << GLOBAL_SLOT_LOG2) - 2 * GLOBAL_RED_ZONE) {
    throw LoadError("buffer " + name + " of " + std::to_string(bytes) + " bytes is too large");
  }
  if (slot >= buffers_.size()) buffers_.resize(slot + 1);
  Buffer& buffer = buffers_[slot];
  buffer.name = std::move(name);
  buffer.host = host;
  buffer.bytes = bytes;
  buffer.writable = writable;
  buffer.base = GLOBAL_BASE + (static_cast<uint64_t>(slot) << GLOBAL_SLOT_LOG2) + GLOBAL_RED_ZONE +
                reinterpret_cast<uintptr_t>(host) % 16;
  buffer.state.clear();
  buffer.uses.clear();
  if (!initialised) buffer.state.assign(bytes, UNINITIALISED);
  return buffer.base;
}

void GlobalMemory::forbid(uint64_t base) {
  Buffer* buffer = find(base);
  if (buffer == nullptr) throw LoadError("no buffer at the address given");
  buffer->state.assign(buffer->bytes, GAP);
}

void GlobalMemory::allow(uint64_t base, const std::vector<uint64_t>& starts, uint64_t length,
                         bool initialised) {
  Buffer* buffer = find(base);
  if (buffer == nullptr || buffer->state.empty()) {
    throw LoadError("no buffer with forbidden bytes at the address given");
  }
  for (const uint64_t start : starts) {
    if (start > buffer->bytes || length > buffer->bytes - start) {
      throw LoadError("a row of buffer " + buffer->name + " lies outside it");
    }
    std::memset(buffer->state.data() + start, initialised ? VALID : UNINITIALISED, length);
  }
}

void GlobalMemory::remove(uint64_t base) {
  const uint64_t slot = (base - GLOBAL_BASE) >> GLOBAL_SLOT_LOG2;
  if (slot < buffers_.size()) buffers_[slot] = Buffer();
}

void GlobalMemory::begin_launch(bool early) {
  // The end of a launch that has waited for the one before it tells the end of that one, too, and
  // so does its start of this one if it had waited by then.
  const bool waited = has_waited_.exchange(false);
  const bool at_start = !lets_start_unwaited_.exchange(false) && waited;
  unknown_long_before_ = early && (unknown_long_before_ || (unknown_before_ && !waited));
  unknown_before_ = early && (!any_launch_ || (unknown_before_ && waited && !at_start));
  any_launch_ = true;
  constexpr uint8_t USES = LaunchUse::READ | LaunchUse::WRITTEN;
  for (Buffer& buffer : buffers_) {
    if (!early) buffer.uses.clear();
    for (uint8_t& use : buffer.uses) {
      const int before = use >> LaunchUse::BEFORE & USES;
      const int now = (use & USES) | (waited && !at_start ? before : 0);
      const int long_before = (use >> LaunchUse::LONG_BEFORE & USES) | (waited ? 0 : before);
      use = static_cast<uint8_t>(now << LaunchUse::BEFORE | long_before << LaunchUse::LONG_BEFORE);
    }
  }
}

bool GlobalMemory::conflicts(Buffer& buffer, uint64_t offset, uint64_t bytes, bool writes,
                             bool waited) const {
  if (unknown_long_before_ || (unknown_before_ && !waited)) return true;
  if (buffer.uses.empty()) return false;
  const int kinds = writes ? LaunchUse::READ | LaunchUse::WRITTEN : LaunchUse::WRITTEN;
  const int mask = kinds << LaunchUse::LONG_BEFORE | (waited ? 0 : kinds << LaunchUse::BEFORE);
  for (uint64_t i = offset / USE_BYTES; i <= (offset + bytes - 1) / USE_BYTES; ++i) {
    if (std::atomic_ref(buffer.uses[i]).load(std::memory_order_relaxed) & mask) return true;
  }
  return false;
}

void GlobalMemory::note_use(Buffer& buffer, uint64_t offset, uint64_t bytes, uint8_t use) {
  for (uint64_t i = offset / USE_BYTES; i <= (offset + bytes - 1) / USE_BYTES; ++i) {
    const std::atomic_ref byte(buffer.uses[i]);
    if ((byte.load(std::memory_order_relaxed) & use) != use) {
      byte.fetch_or(use, std::memory_order_relaxed);
    }
  }
}

std::string GlobalMemory::describe(uint64_t address, uint64_t bytes) {
  std::string text = std::to_string(bytes) + " bytes at ";
  const uint64_t slot = (address - GLOBAL_BASE) >> GLOBAL_SLOT_LOG2;
  if (slot < buffers_.size() && buffers_[slot].base != 0) {
    const Buffer& buffer = buffers_[slot];
    const auto offset = static_cast<int64_t>(address - buffer.base);
    return text + buffer.name + (offset < 0 ? "" : "+") + std::to_string(offset) +
           " (the buffer has " + std::to_string(buffer.bytes) + ")";
  }
  return text + "an address that is in no registered buffer";
}

}  // namespace archflash::sim
