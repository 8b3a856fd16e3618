// The special registers (%tid.x and the like).
#pragma once

#include <string_view>

#include "sim/load/program.h"

namespace archflash::sim {

// nullptr if there is no special register of that name.
const SpecialRegister* find_special_register(std::string_view name);

}  // namespace archflash::sim
