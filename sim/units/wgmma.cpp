#include "sim/units/wgmma.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "sim/numerics/ldmatrix.h"
#include "sim/numerics/mma_avx2.h"
#include "sim/numerics/numeric.h"
#include "sim/numerics/tile_product.h"
#include "sim/run/cluster.h"

namespace archflash::sim {
namespace {

constexpr int WARP_ROWS = 16;
constexpr int WARPGROUP = 4;
constexpr size_t REGISTER_BYTES = LANES * sizeof(uint32_t);

}  // namespace

const char* decode_descriptor(uint64_t bits, MatrixDescriptor& descriptor) {
  descriptor = decode_offsets(bits);
  const auto mode = static_cast<int>(bits >> 62);
  static constexpr uint32_t SPANS[] = {0, 128, 64, 32};
  static constexpr uint32_t MASKS[] = {0, 7, 3, 1};
  descriptor.span = SPANS[mode];
  descriptor.mask = MASKS[mode];
  if (bits >> 14 & 3) return "bits 14-15 are not zero";
  if (bits >> 30 & 3) return "bits 30-31 are not zero";
  if (bits >> 46 & 7) return "bits 46-48 are not zero";
  if (bits >> 52 & 0x3FF) return "bits 52-61 are not zero";
  if (descriptor.base_offset != 0 && !follows_pattern(descriptor)) {
    return "the start address is not where the swizzle's pattern begins, and the base offset does "
           "not say so";
  }
  return nullptr;
}

void MatrixQueue::issue(const WgmmaShape& shape, const Ref* refs, uint64_t a, uint64_t b,
                        bool accumulate) {
  Cta& cta = warp_.cta();
  const int group = warp_.index() / WARPGROUP;
  if (cta.warp_count() < (group + 1) * WARPGROUP) {
    throw Fault{"wgmma", "wgmma in a warpgroup of " +
                             std::to_string(cta.warp_count() - group * WARPGROUP) +
                             " warps: it takes 4, the first with an index that 4 divides"};
  }
  check_fence(shape, refs);
  ++clock_;
  remember();
  Entry entry{&shape, refs, {}, {}, accumulate};
  entry.clock = clock_;
  entry.pc = warp_.pc();
  entry.issued = cta.time();
  const auto decode = [&](const char* operand, uint64_t bits, MatrixDescriptor& descriptor) {
    if (const char* wrong = decode_descriptor(bits, descriptor)) {
      throw Fault{"descriptor",
                  std::string("the descriptor of matrix ") + operand + " of wgmma: " + wrong};
    }
  };
  decode("B", b, entry.b.descriptor);
  entry.b = {
      entry.b.descriptor, shape.b_k_major, 0, static_cast<uint32_t>(shape.n), shape.k, shape.b};
  open_tile(warp_, cta, "matrix B of wgmma", entry.b, clock_);
  if (!shape.a_registers) {
    decode("A", a, entry.a.descriptor);
    const auto first = static_cast<uint32_t>(warp_.index() % WARPGROUP * WARP_ROWS);
    entry.a = {entry.a.descriptor, shape.a_k_major, first, WARP_ROWS, shape.k, shape.a};
    open_tile(warp_, cta, "matrix A of wgmma", entry.a, clock_);
  }
  entries_.push_back(entry);
  for (int i = 0; i < entry.registers(); ++i) ++touch(refs[i]).products;
  warp_.watch_registers(true);
  const Mode mode = cta.options().mode;
  if (mode == Mode::Eager || (mode != Mode::Lazy && cta.random().below(2))) {
    run_up_to(entries_.size());
  }
}

void MatrixQueue::commit() {
  for (Entry& entry : entries_) {
    if (entry.committed) ++entry.age;
    entry.committed = true;
  }
}

void MatrixQueue::wait(uint32_t groups) {
  size_t count = 0;
  while (count < entries_.size() && entries_[count].committed && entries_[count].age >= groups) {
    ++count;
  }
  run_up_to(count);
  if (count == 0) return;
  if (warp_.cta().traced()) trace_wait(count);
  for (size_t i = 0; i < count; ++i) {
    for (int k = 0; k < entries_[i].registers(); ++k) --touch(entries_[i].refs[k]).products;
  }
  const Clock done = entries_[count - 1].clock;
  entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(count));
  if (RaceDetector* races = warp_.cta().races()) {
    races->unit_done(races->matrix_agent(warp_.agent()), done, warp_.agent());
  }
}

