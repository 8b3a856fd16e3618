// Query heads that share a head of K, packed as rows of each warpgroup's part of a tile, with
// whatever number of rows fits. Plain C++.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"

namespace archflash::hopper {

// The 64 rows of a warpgroup are `rows` query rows of each of `count` neighbouring heads, head
// after head. Its last rows belong to no head where `count * rows` is less. `head` and `row` of a
// row of the warpgroup are counted from its first head and first query row.
struct GroupHeads {
  int32_t count;          // 1: nothing is packed
  int32_t rows;           // at least 2
  uint32_t inverse;       // 2^16 / rows, rounded up
  uint32_t tile_inverse;  // 2^32 / (rows of the tile), rounded up

  ARCHFLASH_HOST_DEVICE int head(int row_of_group) const {
    return static_cast<int>(static_cast<uint32_t>(row_of_group) * inverse >> 16);
  }
  ARCHFLASH_HOST_DEVICE int row(int row_of_group) const {
    return row_of_group - head(row_of_group) * rows;
  }
  ARCHFLASH_HOST_DEVICE int filled() const { return count * rows; }  // rows that have a head
};

// `warpgroups` of a tile have `rows` of each of `count` heads.
inline GroupHeads group_heads(int count, int rows, int warpgroups) {
  const auto inverse = [](int bits, int of) {
    return static_cast<uint32_t>(((uint64_t{1} << bits) + of - 1) / static_cast<uint64_t>(of));
  };
  return {count, rows, inverse(16, rows), inverse(32, warpgroups * rows)};
}

// Up to how many rows of all sequences tile_inverse divides exactly: the error of the quotient
// stays below one part of 2^32.
constexpr int64_t MOST_GROUPED_ROWS = int64_t{1} << 23;

}  // namespace archflash::hopper
