#include "sim/load/register_places.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <queue>
#include <tuple>

namespace archflash::sim {
namespace {

// A set of registers that blocks hand on, by the numbers that these have among each other.
class RegisterSet {
 public:
  explicit RegisterSet(size_t registers) : words_((registers + 63) / 64) {}

  void insert(uint32_t r) { words_[r / 64] |= uint64_t{1} << r % 64; }
  void insert_all(const RegisterSet& other) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] |= other.words_[w];
  }
  // Becomes uses | (out & ~defines); returns whether that changed it.
  bool become_live_in(const RegisterSet& uses, const RegisterSet& out, const RegisterSet& defines) {
    bool changed = false;
    for (size_t w = 0; w < words_.size(); ++w) {
      const uint64_t in = uses.words_[w] | (out.words_[w] & ~defines.words_[w]);
      changed = changed || in != words_[w];
      words_[w] = in;
    }
    return changed;
  }
  template <class Function>
  void for_each(Function function) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t rest = words_[w]; rest != 0; rest &= rest - 1) {
        function(w * 64 + static_cast<size_t>(std::countr_zero(rest)));
      }
    }
  }

 private:
  std::vector<uint64_t> words_;
};

int place_bytes(int bits) {
  if (bits == 1) return 4;
  if (bits <= 32) return 4 * LANES;
  return bits / 8 * LANES;
}

class RegisterPlacer {
 public:
  RegisterPlacer(Kernel& kernel, const std::vector<Type>& registers, OperandLists& operands)
      : kernel_(kernel), registers_(registers), operands_(operands) {}

  void run() {
    find_blocks();
    find_live_registers();
    mark_unused_loads();
    find_intervals();
    assign_places();
    replace_numbers();
  }

 private:
  static constexpr size_t NEVER = SIZE_MAX;

  // The instructions that may execute after instruction i.
  void successors(size_t i, std::vector<size_t>& out) const {
    const Instruction& instruction = kernel_.code[i];
    out.clear();
    const bool guarded = instruction.guard != NO_REF;
    if (instruction.control == Control::Branch) {
      out.push_back(instruction.target);
      if (guarded) out.push_back(i + 1);
      return;
    }
    if (instruction.control == Control::BranchIndexed) {
      for (uint32_t t : *static_cast<const std::vector<uint32_t>*>(instruction.extra)) {
        out.push_back(t);
      }
      if (guarded) out.push_back(i + 1);
      return;
    }
    if ((instruction.control == Control::Exit || instruction.control == Control::Trap) &&
        !guarded) {
      return;
    }
    out.push_back(i + 1);
  }

