// Tensor memory of a CTA: 128 lanes of 512 columns of 32 bits. It keeps which columns are
// allocated, which cells hold a value, and who used them last: loads and stores of warps, and the
// tensor pipe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "sim/run/cta.h"
#include "sim/units/pipe_order.h"

namespace archflash::sim {

constexpr int TMEM_LANES = 128;
constexpr int TMEM_COLUMNS = 512;
constexpr int TMEM_UNIT = 32;     // an allocation is a multiple of so many columns
constexpr int TMEM_QUARTERS = 4;  // warps w with w % 4 == q have lanes 32q .. 32q + 31
// The race check treats lanes 16h .. 16h + 15 as one.
constexpr int TMEM_HALVES = 8;
constexpr uint32_t LANE_SHIFT = 16;  // an address has the lane above this bit, the column below
constexpr uint32_t COLUMN_MASK = 0xFFFF;

// A set of lanes: bit i of word q is lane 32q + i.
using LaneMask = std::array<uint32_t, TMEM_QUARTERS>;

// Cells that are used together: some lanes of columns first .. first + count - 1.
struct TmemRegion {
  int first = 0, count = 0;
  LaneMask lanes{};
};
std::string name_of(const TmemRegion& region);

// A use of cells, and what others must know to come after it.
struct TmemUser {
  enum class By : uint8_t { Load, Store, Product, Copy, Shift, Free };
  By by = By::Load;
  uint8_t lane = 0;   // the thread that started it
  uint16_t warp = 0;  // the warp's agent in the race detector
  int unit = -1;      // the agent that carries it out; -1: races are not checked
  Clock clock = 0;
  uint32_t pc = 0;
  uint64_t accumulator = 0;  // of a product: a number that identifies accumulator and shape

  // What kind of operation of the tensor pipe this is, as PipeOrder tells them apart.
  PipeOrder::Kind kind() const {
    return by == By::Copy ? PipeOrder::COPY : by == By::Shift ? PipeOrder::SHIFT : accumulator;
  }
};

class Tmem {
 public:
  explicit Tmem(Cta& cta);

  // ---- Allocation ----
  struct Block {
    int first, columns;
    uint32_t pc;
    uint64_t since;
  };
  // Finds so many free columns that follow one another, and returns the first; -1: there are none.
  int find_free(int columns) const;
  bool is_free(int first, int columns) const;
  void allocate(uint32_t pc, int first, int columns);
  // Throws Fault if that block was not allocated.
  void release(Warp& warp, int first, int columns);
  const std::vector<Block>& blocks() const { return blocks_; }
  std::string allocated() const;  // "columns 0-127", for a report

  // ---- Use. Columns (throws Fault), values and races are checked when an instruction is issued
  // ----
  void read(Warp& warp, const TmemUser& user, const TmemRegion& region, const char* what);
  void write(Warp& warp, const TmemUser& user, const TmemRegion& region, const char* what);

  // Checks the columns and values of cells that a write also reads.
  void check_values(Warp& warp, TmemUser::By by, const TmemRegion& region, const char* what) const;

  uint32_t* column(int c) { return &cells_[static_cast<size_t>(c) * TMEM_LANES]; }

 private:
  // The last write of 16 lanes of a column, and the reads since then, one for each unit.
  struct Marks {
    TmemUser write;
    std::vector<TmemUser> reads;
  };
  struct Complaints {
    bool race = false, fence = false, wait = false, order = false;
  };

  // For the trace: a value that cells hold, from its first write to its last use.
  struct Occupant {
    int first, count;
    TmemUser::By by;
    uint32_t pc;
    uint64_t begin, last;
    bool read;
  };

  void trace_use(const TmemUser& user, const TmemRegion& region, bool writes);
  void trace_end(const Occupant& occupant);
  void check_columns(const TmemRegion& region, const char* what) const;
  void check_order(Warp& warp, const TmemUser& user, const TmemUser& other, bool writes,
                   bool other_wrote, const TmemRegion& region, const char* what,
                   Complaints& complaints);

  Cta& cta_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> cells_;  // [column][lane]
  std::array<LaneMask, TMEM_COLUMNS> written_{};
  std::vector<Occupant> occupants_;  // of a traced CTA
  std::vector<Marks> marks_;         // [column][half]; empty without a race detector
};

}  // namespace archflash::sim
