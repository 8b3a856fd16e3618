// tcgen05.cp and tcgen05.shift: what the tensor pipe copies and moves.
#include <algorithm>
#include <bit>
#include <cstring>

#include "sim/units/tcgen05.h"

namespace archflash::sim {
namespace {

class Copy : public PipeOperation {
 public:
  Copy(Warp& warp, const TmemUser& user, const CopyRequest& request,
       const MatrixDescriptor& descriptor, std::vector<Cta*> ctas)
      : PipeOperation(warp, user),
        request_(request),
        descriptor_(descriptor),
        ctas_(std::move(ctas)) {}

 protected:
  void execute() override {
    const int column = static_cast<int>(request_.to & COLUMN_MASK);
    for (Cta* cta : ctas_) {
      Tmem& memory = cta->tensor()->memory();
      for (int lane = 0; lane < TMEM_LANES; ++lane) {
        const uint32_t row =
            request_.first[static_cast<size_t>(lane / LANES)] + static_cast<uint32_t>(lane % LANES);
        for (uint32_t unit = 0; unit < request_.bytes / TILE_UNIT; ++unit) {
          const uint32_t place = tile_place(descriptor_, true, row, unit);
          uint32_t words[TILE_UNIT / 4];
          std::memcpy(words, cta->shared() + (tile_address(descriptor_, place) - SHARED_START),
                      TILE_UNIT);
          for (int i = 0; i < 4; ++i) {
            memory.column(column + static_cast<int>(unit) * 4 + i)[lane] = words[i];
          }
        }
      }
    }
    trace("copy of warp " + std::to_string(warp().index()));
  }

 private:
  CopyRequest request_;
  MatrixDescriptor descriptor_;
  std::vector<Cta*> ctas_;
};

class Shift : public PipeOperation {
 public:
  Shift(Warp& warp, const TmemUser& user, uint32_t address, std::vector<Cta*> ctas)
      : PipeOperation(warp, user), address_(address), ctas_(std::move(ctas)) {}

 protected:
  void execute() override {
    const auto first = static_cast<int>(address_ >> LANE_SHIFT);
    for (Cta* cta : ctas_) {
      for (int c = 0; c < PRODUCT_K_COLUMNS; ++c) {
        uint32_t* const cells =
            cta->tensor()->memory().column(static_cast<int>(address_ & COLUMN_MASK) + c);
        std::copy_backward(cells + first, cells + TMEM_LANES - 1, cells + TMEM_LANES);
      }
    }
    trace("shift of warp " + std::to_string(warp().index()));
  }

 private:
  uint32_t address_;
  std::vector<Cta*> ctas_;
};

}  // namespace

void TensorUnit::copy(Warp& warp, int lane, const CopyRequest& request) {
  MatrixDescriptor descriptor;
  if (const std::string wrong = decode_tile(request.source, descriptor); !wrong.empty()) {
    throw Fault{"descriptor", "the descriptor of tcgen05.cp: " + wrong, lane};
  }
  if (request.to >> LANE_SHIFT != 0) {
    throw Fault{
        "tmem",
        "tcgen05.cp to lane " + std::to_string(request.to >> LANE_SHIFT) + ": 0 for this shape",
        lane, request.to};
  }
  const TmemUser user = next_operation(warp, lane, TmemUser::By::Copy);
  std::vector<Cta*> ctas =
      group(warp, request.ctas, lane, "tcgen05.cp for a pair with", user.clock);
  // The tile is made of bytes, that is, of elements of 8 bits.
  const MatrixTile tile{descriptor,       true, 0, request.rows, static_cast<int>(request.bytes),
                        ElementType::E4M3};
  TmemRegion region{static_cast<int>(request.to & COLUMN_MASK),
                    static_cast<int>(request.bytes / 4)};
  region.lanes.fill(ALL_LANES);
  for (Cta* cta : ctas) {
    open_tile(warp, *cta, "the source of tcgen05.cp", tile, user.clock);
    cta->tensor()->memory().write(warp, user, region, "tcgen05.cp");
  }
  pipe().enqueue(std::make_shared<Copy>(warp, user, request, descriptor, std::move(ctas)));
}

void TensorUnit::shift(Warp& warp, int lane, int ctas, uint32_t address) {
  const uint32_t first = address >> LANE_SHIFT;
  if (first % LANES != 0 || first >= TMEM_LANES) {
    throw Fault{"tmem", "tcgen05.shift at lane " + std::to_string(first) + ": a multiple of 32",
                lane, address};
  }
  const TmemUser user = next_operation(warp, lane, TmemUser::By::Shift);
  std::vector<Cta*> group =
      this->group(warp, ctas, lane, "tcgen05.shift for a pair with", user.clock);
  TmemRegion region{static_cast<int>(address & COLUMN_MASK), PRODUCT_K_COLUMNS};
  for (size_t q = first / LANES; q < TMEM_QUARTERS; ++q) region.lanes[q] = ALL_LANES;
  for (Cta* cta : group) {
    Tmem& memory = cta->tensor()->memory();
    memory.check_values(warp, user.by, region, "tcgen05.shift");
    memory.write(warp, user, region, "tcgen05.shift");
  }
  pipe().enqueue(std::make_shared<Shift>(warp, user, address, std::move(group)));
}

}  // namespace archflash::sim
