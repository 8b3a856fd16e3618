// wgmma: matrix products of a warpgroup, which read tiles of shared memory through descriptors.
// Each warp computes its own 16 rows, and carries out its products in order.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "sim/run/cta.h"
#include "sim/units/matrix_tile.h"

namespace archflash::sim {

// Returns what is wrong with a descriptor, naming the field; nullptr if nothing is.
const char* decode_descriptor(uint64_t bits, MatrixDescriptor& descriptor);

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

  // `refs` are the registers of d, and then those of a where it is in registers.
  void issue(const WgmmaShape& shape, const Ref* refs, uint64_t a, uint64_t b, bool accumulate);
  void fence();
  void commit();
  void wait(uint32_t groups);
  bool pending() const { return !entries_.empty(); }
  // Called before an instruction other than wgmma that uses registers of a product.
  void check_registers(uint32_t pc);
  void check_exit();
  // Each wgmma instruction of the warp calls this: products, fences, commits and waits.
  void remember() { history_ = (history_ ^ warp_.pc()) * 0x100000001B3u + 1; }
  // A hash of what was executed, to compare the warps of a warpgroup.
  uint64_t history() const { return history_; }

 private:
  struct Entry {
    const WgmmaShape* shape;
    const Ref* refs;
    MatrixTile a, b;
    bool accumulate;
    bool done = false;
    bool committed = false;
    uint32_t age = 0;
    Clock clock;
    uint32_t pc;
    uint64_t issued = 0, ended = 0;  // times, for the trace

    int registers() const { return shape->d_registers() + (shape->a_registers ? 4 : 0); }
  };

  // A register: its last use by another instruction, as how many fences were before it and which
  // instruction it was; and how many products that no wait has covered have it.
  struct Touch {
    uint32_t fences = 0;
    uint32_t pc = 0;
    uint32_t products = 0;
  };

  void run_up_to(size_t count);
  void trace_wait(size_t count);
  Touch& touch(Ref reg);
  void check_fence(const WgmmaShape& shape, const Ref* refs);
  void run(const Entry& entry);
  void run_fp8(const Entry& entry);

  Warp& warp_;
  std::deque<Entry> entries_;
  Clock clock_ = 0;
  uint32_t fences_ = 0;
  std::vector<Touch> touches_;  // by place of the register
  uint64_t history_ = 0;
};

}  // namespace archflash::sim
