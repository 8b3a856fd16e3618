#include "hopper/plan/cache_maps.h"

#include <numeric>
#include <utility>

#include "common/planning/core_set.h"
#include "hopper/cache/grouped_tile.cuh"

namespace archflash::hopper {
namespace {

using GroupRows = GroupedTile<64, 16>;  // for what all of them have in common

}  // namespace

TensorMapSpec make_cache_map(const Problem& problem, Operand operand, size_t offset,
                             Swizzle swizzle, Extents<int32_t> box, Extents<int64_t> dims,
                             std::initializer_list<int64_t> strides) {
  TensorMapSpec map{};
  map.operand = operand;
  map.offset = static_cast<int32_t>(offset);
  map.dtype = problem.dtype;
  map.swizzle = swizzle;
  map.box = box;
  map.dims = dims;
  for (const int64_t stride : strides) map.strides.push_back(stride * dtype_bytes(problem.dtype));
  return map;
}

TensorMapSpec cache_map(const Problem& problem, Operand operand, size_t offset,
                        const core::Box& box, int box_rows) {
  const bool of_v = operand == Operand::V;
  const Strides& strides = of_v ? problem.v : problem.k;
  const int64_t rows = problem.page_size > 0 ? problem.page_size : problem.nk;
  return make_cache_map(
      problem, operand, offset, box.swizzle, {box.columns, box_rows, 1, 1},
      {of_v ? problem.dv : problem.d, rows, problem.heads_kv, problem.cache_batch},
      {strides.row, strides.head, strides.batch});
}

std::optional<int32_t> page_groups(const Problem& problem, Operand operand) {
  constexpr int64_t MOST_GROUPS = int64_t{1} << 31;
  const bool of_v = operand == Operand::V;
  const Strides& strides = of_v ? problem.v : problem.k;
  const int64_t columns = of_v ? problem.dv : problem.d;
  const int64_t group = GroupRows::GROUP_ROWS * strides.row;
  if (problem.page_size == 0 || problem.page_size % GroupRows::GROUP_ROWS != 0) return {};
  if (columns % GroupRows::SLAB != 0 || strides.row <= 0) return {};
  if (problem.cache_batch <= 1) return 0;
  if (strides.batch <= 0 || strides.batch % group != 0) return {};
  const int64_t groups = strides.batch / group;
  if (groups * problem.cache_batch >= MOST_GROUPS) return {};
  return static_cast<int32_t>(groups);
}

TensorMapSpec grouped_map(const Problem& problem, Operand operand, size_t offset, int slabs,
                          int box_rows) {
  const bool of_v = operand == Operand::V;
  const Strides& strides = of_v ? problem.v : problem.k;
  const int64_t groups = (problem.cache_batch - 1) * page_groups(problem, operand).value() +
                         problem.page_size / GroupRows::GROUP_ROWS;
  return make_cache_map(
      problem, operand, offset, GroupRows::SWIZZLE,
      {GroupRows::SLAB, GroupRows::GROUP_ROWS, slabs, box_rows / GroupRows::GROUP_ROWS, 1},
      {GroupRows::SLAB, GroupRows::GROUP_ROWS, (of_v ? problem.dv : problem.d) / GroupRows::SLAB,
       groups, problem.heads_kv},
      {strides.row, GroupRows::SLAB, GroupRows::GROUP_ROWS * strides.row, strides.head});
}

void refuse_cache(const Problem& problem, const std::string& rows, Reasons& reasons) {
  if (problem.page_size > 0 && problem.leftpad_k) {
    reasons.push_back("leftpad_k with a page table: hopper copies " + rows +
                      " from whole pages; leave leftpad_k out" + core::USE_TORCH);
  }
  // A tensor map cannot repeat a head or a block.
  for (const auto& [name, strides] : {std::pair{"k_cache", problem.k}, {"v_cache", problem.v}}) {
    if ((problem.heads_kv > 1 && strides.head == 0) ||
        (problem.cache_batch > 1 && strides.batch == 0)) {
      reasons.push_back(std::string(name) +
                        " repeats a head or a block (a stride of 0): hopper copies by tensor "
                        "maps, which have no such stride; make it contiguous" +
                        core::USE_TORCH);
    }
  }
}

int cache_box_rows(const Problem& problem, int block_rows) {
  if (problem.page_size == 0) return block_rows;
  return static_cast<int>(std::gcd(problem.page_size, static_cast<int64_t>(block_rows)));
}

}  // namespace archflash::hopper
