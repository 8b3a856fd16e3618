#include "ada/quantize.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "common/planning/launch.h"

namespace archflash::ada {

LaunchPlan plan_quantize(const QuantizeProblem& problem, const Device& device) {
  LaunchPlan result;
  result.problem = Problem{};  // of attention: none
  result.implementation = "ada";
  result.device = device;
  const int64_t tiles_per_head = (problem.rows + SCALE_ROWS - 1) / SCALE_ROWS;
  const int64_t tiles = problem.batch * problem.heads * tiles_per_head;
  if (tiles * problem.d == 0) return result;

  QuantizeParams params;
  std::memset(&params, 0, sizeof params);
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

  const std::string word = problem.dtype == DType::F32   ? "f32"
                           : problem.dtype == DType::F16 ? "f16"
                                                         : "bf16";
  const auto add = [&](const std::string& step, int64_t ctas) {
    for (params.first = 0; params.first < ctas; params.first += core::GRID_LIMIT) {
      Launch launch;
      launch.kernel = "ada_quantize_" + step;
      launch.image = "ada/quantize";
      launch.grid = {std::min(ctas - params.first, core::GRID_LIMIT), 1, 1};
      launch.block = {QUANTIZE_THREADS, 1, 1};
      launch.params = core::bytes(params);
      const auto slot = [](Operand operand, size_t offset) {
        return PointerSlot{operand, static_cast<int32_t>(offset), 0};
      };
      launch.pointers = {slot(Operand::Q, offsetof(QuantizeParams, x_gmem)),
                         slot(Operand::Out, offsetof(QuantizeParams, out_gmem)),
                         slot(Operand::Descale, offsetof(QuantizeParams, descale_gmem))};
      if (params.tiles_per_group > 1)
        launch.pointers.push_back(slot(Operand::Workspace, offsetof(QuantizeParams, largest_gmem)));
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

}  // namespace archflash::ada
