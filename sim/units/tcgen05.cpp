#include "sim/units/tcgen05.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

// How many loads are remembered in kernels that never wait for them.
constexpr size_t MOST_USED = 64;

}  // namespace

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
  // A card keeps the dependencies between instructions of tcgen05.
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
  mine.pending.erase(load);  // one load is reported once
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
    memory_.allocate(warp.pc(), first, static_cast<int>(columns));
    last_columns_ = columns;
    return first;
  }
  // Both CTAs of the pair get the same columns, once both have asked.
  Cta& other = peer_of(cta_);
  cta_.cluster().lifetimes().check_use(warp, -1, other, "tcgen05.alloc for a pair with");
  TensorUnit& peer = *other.tensor();
  if (wish_.first < 0) {
    wish_.columns = columns;
    wish_.pc = warp.pc();
    if (peer.wish_.columns == 0) return std::nullopt;
    if (peer.wish_.columns != columns) {
      throw Fault{"tmem", what + " where the other CTA of the pair asks for " +
                              std::to_string(peer.wish_.columns)};
    }
    const int first = memory_.find_free(static_cast<int>(columns));
    if (first < 0 || !peer.memory_.is_free(first, static_cast<int>(columns))) return std::nullopt;
    wish_.first = peer.wish_.first = first;
    memory_.allocate(wish_.pc, first, static_cast<int>(columns));
    peer.memory_.allocate(peer.wish_.pc, first, static_cast<int>(columns));
    peer.wake();
  }
  const int first = wish_.first;
  wish_ = {};
  allocator_ = warp.agent();
  if (const RaceDetector* races = cta_.races()) {
    allocated_at_ = races->known_clock(warp.agent(), warp.agent());
  }
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
  if (cta_.kernel().tcgen05_group != 2) return;
  TensorUnit& peer = *peer_of(cta_).tensor();
  peer.wake();
  // The other CTA may have freed its part and exited, but it must have come out of tcgen05.alloc:
  // else a B300 ends the launch with an error (https://github.com/NVIDIA/cutlass/issues/3435).
  const RaceDetector* races = cta_.races();
  if (peer.allocator_ < 0 ||
      (races != nullptr && !races->happened(warp.agent(), peer.allocator_, peer.allocated_at_))) {
    cta_.report(
        Severity::Error, warp, -1, "tmem",
        "tcgen05.dealloc for a pair, whose other CTA may not have come out of tcgen05.alloc yet: "
        "let all threads of the cluster arrive and wait at barrier.cluster between the two");
  }
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

PipeOperation::PipeOperation(Warp& warp, const TmemUser& user) : PipeOperation(warp, user.lane) {
  commits_ = false;
  kind_ = user.kind();
  clock_ = user.clock;
  before_ = warp.cta().tensor()->port(warp).orders[user.lane].before();
}

bool PipeOperation::must_follow(PipeOperation& earlier) {
  if (&earlier.warp() != &warp() || earlier.lane() != lane() || earlier.commits_) return false;
  return commits_ || before_.has(earlier.kind_, earlier.clock_);
}

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

void TensorUnit::reach(PipeOperation& operation) {
  const bool in_order = cta_.options().mode != Mode::Shuffled;
  for (;;) {
    const auto next =
        std::find_if(operations_.begin(), operations_.end(), [&](const auto& earlier) {
          return in_order || earlier.get() == &operation || operation.must_follow(*earlier);
        });
    if (next->get() == &operation) {
      operations_.erase(next);
      return;
    }
    const std::shared_ptr<PipeOperation> before = *next;
    cta_.cluster().finish(*before);
  }
}

TmemUser TensorUnit::next_operation(Warp& warp, int lane, TmemUser::By by, uint64_t accumulator) {
  TensorPort& mine = port(warp);
  mine.uncommitted.push_back({++mine.issued, lane});
  mine.issued_pc = warp.pc();
  RaceDetector* races = cta_.races();
  const int agent = races != nullptr ? races->matrix_agent(warp.agent()) : -1;
  const TmemUser user{by,
                      static_cast<uint8_t>(lane),
                      static_cast<uint16_t>(warp.agent()),
                      agent,
                      mine.issued,
                      warp.pc(),
                      accumulator};
  mine.orders[lane].issue(user.kind(), user.clock);
  return user;
}

std::vector<Cta*> TensorUnit::group(Warp& warp, int ctas, int lane, const char* what, Clock clock) {
  if (ctas == 1) return {&cta_};
  Cta& peer = peer_of(cta_);
  Lifetimes& lifetimes = cta_.cluster().lifetimes();
  lifetimes.check_use(warp, lane, peer, what);
  if (const RaceDetector* races = cta_.races()) {
    lifetimes.note_use(warp, lane, peer, what, races->matrix_agent(warp.agent()), clock);
  }
  if (cta_.rank() % 2 == 0) return {&cta_, &peer};
  return {&peer, &cta_};
}

// ---- tcgen05.commit -----------------------------------------------------------------------------

namespace {

class Commit : public PipeOperation {
 public:
  Commit(Warp& warp, int lane, std::vector<SharedPlace> places, Clock clock)
      : PipeOperation(warp, lane), places_(std::move(places)), clock_(clock) {
    // Whatever came before the operations comes before their end, too.
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
  // The commit covers clocks only up to the first operation of another thread that is not
  // committed.
  const Clock clock = mine.uncommitted.empty() ? mine.issued : mine.uncommitted.front().clock - 1;
  // The arrival in another CTA comes before that CTA exits if that CTA knows that the operations
  // are done, from this commit or from another one. FlashAttention-4 waits for a later commit.
  const RaceDetector* races = cta_.races();
  for (const SharedPlace& place : places) {
    if (races == nullptr || place.cta == &cta_) continue;
    cta_.cluster().lifetimes().note_use(warp, lane, *place.cta, "tcgen05.commit to",
                                        races->matrix_agent(warp.agent()), clock,
                                        place.cta->shared_base() + place.offset);
  }
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
  if (last_columns_ != 0 && may_allocate_) {
    Finding finding;
    finding.severity = Severity::Lint;
    finding.kind = "tmem-permit";
    finding.message =
        "the CTA has allocated tensor memory and keeps the permit to allocate more until it exits, "
        "so that no other CTA of the SM can: tcgen05.relinquish_alloc_permit is missing";
    finding.cta = cta_.index();
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