void MatrixQueue::fence() {
  ++fences_;
  warp_.watch_registers(true);
}

// Reports a product that uses registers which another instruction has used since the last fence.
void MatrixQueue::check_fence(const WgmmaShape& shape, const Ref* refs) {
  Cta& cta = warp_.cta();
  if (fences_ == 0) {
    cta.report(Severity::Lint, warp_, -1, "wgmma-fence",
               "the first wgmma of the warp comes without wgmma.fence before it");
    fence();
    return;
  }
  const int count = shape.d_registers() + (shape.a_registers ? 4 : 0);
  for (int i = 0; i < count; ++i) {
    const size_t place = refs[i] / REGISTER_BYTES;
    if (place >= touches_.size() || touches_[place].fences != fences_) continue;
    cta.report(Severity::Lint, warp_, -1, "wgmma-fence",
               std::string(i < shape.d_registers() ? "an accumulator" : "a register of matrix A") +
                   " was used by " +
                   describe_instruction(*cta.launch().module, cta.kernel(), touches_[place].pc) +
                   " and no wgmma.fence lies between",
               0, touches_[place].pc);
    return;
  }
}

MatrixQueue::Touch& MatrixQueue::touch(Ref reg) {
  const size_t place = reg / REGISTER_BYTES;
  if (place >= touches_.size()) touches_.resize(place + 1);
  return touches_[place];
}

void MatrixQueue::check_registers(uint32_t pc) {
  const Kernel& kernel = warp_.cta().kernel();
  const Ref* const operands = kernel.code[pc].operands;
  const size_t count = kernel.operand_counts[pc];
  bool of_products = false;
  for (size_t k = 0; k < count; ++k) {
    if (operands[k] & CONSTANT) continue;
    Touch& touched = touch(operands[k]);
    touched.fences = fences_;
    touched.pc = pc;
    of_products |= touched.products != 0;
  }
  if (!of_products) return;
  for (const Entry& entry : entries_) {
    const int results = entry.shape->d_registers();
    for (int i = 0; i < entry.registers(); ++i) {
      for (size_t k = 0; k < count; ++k) {
        if (operands[k] != entry.refs[i]) continue;
        // Other instructions may read what a product only reads.
        if (i >= results && !kernel.written_operands[pc][k]) continue;
        warp_.cta().report_at(
            pc, Severity::Error, warp_, -1, "wgmma",
            std::string("uses ") + (i < results ? "an accumulator" : "a register of matrix A") +
                " of " + describe_instruction(*warp_.cta().launch().module, kernel, entry.pc) +
                " that no wgmma.wait_group has covered",
            0, entry.pc);
        return;
      }
    }
  }
}

void MatrixQueue::check_exit() {
  if (entries_.empty()) return;
  warp_.cta().report_at(entries_.front().pc, Severity::Error, warp_, -1, "pending-copy",
                        "a wgmma is not waited for at the exit");
  entries_.clear();
}

// ---- The products ----

void MatrixQueue::run_up_to(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (entries_[i].done) continue;
    run(entries_[i]);
    entries_[i].done = true;
    entries_[i].ended = warp_.cta().time() + 1;
  }
}

