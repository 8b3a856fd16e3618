// merge_attention: MergeProblem + Device -> LaunchPlan. Pure host code.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common/planning/launch.h"
#include "common/planning/merge_problem.h"
#include "merge/params.h"

namespace archflash::merge {

// More CTAs than a grid can have take several launches.
LaunchPlan plan(const MergeProblem& problem, const Device& device) {
  LaunchPlan result;
  result.problem = Problem{};  // it serves no call of attention
  result.device = device;
  Params params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // padding too
  params.all_rows = problem.batch * problem.heads * problem.rows;
  if (params.all_rows == 0) return result;
  for (int i = 0; i < problem.parts; ++i) {
    const auto& [out, lse, dtype] = problem.part[i];
    Part& part = params.part[i];
    part.out_batch = out.batch, part.out_head = out.head, part.out_row = out.row;
    part.lse_batch = lse.batch, part.lse_head = lse.head, part.lse_row = lse.row;
    params.dtype[i] = dtype;
  }
  params.out_batch = problem.out.batch, params.out_head = problem.out.head,
  params.out_row = problem.out.row;
  params.heads = problem.heads;
  params.rows = problem.rows;
  params.parts = problem.parts;
  params.dv = static_cast<int32_t>(problem.dv);
  params.out_dtype = problem.out_dtype;

  const uint64_t chunks = core::ceil_div(problem.dv, FEWEST_COLUMNS);
  params.lane_bits = std::countr_zero(std::min<uint64_t>(std::bit_ceil(chunks), THREADS));

  const int64_t most_rows = core::GRID_LIMIT * ROWS;
  for (; params.first_row < params.all_rows; params.first_row += most_rows) {
    const int64_t rows = std::min(params.all_rows - params.first_row, most_rows);
    Launch launch;
    launch.kernel = "merge_attention";
    launch.image = "merge/merge";
    launch.grid = {core::ceil_div(rows, ROWS), 1, 1};
    launch.block = {THREADS, 1, 1};
    launch.params = core::bytes(params);
    const auto add = [&](Operand operand, size_t offset) { add_pointer(launch, operand, offset); };
    for (int i = 0; i < problem.parts; ++i) {
      const size_t part = offsetof(Params, part) + i * sizeof(Part);
      add(part_out(i), part + offsetof(Part, out_gmem));
      add(part_lse(i), part + offsetof(Part, lse_gmem));
    }
    add(Operand::Out, offsetof(Params, out_gmem));
    add(Operand::Lse, offsetof(Params, lse_gmem));
    result.launches.push_back(std::move(launch));
  }
  return result;
}

}  // namespace archflash::merge
