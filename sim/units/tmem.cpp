#include "sim/units/tmem.h"

#include <algorithm>
#include <bit>

#include "sim/run/cluster.h"
#include "sim/units/tcgen05.h"

namespace archflash::sim {
namespace {

// Cells hold this before they are written. As a float it is a NaN.
constexpr uint32_t POISON = 0xFFFFFFFFu;

const char* name_of(TmemUser::By by) {
  static constexpr const char* NAMES[] = {"tcgen05.ld", "tcgen05.st",    "tcgen05.mma",
                                          "tcgen05.cp", "tcgen05.shift", "tcgen05.dealloc"};
  return NAMES[static_cast<int>(by)];
}

bool in_pipe(TmemUser::By by) {
  return by == TmemUser::By::Product || by == TmemUser::By::Copy || by == TmemUser::By::Shift;
}

std::string range(int first, int count) {
  return std::to_string(first) + "-" + std::to_string(first + count - 1);
}

bool touches(const TmemRegion& region, int half) {
  return (region.lanes[static_cast<size_t>(half / 2)] >> 16 * (half % 2) & 0xFFFF) != 0;
}

}  // namespace

std::string name_of(const TmemRegion& region) {
  return "tensor memory, columns " + range(region.first, region.count);
}

Tmem::Tmem(Cta& cta) : cta_(cta), cells_(static_cast<size_t>(TMEM_LANES) * TMEM_COLUMNS, POISON) {
  if (cta.races() != nullptr) marks_.resize(static_cast<size_t>(TMEM_COLUMNS) * TMEM_HALVES);
}

bool Tmem::is_free(int first, int columns) const {
  return std::none_of(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    return first < block.first + block.columns && block.first < first + columns;
  });
}

// Searches from the top, so that code which relies on column 0 fails here.
int Tmem::find_free(int columns) const {
  for (const int step : {columns, TMEM_UNIT}) {
    for (int first = (TMEM_COLUMNS - columns) / step * step; first >= 0; first -= step) {
      if (is_free(first, columns)) return first;
    }
  }
  return -1;
}

void Tmem::allocate(uint32_t pc, int first, int columns) {
  blocks_.push_back({first, columns, pc, cta_.time()});
  for (int c = first; c < first + columns; ++c) {
    written_[static_cast<size_t>(c)] = {};
    std::fill_n(column(c), TMEM_LANES, POISON);
  }
}

void Tmem::release(Warp& warp, int first, int columns) {
  const auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    return block.first == first && block.columns == columns;
  });
  if (found == blocks_.end()) {
    throw Fault{"tmem", "tcgen05.dealloc of columns " + range(first, columns) +
                            ", which no tcgen05.alloc gave like that; allocated are " +
                            allocated()};
  }
  TmemUser user{TmemUser::By::Free, 0, static_cast<uint16_t>(warp.agent())};
  user.pc = warp.pc();
  user.unit = cta_.races() != nullptr ? warp.agent() : -1;
  TmemRegion region{first, columns};
  region.lanes.fill(ALL_LANES);
  write(warp, user, region, "tcgen05.dealloc");
  if (cta_.traced()) {
    TraceEvent event;
    event.begin = found->since;
    event.end = event.seen = cta_.time() + 1;
    event.pc = found->pc;
    event.label = "allocated: columns " + range(first, columns);
    cta_.trace().add_async(TMEM_TRACK, std::move(event));
  }
  for (size_t i = static_cast<size_t>(first) * TMEM_HALVES;
       i < marks_.size() && i < static_cast<size_t>(first + columns) * TMEM_HALVES; ++i) {
    marks_[i] = {};
  }
  blocks_.erase(found);
}

std::string Tmem::allocated() const {
  if (blocks_.empty()) return "none";
  std::string text;
  for (const Block& block : blocks_) {
    text += (text.empty() ? "columns " : ", ") + range(block.first, block.columns);
  }
  return text;
}

void Tmem::check_columns(const TmemRegion& region, const char* what) const {
  for (int c = region.first; c < region.first + region.count;) {
    const auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& block) {
      return c >= block.first && c < block.first + block.columns;
    });
    if (found == blocks_.end()) {
      throw Fault{"out-of-bounds",
                  std::string(what) + " uses columns " + range(region.first, region.count) +
                      " of tensor memory, of which column " + std::to_string(c) +
                      " is not allocated; allocated are " + allocated(),
                  -1, static_cast<uint64_t>(c)};
    }
    c = found->first + found->columns;
  }
}

