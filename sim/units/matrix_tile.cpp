#include "sim/units/matrix_tile.h"

#include <bit>
#include <cstring>

#include "sim/run/cluster.h"

namespace archflash::sim {
namespace {

// A line is a row along M or N, or along K in an MN-major tile.
struct Extent {
  uint32_t first_line, lines, first_unit, units;
};

Extent extent_of(const MatrixTile& tile) {
  const auto bytes = static_cast<uint32_t>(element_bits(tile.type) / 8);
  const auto depth = static_cast<uint32_t>(tile.k);
  if (tile.k_major) return {tile.first, tile.count, 0, depth * bytes / TILE_UNIT};
  return {0, depth, tile.first * bytes / TILE_UNIT, tile.count * bytes / TILE_UNIT};
}

// Reports a tile that does not follow the boxes which TMA wrote there.
void check_boxes(Warp& warp, Cta& owner, const char* operand, const MatrixTile& tile) {
  if (!owner.has_tiles()) return;
  const MatrixDescriptor& descriptor = tile.descriptor;
  const Extent extent = extent_of(tile);
  const uint32_t end_line = extent.first_line + extent.lines;
  const uint32_t end_unit = extent.first_unit + extent.units;
  const auto complain = [&](const std::string& what, uint32_t place) {
    warp.cta().report(Severity::Error, warp, -1, "descriptor",
                      std::string("the descriptor of ") + operand + " " + what, place);
  };
  const auto tile_at = [&](uint32_t place) -> const TileLine* {
    const uint32_t offset = place - SHARED_START;
    return offset < owner.shared_bytes() ? owner.tile_of(offset) : nullptr;
  };
  const TileLine* const first = tile_at(descriptor.start);
  if (first != nullptr && first->span != descriptor.span) {
    complain("says a swizzle of " + std::to_string(descriptor.span) +
                 " bytes where TMA wrote with " + std::to_string(first->span),
             descriptor.start);
    return;
  }
  if (descriptor.span == 0) return;
  const auto row_of = [&](const TileLine& line, uint32_t place) {
    return (place - SHARED_START - line.start) / line.pitch;
  };
  for (uint32_t line = TILE_GROUP; line < end_line; line += TILE_GROUP) {
    const uint32_t before = tile_place(descriptor, tile.k_major, line - TILE_GROUP, 0);
    const uint32_t here = tile_place(descriptor, tile.k_major, line, 0);
    const TileLine *from = tile_at(before), *to = tile_at(here);
    if (from == nullptr || to == nullptr) continue;
    // The next 8 rows of a slab follow, or in a box of groups of 8 rows those of its other slabs.
    const bool in_groups = from->slab_rows == TILE_GROUP && from->group_rows != 0;
    const uint32_t next = row_of(*from, before) + (in_groups ? from->group_rows : TILE_GROUP);
    const uint32_t row = row_of(*to, here);
    const bool ends = in_groups ? next >= from->rows : next == from->rows;
    if (from->start == to->start ? row == next : ends && row == next - from->rows) continue;
    complain("has a stride offset of " + std::to_string(descriptor.stride) + " bytes: row " +
                 std::to_string(line) + " is row " + std::to_string(row) + " of a box, after row " +
                 std::to_string(row_of(*from, before)) + " for row " +
                 std::to_string(line - TILE_GROUP),
             here);
    return;
  }
  if (tile.k_major) return;
  const uint32_t per_slab = descriptor.span / TILE_UNIT;
  for (uint32_t unit = per_slab; unit < end_unit; unit += per_slab) {
    const uint32_t before = tile_place(descriptor, tile.k_major, 0, unit - per_slab);
    const uint32_t here = tile_place(descriptor, tile.k_major, 0, unit);
    const TileLine *from = tile_at(before), *to = tile_at(here);
    if (from == nullptr || to == nullptr) continue;
    const uint32_t row_before = row_of(*from, before), row = row_of(*to, here);
    const bool next_of_box = from->start == to->start && from->slab_rows < from->rows &&
                             row == row_before + from->slab_rows;
    if (next_of_box || (from->start != to->start && row_before == row)) continue;
    complain("has a leading offset of " + std::to_string(descriptor.leading) + " bytes: slab " +
                 std::to_string(unit / per_slab) + " begins at row " + std::to_string(row) +
                 " of " + (from->start == to->start ? "the box of the slab before" : "its box") +
                 ", that one at row " + std::to_string(row_before),
             here);
    return;
  }
}

}  // namespace

MatrixDescriptor decode_offsets(uint64_t bits) {
  constexpr uint64_t FIELD = 0x3FFF;
  MatrixDescriptor descriptor;
  descriptor.start = static_cast<uint32_t>(bits & FIELD) * TILE_UNIT;
  descriptor.leading = static_cast<uint32_t>(bits >> 16 & FIELD) * TILE_UNIT;
  descriptor.stride = static_cast<uint32_t>(bits >> 32 & FIELD) * TILE_UNIT;
  descriptor.base_offset = static_cast<uint32_t>(bits >> 49 & 7);
  return descriptor;
}

bool follows_pattern(const MatrixDescriptor& descriptor) {
  return (((descriptor.start >> 7) - descriptor.base_offset) & descriptor.mask) == 0;
}

namespace {

// How many units lie together, in an order that the swizzle chooses, if the first one is aligned to
// all of them.
uint32_t units_together(const MatrixTile& tile, const Extent& extent) {
  if (tile.descriptor.span == 0) return 1;
  const uint32_t units = tile.k_major ? extent.units : tile.descriptor.span / TILE_UNIT;
  const bool whole = std::has_single_bit(units) && units * TILE_UNIT <= tile.descriptor.span &&
                     extent.first_unit % units == 0 && extent.units % units == 0;
  return whole ? units : 1;
}

// Returns true, and notes the read, if a glance shows that units which lie together are in order.
bool opens_quietly(Warp& warp, Cta& owner, const MatrixTile& tile, uint32_t line, uint32_t unit,
                   uint32_t units, Clock clock) {
  const uint32_t bytes = units * TILE_UNIT;
  const uint32_t place = tile_place(tile.descriptor, tile.k_major, line, unit);
  if (place % bytes != 0) return false;
  const uint32_t offset = (tile_address(tile.descriptor, place) & ~(bytes - 1)) - SHARED_START;
  if (offset >= owner.shared_bytes() || bytes > owner.shared_bytes() - offset) return false;
  if (!all_valid(owner.shared_state() + offset, bytes)) return false;
  RaceDetector* races = warp.cta().races();
  return races == nullptr || races->matrix_read_in_order({warp.agent(), 0, warp.pc()}, clock,
                                                         owner.race_base() + offset, bytes);
}

}  // namespace

void open_tile(Warp& warp, Cta& owner, const char* operand, const MatrixTile& tile, Clock clock) {
  const MatrixDescriptor& descriptor = tile.descriptor;
  const Extent extent = extent_of(tile);
  Cta& cta = warp.cta();
  if (!follows_pattern(descriptor)) {
    // A card swizzles by the address bits all the same.
    cta.report(Severity::Lint, warp, -1, "alignment",
               std::string("the descriptor of ") + operand +
                   " starts inside its swizzle's pattern with a base offset of 0",
               descriptor.start);
  }
  const uint32_t together = units_together(tile, extent);
  for (uint32_t line = extent.first_line; line < extent.first_line + extent.lines; ++line) {
    for (uint32_t unit = extent.first_unit; unit < extent.first_unit + extent.units; ++unit) {
      if (unit % together == 0 && opens_quietly(warp, owner, tile, line, unit, together, clock)) {
        unit += together - 1;
        continue;
      }
      const uint32_t address =
          tile_address(descriptor, tile_place(descriptor, tile.k_major, line, unit));
      const uint32_t offset = address - SHARED_START;
      if (offset >= owner.shared_bytes() || TILE_UNIT > owner.shared_bytes() - offset) {
        throw Fault{"out-of-bounds",
                    std::string(operand) + " reads shared offset " +
                        std::to_string(static_cast<int32_t>(offset)) + " of " +
                        std::to_string(owner.shared_bytes()) + ": row " + std::to_string(line) +
                        ", unit " + std::to_string(unit) + " with a leading offset of " +
                        std::to_string(descriptor.leading) + " and a stride of " +
                        std::to_string(descriptor.stride),
                    -1, address};
      }
      const uint8_t* const state = owner.shared_state() + offset;
      if (!all_valid(state, TILE_UNIT)) {
        const bool in_flight = std::memchr(state, IN_FLIGHT, TILE_UNIT) != nullptr;
        cta.report(Severity::Error, warp, -1, in_flight ? "in-flight" : "uninitialised",
                   std::string(operand) + " reads shared offset " + std::to_string(offset) +
                       (in_flight ? ", which an asynchronous copy is writing"
                                  : ", which nothing has written"),
                   address);
      }
      RaceDetector* races = cta.races();
      if (races == nullptr) continue;
      const Accessor who{warp.agent(), 0, warp.pc()};
      const Race race = races->matrix_read(who, clock, owner.race_base() + offset, TILE_UNIT);
      if (race.found) {
        cta.report_race(warp, -1, race, false, false,
                        std::string(operand) + " at shared offset " + std::to_string(offset),
                        address);
      }
    }
  }
  check_boxes(warp, owner, operand, tile);
}

void read_tile(Cta& owner, const MatrixTile& tile, float* out, size_t row_step, size_t k_step) {
  const auto per_unit = TILE_UNIT * 8 / static_cast<uint32_t>(element_bits(tile.type));
  float values[TILE_UNIT];
  const Extent extent = extent_of(tile);
  for (uint32_t line = 0; line < extent.lines; ++line) {
    for (uint32_t unit = 0; unit < extent.units; ++unit) {
      const uint32_t place = tile_place(tile.descriptor, tile.k_major, extent.first_line + line,
                                        extent.first_unit + unit);
      const uint8_t* from = owner.shared() + (tile_address(tile.descriptor, place) - SHARED_START);
      decode_row(tile.type, from, static_cast<int>(per_unit), values);
      for (uint32_t e = 0; e < per_unit; ++e) {
        const size_t row = tile.k_major ? line : unit * per_unit + e;
        const size_t at = tile.k_major ? unit * per_unit + e : line;
        out[row * row_step + at * k_step] = values[e];
      }
    }
  }
}

}  // namespace archflash::sim
