#include "blackwell_consumer/plan_nvfp4.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "blackwell_consumer/nvfp4_config.cuh"
#include "blackwell_consumer/nvfp4_params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/mma_sync.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::blackwell_consumer {
namespace {

constexpr core::Tile TILES[] = {
    core::tile<Nvfp4D64>("nvfp4_d64", {}, "8 warps of 16 rows; its speed is unmeasured on 12.x"),
    core::tile<Nvfp4D128>("nvfp4_d128", {}, "8 warps of 16 rows; its speed is unmeasured on 12.x"),
};
constexpr core::Tile STORED_TILES[] = {
    core::tile<Nvfp4StoredD64>("nvfp4_stored_d64", {}, TILES[0].reason),
    core::tile<Nvfp4StoredD128>("nvfp4_stored_d128", {}, TILES[1].reason),
};

void set_params(const Problem& problem, Nvfp4Params& params) {
  params.dtype = problem.dtype;
  params.heads_kv = static_cast<int32_t>(problem.heads_kv);
  params.k_blocks = static_cast<int32_t>(core::ceil_div(problem.nk, NVFP4_BLOCK_K));
  params.scale = static_cast<float>(problem.scale);
  if (!has_stored_nvfp4(problem)) return;
  params.scales = core::descales(problem);
  const auto unit = [&](int bit, int64_t heads) {
    const int32_t by_head = problem.descale >> bit & 1;
    return Nvfp4Unit{nullptr, by_head * static_cast<int32_t>(heads), by_head};
  };
  params.q_unit = unit(0, problem.heads_q);
  params.k_unit = unit(1, problem.heads_kv);
  params.v_unit = unit(2, problem.heads_kv);
}

}  // namespace

void add_nvfp4_reasons(const Problem& problem, const Device& device, Reasons& why_not) {
  const auto refuse = [&](const std::string& given, const std::string& said) {
    why_not.push_back(given + " with approximate='nvfp4': blackwell_consumer " + said +
                      "; leave approximate out" + core::USE_TORCH);
  };
  if (device.major != 12) {
    refuse(
        "compute capability " + std::to_string(device.major) + "." + std::to_string(device.minor),
        "multiplies numbers of four bits on 12.x only");
  }
  if (problem.varlen) refuse("cu_seqlens", "takes one length for all");
  if (problem.d > Nvfp4D128::HEAD_DIM || problem.dv > Nvfp4D128::HEAD_DIM) {
    refuse("d " + std::to_string(problem.d) + " and dv " + std::to_string(problem.dv),
           "takes at most " + std::to_string(Nvfp4D128::HEAD_DIM));
  }
  if (problem.out_dtype != problem.dtype)
    refuse(std::string("out_dtype ") + dtype_name(problem.out_dtype), "writes q's dtype");
  if (problem.softcap != 0) {
    refuse("softcap", "adds the mean of k back where a row ends, which a cap is not linear for");
  } else if (core::attention_params(problem).transform_scores) {
    refuse("scale " + core::number_text(problem.scale), "takes positive normal ones");
  }
}

PlanResult plan_nvfp4(const Problem& problem, const Device& device) {
  const std::string folder = "blackwell_consumer";
  const int64_t heads = problem.batch * problem.heads_kv;
  const int64_t blocks = heads * core::ceil_div(problem.nk, NVFP4_BLOCK_K);
  if (blocks > core::GRID_LIMIT) return core::grid_too_large(blocks);
  const bool stored = has_stored_nvfp4(problem);
  PlanResult result = mma_sync::plan<Nvfp4Params>(
      folder, stored ? std::span<const core::Tile>(STORED_TILES) : TILES, problem, device,
      set_params);
  auto* made = std::get_if<LaunchPlan>(&result);
  if (made == nullptr) return result;

  const bool small = made->tile.head_dim == Nvfp4D64::HEAD_DIM;
  const auto bytes_of = [&](auto of) { return small ? of(Nvfp4D64()) : of(Nvfp4D128()); };
  const int64_t k_bytes = bytes_of([](auto c) { return decltype(c)::K_BYTES; });
  const int64_t v_bytes = bytes_of([](auto c) { return decltype(c)::V_BYTES; });
  const int64_t mean_bytes = bytes_of([](auto c) { return 4 * decltype(c)::HEAD_DIM; });
  Launch last = std::move(made->launches[0]);
  made->launches.clear();
  last.image = folder + "/nvfp4";
  last.kernel = folder + "_attention_fwd_" + made->tile.name;
  core::Workspace workspace;
  const auto part = [&](size_t pointer, int64_t bytes) {
    add_pointer(last, Operand::Workspace, pointer, workspace.add(bytes));
  };
  if (stored) {
    const std::pair<Operand, size_t> operands[] = {
        {Operand::QDescale, offsetof(Nvfp4Params, scales.q.gmem)},
        {Operand::KDescale, offsetof(Nvfp4Params, scales.k.gmem)},
        {Operand::VDescale, offsetof(Nvfp4Params, scales.v.gmem)},
        {Operand::QUnit, offsetof(Nvfp4Params, q_unit.gmem)},
        {Operand::KUnit, offsetof(Nvfp4Params, k_unit.gmem)},
        {Operand::VUnit, offsetof(Nvfp4Params, v_unit.gmem)}};
    for (const auto& [operand, offset] : operands) add_pointer(last, operand, offset);
  } else {
    part(offsetof(Nvfp4Params, k_mean_gmem), heads * mean_bytes);
    part(offsetof(Nvfp4Params, v_unit_gmem), heads * sizeof(float));
    part(offsetof(Nvfp4Params, k_units_gmem), blocks * sizeof(float));
  }
  part(offsetof(Nvfp4Params, k_chunks_gmem), blocks * k_bytes);
  part(offsetof(Nvfp4Params, v_chunks_gmem), blocks * v_bytes);
  made->workspace_bytes = workspace.whole_bytes();

  const auto prepare = [&](const char* step, int64_t grid) {
    Launch launch;
    launch.kernel = folder + "_nvfp4_" + step + (small ? "_d64" : "_d128");
    launch.image = last.image;
    launch.grid = {grid, 1, 1};
    launch.block = {NVFP4_PREPARE_THREADS, 1, 1};
    launch.params = last.params;
    launch.pointers = last.pointers;
    made->launches.push_back(std::move(launch));
  };
  if (!stored) prepare("means", heads);
  if (blocks > 0) prepare(stored ? "copies" : "chunks", blocks);
  made->launches.push_back(std::move(last));
  return result;
}

}  // namespace archflash::blackwell_consumer
