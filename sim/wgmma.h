// wgmma: matrix products of a warpgroup that read tiles of shared memory through descriptors. Each
// warp carries out its own 16 rows; its products are one pipe, in order.
#pragma once

#include <bit>
#include <cstdint>
#include <deque>
#include <string>

#include "sim/cta.h"
#include "sim/matrix.h"

namespace archflash::sim {

constexpr uint32_t UNIT = 16;       // bytes that lie together, whatever the swizzle
constexpr uint32_t GROUP_ROWS = 8;  // rows of a core matrix

// What a matrix descriptor says.
struct MatrixDescriptor {
  uint32_t start = 0;    // address in the shared window, below 256 KB
  uint32_t leading = 0;  // byte offsets
  uint32_t stride = 0;
  uint32_t base_offset = 0;
  uint32_t span = 0;  // of the swizzle, in bytes; 0: none
  uint32_t mask = 0;  // address bits from 7 on that the swizzle takes
};

// The name of a field that is not as it must be; nullptr: all are.
const char* decode_descriptor(uint64_t bits, MatrixDescriptor& descriptor);

// Where the 16-byte unit of a tile lies, as an address, before and after swizzling. K-major: unit
// `unit` (0 or 1) of row `line`. MN-major: unit `unit` along M or N of row `line` of K.
inline uint32_t tile_place(const MatrixDescriptor& d, bool k_major, uint32_t line, uint32_t unit) {
  const uint32_t in_group = line % GROUP_ROWS, group = line / GROUP_ROWS;
  if (d.span == 0) {
    return k_major ? d.start + in_group * UNIT + group * d.stride + unit * d.leading
                   : d.start + unit * d.stride + in_group * UNIT + group * d.leading;
  }
  if (k_major) return d.start + in_group * d.span + group * d.stride + unit * UNIT;
  const uint32_t along = unit * UNIT;  // the span is a power of two
  return d.start + (along & (d.span - 1)) + (along >> std::countr_zero(d.span)) * d.leading +
         in_group * d.span + group * d.stride;
}
inline uint32_t tile_address(const MatrixDescriptor& d, uint32_t place) {
  return place ^ ((((place >> 7) - d.base_offset) & d.mask) << 4);
}

struct WgmmaShape {
  int n = 0, k = 0;
  ElementType a = ElementType::F16, b = ElementType::F16, d = ElementType::F32;
  bool a_registers = false;
  bool a_k_major = true, b_k_major = true;
  bool negate_a = false, negate_b = false;
  bool satfinite = false;
  int d_registers() const { return d == ElementType::F16 ? n / 4 : n / 2; }
};

// The products of one warp.
class MatrixQueue {
 public:
  explicit MatrixQueue(Warp& warp) : warp_(warp) {}

  // `refs`: d, then a where it is in registers.
  void issue(const WgmmaShape& shape, const Ref* refs, uint64_t a, uint64_t b, bool accumulate);
  void fence() { fenced_ = true; }
  void commit();
  void wait(uint32_t groups);
  bool pending() const { return !entries_.empty(); }
  // An instruction other than wgmma is about to execute.
  void check_registers(uint32_t pc);
  void check_exit();
  // What was issued, to compare the warps of a warpgroup.
  uint64_t history() const { return history_; }

 private:
  struct Entry {
    const WgmmaShape* shape;
    const Ref* refs;
    MatrixDescriptor a, b;
    bool accumulate;
    bool done = false;
    bool committed = false;
    uint32_t age = 0;
    Clock clock;
    uint32_t pc;
    uint64_t issued = 0, ended = 0;  // times, for the trace
  };

  void open(const char* operand, const MatrixDescriptor& descriptor, bool k_major, uint32_t first,
            uint32_t count, int k, ElementType type);
  void check_tile(const char* operand, const MatrixDescriptor& descriptor, bool k_major,
                  uint32_t lines, uint32_t units);
  void run_up_to(size_t count);
  void trace_wait(size_t count);
  void run(const Entry& entry);
  void run_fp8(const Entry& entry);

  Warp& warp_;
  std::deque<Entry> entries_;
  Clock clock_ = 0;
  bool fenced_ = false;
  uint64_t history_ = 0;
};

}  // namespace archflash::sim
