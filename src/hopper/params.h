// The one parameter of every hopper kernel.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/device/packed_heads.cuh"
#include "common/dropout_params.h"
#include "common/dtype.h"
#include "common/partials.h"
#include "common/tensor_map.h"
#include "hopper/forward/group_heads.h"

namespace archflash::hopper {

struct Params {
  AttentionParams attention;
  // Row tiles of all heads, times partials.splits and v_slices, which the CTAs share out.
  int32_t tiles;
  // Not 0: the row tiles of packed sequences are listed behind the counter (PackedTiles).
  int32_t listed;
  // Counts the tiles that CTAs have taken beyond their first ones; 0 before the launch. Null: the
  // tiles are shared out in a fixed order.
  int32_t* taken_gmem;
  Partials partials;
  device::PackedHeads packed_heads;  // for kernels with CAN_PACK
  GroupHeads groups;                 // for those with PACKS
  TensorMap q_map, k_map, v_map;
  // For 8-bit inputs only; descales of k and v for copies of 8-bit caches, too. With them
  // attention.rule.tanh_scale is set even if there is no softcap. With v_columns v_map is of the
  // transposed V, (batch, heads_kv, dv, v_columns), in the workspace; where it is 0 the kernel
  // transposes V itself.
  Descales descales;
  DType out_dtype;  // F16 or BF16
  uint8_t* v_columns_gmem;
  int32_t v_columns;  // keys of a column of V, each sequence filled up to whole V_COLUMN_KEYS
  int32_t v_slices;   // into which the columns of V are shared out, for kernels that can do that
  // The tiles from whole_tiles on are parts of a row tile, which have part_rows rows or what is
  // left (for kernels with CUTS_TILES). With part_rows = ONE_TILE_EACH, for kernels with SHORT, no
  // packed sequence has more than one row tile, and each has the tiles of its number.
  int32_t whole_tiles, part_rows;
};
constexpr int32_t ONE_TILE_EACH = -1;

// A row tile of packed sequences; first_row is negative behind the last one.
struct alignas(16) PackedTile {
  int32_t sequence, first_row, nq, nk;
};

// The counter of tiles (Params::taken_gmem), and the tiles in the order in which they are taken, as
// the kernel before has listed them (order_packed.cuh).
struct PackedTiles {
  int32_t taken;
  PackedTile tiles[1];  // and more

  static constexpr int64_t bytes(int64_t tiles) {
    return static_cast<int64_t>(sizeof(PackedTiles) + (tiles - 1) * sizeof(PackedTile));
  }
};

// The one parameter of the kernel that clears the counter of tiles (Params::taken_gmem).
struct CounterParams {
  int32_t* taken_gmem;
};

// The one parameter of kernels with STORES_BY_TMA.
struct StoringParams {
  Params call;
  TensorMap out_map;  // a box has the rows of a warp and the columns of a slab
};

// The one parameter of kernels with dropout.
struct DroppingParams {
  Params call;
  DropoutParams dropout;
};

}  // namespace archflash::hopper