// Traces a wait for the first `count` products.
void MatrixQueue::trace_wait(size_t count) {
  Trace& trace = warp_.cta().trace();
  const uint64_t now = warp_.cta().time() + 1;
  for (size_t i = 0; i < count; ++i) {
    TraceEvent event;
    event.begin = entries_[i].issued;
    event.end = entries_[i].ended;
    event.seen = now;
    event.pc = entries_[i].pc;
    event.label = "of warp " + std::to_string(warp_.index());
    trace.add_async(TENSOR_TRACK, std::move(event));
  }
  TraceEvent wait;  // takes no time: products that have not ended end now
  wait.kind = TraceEvent::Kind::Wait;
  wait.track = warp_.index();
  wait.begin = wait.end = now;
  wait.pc = warp_.pc();
  wait.cause = trace.track(TENSOR_TRACK);
  wait.label = std::to_string(count) + " wgmma";
  trace.events.push_back(std::move(wait));
}

namespace {

constexpr int BLOCK = 8;  // rows of A, or columns of B, in a register

// Reads a register of an mma.sync fragment: rows first .. first + 7 of a tile, unit `unit` along K.
void read_register(Cta& cta, const MatrixTile& tile, uint32_t first, uint32_t unit,
                   uint32_t negation, uint32_t* lanes) {
  const auto bytes_at = [&](uint32_t line, uint32_t at) {
    const uint32_t place = tile_place(tile.descriptor, tile.k_major, line, at);
    return cta.shared() + (tile_address(tile.descriptor, place) - SHARED_START);
  };
  if (tile.k_major) {
    for (uint32_t row = 0; row < BLOCK; ++row) {
      std::memcpy(lanes + row * (TILE_UNIT / 4), bytes_at(first + row, unit), TILE_UNIT);
    }
  } else {
    uint16_t rows[BLOCK][BLOCK];
    for (uint32_t k = 0; k < BLOCK; ++k) {
      std::memcpy(rows[k], bytes_at(unit * BLOCK + k, first / BLOCK), TILE_UNIT);
    }
    ldmatrix_m8n8_b16(rows, true, lanes);
  }
  if (negation != 0) {
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] ^= negation;
  }
}

}  // namespace

void MatrixQueue::run(const Entry& entry) {
  if (is_fp8(entry.shape->a)) {
    run_fp8(entry);
    return;
  }
  // A warp's part is N / 8 products of mma.sync, with the same fragments and the same sums.
  const WgmmaShape& shape = *entry.shape;
  Cta& cta = warp_.cta();
  const TensorCore& core = *cta.launch().tensor_core;
  const auto sign = [&](bool negate) -> uint32_t {
    if (!negate) return 0;
    return element_bits(shape.a) == 32 ? 0x80000000u : 0x80008000u;
  };
  const Ref* refs = entry.refs;
  MmaOperands operands;
  uint32_t a[4][LANES];
  const auto first = static_cast<uint32_t>(warp_.index() % WARPGROUP * WARP_ROWS);
  for (uint32_t j = 0; j < 4; ++j) {
    operands.a[j] = a[j];
    if (!shape.a_registers) {
      read_register(cta, entry.a, first + j % 2 * BLOCK, j / 2, sign(shape.negate_a), a[j]);
      continue;
    }
    const uint32_t* lanes = warp_.lanes<const uint32_t>(refs[shape.d_registers() + j]);
    for (int lane = 0; lane < LANES; ++lane) a[j][lane] = lanes[lane] ^ sign(shape.negate_a);
  }
  constexpr int MOST_BLOCKS = 256 / BLOCK;
  uint32_t b[MOST_BLOCKS][2][LANES];
  const int blocks = shape.n / BLOCK;
  for (int i = 0; i < blocks; ++i) {
    for (uint32_t unit = 0; unit < 2; ++unit) {
      read_register(cta, entry.b, static_cast<uint32_t>(i) * BLOCK, unit, sign(shape.negate_b),
                    b[i][unit]);
    }
  }
  void* d[4 * MOST_BLOCKS];
  const int per_block = shape.d_registers() / blocks;
  for (int i = 0; i < shape.d_registers(); ++i) {
    d[i] = warp_.lanes<uint32_t>(refs[i]);
    if (!entry.accumulate) std::memset(d[i], 0, LANES * sizeof(uint32_t));
  }
  MmaShape product{WARP_ROWS, BLOCK, shape.k, shape.d, shape.a, shape.b, shape.d};
  product.satfinite = shape.satfinite;
  if (const WideMmaFunction wide = find_wide_mma(product)) {
    wide({{a[0], a[1], a[2], a[3]}, b, d}, blocks, core);
    return;
  }
  const MmaFunction function = find_mma(product);
  for (int i = 0; i < blocks; ++i) {
    for (int unit = 0; unit < 2; ++unit) operands.b[unit] = b[i][unit];
    for (int j = 0; j < per_block; ++j) operands.c[j] = operands.d[j] = d[per_block * i + j];
    function(product, operands, core);
  }
}

