#include "sim/run/warp.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "sim/run/cluster.h"
#include "sim/units/bulk.h"
#include "sim/units/tcgen05.h"
#include "sim/units/wgmma.h"

namespace archflash::sim {
namespace {

// After so many instructions of one fragment, another runnable fragment of its warp gets a turn: a
// loop that waits for the others must end.
constexpr uint64_t FAIRNESS_LIMIT = 10000;
// Registers hold this before they are written: as a float it is a NaN, as an address it is in no
// memory.
constexpr int REGISTER_POISON = 0xFF;

}  // namespace

Warp::Warp(Cta& cta, int index, int agent, uint32_t lanes)
    : cta_(cta), index_(index), agent_(agent), live_(lanes) {
  const Kernel& kernel = cta.kernel();
  registers_.assign(kernel.register_bytes + 64, REGISTER_POISON);
  auto start = reinterpret_cast<uintptr_t>(registers_.data());
  start = (start + 63) / 64 * 64;  // whole cache lines for the vector code
  bases_[0] = reinterpret_cast<uint8_t*>(start);
  bases_[1] = const_cast<uint8_t*>(cta.constants());
  fragments_.push_back({lanes, 0});
  set_specials();
  bulk_ = std::make_unique<BulkQueue>(*this);
  matrix_ = std::make_unique<MatrixQueue>(*this);
}

Warp::~Warp() = default;

void Warp::watch_registers(bool on) {
  watched_ = on ? cta_.kernel().touches_pinned.data() : nullptr;
}

void Warp::check_registers() {
  matrix_->check_registers(pc_);
  if (TensorUnit* tensor = cta_.tensor()) tensor->check_registers(*this, pc_);
}

void Warp::set_specials() {
  const LaunchContext& launch = cta_.launch();
  ThreadPosition position{
      launch.block, launch.grid,           launch.cluster,     cta_.position(), 0,
      cta_.index(), launch.dynamic_shared, cta_.shared_bytes()};
  for (const SpecialUse& use : cta_.kernel().specials) {
    for (int lane = 0; lane < LANES; ++lane) {
      position.thread = int64_t{index_} * LANES + lane;
      const uint64_t value = use.special->value(position);
      if (use.special->bits == 64)
        lanes<uint64_t>(use.place)[lane] = value;
      else
        lanes<uint32_t>(use.place)[lane] = static_cast<uint32_t>(value);
    }
  }
}

bool Warp::runnable() const {
  return std::any_of(fragments_.begin(), fragments_.end(),
                     [](const Fragment& f) { return f.state == Fragment::State::Ready; });
}

void Warp::merge_fragments() {
  for (size_t i = 0; i < fragments_.size(); ++i) {
    if (fragments_[i].state == Fragment::State::Blocked) continue;
    for (size_t j = i + 1; j < fragments_.size();) {
      if (fragments_[j].state != Fragment::State::Blocked && fragments_[j].pc == fragments_[i].pc) {
        fragments_[i].mask |= fragments_[j].mask;
        fragments_[i].state = Fragment::State::Ready;
        fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(j));
        since_merge_ = 0;
      } else {
        ++j;
      }
    }
  }
}

