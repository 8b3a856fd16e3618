// What the plans of the hopper kernels that read a KV cache share. Pure host code.
#pragma once

#include <cstddef>
#include <string>

#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::hopper {

// The tensor map of K or V of a cache: (columns, rows of a block, heads, blocks). Boxes have
// `box_rows` rows and else the form of `box`.
TensorMapSpec cache_map(const Problem& problem, Operand operand, size_t offset,
                        const core::Box& box, int box_rows);

// Adds why tensor maps cannot copy rows of a cache, whatever its pages are. `rows`: what they are
// called, such as "latent rows".
void refuse_cache(const Problem& problem, const std::string& rows, Reasons& reasons);

// The rows of a box: `block_rows`, or with a page table their greatest common divisor with the rows
// of a page.
int cache_box_rows(const Problem& problem, int block_rows);

}  // namespace archflash::hopper
