// What implementations that copy by TMA plan alike: tensor maps and what those cannot describe, the
// order of tiles. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/plan.h"
#include "common/problem.h"

namespace archflash::core {

// What TMA cannot describe, beyond the limits of the core set. `stores`: the output goes by TMA
// too.
void add_tma_reasons(const Problem& problem, const std::string& implementation, bool stores,
                     Reasons& reasons);

// Columns and rows of a TMA box.
struct Box {
  int columns, rows;
};

// The map of Q, K, V or Out: (columns, rows, heads, batch). A dimension of stride 0 is one that the
// kernel does not move along: size 1, any stride.
TensorMapSpec tensor_map(const Problem& problem, Operand operand, size_t offset, Swizzle swizzle,
                         Box box);

// Whether all row tiles take the same time.
bool equal_tiles(const Problem& problem);

// Heads whose K and V stay in half of L2 while their row tiles are computed: neighbouring CTAs read
// the same keys, and the longest tiles of a causal problem still come first. All groups but the
// last have this size, and the last is not much smaller: its longest tiles would come when the
// others are done.
int32_t heads_per_group(const Problem& problem, const Device& device);

}  // namespace archflash::core
