// tcgen05.mma: what a product checks when it starts, and what the pipe computes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "sim/numerics/numeric.h"
#include "sim/numerics/tile_product.h"
#include "sim/units/tcgen05.h"

namespace archflash::sim {
namespace {

constexpr uint32_t LOWER = 0xFFFF;

// A number that identifies an accumulator and its shape.
constexpr uint64_t accumulator_of(uint32_t address, const MmaDescriptor& mma, int ctas) {
  return uint64_t{address} << 24 | static_cast<uint64_t>(mma.m / 16) << 16 |
         static_cast<uint64_t>(mma.n / 8) << 8 | static_cast<uint64_t>(mma.half) << 4 |
         static_cast<uint64_t>(ctas);
}

// Where rows of a CTA's part of D lie in tensor memory. There are two groups where the columns of D
// are folded in halves.
struct RowGroup {
  int lane = 0;               // the lane of the first row
  int first_n = 0, n = 0;     // the columns of D that the group has
  bool sparse_lanes = false;  // 16 rows lie in the first or the second half of each quarter
};

int lane_of(const RowGroup& group, int row) {
  return group.lane + (group.sparse_lanes ? row % 16 + row / 16 * 32 : row);
}

LaneMask lanes_of(const RowGroup& group, int rows) {
  LaneMask mask{};
  for (int row = 0; row < rows; ++row) {
    const int lane = lane_of(group, row);
    mask[static_cast<size_t>(lane / LANES)] |= 1u << lane % LANES;
  }
  return mask;
}

std::vector<RowGroup> groups_of(const MmaDescriptor& mma, int ctas, int lane) {
  if (ctas == 1) return {{lane, 0, mma.n, mma.m == 64}};
  if (mma.m == 256) return {{0, 0, mma.n, false}};
  return {{0, 0, mma.n / 2, false}, {64, mma.n / 2, mma.n / 2, false}};
}

// A product in one CTA or a pair, with the places of its operands.
class Product : public PipeOperation {
 public:
  struct Part {  // the tiles of one CTA
    Cta* cta;
    MatrixTile a, b;
  };

  Product(Warp& warp, const TmemUser& user, const MmaRequest& request, const MmaDescriptor& mma)
      : PipeOperation(warp, user), request_(request), mma_(mma) {}

  std::vector<Part>& parts() { return parts_; }
  std::vector<RowGroup>& groups() { return groups_; }
  int rows() const { return mma_.m / request_.ctas; }
  int d_column() const { return static_cast<int>(request_.d & COLUMN_MASK); }
  int a_column() const { return static_cast<int>(request_.a_tmem & COLUMN_MASK); }
  // The lanes of D that are written in a part.
  LaneMask written(const RowGroup& group, size_t part) const {
    LaneMask lanes = lanes_of(group, rows());
    for (size_t q = 0; q < TMEM_QUARTERS; ++q) {
      lanes[q] &= ~request_.skip[part * TMEM_QUARTERS + q];
    }
    return lanes;
  }

 protected:
  void execute() override {
    const auto n = static_cast<size_t>(mma_.n), k = static_cast<size_t>(mma_.k);
    std::vector<float> b(n * k);  // (n, k)
    for (size_t part = 0; part < parts_.size(); ++part) {
      read_tile(*parts_[part].cta, parts_[part].b, &b[part * n / parts_.size() * k], k, 1);
    }
    if (mma_.negate_b) std::transform(b.begin(), b.end(), b.begin(), std::negate<>());
    for (size_t part = 0; part < parts_.size(); ++part) {
      for (const RowGroup& group : groups_) multiply(part, group, b.data());
    }
    const uint64_t a = request_.a_in_tmem ? request_.a_tmem : request_.a;
    trace("of warp " + std::to_string(warp().index()),
          {request_.d, a, request_.b, request_.descriptor});
  }

 private:
  std::vector<float> read_a(const Part& part, const RowGroup& group) const {
    const auto m = static_cast<size_t>(rows()), k = static_cast<size_t>(mma_.k);
    std::vector<float> a(k * m);  // (k, m)
    if (!request_.a_in_tmem) {
      read_tile(*part.cta, part.a, a.data(), 1, m);
    } else {
      Tmem& memory = part.cta->tensor()->memory();
      std::vector<float> row(k);
      for (size_t i = 0; i < m; ++i) {
        uint32_t words[PRODUCT_K_COLUMNS];
        for (int c = 0; c < PRODUCT_K_COLUMNS; ++c) {
          words[c] = memory.column(a_column() + c)[lane_of(group, static_cast<int>(i))];
        }
        decode_row(mma_.a, words, mma_.k, row.data());
        for (size_t at = 0; at < k; ++at) a[at * m + i] = row[at];
      }
    }
    if (mma_.negate_a) std::transform(a.begin(), a.end(), a.begin(), std::negate<>());
    return a;
  }

