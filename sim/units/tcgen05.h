// tcgen05: matrix products on tiles of shared memory and on tensor memory. One thread starts a
// product and the tensor pipe carries it out. Warps load and store tensor memory; a port keeps what
// a warp has under way there. tcgen05_descriptor.cpp, _product.cpp and _copy.cpp have parts of
// this.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/memory/access.h"
#include "sim/run/cluster.h"
#include "sim/units/matrix_tile.h"
#include "sim/units/pipe_order.h"
#include "sim/units/tmem.h"

namespace archflash::sim {

constexpr int PRODUCT_K_BYTES = 32;   // what one product takes along K in shared memory
constexpr int PRODUCT_K_COLUMNS = 8;  // and in tensor memory

enum class MmaKind : uint8_t { F16, TF32, F8F6F4 };

// A decoded instruction descriptor.
struct MmaDescriptor {
  int m = 0, n = 0, k = 0;
  ElementType a = ElementType::F16, b = ElementType::F16;
  bool half = false;  // D holds .f16
  bool negate_a = false, negate_b = false;
  bool a_k_major = true, b_k_major = true;
};

// Both return what is wrong, naming the field, or an empty string. `ctas` is the number that
// .cta_group states: 1 or 2.
std::string decode_mma(MmaKind kind, int ctas, bool a_in_tmem, uint32_t bits, MmaDescriptor& mma);
std::string decode_tile(uint64_t bits, MatrixDescriptor& descriptor);

// One tcgen05.mma as its thread starts it.
struct MmaRequest {
  MmaKind kind = MmaKind::F16;
  int ctas = 1;
  bool a_in_tmem = false;
  uint32_t d = 0, a_tmem = 0;
  uint64_t a = 0, b = 0;  // descriptors
  uint32_t descriptor = 0;
  bool accumulate = false;
  int scale = 0;  // D is multiplied by 2^-scale first
  // The lanes of D that are not written: four words for the first CTA, then four for the second.
  std::array<uint32_t, 8> skip{};
};

// One tcgen05.cp: it copies rows of shared memory to lanes. Quarter q of the lanes takes the rows
// from first[q] on.
struct CopyRequest {
  int ctas = 1;
  uint32_t rows = 128, bytes = 16;  // of each row
  std::array<uint32_t, TMEM_QUARTERS> first{0, 32, 64, 96};
  uint64_t source = 0;  // descriptor
  uint32_t to = 0;
};

// What a warp has under way in tensor memory, and what it knows about the work of others.
struct TensorPort {
  struct Unit {
    int agent = -1;    // of the race detector
    Clock issued = 0;  // instructions so far
    // The instructions that were waited for before the last fence::before_thread_sync.
    Clock fenced = 0;
  };
  // A load that no wait::ld has covered, and its registers.
  struct Load {
    Clock clock;
    uint32_t pc;
    const Ref* registers;
    int count;
  };
  // A load whose registers were used before a wait, and the warp's own clock at that use. If a card
  // keeps the dependencies between registers, the load has read its cells by then, so that whoever
  // knows of that clock comes after the load.
  struct Used {
    Clock load, at;
  };
  // An operation that a thread of the warp has put into the pipe and has not committed.
  struct Issued {
    Clock clock;
    int lane;
  };

  Unit loads, stores;
  std::vector<Load> pending;
  std::deque<Used> used;  // since the last wait::ld
  Clock issued = 0;       // operations of the pipe
  uint32_t issued_pc = 0;
  std::vector<Issued> uncommitted;
  std::map<int, PipeOrder> orders;  // of these operations, by lane
  std::vector<Clock> seen;  // what the warp knew at its last fence::after_thread_sync, by agent

  bool has_seen(int agent, Clock clock) const {
    const auto a = static_cast<size_t>(agent);
    return a < seen.size() && seen[a] >= clock;
  }
};
// The port of a warp of the cluster, by its agent.
const TensorPort& port_of(Cta& cta, int agent);

// An operation in a tensor pipe. It is carried out after all operations before it or, in mode
// `shuffled`, after those that the ISA names.
class PipeOperation : public AsyncOperation {
 public:
  // A commit, whose place is after everything that its thread has issued.
  PipeOperation(Warp& warp, int lane);
  // An operation that uses tensor memory: the last one that its thread has issued.
  PipeOperation(Warp& warp, const TmemUser& user);
  bool step() override;
  // Whether the ISA promises that an operation which was issued before is carried out before.
  bool must_follow(PipeOperation& earlier);

