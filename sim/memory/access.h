// Finds the bytes that the lanes of an instruction access, with every check on the way.
#pragma once

#include <cstdint>

#include "sim/run/cta.h"
#include "sim/run/warp.h"

namespace archflash::sim {

enum class Access : uint8_t {
  Read,
  MatrixLoad,  // ldmatrix, which reads for several lanes
  Write,       // the caller checks for races once it has the data (note_write)
  StrongRead,  // volatile, relaxed or acquiring: it does not race with strong writes
  Atomic,      // reads and writes
  Copy,        // the destination of an asynchronous copy
};

// An address operand: each lane's address is its element of `base` plus `offset`.
struct Address {
  Ref base = NO_REF;
  int64_t offset = 0;
  bool wide = false;  // the elements of `base` have 64 bits, else 32
  Space space = Space::Generic;

  uint64_t of_lane(Warp& warp, int lane) const {
    return wide ? warp.lanes<const uint64_t>(base)[lane] + static_cast<uint64_t>(offset)
                : static_cast<uint32_t>(warp.lanes<const uint32_t>(base)[lane] +
                                        static_cast<uint32_t>(offset));
  }
};

// What `locate` found for the lanes of its mask.
struct Located {
  uint8_t* where[LANES];    // the bytes on the host
  uint64_t address[LANES];  // within `space`
  Space space[LANES];       // never Generic
};

// Locates `bytes` bytes for each lane of `mask`. Checks bounds and alignment (throws Fault) and,
// for reads, that the bytes hold a value and do not race (reports). Counts transactions and bank
// conflicts.
void locate(Warp& warp, uint32_t mask, const Address& address, uint32_t bytes, Access access,
            Located& located);

// A place in the shared memory of a CTA of the cluster.
struct SharedPlace {
  Cta* cta;
  uint32_t offset;

  uint32_t address() const { return cta->shared_base() + offset; }
  uint32_t race_offset() const { return cta->race_base() + offset; }
  uint8_t* bytes() const { return cta->shared() + offset; }
  uint8_t* state() const { return cta->shared_state() + offset; }
};

// Locates an object of `bytes` bytes in shared memory at a lane's address, which must be a multiple
// of `align`. With space Shared it must be in the lane's own CTA. Throws Fault; checks neither
// races nor what the bytes hold.
SharedPlace locate_object(Warp& warp, int lane, const Address& address, uint32_t bytes,
                          uint32_t align);

// Locates an object of `bytes` bytes, such as a tensor map, at a generic address, for reading.
// `bytes` and the address are multiples of `align`.
const uint8_t* locate_generic(Warp& warp, int lane, uint64_t address, uint32_t bytes,
                              uint32_t align);

// Locates any number of bytes of global memory that an asynchronous operation reads or writes.
// Checks bounds and, for a read, that the bytes hold a value and do not race.
uint8_t* locate_global_range(Warp& warp, int lane, uint64_t address, uint64_t bytes, bool writes);

enum class Writing : uint8_t {
  Plain,
  ByMatrix,  // stmatrix, which writes for several lanes
  Strong,    // volatile, relaxed or releasing: it does not race with strong accesses
};

// Checks one lane's write for races and marks the bytes as valid. `data` is what will be written.
void note_write(Warp& warp, const Located& located, int lane, uint32_t bytes, const uint8_t* data,
                Writing writing = Writing::Plain);

// Locates the first `bytes` bytes of a piece of global memory that is aligned to `align`, for
// reading: the source of a copy that reads a part of the piece only.
const uint8_t* locate_part(Warp& warp, int lane, const Address& address, uint32_t align,
                           uint32_t bytes);

}  // namespace archflash::sim