  void multiply(size_t part, const RowGroup& group, const float* b) {
    Cta& cta = *parts_[part].cta;
    Tmem& memory = cta.tensor()->memory();
    const std::vector<float> a = read_a(parts_[part], group);
    const LaneMask lanes = written(group, part);
    // The columns of D follow one another in tensor memory, so that D is the product of B and A.
    const TileShape shape{group.n, rows(), mma_.k, mma_.b, mma_.a, mma_.half};
    const TensorCore& core = *cta.launch().tensor_core;
    const auto add_product = [&](float* d, int d_pitch) {
      multiply_accumulate(shape, is_fp8(mma_.a) ? core.fp8_async : core.wide,
                          b + group.first_n * mma_.k, mma_.k, a.data(), rows(), d, d_pitch,
                          request_.accumulate);
    };
    const bool plain = !mma_.half && request_.scale == 0 && !group.sparse_lanes &&
                       lanes == lanes_of(group, rows());
    if (plain) {
      add_product(reinterpret_cast<float*>(memory.column(d_column()) + group.lane), TMEM_LANES);
      return;
    }
    const float scale = std::ldexp(1.0f, -request_.scale);
    const auto m = static_cast<size_t>(rows());
    std::vector<float> sums(static_cast<size_t>(group.n) * m);
    const auto for_each_cell = [&](auto function) {
      for (int column = 0; column < group.n; ++column) {
        uint32_t* const cells = memory.column(d_column() + column);
        for (int row = 0; row < rows(); ++row) {
          const int lane = lane_of(group, row);
          function(sums[static_cast<size_t>(column) * m + static_cast<size_t>(row)], cells[lane],
                   lane);
        }
      }
    };
    if (request_.accumulate) {
      for_each_cell([&](float& sum, uint32_t cell, int) {
        sum = scale * (mma_.half ? f32_of_f16(static_cast<uint16_t>(cell)) : f32_of(cell));
      });
    }
    add_product(sums.data(), rows());
    for_each_cell([&](float sum, uint32_t& cell, int lane) {
      if (!(lanes[static_cast<size_t>(lane / LANES)] >> lane % LANES & 1)) return;
      cell = mma_.half ? (cell & ~LOWER) | cvt_rn_f16_f32(sum) : bits_of(sum);
    });
  }

  MmaRequest request_;
  MmaDescriptor mma_;
  std::vector<Part> parts_;
  std::vector<RowGroup> groups_;
};

}  // namespace

void TensorUnit::multiply(Warp& warp, int lane, const MmaRequest& request) {
  MmaDescriptor mma;
  if (const std::string wrong =
          decode_mma(request.kind, request.ctas, request.a_in_tmem, request.descriptor, mma);
      !wrong.empty()) {
    throw Fault{"descriptor", "the instruction descriptor of tcgen05.mma: " + wrong, lane};
  }
  const auto decode = [&](const char* operand, uint64_t bits) {
    MatrixDescriptor descriptor;
    if (const std::string wrong = decode_tile(bits, descriptor); !wrong.empty()) {
      throw Fault{"descriptor",
                  std::string("the descriptor of matrix ") + operand + " of tcgen05.mma: " + wrong,
                  lane};
    }
    return descriptor;
  };
  const auto lane_field = [&](const char* operand, uint32_t address) {
    const int field = static_cast<int>(address >> LANE_SHIFT);
    const bool halves = request.ctas == 1 && mma.m == 64;
    if (field != 0 && !(halves && field == 16)) {
      throw Fault{"tmem",
                  std::string("the lane of ") + operand + " of tcgen05.mma is " +
                      std::to_string(field) +
                      (halves ? ": 0 or 16 for 64 rows" : ": 0 for this shape"),
                  lane, address};
    }
    return field;
  };
  const int d_lane = lane_field("D", request.d);
  if (request.a_in_tmem && lane_field("A", request.a_tmem) != d_lane) {
    throw Fault{"tmem", "A and D of tcgen05.mma are in different halves of the lanes", lane};
  }
  const TmemUser user = next_operation(warp, lane, TmemUser::By::Product,
                                       accumulator_of(request.d, mma, request.ctas));
  auto product = std::make_shared<Product>(warp, user, request, mma);
  product->groups() = groups_of(mma, request.ctas, d_lane);
  const int d_columns = product->groups().front().n;
  if (request.a_in_tmem && product->a_column() < product->d_column() + d_columns &&
      product->d_column() < product->a_column() + PRODUCT_K_COLUMNS) {
    cta_.report(Severity::Error, warp, lane, "tcgen05",
                "D of tcgen05.mma overwrites A while it is read: D has columns " +
                    std::to_string(product->d_column()) + "-" +
                    std::to_string(product->d_column() + d_columns - 1) + ", A from " +
                    std::to_string(product->a_column()) + " on");
  }
  const std::vector<Cta*> ctas =
      group(warp, request.ctas, lane, "tcgen05.mma for a pair with", user.clock);
  const auto rows = static_cast<uint32_t>(product->rows());
  const MatrixDescriptor b = decode("B", request.b);
  const MatrixDescriptor a = request.a_in_tmem ? MatrixDescriptor{} : decode("A", request.a);
  for (size_t part = 0; part < ctas.size(); ++part) {
    Cta& owner = *ctas[part];
    Tmem& memory = owner.tensor()->memory();
    const MatrixTile a_tile{a, mma.a_k_major, 0, rows, mma.k, mma.a};
    const MatrixTile b_tile{b,     mma.b_k_major, 0, static_cast<uint32_t>(mma.n / request.ctas),
                            mma.k, mma.b};
    open_tile(warp, owner, "matrix B of tcgen05.mma", b_tile, user.clock);
    if (!request.a_in_tmem) open_tile(warp, owner, "matrix A of tcgen05.mma", a_tile, user.clock);
    for (const RowGroup& group : product->groups()) {
      if (request.a_in_tmem) {
        const TmemRegion region{product->a_column(), PRODUCT_K_COLUMNS,
                                lanes_of(group, product->rows())};
        memory.read(warp, user, region, "matrix A of tcgen05.mma");
      }
      const TmemRegion region{product->d_column(), group.n, product->written(group, part)};
      if (request.accumulate) {
        memory.check_values(warp, user.by, region, "tcgen05.mma that adds to D");
      }
      memory.write(warp, user, region, "matrix D of tcgen05.mma");
    }
    product->parts().push_back({&owner, a_tile, b_tile});
  }
  pipe().enqueue(std::move(product));
}

}  // namespace archflash::sim