 protected:
  virtual void execute() = 0;
  // Adds an event to the tensor pipe's track. It appears once a commit tells that it is done.
  void trace(const std::string& label, std::vector<uint64_t> operands = {});

 private:
  uint64_t issued_;
  bool commits_ = true;
  PipeOrder::Kind kind_ = 0;
  Clock clock_ = 0;
  PipeOrder::Set before_;
};

// Tensor memory of a CTA, its warps' ports, and its tensor pipe. A pair uses the pipe of its even
// CTA.
class TensorUnit {
 public:
  explicit TensorUnit(Cta& cta);

  Tmem& memory() { return memory_; }
  TensorPort& port(const Warp& warp) { return ports_[static_cast<size_t>(warp.index())]; }
  TensorUnit& pipe();  // the unit whose pipe the CTA uses

  // ---- Allocation ----
  // Returns the first column, or nothing if the warp has to wait.
  std::optional<int> allocate(Warp& warp, int ctas, uint32_t columns);
  void release(Warp& warp, uint32_t address, uint32_t columns);
  void give_up_permit() { may_allocate_ = false; }
  std::string describe_wait(uint64_t columns) const;

  // ---- The pipe ----
  void multiply(Warp& warp, int lane, const MmaRequest& request);
  void copy(Warp& warp, int lane, const CopyRequest& request);
  void shift(Warp& warp, int lane, int ctas, uint32_t address);
  // Arrives at each place once everything that the thread has put into the pipe is done.
  void commit(Warp& warp, int lane, std::vector<SharedPlace> places);
  // Counts the next operation of a thread; the result identifies it as a user of cells.
  TmemUser next_operation(Warp& warp, int lane, TmemUser::By by, uint64_t accumulator = 0);
  void enqueue(std::shared_ptr<PipeOperation> operation);
  // Carries out the operations that come before this one, and takes this one from the pipe.
  void reach(PipeOperation& operation);

  // ---- Loads and stores of a warp ----
  TmemUser next_load(Warp& warp, const Ref* registers, int count);
  TmemUser next_store(Warp& warp);
  void wait_loads(Warp& warp);
  void wait_stores(Warp& warp);
  void fence_before(Warp& warp);
  void fence_after(Warp& warp);
  // Called before an instruction that uses registers which loads write.
  void check_registers(Warp& warp, uint32_t pc);

  // Events of a traced CTA that are done, but that no commit has told yet.
  void add_trace(int agent, TraceEvent event) { untold_.emplace_back(agent, std::move(event)); }
  void tell(int agent);

  void check_exit();

 private:
  // This CTA, or both CTAs of the pair in the order of their ranks, for an operation of that clock.
  std::vector<Cta*> group(Warp& warp, int ctas, int lane, const char* what, Clock clock);
  TmemUser next(Warp& warp, TensorPort::Unit& unit, TmemUser::By by);
  void wake();  // warps that wait for columns

  Cta& cta_;
  Tmem memory_;
  std::vector<TensorPort> ports_;
  bool may_allocate_ = true;
  uint32_t last_columns_ = 0;  // how many the last allocation took
  struct Wish {                // what this CTA asks for in a pair's allocation
    uint32_t columns = 0;      // 0: it asks for none
    uint32_t pc = 0;
    int first = -1;  // the first column, once granted
  };
  Wish wish_;
  // The warp that executed the last tcgen05.alloc of a pair, and its clock then.
  int allocator_ = -1;
  Clock allocated_at_ = 0;
  std::deque<std::shared_ptr<PipeOperation>> operations_;
  std::vector<std::pair<int, TraceEvent>> untold_;
};

// The CTA that shares a pair with this one. Throws Fault when there is none.
Cta& peer_of(Cta& cta);

}  // namespace archflash::sim
