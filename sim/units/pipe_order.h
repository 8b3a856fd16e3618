// What the ISA promises about the order of one thread's operations in the tensor pipe.
//
// PTX ISA, "tcgen05: Pipelined Instructions": asynchronous tcgen05 instructions may execute in
// another order than they were issued, but for these pairs: products with the same accumulator and
// shape; a copy and a later product; a shift and a later product; a product and a later shift. (And
// a shift and a later copy of 4 rows, which is not simulated.) What follows from several pairs is
// promised, too. A commit arrives after all that its thread has issued before.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/memory/race.h"

namespace archflash::sim {

class PipeOrder {
 public:
  // What an operation is: COPY, SHIFT or, for a product, a number that names accumulator and shape.
  using Kind = uint64_t;
  static constexpr Kind COPY = 0, SHIFT = 1;

  // Operations of one thread: of each kind all up to a clock.
  class Set {
   public:
    bool has(Kind kind, Clock clock) const;
    void add(Kind kind, Clock clock);
    void add(const Set& other);

   private:
    struct Last {
      Kind kind;
      Clock clock;
    };
    std::vector<Last> last_;
  };

  // Takes in the thread's next operation, whose clock is larger than those before.
  void issue(Kind kind, Clock clock);
  // The operations that come before the one that was issued last.
  const Set& before() const { return before_; }

 private:
  struct Chain {
    Kind accumulator;
    Set products;
  };

  Set before_;
  // The operations so far, each set with all that comes before them.
  Set copies_, shifts_, products_;
  std::vector<Chain> chains_;  // the products of each accumulator
};

}  // namespace archflash::sim