  // Basic blocks: block b has the instructions begin_[b] .. begin_[b + 1] - 1.
  void find_blocks() {
    const size_t count = kernel_.code.size();
    std::vector<char> leader(count + 1, 0);
    leader[0] = 1;
    std::vector<size_t> next;
    for (size_t i = 0; i < count; ++i) {
      const Control control = kernel_.code[i].control;
      if (control == Control::None || control == Control::Barrier) continue;
      successors(i, next);
      for (const size_t s : next) leader[s] = 1;
      if (i + 1 < count) leader[i + 1] = 1;
    }
    block_of_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      if (leader[i]) begin_.push_back(i);
      block_of_[i] = begin_.size() - 1;
    }
    begin_.push_back(count);
  }

  size_t blocks() const { return begin_.size() - 1; }

  // The registers that are alive where each block begins and ends. Most are written and read in one
  // block: the sets are of the others.
  void find_live_registers() {
    std::vector<uint32_t> number(registers_.size(), 0);  // from 1; 0: no block hands it on
    std::vector<size_t> defined_in(registers_.size(), NEVER);
    std::vector<std::vector<uint32_t>> read_first(blocks());
    for (size_t b = 0; b < blocks(); ++b) {
      const auto read = [&](Ref r) {
        if ((r & CONSTANT) || defined_in[r] == b) return;
        if (number[r] == 0) {
          handed_on_.push_back(r);
          number[r] = static_cast<uint32_t>(handed_on_.size());
        }
        read_first[b].push_back(number[r] - 1);
      };
      for (size_t i = begin_[b]; i < begin_[b + 1]; ++i) {
        const std::vector<Ref>& refs = operands_.refs[i];
        const std::vector<Role>& roles = operands_.roles[i];
        const bool guarded = kernel_.code[i].guard != NO_REF;
        if (guarded) read(kernel_.code[i].guard);
        for (size_t k = 0; k < refs.size(); ++k) {
          // A guarded instruction may leave its destination as it is, so that it counts as a
          // reader.
          if (roles[k] == Role::Read || guarded) read(refs[k]);
        }
        for (size_t k = 0; k < refs.size(); ++k) {
          if (roles[k] == Role::Write) defined_in[refs[k]] = b;
        }
      }
    }
    const RegisterSet none(handed_on_.size());
    std::vector<RegisterSet> uses(blocks(), none), defines(blocks(), none);
    live_in_.assign(blocks(), none);
    live_out_.assign(blocks(), none);
    for (size_t b = 0; b < blocks(); ++b) {
      for (const uint32_t r : read_first[b]) uses[b].insert(r);
      for (size_t i = begin_[b]; i < begin_[b + 1]; ++i) {
        const std::vector<Ref>& refs = operands_.refs[i];
        for (size_t k = 0; k < refs.size(); ++k) {
          if (operands_.roles[i][k] == Role::Write && number[refs[k]] != 0) {
            defines[b].insert(number[refs[k]] - 1);
          }
        }
      }
    }
    std::vector<size_t> next;
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t b = blocks(); b-- > 0;) {
        successors(begin_[b + 1] - 1, next);
        for (const size_t s : next) live_out_[b].insert_all(live_in_[block_of_[s]]);
        if (live_in_[b].become_live_in(uses[b], live_out_[b], defines[b])) changed = true;
      }
    }
  }

  // Compilers load whole structures at once, with parts that nobody has written and nobody will
  // read. Reading those parts must not be reported.
  void mark_unused_loads() {
    std::vector<size_t> live_in_block(registers_.size(), NEVER);
    for (size_t b = 0; b < blocks(); ++b) {
      live_out_[b].for_each([&](size_t r) { live_in_block[handed_on_[r]] = b; });
      for (size_t i = begin_[b + 1]; i-- > begin_[b];) {
        Instruction& instruction = kernel_.code[i];
        const std::vector<Ref>& refs = operands_.refs[i];
        const std::vector<Role>& roles = operands_.roles[i];
        const bool guarded = instruction.guard != NO_REF;
        int element = 0;
        for (size_t k = 0; k < refs.size(); ++k) {
          if (roles[k] != Role::Write) continue;
          if (instruction.counted == Class::Load && live_in_block[refs[k]] != b && element < 8) {
            instruction.unused |= static_cast<uint8_t>(1u << element);
          }
          ++element;
        }
        for (size_t k = 0; k < refs.size(); ++k) {
          if (roles[k] == Role::Write && !guarded) live_in_block[refs[k]] = NEVER;
        }
        for (size_t k = 0; k < refs.size(); ++k) {
          if (roles[k] == Role::Read && !(refs[k] & CONSTANT)) live_in_block[refs[k]] = b;
        }
        if (guarded) live_in_block[instruction.guard] = b;
      }
    }
  }

  void touch(Ref r, size_t instruction) {
    first_[r] = std::min(first_[r], instruction);
    last_[r] = std::max(last_[r], instruction);
  }

  // For each register, the first and the last instruction at which it is alive. Both belong to the
  // interval, so that an instruction's destination never shares a place with one of its sources of
  // another width.
  void find_intervals() {
    const size_t count = kernel_.code.size();
    first_.assign(registers_.size(), NEVER);
    last_.assign(registers_.size(), 0);
    for (size_t b = 0; b < blocks(); ++b) {
      live_in_[b].for_each([&](size_t r) { touch(handed_on_[r], begin_[b]); });
      live_out_[b].for_each([&](size_t r) { touch(handed_on_[r], begin_[b + 1] - 1); });
      for (size_t i = begin_[b]; i < begin_[b + 1]; ++i) {
        if (kernel_.code[i].guard != NO_REF) touch(kernel_.code[i].guard, i);
        for (const Ref r : operands_.refs[i]) {
          if (!(r & CONSTANT)) touch(r, i);
        }
      }
    }
    for (const SpecialUse& use : kernel_.specials) touch(use.place, 0);
    for (size_t i = 0; i < count; ++i) {  // a pinned register shares its place with no other
      if (!kernel_.code[i].pinned) continue;
      for (const Ref r : operands_.refs[i]) {
        if (r & CONSTANT) continue;
        touch(r, 0);
        touch(r, count - 1);
      }
    }
  }

  void assign_places() {
    std::vector<Ref> order;
    for (Ref r = 0; r < registers_.size(); ++r) {
      if (first_[r] != NEVER) order.push_back(r);
    }
    std::sort(order.begin(), order.end(),
              [&](Ref a, Ref b) { return first_[a] != first_[b] ? first_[a] < first_[b] : a < b; });
    std::map<int, std::vector<Ref>> free_places;  // by size, the most recently used one last
    // By last instruction, of several the first that became active.
    using Active = std::tuple<size_t, size_t, Ref>;
    std::priority_queue<Active, std::vector<Active>, std::greater<>> active;
    size_t activated = 0;
    place_.assign(registers_.size(), 0);
    uint32_t top = 0;
    for (const Ref r : order) {
      while (!active.empty() && std::get<0>(active.top()) < first_[r]) {
        const Ref done = std::get<2>(active.top());
        free_places[place_bytes(registers_[done].bits)].push_back(place_[done]);
        active.pop();
      }
      const int bytes = place_bytes(registers_[r].bits);
      std::vector<Ref>& available = free_places[bytes];
      if (!available.empty()) {
        place_[r] = available.back();
        available.pop_back();
      } else if (bytes < 4 * LANES) {
        // Predicates take the place of another register at once: all others start at its multiples,
        // by which the queues of products know them.
        for (int k = LANES - 1; k > 0; --k) {
          available.push_back(top + static_cast<uint32_t>(bytes * k));
        }
        place_[r] = top;
        top += 4 * LANES;
      } else {
        place_[r] = top;
        top += static_cast<uint32_t>(bytes);
      }
      active.emplace(last_[r], activated++, r);
    }
    kernel_.register_bytes = top;
  }

  void replace_numbers() {
    for (size_t i = 0; i < kernel_.code.size(); ++i) {
      Instruction& instruction = kernel_.code[i];
      if (instruction.guard != NO_REF) instruction.guard = place_[instruction.guard];
      for (Ref& r : operands_.refs[i]) {
        if (!(r & CONSTANT)) r = place_[r];
      }
    }
    for (SpecialUse& use : kernel_.specials) use.place = place_[use.place];
  }

  Kernel& kernel_;
  const std::vector<Type>& registers_;
  OperandLists& operands_;
  std::vector<size_t> begin_, block_of_;
  std::vector<Ref> handed_on_;  // the registers that a block reads of another one
  std::vector<RegisterSet> live_in_, live_out_;
  std::vector<size_t> first_, last_;
  std::vector<Ref> place_;
};

}  // namespace

void place_registers(Kernel& kernel, const std::vector<Type>& registers, OperandLists& operands) {
  RegisterPlacer(kernel, registers, operands).run();
}

}  // namespace archflash::sim
