// What several kinds of instructions need for their operands.
#pragma once

#include <bit>
#include <cstdint>

#include "sim/load/builder.h"
#include "sim/memory/access.h"

namespace archflash::sim {

// The address of an instruction that has a single one (Builder::address), whose base is the operand
// of that number.
inline Address address_of(const Instruction& instruction, int operand) {
  return {instruction.operands[operand], instruction.offset,
          (instruction.flags & Builder::ADDRESS_64) != 0, instruction.space};
}

// One of the addresses of an instruction that has several: the number of the operand that is its
// base, and the rest of it.
struct AddressOperand {
  int operand = 0;
  int64_t offset = 0;
  bool wide = false;
  Space space = Space::Generic;

  Address of(const Instruction& instruction) const {
    return {instruction.operands[operand], offset, wide, space};
  }
};

// Takes the next operand of the statement, [base + offset]. The base becomes the handler's operand
// of that number.
inline AddressOperand take_address(Builder& b, int operand, Space space) {
  b.instruction.flags &= ~Builder::ADDRESS_64;
  b.address(space);
  const AddressOperand address{operand, b.instruction.offset,
                               (b.instruction.flags & Builder::ADDRESS_64) != 0, space};
  b.instruction.flags &= ~Builder::ADDRESS_64;
  return address;
}

template <class F>
void for_each_lane(uint32_t mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

}  // namespace archflash::sim
