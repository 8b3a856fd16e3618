// The builder turns a statement that matches a form into an Instruction. A form's `build` function
// asks it for the modifiers and for one operand after the other, and gives it a handler.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/load/forms.h"
#include "sim/load/program.h"
#include "sim/load/register_places.h"
#include "sim/load/syntax.h"

namespace archflash::sim {

class KernelLoader;

class Builder {
 public:
  Instruction instruction;

  // ---- Modifiers ----
  // The modifier that filled slot i of the form; empty when it is missing.
  std::string_view slot(size_t i) const { return slots_[i]; }
  bool has(std::string_view modifier) const;
  Type type(size_t slot) const { return type_named(slots_[slot]); }
  Type type_named(std::string_view name) const;

  // ---- Operands, in order; each call takes the next one and adds it to the handler's list ----
  size_t operands_left() const { return statement_->operands.size() - next_; }
  const Operand& peek() const;
  const Operand& take();
  Ref destination(Type type);
  Ref source(Type type);
  // These take a register that may be wider than the type (ld, cvt), and return its width in bits.
  int destination_at_least(Type type);
  int source_at_least(Type type);
  // A negated predicate sets the flag NEGATED.
  Ref predicate_destination();
  Ref predicate_source();
  // Adds both parts of destination|predicate. A missing predicate becomes a register that nobody
  // reads.
  void destination_with_predicate(Type type);
  void predicate_destinations();  // p|q
  // Each adds the registers of {a, b, ...}, or one register, and returns how many.
  int vector_destination(Type type, bool wider = false);
  int vector_source(Type type, bool wider = false);
  int64_t immediate();
  // Adds the base of [base + offset], and sets instruction.offset and the flag ADDRESS_64.
  void address(Space space);
  // As `address`, for [base + offset, further, ...]: the caller adds the further items.
  const Operand& address_items(Space space);
  uint32_t label();
  std::vector<uint32_t> target_list();
  // Takes the operand of .L2::cache_hint where one is expected. It has no effect.
  void cache_policy(bool expected);
  void end();  // fails if an operand is left

  bool is_predicate(const Operand& operand) const;
  int register_bits(Ref ref) const;

  // ---- Operands that the statement does not spell ----
  // `shared`: the constant is an address of shared memory.
  Ref constant(uint64_t value, int bits, bool shared = false);
  Ref add_constant(uint64_t value, int bits, bool shared = false);
  Ref add_source(const Operand& operand, Type type, bool wider = false);
  Ref add_destination(const Operand& operand, Type type, bool wider = false);
  Ref add_scratch(int bits);  // a register of this kernel that nobody else uses
  void widen(Ref scratch);    // makes a scratch register 64 bits wide
  void add_carry(Role role);  // the carry flag of add.cc, addc and the like: one bit for each lane
  void add(Ref ref, Role role);

  // Stores a value that lives as long as the kernel.
  template <class T>
  const T* keep(T value) {
    auto kept = std::make_shared<T>(std::move(value));
    kernel_->extras.push_back(kept);
    return kept.get();
  }

  void handler(Handler run, Class counted) {
    instruction.run = run;
    instruction.counted = counted;
  }
  Kernel& kernel() { return *kernel_; }
  // Fails unless the module's target is one of `needed`, for what targets.cpp does not tell by
  // opcode and modifiers.
  void require_target(std::string_view needed) const;
  int line() const { return statement_->line; }
  [[noreturn]] void fail(const std::string& message) const;

  static constexpr uint32_t NEGATED = 1u << 31;     // the predicate source is negated
  static constexpr uint32_t ADDRESS_64 = 1u << 30;  // the address register has 64 bits

 private:
  friend class KernelLoader;
  const Statement* statement_ = nullptr;
  Kernel* kernel_ = nullptr;
  KernelLoader* loader_ = nullptr;
  std::span<const std::string_view> slots_;
  std::vector<Ref> operands_;
  std::vector<Role> roles_;
  size_t next_ = 0;
};

}  // namespace archflash::sim
