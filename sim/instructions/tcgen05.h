// What the files of tcgen05 instructions share.
#pragma once

#include <bit>
#include <string>

#include "sim/instructions/operands.h"
#include "sim/units/tcgen05.h"

namespace archflash::sim {

// A lane's address of tensor memory, which has 32 bits.
inline uint32_t tensor_address(Warp& warp, const Instruction& instruction,
                               const AddressOperand& address, int lane) {
  return static_cast<uint32_t>(address.of(instruction).of_lane(warp, lane));
}

// The value of all lanes; a fault if they disagree.
template <class F>
uint32_t uniform(uint32_t mask, const char* what, F value_of) {
  const uint32_t value = value_of(std::countr_zero(mask));
  for_each_lane(mask, [&](int lane) {
    if (value_of(lane) == value) return;
    throw Fault{"tcgen05", std::string("lanes disagree about ") + what, lane};
  });
  return value;
}

// Builders of tcgen05.ld and .st, and of tcgen05.wait.
void build_transfer(Builder& b);
void build_wait(Builder& b);

}  // namespace archflash::sim