void Tmem::trace_end(const Occupant& occupant) {
  TraceEvent event;
  event.begin = occupant.begin;
  event.end = event.seen = occupant.last + 1;
  event.pc = occupant.pc;
  event.label =
      std::string(name_of(occupant.by)) + ": columns " + range(occupant.first, occupant.count);
  cta_.trace().add_async(TMEM_TRACK, std::move(event));
}

void Tmem::trace_use(const TmemUser& user, const TmemRegion& region, bool writes) {
  const uint64_t now = cta_.time();
  const auto overlaps = [&](const Occupant& o) {
    return o.first < region.first + region.count && region.first < o.first + o.count;
  };
  // Other warps, or the next step of K, may continue the same use.
  const auto continues = [&](const Occupant& o) {
    return writes && !o.read && o.by == user.by && o.first == region.first &&
           o.count == region.count;
  };
  bool continued = false;
  std::erase_if(occupants_, [&](Occupant& o) {
    if (!overlaps(o)) return false;
    if (!writes || continues(o)) {
      continued = continued || writes;
      o.read = o.read || !writes;
      o.last = now;
      return false;
    }
    trace_end(o);
    return true;
  });
  if (writes && !continued && user.by != TmemUser::By::Free) {
    occupants_.push_back({region.first, region.count, user.by, user.pc, now, now, false});
  }
}

// Reports a use `other` that does not come before the use that `user` is about to make.
void Tmem::check_order(Warp& warp, const TmemUser& user, const TmemUser& other, bool writes,
                       bool other_wrote, const TmemRegion& region, const char* what,
                       Complaints& complaints) {
  const RaceDetector& races = *cta_.races();
  const bool same_warp = user.warp == other.warp;
  const auto report = [&](bool& once, Severity severity, const char* kind,
                          const std::string& reason) {
    if (once) return;
    once = true;
    std::string message = std::string(writes ? "a write to " : "a read of ") + name_of(region) +
                          ", by " + what + " " + reason + " ";
    message += other_wrote ? "the write by " : "the read by ";
    message += name_of(other.by);
    if (!same_warp) message += " of warp " + std::to_string(other.warp % cta_.warp_count());
    message += " at " + describe_instruction(*cta_.launch().module, cta_.kernel(), other.pc);
    // As long as its own warp has not waited for a use, nobody can know that it is over.
    const bool waited = races.happened(other.warp, other.unit, other.clock);
    if (severity == Severity::Error && in_pipe(other.by)) {
      message += ": no tcgen05.commit that covers it has been waited for";
    } else if (!waited && !in_pipe(other.by)) {
      message += other.by == TmemUser::By::Load ? ": no tcgen05.wait::ld covers it"
                                                : ": no tcgen05.wait::st covers it";
    }
    warp.cta().report(severity, warp, -1, kind, std::move(message),
                      static_cast<uint64_t>(region.first), other.pc);
  };
  if (other.by == TmemUser::By::Free) return;
  if (races.happened(warp.agent(), other.unit, other.clock)) {
    if (same_warp) return;
    const TensorPort& theirs = port_of(cta_, other.warp);
    if ((other.by == TmemUser::By::Load && other.clock > theirs.loads.fenced) ||
        (other.by == TmemUser::By::Store && other.clock > theirs.stores.fenced)) {
      report(complaints.fence, Severity::Lint, "tcgen05-fence",
             "comes without tcgen05.fence::before_thread_sync after");
    } else if (!port_of(cta_, user.warp).has_seen(other.unit, other.clock)) {
      report(complaints.fence, Severity::Lint, "tcgen05-fence",
             "comes without tcgen05.fence::after_thread_sync after");
    }
    return;
  }
  if (in_pipe(user.by) && in_pipe(other.by) && user.unit == other.unit && user.lane == other.lane) {
    // Cards carry out one thread's work in order; the ISA promises that for some pairs only.
    const auto& orders = port_of(cta_, user.warp).orders;
    if (orders.at(user.lane).before().has(other.kind(), other.clock)) return;
    const bool products = user.by == TmemUser::By::Product && other.by == TmemUser::By::Product;
    if (!products || !other_wrote) {
      report(complaints.order, Severity::Lint, "tcgen05-order",
             "follows in the same pipe, where the ISA promises no order between the two,");
      return;
    }
  }
  if (same_warp && user.by == TmemUser::By::Store && other.by == TmemUser::By::Load) {
    report(complaints.wait, Severity::Lint, "tcgen05-wait", "may overtake");
    return;
  }
  if (other.by == TmemUser::By::Load) {
    const auto& used = port_of(cta_, other.warp).used;
    const auto known = [&](const TensorPort::Used& use) {
      return use.load == other.clock && races.happened(warp.agent(), other.warp, use.at);
    };
    if (std::any_of(used.begin(), used.end(), known)) {
      report(complaints.wait, Severity::Lint, "tcgen05-wait",
             "is ordered by a use of registers alone after");
      return;
    }
  }
  report(complaints.race, Severity::Error, "race", "is not ordered after");
}

