// Gives each register of a kernel a place in the memory of a warp's registers.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/load/program.h"
#include "sim/load/syntax.h"

namespace archflash::sim {

// How an instruction uses an operand.
enum class Role : uint8_t { Read, Write };

// The operands of every instruction of a kernel while it is being loaded.
struct OperandLists {
  std::vector<std::vector<Ref>> refs;
  std::vector<std::vector<Role>> roles;  // one for each ref
};

// Replaces the numbers of registers by places, in the operands, guards and special registers of the
// kernel. Registers that are never alive together share a place, so that a warp's registers stay in
// the host's cache. Also notes which elements of a load nothing reads.
void place_registers(Kernel& kernel, const std::vector<Type>& registers, OperandLists& operands);

}  // namespace archflash::sim
