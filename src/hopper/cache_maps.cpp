#include "hopper/cache_maps.h"

#include <numeric>
#include <utility>

#include "common/planning/core_set.h"

namespace archflash::hopper {

TensorMapSpec cache_map(const Problem& problem, Operand operand, size_t offset,
                        const core::Box& box, int box_rows) {
  const bool of_v = operand == Operand::V;
  const Strides& strides = of_v ? problem.v : problem.k;
  TensorMapSpec map{};
  map.operand = operand;
  map.offset = static_cast<int32_t>(offset);
  map.dtype = problem.dtype;
  map.swizzle = box.swizzle;
  map.box = {box.columns, box_rows, 1, 1};
  map.dims = {of_v ? problem.dv : problem.d, problem.page_size > 0 ? problem.page_size : problem.nk,
              problem.heads_kv, problem.cache_batch};
  for (const int64_t stride : {strides.row, strides.head, strides.batch})
    map.strides.push_back(stride * dtype_bytes(problem.dtype));
  return map;
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
