// Finding the bytes that the lanes of an instruction access, with every check on the way.
#pragma once

#include <cstdint>

#include "sim/run/cta.h"
#include "sim/run/warp.h"

namespace archflash::sim {

enum class Access : uint8_t {
  Read,
  MatrixLoad,  // by several lanes: ldmatrix
  Write,       // races are checked by the caller once it has the data
  StrongRead,  // volatile, relaxed or acquiring: does not race with strong writes
  Atomic,      // reads and writes
  Copy,        // the destination of an asynchronous copy
};

struct Located {
  uint8_t* where[LANES];    // host bytes, of the active lanes
  uint64_t address[LANES];  // as the program names them, within `space`
  Space space[LANES];       // never Generic
};

// Locates `bytes` bytes for each lane of `mask` at base + offset; checks bounds and alignment
// (throws Fault), and for reads initialisation and races (reports). Counts transactions and bank
// conflicts.
void locate(Warp& warp, const Instruction& instruction, uint32_t mask, Ref base, int64_t offset,
            bool wide_address, Space space, uint32_t bytes, Access access, Located& located);

// A place in the shared memory of a CTA of the cluster.
struct SharedPlace {
  Cta* cta;
  uint32_t offset;

  uint32_t address() const { return cta->shared_base() + offset; }
  uint32_t race_offset() const { return cta->race_base() + offset; }
  uint8_t* bytes() const { return cta->shared() + offset; }
  uint8_t* state() const { return cta->shared_state() + offset; }
};

// `bytes` bytes of shared memory at a lane's base + offset, a multiple of `align`; with space
// Shared in the CTA's own. Throws Fault; checks neither races nor what the bytes hold.
SharedPlace locate_object(Warp& warp, int lane, Ref base, int64_t offset, bool wide_address,
                          Space space, uint32_t bytes, uint32_t align);

// `bytes` bytes at a lane's generic address, a multiple of `align` as `bytes` is, for reading
// something of one piece: a tensor map.
const uint8_t* locate_generic(Warp& warp, int lane, uint64_t address, uint32_t bytes,
                              uint32_t align);

// Any number of bytes of global memory that an asynchronous operation reads or writes. Checks
// bounds, state, and the races of a read.
uint8_t* locate_global_range(Warp& warp, int lane, uint64_t address, uint64_t bytes, bool writes);

// Checks one lane's write for races and marks the bytes as valid. `data` is what will be written;
// `by_matrix`: by stmatrix, for several lanes.
void note_write(Warp& warp, const Located& located, int lane, uint32_t bytes, const uint8_t* data,
                bool by_matrix = false);

// Likewise for volatile, relaxed and releasing writes, which do not race with each other.
void note_strong_write(Warp& warp, const Located& located, int lane, uint32_t bytes);

// The source of a copy that reads only `bytes` bytes of a piece that is aligned as a whole.
const uint8_t* locate_bytes(Warp& warp, int lane, Ref base, int64_t offset, bool wide_address,
                            uint32_t aligned, uint32_t bytes);

// Wavefronts of shared memory that `bytes` bytes (4, 8 or 16; less counts as 4) at each active
// lane's offset take; `ideal`: without conflicts.
uint32_t bank_wavefronts(const uint32_t* offsets, uint32_t mask, uint32_t bytes, uint32_t& ideal);

}  // namespace archflash::sim
