// The instruction table: each form names an opcode, the modifiers it takes, and the function that
// reads its operands and chooses a handler. A statement that no form matches does not load.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/load/program.h"
#include "sim/load/syntax.h"

namespace archflash::sim {

class Builder;

struct Form {
  const char* opcode;
  // Modifiers in order, separated by spaces: alternatives with |, ? before what may be missing,
  // $name for a set of alternatives (instructions.cpp lists them).
  const char* modifiers;
  void (*build)(Builder& b);
};

std::span<const Form> integer_forms();
std::span<const Form> float_forms();
std::span<const Form> move_forms();
std::span<const Form> memory_forms();
std::span<const Form> warp_forms();
std::span<const Form> matrix_forms();
std::span<const Form> mbarrier_forms();
std::span<const Form> bulk_forms();
std::span<const Form> cluster_forms();
std::span<const Form> wgmma_forms();
std::span<const Form> tcgen05_forms();
std::span<const Form> store_async_forms();
std::span<const Form> tcgen05_refused_forms();

// All of them, by what they are about.
struct FormTable {
  const char* name;
  std::span<const Form> forms;
};
std::span<const FormTable> form_tables();
// The form of a spelled instruction such as "ld.global.v4.f32"; nullptr: the simulator has none.
const Form* find_form(std::string_view instruction);
// Alternatives that forms name with $: (name, "u16|s16|...").
std::vector<std::pair<std::string, std::string>> modifier_sets();

// How a register is used, for liveness.
enum class Role : uint8_t { Read, Write };

// Turns one matched statement into an Instruction.
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
  // `wider`: the register may be wider than the type (ld, cvt). Returns the register's bits.
  int destination_at_least(Type type);
  Ref source(Type type);
  int source_at_least(Type type);  // likewise
  // A predicate; negated predicates set flag NEGATED.
  Ref predicate_destination();
  Ref predicate_source();
  // destination|predicate: adds both; a missing predicate becomes a register that nobody reads.
  void destination_with_predicate(Type type);
  void predicate_destinations();  // p|q
  // {a, b, ...} or one operand: that many registers of the type.
  int vector_destination(Type type, bool wider = false);
  int vector_source(Type type, bool wider = false);
  int64_t immediate();
  // [base + offset]: adds the base and sets instruction.offset and flag ADDRESS_64.
  void address(Space space);
  const Operand& address_items(Space space);  // likewise; further items stay for the caller
  uint32_t label();
  std::vector<uint32_t> target_list();
  void cache_policy(bool expected);  // a trailing .L2::cache_hint operand: read, no effect
  void end();                        // no operand may be left

  bool is_predicate(const Operand& operand) const;
  int register_bits(Ref ref) const;

  // Lower-level: adds an operand that the statement does not spell.
  Ref constant(uint64_t value, int bits, bool shared = false);
  // `shared`: it is an address of shared memory.
  Ref add_constant(uint64_t value, int bits, bool shared = false);
  Ref add_source(const Operand& operand, Type type, bool wider = false);
  Ref add_destination(const Operand& operand, Type type, bool wider = false);
  Ref add_scratch(int bits);  // a register of this kernel that nobody else uses
  void widen(Ref scratch);    // to 64 bits
  void add_carry(Role role);  // the carry flag of add.cc and its kind, one bit for each lane
  void add(Ref ref, Role role);

  template <class T>
  const T* keep(T value) {  // lives as long as the kernel
    auto kept = std::make_shared<T>(std::move(value));
    kernel_->extras.push_back(kept);
    return kept.get();
  }

  void handler(Handler run, Class counted) {
    instruction.run = run;
    instruction.counted = counted;
  }
  Kernel& kernel() { return *kernel_; }
  int line() const { return statement_->line; }
  [[noreturn]] void fail(const std::string& message) const;

  static constexpr uint32_t NEGATED = 1u << 31;     // the predicate source is negated
  static constexpr uint32_t ADDRESS_64 = 1u << 30;  // the address register has 64 bits

 private:
  friend class KernelLoader;
  const Statement* statement_ = nullptr;
  KernelSyntax* syntax_ = nullptr;
  ModuleSyntax* module_ = nullptr;
  Kernel* kernel_ = nullptr;
  class KernelLoader* loader_ = nullptr;
  std::vector<std::string_view> slots_;
  std::vector<Ref> operands_;
  std::vector<Role> roles_;
  size_t next_ = 0;
};

}  // namespace archflash::sim
