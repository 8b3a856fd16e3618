#include "common/planning/tiles.h"

#include <algorithm>
#include <bit>

#include "common/device/packed_heads.cuh"
#include "common/planning/core_set.h"

namespace archflash::core {
namespace {

constexpr int64_t RESERVED_SHARED_BYTES = 1024;  // CUDA: taken from the SM by each CTA, from 8.0 on

}  // namespace

int64_t row_tiles(const Problem& problem, int block_q) {
  const int64_t tiles = ceil_div(problem.nq, block_q);
  return problem.varlen ? tiles + problem.batch : tiles * problem.batch;
}

int64_t tiles_of(const Problem& problem, const Tile& tile) {
  return row_tiles(problem, tile.block_q) * (problem.heads_q / tile.packed_heads);
}

int64_t filled_tiles(const Problem& problem, const Tile& tile) {
  const int64_t tiles = tiles_of(problem, tile);
  if (!problem.varlen || problem.max_seqlen_q == UNKNOWN) return tiles;
  const int64_t most = problem.batch * ceil_div(problem.max_seqlen_q, tile.block_q);
  return std::min(tiles, most * (problem.heads_q / tile.packed_heads));
}

int64_t rows_per_sequence(const Problem& problem) {
  return problem.varlen ? problem.nq / std::max<int64_t>(problem.batch, 1) : problem.nq;
}

bool equal_tiles(const Problem& problem) {
  return !problem.varlen && problem.window_left == UNBOUNDED && problem.window_right == UNBOUNDED;
}

bool is_triangle(const Problem& problem) {
  return problem.window_left == UNBOUNDED && problem.window_right != UNBOUNDED;
}

int64_t resident_ctas(const Tile& tile, const Device& device) {
  const int64_t by_shared = device.shared_per_sm / (tile.shared_bytes + RESERVED_SHARED_BYTES);
  return std::clamp<int64_t>(by_shared, 1, tile.ctas_per_sm);
}

int64_t workers_of(const Tile& tile, const Device& device) {
  return std::max<int64_t>(device.sm_count * resident_ctas(tile, device) / tile.cluster, 1);
}

int64_t kv_head_bytes(const Problem& problem) {
  return problem.nk * (problem.d + problem.dv) * dtype_bytes(problem.dtype);
}

void pack_heads(const Problem& problem, Tile& tile) {
  const int heads_per_kv = static_cast<int>(problem.heads_q / problem.heads_kv);
  const bool loads_by_map = tile.q_box.rows > 0, stores_by_map = tile.out_box.rows > 0;
  if (heads_per_kv == 1 || (loads_by_map && problem.q.head == 0) ||
      (stores_by_map && problem.out.head == 0))
    return;
  const device::PackedHeads packed_heads = device::pack_heads(tile.block_q, heads_per_kv);
  Tile packed = tile;
  packed.block_q = packed_heads.rows();
  packed.packed_heads = packed_heads.count;
  if (loads_by_map) {
    packed.q_box.rows = packed.block_q;
    packed.q_box.heads = tile.block_q / packed.block_q;
  } else if (!problem.varlen) {
    // With no more rows of a head than there are, whole warps have none and skip the products.
    const uint64_t rows = std::max<int64_t>(problem.nq, 1);
    packed.block_q = static_cast<int>(std::min<uint64_t>(packed.block_q, std::bit_ceil(rows)));
  }
  if (stores_by_map) {
    packed.out_box.rows = packed.block_q;
    packed.out_box.heads = packed.packed_heads;
  }
  if (4 * tiles_of(problem, packed) <= 3 * tiles_of(problem, tile)) tile = packed;
}

bool takes_head_dims(const Tile& tile, const Problem& problem) {
  return problem.d <= tile.head_dim && problem.dv <= tile.head_dim_v;
}

bool serves(const Tile& tile, const Problem& problem, const Device& device) {
  const ServesFrom& from = tile.serves;
  const double per_sm = equal_tiles(problem) ? from.min_tiles_per_sm : from.min_uneven_tiles_per_sm;
  const bool fills_gpu = static_cast<double>(tiles_of(problem, tile)) > per_sm * device.sm_count;
  const bool rows_mostly_used =
      from.min_tiles_per_sm == 0 || rows_per_sequence(problem) > tile.block_q / 2;
  return fills_gpu && rows_mostly_used && resident_ctas(tile, device) >= from.min_ctas_per_sm &&
         problem.nk >= from.min_keys && problem.nk <= from.max_keys &&
         device.shared_per_sm <= from.max_shared_per_sm;
}

Reasons too_little_shared_memory(const std::string& folder, int64_t needed, const Device& device) {
  return {"shared memory: " + device.name + " gives a CTA " +
          std::to_string(device.shared_per_block) + " bytes and " + folder + " needs up to " +
          std::to_string(ceil_div(needed, 1024)) + " KB, as head_dim says; use another GPU" +
          USE_TORCH};
}

Reasons grid_too_large(int64_t ctas) {
  return {"grid of " + std::to_string(ctas) + " CTAs: CUDA takes up to " +
          std::to_string(GRID_LIMIT) + "; split the batch" + USE_TORCH};
}

}  // namespace archflash::core