// FP8 does not add up as it does in mma.sync.
void MatrixQueue::run_fp8(const Entry& entry) {
  const WgmmaShape& shape = *entry.shape;
  Cta& cta = warp_.cta();
  const auto n = static_cast<size_t>(shape.n), k = static_cast<size_t>(shape.k);
  std::vector<float> a(WARP_ROWS * k), b(k * n);
  if (shape.a_registers) {
    constexpr int PER_REGISTER = 4;
    const Ref* refs = entry.refs + shape.d_registers();
    for (int j = 0; j < 4; ++j) {
      const uint32_t* lanes = warp_.lanes<const uint32_t>(refs[j]);
      for (int lane = 0; lane < LANES; ++lane) {
        const int row = lane / 4 + BLOCK * (j & 1);
        const int column = PER_REGISTER * (lane % 4) + 4 * PER_REGISTER * (j >> 1);
        decode_row(shape.a, &lanes[lane], PER_REGISTER,
                   &a[static_cast<size_t>(row) * k + static_cast<size_t>(column)]);
      }
    }
  } else {
    read_tile(cta, entry.a, a.data(), k, 1);
  }
  read_tile(cta, entry.b, b.data(), 1, n);
  if (shape.negate_a) std::transform(a.begin(), a.end(), a.begin(), std::negate<>());
  if (shape.negate_b) std::transform(b.begin(), b.end(), b.begin(), std::negate<>());

  const auto place = [](int lane, int i) {
    return std::pair<size_t, size_t>(lane / 4 + 8 * (i >> 1 & 1),
                                     2 * (lane % 4) + (i & 1) + 8 * (i >> 2));
  };
  const int elements = shape.n / 2;  // each lane has so many
  const bool half = shape.d == ElementType::F16;
  std::vector<float> d(WARP_ROWS * n);
  if (entry.accumulate) {
    for (int i = 0; i < elements; ++i) {
      const uint32_t* lanes = warp_.lanes<const uint32_t>(entry.refs[half ? i / 2 : i]);
      for (int lane = 0; lane < LANES; ++lane) {
        const auto [row, column] = place(lane, i);
        float& value = d[row * n + column];
        if (half) {
          const auto bits = static_cast<uint16_t>(lanes[lane] >> 16 * (i & 1));
          decode_row(ElementType::F16, &bits, 1, &value);
        } else {
          value = f32_of(lanes[lane]);
        }
      }
    }
  }
  multiply_accumulate({WARP_ROWS, shape.n, shape.k, shape.a, shape.b, half},
                      cta.launch().tensor_core->fp8_async, a.data(), shape.k, b.data(), shape.n,
                      d.data(), shape.n, entry.accumulate);
  for (int i = 0; i < elements; ++i) {
    uint32_t* lanes = warp_.lanes<uint32_t>(entry.refs[half ? i / 2 : i]);
    for (int lane = 0; lane < LANES; ++lane) {
      const auto [row, column] = place(lane, i);
      const float value = d[row * n + column];
      if (!half) {
        lanes[lane] = bits_of(value);
        continue;
      }
      const uint32_t bits = cvt_rn_f16_f32(value);
      lanes[lane] = i & 1 ? (lanes[lane] & 0xFFFF) | bits << 16 : (lanes[lane] & 0xFFFF0000) | bits;
    }
  }
}

}  // namespace archflash::sim
