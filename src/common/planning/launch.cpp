#include "common/planning/launch.h"

#include <algorithm>
#include <cmath>

#include "common/planning/makespan.h"
#include "common/planning/split_keys.h"
#include "common/planning/tensor_maps.h"

namespace archflash::core {
namespace {

// One line of notes each.
std::string tile_text(const TileChoice& tile) {
  const std::string heads =
      tile.packed_heads == 1 ? "" : str(tile.packed_heads) + " heads that share K and V x ";
  return heads + str(tile.block_q) + " query rows x " + str(tile.block_k) +
         " keys, head_dim up to " + str(tile.head_dim) +
         (tile.head_dim == tile.head_dim_v ? "" : " and " + str(tile.head_dim_v));
}
std::string warps_text(const TileChoice& tile) {
  return str(tile.warps) +
         (tile.rows_per_warp == 0 ? "" : " of " + str(tile.rows_per_warp) + " rows");
}
std::string stages_text(const TileChoice& tile) {
  if (tile.v_stages == 0) return str(tile.k_stages) + " that K and V share";
  if (tile.v_stages == tile.k_stages) return str(tile.k_stages);
  return str(tile.k_stages) + " of K, " + str(tile.v_stages) + " of V";
}
std::string ctas_text(const LaunchPlan& plan) {
  const TileChoice& tile = plan.tile;
  std::string text = str(tile.ctas);
  if (tile.ctas != tile.tiles || tile.splits > 1) text += " for " + str(tile.tiles) + " tiles";
  if (tile.part_rows > 0) {
    text += ", the last " + str(tile.tiles - tile.whole_tiles) + " in parts of " +
            str(tile.part_rows) + " rows";
  }
  if (tile.splits > 1) text += " x " + str(tile.splits) + " shares";
  if (tile.v_slices > 1)
    text += " x " + str(tile.v_slices) + " slices of V, all of which compute the scores";
  text += ", " + str(tile.ctas_per_sm) + " per SM on " + str(plan.device.sm_count) + " SMs";
  return text + (tile.cluster == 2 ? ", in pairs" : "");
}
constexpr int64_t MOST_TILES_TO_MODEL = 1 << 20;  // a fraction of a second
std::string balance_text(const LaunchPlan& plan) {
  const Makespan model = makespan(plan, {});
  return str(std::lround(100 * model.share())) + "% of the best that these tiles allow (a model)";
}
std::string order_text(const LaunchPlan& plan) {
  if (plan.problem.varlen) return "by sequence, last row tiles first";
  const TileChoice& tile = plan.tile;
  std::string text = "last row tiles first";
  if (tile.turned_end > tile.turned_begin) {
    text += ", but number " + str(tile.turned_begin + 1) + " to " + str(tile.turned_end) +
            " of them the other way round";
  }
  if (tile.heads_per_group == 0) return text;
  const std::string heads =
      tile.heads_per_group == 1 ? "one head" : str(tile.heads_per_group) + " heads";
  return text + ", " + heads + " at a time";
}

}  // namespace

constexpr size_t MOST_USUAL_LAUNCHES = 2;  // a second one combines shares, or comes before

const char* dtype_word(DType dtype) {
  constexpr const char* WORDS[DTYPE_COUNT] = {"f32", "f16", "bf16", "e4m3", "e5m2", "f64"};
  return WORDS[static_cast<int>(dtype)];
}

LaunchPlan one_launch(const std::string& folder, const Problem& problem, const Device& device,
                      const Tile& tile, int64_t ctas, const TileOrder& order,
                      std::vector<uint8_t> params, const Offsets& offsets) {
  LaunchPlan plan;  // the registry adds what it was made for
  plan.tile = {
      .name = tile.name,
      .reason = tile.reason,
      .head_dim = tile.head_dim,
      .head_dim_v = tile.head_dim_v,
      .block_q = tile.block_q,
      .block_k = tile.block_k,
      .warps = tile.warps,
      .rows_per_warp = tile.rows_per_warp,
      .k_stages = tile.k_stages,
      .v_stages = tile.v_stages,
      .cluster = tile.cluster,
      .packed_heads = tile.packed_heads,
      .ctas_per_sm = static_cast<int32_t>(resident_ctas(tile, device)),
      .ctas = ctas,
      .tiles = tiles_of(problem, tile),
      .splits = 1,
      .v_slices = 1,
      .heads_per_group = order.heads_per_group,
      .turned_begin = order.turned_begin,
      .turned_end = order.turned_end,
  };
  const char* const word = dtype_word(problem.dtype);
  plan.launches.reserve(MOST_USUAL_LAUNCHES);
  Launch& launch = plan.launches.emplace_back();
  launch.kernel.reserve(MOST_OF_NAME);
  launch.kernel.append(folder).append("_attention_fwd_").append(word).append("_").append(tile.name);
  launch.image.append(folder).append("/fwd_").append(word);
  launch.grid = {ctas, 1, 1};
  launch.cluster = {tile.cluster, 1, 1};
  launch.block = {tile.threads, 1, 1};
  launch.shared_bytes = tile.shared_bytes;
  launch.params = std::move(params);
  launch.pointers = pointers(problem);
  if (offsets.descales >= 0) {
    add_pointers(launch, descale_pointers(problem, offsets.descales));
  }
  launch.tensor_maps.reserve(offsets.q_map >= 0 ? 4 : 0);
  const auto map = [&](Operand operand, int offset, const Box& box) {
    if (offset >= 0) launch.tensor_maps.push_back(tensor_map(problem, operand, offset, box));
  };
  map(Operand::Q, offsets.q_map, tile.q_box);
  if (problem.nk > 0) {  // an empty k or v is never read
    map(Operand::K, offsets.k_map, tile.k_box);
    map(Operand::V, offsets.v_map, tile.v_box);
  }
  // fp32 outputs of 16-bit inputs are written without it.
  if (!writes_f32(problem)) map(Operand::Out, offsets.out_map, tile.out_box);
  return plan;
}

Notes notes(const LaunchPlan& plan, const Notes& own) {
  const TileChoice& tile = plan.tile;
  Notes lines = {{"tile", tile_text(tile)}};
  if (!tile.reason.empty()) lines.emplace_back("variant", tile.reason);
  lines.emplace_back("warps", warps_text(tile));
  if (tile.k_stages > 0) lines.emplace_back("stages", stages_text(tile));
  const size_t before_ctas = lines.size();
  lines.emplace_back("CTAs", ctas_text(plan));
  if (plan.problem.batch_invariant) {
    lines.emplace_back("splits", "one for every " + str(FIXED_SHARE_KEYS) +
                                     " keys of a sequence, by position (batch_invariant); a second "
                                     "kernel combines them");
  } else if (tile.splits > 1) {
    lines.emplace_back(
        "splits",
        str(tile.splits) + " shares of the keys of each tile, " +
            (plan.problem.num_splits > 0 ? "as asked for" : "expected to be the fastest") +
            (plan.launches[0].cluster[2] > 1 ? "; their CTAs are a cluster and join them"
                                             : "; a second kernel combines them"));
  }
  lines.emplace_back("order", order_text(plan));
  // The model cuts equal shares, and batch_invariant cuts them by position. It knows no masks that
  // lie on the device.
  const bool modelled =
      !plan.problem.varlen && !plan.problem.batch_invariant && !takes_masked_kernels(plan.problem);
  if (modelled && tile.tiles * tile.splits * tile.v_slices <= MOST_TILES_TO_MODEL)
    lines.emplace_back("balance", balance_text(plan));
  Notes added;
  for (const auto& [name, text] : own) {
    const auto same = std::find_if(lines.begin(), lines.end(),
                                   [&](const auto& line) { return line.first == name; });
    if (same == lines.end()) {
      added.emplace_back(name, text);
    } else {
      same->second = text;
    }
  }
  lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(before_ctas), added.begin(),
               added.end());
  return lines;
}

}  // namespace archflash::core