Warp::Stop Warp::run(uint64_t budget) {
  const Instruction* const code = cta_.kernel().code.data();
  uint64_t* const executed = cta_.counts().executed.data();
  while (live_ != 0) {
    if (fragments_.size() > 1) merge_fragments();
    size_t chosen = fragments_.size();
    size_t furthest = fragments_.size();
    for (size_t i = 0; i < fragments_.size(); ++i) {
      if (fragments_[i].state != Fragment::State::Ready) continue;
      if (chosen == fragments_.size() || fragments_[i].pc < fragments_[chosen].pc) chosen = i;
      if (furthest == fragments_.size() || fragments_[i].pc > fragments_[furthest].pc) furthest = i;
    }
    if (chosen == fragments_.size()) return Stop::Blocked;
    if (since_merge_ > FAIRNESS_LIMIT) {
      chosen = furthest;
      since_merge_ = 0;
    }
    // The next place where another fragment waits: there the two may become one.
    uint32_t meeting = UINT32_MAX;
    for (size_t i = 0; i < fragments_.size(); ++i) {
      const Fragment& other = fragments_[i];
      if (i != chosen && other.state != Fragment::State::Blocked &&
          other.pc > fragments_[chosen].pc) {
        meeting = std::min(meeting, other.pc);
      }
    }
    current_ = chosen;
    reshaped_ = false;
    uint32_t pc = fragments_[chosen].pc;
    const uint32_t mask = fragments_[chosen].mask;
    const uint64_t before = budget;
    bool again = true;
    while (again) {
      if (budget == 0) break;
      --budget;
      pc_ = pc;
      if (watched_ != nullptr && watched_[pc]) [[unlikely]]
        check_registers();
      const Instruction& instruction = code[pc];
      uint32_t active = mask;
      if (instruction.guard != NO_REF) {
        const uint32_t predicate = this->predicate(instruction.guard);
        active &= instruction.guard_negated ? ~predicate : predicate;
      }
      // An aligned instruction is plain, too, where the whole warp is at it.
      const bool plain = instruction.converge == Converge::No ||
                         (instruction.converge == Converge::Aligned && active == live_) ||
                         (instruction.converge == Converge::Whole && active == ALL_LANES);
      if (instruction.control == Control::None && plain) [[likely]] {
        ++executed[pc];
        if (active != 0) instruction.run(*this, instruction, active);
        ++pc;
        again = pc < meeting;
      } else {
        Fragment& fragment = fragments_[chosen];
        fragment.pc = pc;
        execute_control(fragment, instruction, active);
        again = !reshaped_;
        if (again) {
          pc = fragments_[chosen].pc;
          again = pc < meeting;
        }
      }
    }
    if (!reshaped_) fragments_[chosen].pc = pc;
    executed_ += before - budget;
    since_merge_ = fragments_.size() > 1 ? since_merge_ + before - budget : 0;
    if (budget == 0) return live_ == 0 ? Stop::Exited : Stop::Budget;
  }
  return Stop::Exited;
}

bool Warp::converged(const Fragment& fragment, const Instruction& instruction) {
  if (instruction.converge == Converge::Aligned || instruction.converge == Converge::Whole) {
    return (live_ & ~fragment.mask) == 0;
  }
  if (instruction.converge == Converge::Members) {
    const uint32_t* members = lanes<uint32_t>(instruction.operands[instruction.converge_operand]);
    for (uint32_t rest = fragment.mask; rest != 0; rest &= rest - 1) {
      if (members[std::countr_zero(rest)] & live_ & ~fragment.mask) return false;
    }
  }
  return true;
}

// Checks that the lanes which execute an instruction of converged lanes are those that must.
void Warp::check_lanes(const Fragment& fragment, const Instruction& instruction, uint32_t active) {
  if (active == 0) return;
  if (instruction.converge == Converge::Members) {
    const uint32_t* members = lanes<uint32_t>(instruction.operands[instruction.converge_operand]);
    for (uint32_t rest = active; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      if (!(members[lane] >> lane & 1)) {
        throw Fault{"member-mask", "the lane is not in its own member mask", lane, 0};
      }
      if (members[lane] & live_ & ~active) {
        throw Fault{"member-mask",
                    "the member mask names lane " +
                        std::to_string(std::countr_zero(members[lane] & live_ & ~active)) +
                        ", which does not execute the instruction (its guard is false)",
                    lane, 0};
      }
    }
    return;
  }
  if (active != fragment.mask) {
    throw Fault{"divergent-aligned",
                "an instruction that all lanes of the warp must execute together is executed by "
                "some of them (its guard differs)",
                std::countr_zero(active), 0};
  }
  if (instruction.converge == Converge::Whole && live_ != ALL_LANES) {
    throw Fault{"partial-warp",
                "an instruction that takes all 32 lanes of a warp is executed by " +
                    std::to_string(std::popcount(live_)) + ": lane " +
                    std::to_string(std::countr_one(live_)) +
                    " has returned, or was never there because the block's size is no multiple "
                    "of 32",
                std::countr_zero(active), 0};
  }
}

