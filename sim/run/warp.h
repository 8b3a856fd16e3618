// A warp in execution: its registers and a list of fragments. A fragment is a set of lanes at one
// instruction. Lanes that part at a branch become two fragments, and fragments that meet at an
// instruction become one. Of the fragments that can run, the one furthest back runs first.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sim/load/program.h"
#include "sim/run/report.h"

namespace archflash::sim {

class Cta;
class BulkQueue;
class MatrixQueue;

// What a blocked fragment waits for, and what the key of its wait is.
enum class Wait : uint8_t {
  Barrier,         // a barrier of the CTA; the key is its number
  ClusterBarrier,  // the phase of the cluster's barrier in which its lanes arrived
  Mbarrier,        // the phase of an mbarrier object to change; the key is the object's address
  TensorMemory,    // columns of tensor memory; the key is how many it wants
  Registers,       // registers in the CTA's pool; the key is how many it wants
  Rest,            // anything that others do: it waits in a loop
};

struct Fragment {
  enum class State : uint8_t {
    Ready,
    Parked,  // it is at an instruction that needs lanes which are elsewhere
    Blocked,
  };
  uint32_t mask = 0;
  uint32_t pc = 0;
  State state = State::Ready;
  Wait wait = Wait::Barrier;  // if it is blocked
  uint64_t key = 0;
  uint32_t waiting_pc = 0;  // the instruction that blocked it
  uint64_t since = 0;       // when it was blocked, for the trace
};

// The cp.async of one instruction, for those lanes of a warp whose groups have the same age.
struct PendingCopy {
  uint32_t lanes = 0;     // the lanes that copy
  uint32_t mask = 0;      // the lanes whose part has not landed
  uint32_t unwaited = 0;  // the lanes that have not waited for it
  uint32_t sequence = 0;  // its number among the warp's copies, from 1
  uint32_t age = 0;       // how many groups were committed after its own, once it is committed
  bool committed = false;
  uint32_t pc = 0;
  uint8_t bytes = 0;
  uint64_t issued = 0;  // the times, for the trace
  uint64_t landed = 0;
  uint32_t offset[LANES];     // destination in shared memory
  uint8_t read_bytes[LANES];  // so many are copied, the rest is set to zero
  const uint8_t* source[LANES];
};

class Warp {
 public:
  enum class Stop : uint8_t { Budget, Blocked, Exited };

  Warp(Cta& cta, int index, int agent, uint32_t lanes);
  ~Warp();

  // Runs up to `budget` instructions.
  Stop run(uint64_t budget);

  template <class T>
  T* lanes(Ref ref) {
    return reinterpret_cast<T*>(bases_[ref >> 31] + (ref & ~CONSTANT));
  }
  uint32_t& predicate(Ref ref) { return *lanes<uint32_t>(ref); }

  Cta& cta() { return cta_; }
  int index() const { return index_; }
  int agent() const { return agent_; }  // its number in the race detector and in the cluster
  uint32_t live() const { return live_; }
  uint32_t pc() const { return pc_; }
  uint64_t executed() const { return executed_; }
  bool exited() const { return live_ == 0; }
  bool runnable() const;
  std::vector<Fragment>& fragments() { return fragments_; }
  // The lanes that are at the instruction being executed.
  uint32_t fragment_mask() const { return fragments_[current_].mask; }
  // Blocks the fragment that is executing. When it is woken it goes on behind this instruction or,
  // with `again`, executes it again. Only instructions with Control::Barrier may block.
  void block(Wait wait, uint64_t key, bool again = false);
  // Wakes the fragments that wait for this.
  void wake(Wait wait, uint64_t key);
  void wake_all(Wait wait);  // whatever the key
  bool waits_for(Wait wait) const;

  BulkQueue& bulk() { return *bulk_; }
  MatrixQueue& matrix() { return *matrix_; }
  // Turns the check of instructions that use registers of a wgmma or of a load of tensor memory on
  // or off.
  void watch_registers(bool on);

  // ---- Asynchronous copies ----
  std::vector<PendingCopy>& copies() { return copies_; }
  uint32_t next_copy_sequence() { return ++copy_sequence_; }
  uint32_t copy_sequence() const { return copy_sequence_; }
  void commit_copies(uint32_t mask);
  // Waits until at most `groups` of the newest groups of these lanes are pending. With
  // `uncommitted` it also waits for copies that are not committed (cp.async.wait_all).
  void wait_copies(uint32_t mask, uint32_t groups, bool uncommitted);
  // Lets these lanes' copies up to `sequence` land, without a wait: an mbarrier tells of it.
  void land_copies(uint32_t mask, uint32_t sequence);
  // Lets one pending copy land, chosen by `pick`.
  void land_copy(uint64_t pick);

 private:
  void execute_control(Fragment& fragment, const Instruction& instruction, uint32_t mask);
  bool converged(const Fragment& fragment, const Instruction& instruction);
  void check_lanes(const Fragment& fragment, const Instruction& instruction, uint32_t active);
  void merge_fragments();
  void set_specials();
  void finish_copies();
  void check_registers();
  void trace_copy(const PendingCopy& copy);

  uint8_t* bases_[2];
  Cta& cta_;
  int index_, agent_;
  uint32_t live_;
  uint32_t pc_ = 0;
  uint64_t executed_ = 0;
  uint64_t since_merge_ = 0;
  size_t current_ = 0;  // the fragment that is executing
  bool reshaped_ = false;
  std::vector<Fragment> fragments_;
  std::vector<uint8_t> registers_;
  std::vector<PendingCopy> copies_;
  uint32_t copy_sequence_ = 0;
  std::unique_ptr<BulkQueue> bulk_;
  std::unique_ptr<MatrixQueue> matrix_;
  const uint8_t* watched_ = nullptr;  // by instruction: whether its registers are to be checked
};

}  // namespace archflash::sim
