// The formats of latent rows whose numbers are e4m3 with scales beside them, as FlashMLA stores
// them. python/archflash/_packed_rows.py has them in words.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"

namespace archflash {

enum class PackedRows : int32_t { None = 0, Bytes656 = 1, Bytes584 = 2 };

struct PackedFormat {
  const char* name;
  int64_t row_bytes;  // that a row takes in its page
  int64_t step;       // bytes from the numbers of one row to those of the next
};
constexpr PackedFormat PACKED_FORMATS[] = {
    {"", 0, 0}, {"fp8_656", 656, 656}, {"fp8_584", 584, 576}};
constexpr int PACKED_FORMAT_COUNT = 3;

}  // namespace archflash