// Executes anything but a plain instruction. Sets `reshaped_` if the fragments have changed;
// otherwise the fragment is at its next instruction afterwards.
void Warp::execute_control(Fragment& fragment, const Instruction& instruction, uint32_t active) {
  cta_.launch().check_given_up();  // a turn that takes long has branches
  if (instruction.converge != Converge::No) {
    if (!converged(fragment, instruction)) {
      fragment.state = Fragment::State::Parked;
      reshaped_ = true;
      return;
    }
    check_lanes(fragment, instruction, active);
  }
  ++cta_.counts().executed[pc_];
  switch (instruction.control) {
    case Control::None:
      if (active != 0) instruction.run(*this, instruction, active);
      ++fragment.pc;
      return;
    case Control::Branch:
      if (active == fragment.mask) {
        fragment.pc = instruction.target;
      } else if (active == 0) {
        ++fragment.pc;
      } else {
        const Fragment taken{active, instruction.target};
        fragment.mask &= ~active;
        ++fragment.pc;
        fragments_.push_back(taken);
      }
      reshaped_ = fragments_.size() > 1;
      return;
    case Control::BranchIndexed: {
      const uint32_t* index = lanes<uint32_t>(instruction.operands[0]);
      const auto& targets = *static_cast<const std::vector<uint32_t>*>(instruction.extra);
      const uint32_t next = fragment.pc + 1;
      const uint32_t stays = fragment.mask & ~active;
      std::vector<Fragment> parts;
      if (stays != 0) parts.push_back({stays, next});
      for (uint32_t rest = active; rest != 0; rest &= rest - 1) {
        const int lane = std::countr_zero(rest);
        if (index[lane] >= targets.size()) {
          throw Fault{"branch",
                      "brx.idx with index " + std::to_string(index[lane]) + " of " +
                          std::to_string(targets.size()) + " targets",
                      lane, 0};
        }
        parts.push_back({1u << lane, targets[index[lane]]});
      }
      fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(current_));
      fragments_.insert(fragments_.end(), parts.begin(), parts.end());
      reshaped_ = true;
      return;
    }
    case Control::Exit:
      if (active == 0) {
        ++fragment.pc;
        return;
      }
      finish_copies();
      bulk_->check_exit(active);
      matrix_->check_exit();
      live_ &= ~active;
      fragment.mask &= ~active;
      ++fragment.pc;
      if (fragment.mask == 0) {
        fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(current_));
      }
      for (Fragment& other : fragments_) {  // parked fragments may wait for fewer lanes now
        if (other.state == Fragment::State::Parked) other.state = Fragment::State::Ready;
      }
      reshaped_ = true;
      cta_.lanes_exited(*this);
      return;
    case Control::Trap:
      if (active != 0) {
        throw Fault{"trap", "the kernel executed " + std::string(cta_.kernel().texts[pc_].text),
                    std::countr_zero(active), 0};
      }
      ++fragment.pc;
      return;
    case Control::Barrier:
      ++fragment.pc;
      if (active == 0) return;
      instruction.run(*this, instruction, active);
      return;
  }
}

void Warp::block(Wait wait, uint64_t key, bool again) {
  Fragment& fragment = fragments_[current_];
  fragment.state = Fragment::State::Blocked;
  fragment.wait = wait;
  fragment.key = key;
  fragment.waiting_pc = pc_;
  fragment.since = cta_.time() + 1;
  if (again) fragment.pc = pc_;
  reshaped_ = true;
}

void Warp::wake(Wait wait, uint64_t key) {
  for (Fragment& fragment : fragments_) {
    if (fragment.state == Fragment::State::Blocked && fragment.wait == wait &&
        fragment.key == key) {
      fragment.state = Fragment::State::Ready;
    }
  }
}

void Warp::wake_all(Wait wait) {
  for (Fragment& fragment : fragments_) {
    if (fragment.state == Fragment::State::Blocked && fragment.wait == wait) {
      fragment.state = Fragment::State::Ready;
    }
  }
}

bool Warp::waits_for(Wait wait) const {
  return std::any_of(fragments_.begin(), fragments_.end(), [&](const Fragment& fragment) {
    return fragment.state == Fragment::State::Blocked && fragment.wait == wait;
  });
}

// ---- Asynchronous copies ----

namespace {

void land(Cta& cta, PendingCopy& copy, uint32_t mask) {
  for (uint32_t rest = mask & copy.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    uint8_t* destination = cta.shared() + copy.offset[lane];
    const uint32_t read = copy.read_bytes[lane];
    if (read > 0) std::memcpy(destination, copy.source[lane], read);
    if (read < copy.bytes) std::memset(destination + read, 0, copy.bytes - read);
  }
  copy.mask &= ~mask;
  if (copy.mask == 0 && copy.landed == 0) copy.landed = cta.time() + 1;
}

// Lands what is left of a copy for the lanes of `mask`, which have waited for it.
void complete(Cta& cta, PendingCopy& copy, uint32_t mask) {
  land(cta, copy, mask);
  for (uint32_t rest = copy.unwaited & mask; rest != 0; rest &= rest - 1) {
    std::memset(cta.shared_state() + copy.offset[std::countr_zero(rest)], VALID, copy.bytes);
  }
  copy.unwaited &= ~mask;
}

}  // namespace

