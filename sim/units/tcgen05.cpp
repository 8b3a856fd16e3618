#include "sim/units/tcgen05.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "sim/numerics/fma_product.h"
#include "sim/numerics/numeric.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

constexpr int K_BYTES = 32;   // of one product, in shared memory
constexpr int K_COLUMNS = 8;  // likewise in tensor memory
constexpr uint32_t LOWER = 0xFFFF;
constexpr size_t MOST_USED = 64;  // loads to be remembered in kernels that never wait for them
// A number for accumulator and shape that no two of them share.
constexpr uint64_t accumulator_of(uint32_t address, const MmaDescriptor& mma, int ctas) {
  return uint64_t{address} << 24 | static_cast<uint64_t>(mma.m / 16) << 16 |
         static_cast<uint64_t>(mma.n / 8) << 8 | static_cast<uint64_t>(mma.half) << 4 |
         static_cast<uint64_t>(ctas);
}

// How the rows of a CTA's part of D lie in tensor memory: two groups of rows where the columns of
// D are folded in halves.
struct RowGroup {
  int lane = 0;               // of the first row
  int first_n = 0, n = 0;     // its columns of D
  bool sparse_lanes = false;  // 16 rows in the first or the second half of each quarter
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

bool is_one_of(int value, std::initializer_list<int> values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

std::string decode_tile(uint64_t bits, MatrixDescriptor& descriptor) {
  descriptor = decode_offsets(bits);
  if (bits >> 14 & 3) return "bits 14-15 are not zero";
  if (bits >> 30 & 3) return "bits 30-31 are not zero";
  if ((bits >> 46 & 7) != 1) {
    return "bits 46-48 are " + std::to_string(bits >> 46 & 7) + " and must be 1";
  }
  if (bits >> 52 & 1) return "bit 52: an absolute leading offset is not simulated";
  if (bits >> 53 & 0xFF) return "bits 53-60 are not zero";
  const auto mode = static_cast<int>(bits >> 61);
  switch (mode) {
    case 0:
      break;
    case 2:
      descriptor.span = 128;
      descriptor.mask = 7;
      break;
    case 4:
      descriptor.span = 64;
      descriptor.mask = 3;
      break;
    case 6:
      descriptor.span = 32;
      descriptor.mask = 1;
      break;
    case 1:
      return "swizzle (bits 61-63) 1, 128 bytes with atoms of 32, is not simulated";
    default:
      return "swizzle (bits 61-63) " + std::to_string(mode) + " does not exist";
  }
  if (descriptor.base_offset != 0 && !follows_pattern(descriptor)) {
    return "the start address is not where the swizzle's pattern begins, and the base offset "
           "(bits 49-51) does not say so";
  }
  return {};
}

std::string decode_mma(MmaKind kind, int ctas, bool a_in_tmem, uint32_t bits, MmaDescriptor& mma) {
  const auto field = [&](int first, int last) {
    return static_cast<int>(bits >> first & ((2u << (last - first)) - 1));
  };
  const auto is = [](const char* name, int value, const std::string& allowed) {
    return std::string(name) + " is " + std::to_string(value) + ": " + allowed;
  };
  if (field(0, 1) != 0) return "sparsity selector (bits 0-1) is not zero: A is dense here";
  if (field(2, 2) != 0) return "sparsity (bit 2) is set: A is dense here";
  if (field(3, 3) != 0) return "saturation (bit 3) is set: for kind::i8 only";
  if (field(6, 6) != 0) return "bit 6 is not zero";
  if (field(23, 23) != 0) return "bit 23 is not zero";
  if (field(29, 29) != 0) return "bit 29 is not zero";
  if (field(30, 31) != 0) return "the shift of .ws (bits 30-31) is not zero";
  const int d = field(4, 5), a = field(7, 9), b = field(10, 12);
  if (d > 1) return is("the type of D (bits 4-5)", d, "0 (f16) or 1 (f32)");
  mma.half = d == 0;
  switch (kind) {
    case MmaKind::F16: {
      if (a > 1) return is("the type of A (bits 7-9)", a, "0 (f16) or 1 (bf16)");
      if (b != a) return is("the type of B (bits 10-12)", b, "as A's, " + std::to_string(a));
      if (mma.half && a == 1) return "the type of D (bits 4-5) is f16 with A in bf16";
      mma.a = mma.b = a == 0 ? ElementType::F16 : ElementType::BF16;
      break;
    }
    case MmaKind::TF32:
      if (a != 2) return is("the type of A (bits 7-9)", a, "2 (tf32)");
      if (b != 2) return is("the type of B (bits 10-12)", b, "2 (tf32)");
      if (mma.half) return "the type of D (bits 4-5) is f16: f32 for tf32";
      mma.a = mma.b = ElementType::TF32;
      break;
    case MmaKind::F8F6F4:
      for (const auto& [name, code, type] : {std::tuple("the type of A (bits 7-9)", a, &mma.a),
                                             std::tuple("the type of B (bits 10-12)", b, &mma.b)}) {
        if (is_one_of(code, {3, 4, 5})) {
          return is(name, code, "types of 6 and 4 bits are not simulated");
        }
        if (code > 1) return is(name, code, "0 (e4m3) or 1 (e5m2)");
        *type = code == 0 ? ElementType::E4M3 : ElementType::E5M2;
      }
      break;
  }
  mma.k = K_BYTES * 8 / element_bits(mma.a);
  mma.negate_a = field(13, 13) != 0;
  mma.negate_b = field(14, 14) != 0;
  mma.a_k_major = field(15, 15) == 0;
  mma.b_k_major = field(16, 16) == 0;
  if (a_in_tmem && !mma.a_k_major) {
    return "the transposition of A (bit 15) is set: in tensor memory A is K-major";
  }
  if (kind == MmaKind::TF32 && !(mma.a_k_major && mma.b_k_major)) {
    return "a transposition (bits 15-16) is set: tf32 that is MN-major is not simulated";
  }
  mma.m = field(24, 28) * 16;
  mma.n = field(17, 22) * 8;
  const std::string group = " with cta_group::" + std::to_string(ctas);
  if (!(ctas == 1 ? is_one_of(mma.m, {64, 128}) : is_one_of(mma.m, {128, 256}))) {
    return is("M (bits 24-28, in 16)", mma.m, (ctas == 1 ? "64 or 128" : "128 or 256") + group);
  }
  int step = 8 * ctas;
  // What 8-bit elements of B that are MN-major take.
  if (kind == MmaKind::F8F6F4 && !mma.b_k_major) step *= 2;
  if (mma.n < step || mma.n > 256 || mma.n % step != 0) {
    return is("N (bits 17-22, in 8)", mma.n,
              "a multiple of " + std::to_string(step) + " up to 256" + group);
  }
  if (a_in_tmem && mma.m == 128 * ctas && mma.n % (16 * ctas) != 0) {
    return is("N (bits 17-22, in 8)", mma.n,
              "a multiple of " + std::to_string(16 * ctas) + " with A in tensor memory" + group);
  }
  return {};
}

// ---- Ports --------------------------------------------------------------------------------------

const TensorPort& port_of(Cta& cta, int agent) {
  const int count = cta.warp_count();
  Cta& owner = cta.cluster().cta(agent / count);
  return owner.tensor()->port(owner.warp(agent % count));
}

Cta& peer_of(Cta& cta) {
  const int peer = cta.rank() ^ 1;
  if (peer >= cta.cluster().size()) {
    throw Fault{"tcgen05", "cta_group::2 in a cluster of " + std::to_string(cta.cluster().size()) +
                               ": a pair is two CTAs whose ranks differ in bit 0"};
  }
  return cta.cluster().cta(peer);
}

TensorUnit::TensorUnit(Cta& cta)
    : cta_(cta), memory_(cta), ports_(static_cast<size_t>(cta.warp_count())) {}

TensorUnit& TensorUnit::pipe() {
  if (cta_.kernel().tcgen05_group != 2 || cta_.rank() % 2 == 0) return *this;
  return *peer_of(cta_).tensor();
}

TmemUser TensorUnit::next(Warp& warp, TensorPort::Unit& unit, TmemUser::By by) {
  RaceDetector* races = cta_.races();
  if (races != nullptr && unit.agent < 0) unit.agent = races->add_unit();
  return {by, 0, static_cast<uint16_t>(warp.agent()), unit.agent, ++unit.issued, warp.pc()};
}

TmemUser TensorUnit::next_load(Warp& warp, const Ref* registers, int count) {
  TensorPort& mine = port(warp);
  const TmemUser user = next(warp, mine.loads, TmemUser::By::Load);
  mine.pending.push_back({user.clock, warp.pc(), registers, count});
  warp.watch_registers(true);
  return user;
}

TmemUser TensorUnit::next_store(Warp& warp) {
  return next(warp, port(warp).stores, TmemUser::By::Store);
}

void TensorUnit::wait_loads(Warp& warp) {
  TensorPort& mine = port(warp);
  mine.pending.clear();
  mine.used.clear();
  warp.watch_registers(false);
  if (mine.loads.agent >= 0) {
    cta_.races()->unit_done(mine.loads.agent, mine.loads.issued, warp.agent());
  }
}

void TensorUnit::wait_stores(Warp& warp) {
  const TensorPort::Unit& unit = port(warp).stores;
  if (unit.agent >= 0) cta_.races()->unit_done(unit.agent, unit.issued, warp.agent());
}

void TensorUnit::fence_before(Warp& warp) {
  RaceDetector* races = cta_.races();
  if (races == nullptr) return;
  TensorPort& mine = port(warp);
  for (TensorPort::Unit* unit : {&mine.loads, &mine.stores}) {
    if (unit->agent >= 0) unit->fenced = races->known_clock(warp.agent(), unit->agent);
  }
}

void TensorUnit::fence_after(Warp& warp) {
  if (RaceDetector* races = cta_.races()) port(warp).seen = races->known_clocks(warp.agent());
}

void TensorUnit::check_registers(Warp& warp, uint32_t pc) {
  TensorPort& mine = port(warp);
  if (mine.pending.empty()) return;
  const Kernel& kernel = cta_.kernel();
  // Dependencies between instructions of tcgen05 are kept.
  if (kernel.texts[pc].text.starts_with("tcgen05.")) return;
  const Ref* const operands = kernel.code[pc].operands;
  const size_t count = kernel.operand_counts[pc];
  const auto uses = [&](const TensorPort::Load& load) {
    return std::any_of(load.registers, load.registers + load.count, [&](Ref ref) {
      return std::find(operands, operands + count, ref) != operands + count;
    });
  };
  const auto load = std::find_if(mine.pending.begin(), mine.pending.end(), uses);
  if (load == mine.pending.end()) return;
  cta_.report_at(pc, Severity::Lint, warp, -1, "tcgen05-wait",
                 "uses a register that " +
                     describe_instruction(*cta_.launch().module, kernel, load->pc) +
                     " writes before tcgen05.wait::ld",
                 0, load->pc);
  if (const RaceDetector* races = cta_.races()) {
    mine.used.push_back({load->clock, races->known_clock(warp.agent(), warp.agent())});
    if (mine.used.size() > MOST_USED) mine.used.pop_front();
  }
  mine.pending.erase(load);  // said once
  warp.watch_registers(!mine.pending.empty());
}

// ---- Allocation ---------------------------------------------------------------------------------

std::optional<int> TensorUnit::allocate(Warp& warp, int ctas, uint32_t columns) {
  const std::string what = "tcgen05.alloc of " + std::to_string(columns) + " columns";
  if (columns < TMEM_UNIT || columns > TMEM_COLUMNS || !std::has_single_bit(columns)) {
    throw Fault{"tmem", what + ": a power of two from 32 to 512"};
  }
  if (!may_allocate_) {
    throw Fault{"tmem", what + " after tcgen05.relinquish_alloc_permit of the CTA"};
  }
  if (last_columns_ != 0 && columns > last_columns_) {
    cta_.report(Severity::Error, warp, -1, "tmem",
                what + " after one of " + std::to_string(last_columns_) +
                    ": later allocations of a CTA may not be larger");
  }
  if (ctas == 1) {
    const int first = memory_.find_free(static_cast<int>(columns));
    if (first < 0) return std::nullopt;
    memory_.allocate(warp, first, static_cast<int>(columns));
    last_columns_ = columns;
    return first;
  }
  // Both CTAs of the pair get the same columns, once both have asked.
  TensorUnit& peer = *peer_of(cta_).tensor();
  if (wish_.first < 0) {
    wish_.columns = columns;
    if (peer.wish_.columns == 0) return std::nullopt;
    if (peer.wish_.columns != columns) {
      throw Fault{"tmem", what + " where the other CTA of the pair asks for " +
                              std::to_string(peer.wish_.columns)};
    }
    const int first = memory_.find_free(static_cast<int>(columns));
    if (first < 0 || !peer.memory_.is_free(first, static_cast<int>(columns))) return std::nullopt;
    wish_.first = peer.wish_.first = first;
    peer.wake();
  }
  const int first = wish_.first;
  wish_ = {};
  memory_.allocate(warp, first, static_cast<int>(columns));
  last_columns_ = columns;
  return first;
}

void TensorUnit::release(Warp& warp, uint32_t address, uint32_t columns) {
  if (address >> LANE_SHIFT != 0) {
    throw Fault{"tmem", "tcgen05.dealloc of an address with lane " +
                            std::to_string(address >> LANE_SHIFT) + ": the one of tcgen05.alloc"};
  }
  memory_.release(warp, static_cast<int>(address & COLUMN_MASK), static_cast<int>(columns));
  wake();
  if (cta_.kernel().tcgen05_group == 2) peer_of(cta_).tensor()->wake();
}

void TensorUnit::wake() {
  for (int w = 0; w < cta_.warp_count(); ++w) cta_.warp(w).wake_all(Wait::TensorMemory);
  cta_.cluster().progress();
}

std::string TensorUnit::describe_wait(uint64_t columns) const {
  return "tcgen05.alloc waits for " + std::to_string(columns) +
         " columns of tensor memory; allocated are " + memory_.allocated() +
         (cta_.kernel().tcgen05_group == 2 ? ", and both CTAs of a pair must ask" : "");
}

// ---- The pipe -----------------------------------------------------------------------------------

PipeOperation::PipeOperation(Warp& warp, int lane)
    : AsyncOperation(warp, lane), issued_(warp.cta().time()) {}

bool PipeOperation::step() {
  warp().cta().tensor()->pipe().reach(*this);
  execute();
  return true;
}

void PipeOperation::trace(const std::string& label, std::vector<uint64_t> operands) {
  Cta& cta = warp().cta();
  if (!cta.traced()) return;
  TraceEvent event;
  event.begin = issued_;
  event.end = cta.time() + 1;
  event.pc = pc();
  event.label = label;
  event.operands = std::move(operands);
  cta.tensor()->add_trace(warp().agent(), std::move(event));
}

void TensorUnit::tell(int agent) {
  std::erase_if(untold_, [&](std::pair<int, TraceEvent>& entry) {
    if (entry.first != agent) return false;
    entry.second.seen = cta_.time() + 1;
    cta_.trace().add_async(TENSOR_TRACK, std::move(entry.second));
    return true;
  });
}

void TensorUnit::enqueue(std::shared_ptr<PipeOperation> operation) {
  operations_.push_back(operation);
  cta_.cluster().start(std::move(operation));
}

void TensorUnit::reach(const PipeOperation& operation) {
  while (operations_.front().get() != &operation) {
    const std::shared_ptr<PipeOperation> before = operations_.front();
    cta_.cluster().finish(*before);
  }
  operations_.pop_front();
}

TmemUser TensorUnit::next_operation(Warp& warp, int lane, TmemUser::By by) {
  TensorPort& mine = port(warp);
  mine.uncommitted.push_back({++mine.issued, lane});
  mine.issued_pc = warp.pc();
  RaceDetector* races = cta_.races();
  const int agent = races != nullptr ? races->matrix_agent(warp.agent()) : -1;
  return {
      by,       static_cast<uint8_t>(lane), static_cast<uint16_t>(warp.agent()), agent, mine.issued,
      warp.pc()};
}

// ---- Products -----------------------------------------------------------------------------------

namespace {

// A product with its operands' places, in one CTA or a pair.
class Product : public PipeOperation {
 public:
  struct Part {  // of one CTA
    Cta* cta;
    MatrixTile a, b;
  };

  Product(Warp& warp, int lane, const MmaRequest& request, const MmaDescriptor& mma)
      : PipeOperation(warp, lane), request_(request), mma_(mma) {}

  std::vector<Part>& parts() { return parts_; }
  std::vector<RowGroup>& groups() { return groups_; }
  int rows() const { return mma_.m / request_.ctas; }
  int d_column() const { return static_cast<int>(request_.d & COLUMN_MASK); }
  int a_column() const { return static_cast<int>(request_.a_tmem & COLUMN_MASK); }
  // Lanes of D that are written in a part.
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
        uint32_t words[K_COLUMNS];
        for (int c = 0; c < K_COLUMNS; ++c) {
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
    Tmem& memory = parts_[part].cta->tensor()->memory();
    const std::vector<float> a = read_a(parts_[part], group);
    const float* const b_rows = b + group.first_n * mma_.k;
    const LaneMask lanes = written(group, part);
    const bool plain = !mma_.half && request_.scale == 0 && !group.sparse_lanes &&
                       lanes == lanes_of(group, rows());
    if (plain) {
      auto* d = reinterpret_cast<float*>(memory.column(d_column()) + group.lane);
      add_fma_product(a.data(), b_rows, d, TMEM_LANES, group.n, rows(), mma_.k,
                      request_.accumulate);
      return;
    }
    const float scale = std::ldexp(1.0f, -request_.scale);
    std::vector<float> sums(static_cast<size_t>(rows()));
    for (int column = 0; column < group.n; ++column) {
      uint32_t* const cells = memory.column(d_column() + column);
      for (int row = 0; request_.accumulate && row < rows(); ++row) {
        const uint32_t cell = cells[lane_of(group, row)];
        sums[static_cast<size_t>(row)] =
            scale * (mma_.half ? f32_of_f16(static_cast<uint16_t>(cell)) : f32_of(cell));
      }
      add_fma_product(a.data(), b_rows + column * mma_.k, sums.data(), rows(), 1, rows(), mma_.k,
                      request_.accumulate);
      for (int row = 0; row < rows(); ++row) {
        const int lane = lane_of(group, row);
        if (!(lanes[static_cast<size_t>(lane / LANES)] >> lane % LANES & 1)) continue;
        const float sum = sums[static_cast<size_t>(row)];
        cells[lane] = mma_.half ? (cells[lane] & ~LOWER) | cvt_rn_f16_f32(sum) : bits_of(sum);
      }
    }
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
  auto product = std::make_shared<Product>(warp, lane, request, mma);
  product->groups() = groups_of(mma, request.ctas, d_lane);
  if (request.a_in_tmem && lane_field("A", request.a_tmem) != d_lane) {
    throw Fault{"tmem", "A and D of tcgen05.mma are in different halves of the lanes", lane};
  }
  const int d_columns = product->groups().front().n;
  if (request.a_in_tmem && product->a_column() < product->d_column() + d_columns &&
      product->d_column() < product->a_column() + K_COLUMNS) {
    cta_.report(Severity::Error, warp, lane, "tcgen05",
                "D of tcgen05.mma overwrites A while it is read: D has columns " +
                    std::to_string(product->d_column()) + "-" +
                    std::to_string(product->d_column() + d_columns - 1) + ", A from " +
                    std::to_string(product->a_column()) + " on");
  }
  TmemUser user = next_operation(warp, lane, TmemUser::By::Product);
  user.accumulator = accumulator_of(request.d, mma, request.ctas);
  const std::vector<Cta*> ctas = group(request.ctas, lane, "tcgen05.mma");
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
        const TmemRegion region{product->a_column(), K_COLUMNS, lanes_of(group, product->rows())};
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

std::vector<Cta*> TensorUnit::group(int ctas, int lane, const char* what) {
  if (ctas == 1) return {&cta_};
  Cta& peer = peer_of(cta_);
  if (peer.exited()) {
    throw Fault{"exited-cta", std::string(what) + " of a pair whose other CTA has exited", lane};
  }
  if (cta_.rank() % 2 == 0) return {&cta_, &peer};
  return {&peer, &cta_};
}

// ---- tcgen05.cp, tcgen05.shift ------------------------------------------------------------------

namespace {

class Copy : public PipeOperation {
 public:
  Copy(Warp& warp, int lane, const CopyRequest& request, const MatrixDescriptor& descriptor,
       std::vector<Cta*> ctas)
      : PipeOperation(warp, lane),
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
  Shift(Warp& warp, int lane, uint32_t address, std::vector<Cta*> ctas)
      : PipeOperation(warp, lane), address_(address), ctas_(std::move(ctas)) {}

 protected:
  void execute() override {
    const auto first = static_cast<int>(address_ >> LANE_SHIFT);
    for (Cta* cta : ctas_) {
      for (int c = 0; c < K_COLUMNS; ++c) {
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
  std::vector<Cta*> ctas = group(request.ctas, lane, "tcgen05.cp");
  // Bytes, as elements of 8 bits.
  const MatrixTile tile{descriptor,       true, 0, request.rows, static_cast<int>(request.bytes),
                        ElementType::E4M3};
  TmemRegion region{static_cast<int>(request.to & COLUMN_MASK),
                    static_cast<int>(request.bytes / 4)};
  region.lanes.fill(ALL_LANES);
  for (Cta* cta : ctas) {
    open_tile(warp, *cta, "the source of tcgen05.cp", tile, user.clock);
    cta->tensor()->memory().write(warp, user, region, "tcgen05.cp");
  }
  pipe().enqueue(std::make_shared<Copy>(warp, lane, request, descriptor, std::move(ctas)));
}

void TensorUnit::shift(Warp& warp, int lane, int ctas, uint32_t address) {
  const uint32_t first = address >> LANE_SHIFT;
  if (first % LANES != 0 || first >= TMEM_LANES) {
    throw Fault{"tmem", "tcgen05.shift at lane " + std::to_string(first) + ": a multiple of 32",
                lane, address};
  }
  const TmemUser user = next_operation(warp, lane, TmemUser::By::Shift);
  std::vector<Cta*> group = this->group(ctas, lane, "tcgen05.shift");
  TmemRegion region{static_cast<int>(address & COLUMN_MASK), K_COLUMNS};
  for (size_t q = first / LANES; q < TMEM_QUARTERS; ++q) region.lanes[q] = ALL_LANES;
  for (Cta* cta : group) {
    Tmem& memory = cta->tensor()->memory();
    memory.check_values(warp, user.by, region, "tcgen05.shift");
    memory.write(warp, user, region, "tcgen05.shift");
  }
  pipe().enqueue(std::make_shared<Shift>(warp, lane, address, std::move(group)));
}

// ---- tcgen05.commit -----------------------------------------------------------------------------

namespace {

class Commit : public PipeOperation {
 public:
  Commit(Warp& warp, int lane, std::vector<SharedPlace> places, Clock clock)
      : PipeOperation(warp, lane), places_(std::move(places)), clock_(clock) {
    // What came before the operations comes before their end.
    if (RaceDetector* races = warp.cta().races()) before_ = races->known_of_others(warp.agent());
  }

 protected:
  void execute() override {
    RaceDetector* races = warp().cta().races();
    const int agent = races != nullptr ? races->matrix_agent(warp().agent()) : -1;
    warp().cta().tensor()->tell(warp().agent());
    for (const SharedPlace& place : places_) {
      place.cta->mbarriers().commit_arrives(*this, place.offset, agent, clock_, before_);
    }
  }

 private:
  std::vector<SharedPlace> places_;
  Clock clock_;
  Knowledge before_;
};

}  // namespace

void TensorUnit::commit(Warp& warp, int lane, std::vector<SharedPlace> places) {
  for (const SharedPlace& place : places) {
    place.cta->mbarriers().expect_arrival(warp, lane, place.offset);
  }
  TensorPort& mine = port(warp);
  std::erase_if(mine.uncommitted, [&](const TensorPort::Issued& i) { return i.lane == lane; });
  // The clock of what other threads of the warp have put in says nothing yet.
  const Clock clock = mine.uncommitted.empty() ? mine.issued : mine.uncommitted.front().clock - 1;
  pipe().enqueue(std::make_shared<Commit>(warp, lane, std::move(places), clock));
}

void TensorUnit::check_exit() {
  for (const Tmem::Block& block : memory_.blocks()) {
    Finding finding;
    finding.kind = "tmem";
    finding.message = "columns " + std::to_string(block.first) + "-" +
                      std::to_string(block.first + block.columns - 1) +
                      " of tensor memory are not deallocated at the exit of the CTA";
    finding.cta = cta_.index();
    finding.pc = block.pc;
    cta_.findings().add(std::move(finding));
  }
  const RaceDetector* races = cta_.races();
  for (size_t w = 0; races != nullptr && w < ports_.size(); ++w) {
    const TensorPort& port = ports_[w];
    if (port.issued == 0) continue;
    const int agent = cta_.warp(static_cast<int>(w)).agent();
    if (races->known(races->matrix_agent(agent), port.issued)) continue;
    Finding finding;
    finding.kind = "pending-copy";
    finding.message =
        "what the tensor pipe was given is not waited for before the exit: no tcgen05.commit that "
        "covers it has been waited for";
    finding.cta = cta_.index();
    finding.warp = static_cast<int>(w);
    finding.pc = port.issued_pc;
    cta_.findings().add(std::move(finding));
  }
}

}  // namespace archflash::sim
