// quantize_fp8: QuantizeProblem + Device -> LaunchPlan. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "common/planning/launch.h"
#include "common/planning/quantize_problem.h"
#include "quantize/params.h"

namespace archflash::quantize {

// A step of more CTAs than a grid can have takes several launches.
LaunchPlan plan(const QuantizeProblem& problem, const Device& device) {
  LaunchPlan result;
  result.problem = Problem{};  // it serves no call of attention
  result.device = device;
  const int64_t tiles_per_head = core::ceil_div(problem.rows, SCALE_ROWS);
  const int64_t tiles = problem.batch * problem.heads * tiles_per_head;
  if (tiles * problem.d == 0) return result;

  Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  params.x_batch = problem.x.batch, params.x_head = problem.x.head, params.x_row = problem.x.row;
  params.out_batch = problem.out.batch, params.out_head = problem.out.head,
  params.out_row = problem.out.row;
  params.heads = problem.heads;
  params.rows = problem.rows;
  params.d = static_cast<int32_t>(problem.d);
  params.tiles_per_head = tiles_per_head;
  params.tiles_per_group = problem.per == QuantizePer::Tensor ? tiles
                           : problem.per == QuantizePer::Head ? tiles_per_head
                                                              : 1;
  params.out_dtype = problem.out_dtype;

  const std::string word = core::dtype_word(problem.dtype);
  const auto add = [&](const std::string& step, int64_t ctas) {
    for (params.first = 0; params.first < ctas; params.first += core::GRID_LIMIT) {
      Launch launch;
      launch.kernel = "quantize_" + step;
      launch.image = "quantize/quantize";
      launch.grid = {std::min(ctas - params.first, core::GRID_LIMIT), 1, 1};
      launch.block = {THREADS, 1, 1};
      launch.params = core::bytes(params);
      const auto slot = [](Operand operand, size_t offset) {
        return PointerSlot{operand, static_cast<int32_t>(offset), 0};
      };
      launch.pointers = {slot(Operand::Q, offsetof(Params, x_gmem)),
                         slot(Operand::Out, offsetof(Params, out_gmem)),
                         slot(Operand::Descale, offsetof(Params, descale_gmem))};
      if (params.tiles_per_group > 1)
        launch.pointers.push_back(slot(Operand::Workspace, offsetof(Params, largest_gmem)));
      result.launches.push_back(std::move(launch));
    }
  };
  if (params.tiles_per_group == 1) {
    add("at_once_" + word, tiles);
  } else {
    result.workspace_bytes = tiles * static_cast<int64_t>(sizeof(float));
    add("largest_" + word, tiles);
    add("descale", tiles / params.tiles_per_group);
    add("values_" + word, tiles);
  }
  return result;
}

}  // namespace archflash::quantize