void Warp::land_copy(uint64_t pick) {
  if (copies_.empty()) return;
  land(cta_, copies_[pick % copies_.size()], ALL_LANES);
}

void Warp::land_copies(uint32_t mask, uint32_t sequence) {
  for (PendingCopy& copy : copies_) {
    if (copy.sequence > sequence || !(copy.unwaited & mask)) continue;
    complete(cta_, copy, mask);
    if (copy.unwaited == 0 && cta_.traced()) trace_copy(copy);
  }
  std::erase_if(copies_, [](const PendingCopy& copy) { return copy.unwaited == 0; });
}

void Warp::commit_copies(uint32_t mask) {
  // The lanes of a copy that do not commit now become a copy of their own.
  const size_t count = copies_.size();
  for (size_t i = 0; i < count; ++i) {
    if (!(copies_[i].unwaited & mask)) continue;
    if (copies_[i].unwaited & ~mask) {
      PendingCopy rest = copies_[i];
      rest.lanes &= ~mask;
      rest.mask &= ~mask;
      rest.unwaited &= ~mask;
      copies_[i].lanes &= mask;
      copies_[i].mask &= mask;
      copies_[i].unwaited &= mask;
      copies_.push_back(rest);
    }
    PendingCopy& copy = copies_[i];
    if (copy.committed) ++copy.age;
    copy.committed = true;
  }
}

void Warp::wait_copies(uint32_t mask, uint32_t groups, bool uncommitted) {
  if (copies_.empty()) return;
  const auto waited = [&](const PendingCopy& copy) {
    return uncommitted || (copy.committed && copy.age >= groups);
  };
  size_t ended = 0;
  for (PendingCopy& copy : copies_) {
    if (!(copy.unwaited & mask) || !waited(copy)) continue;
    complete(cta_, copy, mask);
    if (copy.unwaited > 0) continue;
    ++ended;
    if (cta_.traced()) trace_copy(copy);
  }
  if (cta_.traced() && ended > 0) {  // takes no time: copies that have not landed land now
    TraceEvent event;
    event.kind = TraceEvent::Kind::Wait;
    event.track = index_;
    event.begin = event.end = cta_.time() + 1;
    event.pc = pc_;
    event.label = std::to_string(ended) + " cp.async";
    cta_.trace().events.push_back(std::move(event));
  }
  std::erase_if(copies_, [](const PendingCopy& copy) { return copy.unwaited == 0; });
  if (RaceDetector* races = cta_.races()) {
    uint32_t done = copy_sequence_;
    for (const PendingCopy& copy : copies_) done = std::min(done, copy.sequence - 1);
    races->copies_done(agent_, done);
  }
}

void Warp::trace_copy(const PendingCopy& copy) {
  TraceEvent event;
  event.begin = copy.issued;
  event.end = copy.landed;
  event.seen = cta_.time() + 1;
  event.pc = copy.pc;
  event.label = "zeros";
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(copy.lanes >> lane & 1)) continue;
    event.bytes += copy.bytes;
    if (copy.read_bytes[lane] == 0) continue;
    for (const Buffer& buffer : cta_.launch().memory->buffers()) {
      const uint8_t* const source = copy.source[lane];
      if (source >= buffer.host && source < buffer.host + buffer.bytes) event.label = buffer.name;
    }
  }
  cta_.trace().add_async("warp " + std::to_string(index_) + " cp.async", std::move(event));
}

// Called when a warp exits: no copy may be under way any more.
void Warp::finish_copies() {
  if (copies_.empty()) return;
  const PendingCopy& copy = copies_.front();
  cta_.report(Severity::Error, *this, std::countr_zero(copy.unwaited), "pending-copy",
              "an asynchronous copy of " + std::to_string(copy.bytes) +
                  " bytes has not been waited for at the exit",
              cta_.shared_base() + copy.offset[std::countr_zero(copy.unwaited)], copy.pc);
  copies_.clear();
}

}  // namespace archflash::sim