void Tmem::check_values(Warp& warp, TmemUser::By by, const TmemRegion& region,
                        const char* what) const {
  check_columns(region, what);
  constexpr uint32_t UPPER = 0xFFFF0000u;
  for (int c = region.first; c < region.first + region.count; ++c) {
    const LaneMask& written = written_[static_cast<size_t>(c)];
    uint32_t missing = 0;
    size_t quarter = 0;
    for (size_t q = 0; q < TMEM_QUARTERS; ++q) {
      const uint32_t here = region.lanes[q] & ~written[q];
      if (here != 0 && missing == 0) quarter = q;
      missing |= here;
    }
    if (missing == 0) continue;
    // Products of 64 rows leave every other 16 lanes alone, but loads of 32 lanes read those, too.
    const bool half = by == TmemUser::By::Load && region.lanes[quarter] == ALL_LANES &&
                      (missing == UPPER || missing == static_cast<uint32_t>(~UPPER));
    warp.cta().report(
        half ? Severity::Lint : Severity::Error, warp, -1, "uninitialised",
        std::string(what) + " reads tensor memory that nothing has written: column " +
            std::to_string(c) + ", lane " +
            std::to_string(32 * quarter + static_cast<size_t>(std::countr_zero(
                                              region.lanes[quarter] & ~written[quarter]))),
        static_cast<uint64_t>(c));
    break;
  }
}

void Tmem::read(Warp& warp, const TmemUser& user, const TmemRegion& region, const char* what) {
  check_values(warp, user.by, region, what);
  if (cta_.traced()) trace_use(user, region, false);
  if (user.unit < 0) return;
  Complaints complaints;
  TmemUser checked{};
  for (int c = region.first; c < region.first + region.count; ++c) {
    for (int half = 0; half < TMEM_HALVES; ++half) {
      if (!touches(region, half)) continue;
      Marks& marks = marks_[static_cast<size_t>(c * TMEM_HALVES + half)];
      const TmemUser& last = marks.write;
      if (last.clock != 0 && (last.unit != checked.unit || last.clock != checked.clock)) {
        check_order(warp, user, last, false, true, region, what, complaints);
        checked = last;
      }
      const auto mine = std::find_if(marks.reads.begin(), marks.reads.end(),
                                     [&](const TmemUser& read) { return read.unit == user.unit; });
      if (mine != marks.reads.end())
        *mine = user;
      else
        marks.reads.push_back(user);
    }
  }
}

void Tmem::write(Warp& warp, const TmemUser& user, const TmemRegion& region, const char* what) {
  check_columns(region, what);
  if (cta_.traced()) trace_use(user, region, true);
  if (user.by != TmemUser::By::Free) {
    for (int c = region.first; c < region.first + region.count; ++c) {
      for (size_t q = 0; q < TMEM_QUARTERS; ++q) {
        written_[static_cast<size_t>(c)][q] |= region.lanes[q];
      }
    }
  }
  if (user.unit < 0) return;
  Complaints complaints;
  TmemUser checked{}, checked_read{};
  for (int c = region.first; c < region.first + region.count; ++c) {
    for (int half = 0; half < TMEM_HALVES; ++half) {
      if (!touches(region, half)) continue;
      Marks& marks = marks_[static_cast<size_t>(c * TMEM_HALVES + half)];
      const TmemUser& last = marks.write;
      if (last.clock != 0 && (last.unit != checked.unit || last.clock != checked.clock)) {
        check_order(warp, user, last, true, true, region, what, complaints);
        checked = last;
      }
      for (const TmemUser& read : marks.reads) {
        if (read.unit == checked_read.unit && read.clock == checked_read.clock) continue;
        check_order(warp, user, read, true, false, region, what, complaints);
        checked_read = read;
      }
      marks.reads.clear();
      marks.write = user;
    }
  }
}

}  // namespace archflash::sim
