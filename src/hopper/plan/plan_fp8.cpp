#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "common/planning/core_set.h"
#include "common/planning/order.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "hopper/config.cuh"
#include "hopper/params.h"
#include "hopper/plan/plan_parts.h"

namespace archflash::hopper {

void refuse_fp8(const Problem& problem, Reasons& reasons) {
  const std::string dtype = dtype_name(problem.dtype);
  core::refuse_splits(problem, "hopper", dtype, reasons);
  if (v_columns(problem) > INT32_MAX) {
    reasons.push_back("V of " + std::to_string(problem.nk) + " keys in " +
                      std::to_string(problem.batch) + " sequences with " + dtype +
                      ": hopper transposes V into columns of up to " + std::to_string(INT32_MAX) +
                      " keys, in which each sequence is filled up to a multiple of " +
                      std::to_string(V_COLUMN_KEYS) + "; split the batch" + core::USE_TORCH);
  }
  if (is_masked(problem)) {
    reasons.push_back("masks as data with " + dtype +
                      " inputs: hopper takes them with float16 and bfloat16; convert q, k and v" +
                      core::USE_TORCH);
  }
}

// Packed sequences start at the tiles of device::varlen_tile_start().
int64_t v_columns(const Problem& problem) {
  const int64_t blocks = core::ceil_div(problem.nk, V_COLUMN_KEYS);
  return (problem.varlen ? blocks + problem.batch : blocks) * V_COLUMN_KEYS;
}

int64_t transpose_ctas(const Problem& problem) {
  const int64_t batch = problem.varlen ? 1 : problem.batch;
  return v_columns(problem) / V_COLUMN_KEYS * core::ceil_div(problem.dv, TRANSPOSED_COLUMNS) *
         batch * problem.heads_kv;
}

// That takes no launch of its own, but V is transposed as often as tiles see it: measured to be
// faster as long as few rows see a key (docs/lab/hopper.md).
bool transposes_v(const Problem& problem, const KernelTile& tile) {
  constexpr double MOST_ROWS = 3072;  // of all heads that read the same V
  if (!tile.transposes_v || !tile.takes_transposed_v) return tile.transposes_v;
  const HeadModel head(problem, tile);
  double keys = 0;  // that the tiles of a head visit
  for (const double time : head.times) keys += time - core::TILE_KEYS;
  const auto ratio = static_cast<double>(problem.heads_q / problem.heads_kv);
  const int64_t columns = core::ceil_div(head.nk, V_COLUMN_KEYS) * V_COLUMN_KEYS;
  return keys * tile.block_q * ratio <= MOST_ROWS * static_cast<double>(columns);
}

void transpose_v(LaunchPlan& plan, const Problem& problem, const KernelTile& tile,
                 core::Workspace& workspace) {
  const int64_t batch = problem.varlen ? 1 : problem.batch;
  const int64_t columns = v_columns(problem);
  const int64_t head_bytes = problem.dv * columns;
  const int64_t start = workspace.add(batch * problem.heads_kv * head_bytes);
  Launch& last = plan.launches[0];
  for (TensorMapSpec& map : last.tensor_maps) {
    if (map.operand != Operand::V) continue;
    map.operand = Operand::Workspace;
    map.addend = start;
    map.dims = {columns, problem.dv, problem.heads_kv, batch};
    map.strides = {columns, head_bytes, problem.heads_kv * head_bytes};
    map.box = {tile.v_box.columns, tile.v_box.rows, 1, 1};
  }
  Launch first;
  first.kernel = "hopper_transpose_v";
  first.image = last.image;
  first.grid = {transpose_ctas(problem), 1, 1};
  first.block = {TRANSPOSE_THREADS, 1, 1};
  first.params = last.params;
  first.uses_pdl = last.uses_pdl = true;
  first.pointers = last.pointers;
  add_pointer(first, Operand::Workspace, offsetof(Params, v_columns_gmem), start);
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

}  // namespace archflash::hopper
