// What the plans of the hopper kernels that read a KV cache share. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::hopper {

// A tensor map of K or V of a cache. `strides`: of all dimensions but the first, in elements.
TensorMapSpec make_cache_map(const Problem& problem, Operand operand, size_t offset,
                             Swizzle swizzle, Extents<int32_t> box, Extents<int64_t> dims,
                             std::initializer_list<int64_t> strides);

// The tensor map of K or V of a cache: (columns, rows of a block, heads, blocks). Boxes have
// `box_rows` rows and else the form of `box`.
TensorMapSpec cache_map(const Problem& problem, Operand operand, size_t offset,
                        const core::Box& box, int box_rows);

// Groups of 8 rows from one page of K or V to the next, if one tensor map can have groups as a
// dimension and its columns are whole slabs (hopper::GroupedTile).
std::optional<int32_t> page_groups(const Problem& problem, Operand operand);

// The tensor map of K or V of pages whose groups of rows are a dimension: (columns of a slab, 8
// rows, slabs, groups, heads). Boxes have `box_rows` rows of `slabs` slabs.
TensorMapSpec grouped_map(const Problem& problem, Operand operand, size_t offset, int slabs,
                          int box_rows);

// Adds why tensor maps cannot copy rows of a cache, whatever its pages are. `rows`: what they are
// called, such as "latent rows".
void refuse_cache(const Problem& problem, const std::string& rows, Reasons& reasons);

// The rows of a box: `block_rows`, or with a page table their greatest common divisor with the rows
// of a page.
int cache_box_rows(const Problem& problem, int block_rows);

}  // namespace archflash::hopper
