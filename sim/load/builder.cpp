#include "sim/load/builder.h"

#include <algorithm>

#include "sim/load/kernel_loader.h"
#include "sim/memory/memory.h"
#include "sim/numerics/numeric.h"

namespace archflash::sim {

void Builder::fail(const std::string& message) const {
  sim::fail(statement_->line, message + ": " + std::string(statement_->text));
}

void Builder::require_target(std::string_view needed) const {
  loader_->require(needed, statement_->text, statement_->line);
}

bool Builder::has(std::string_view modifier) const {
  return std::find(slots_.begin(), slots_.end(), modifier) != slots_.end();
}

Type Builder::type_named(std::string_view name) const {
  if (name == "pred") return {'p', 1};
  if (name == "f16x2" || name == "bf16x2" || name == "tf32") return {'f', 32};
  if (name == "f32x2") return {'f', 64};
  if (name == "bf16") return {'f', 16};
  if (name == "e4m3x2" || name == "e5m2x2" || name == "e2m3x2" || name == "e3m2x2" ||
      name == "ue8m0x2") {
    return {'b', 16};
  }
  if (name == "e2m1x2") return {'b', 8};
  const char kind = name.empty() ? '?' : name[0];
  const int bits = std::atoi(std::string(name.substr(name.empty() ? 0 : 1)).c_str());
  if ((kind != 'b' && kind != 'u' && kind != 's' && kind != 'f') || bits == 0) {
    fail("." + std::string(name) + " is not a type");
  }
  return {kind, bits};
}

const Operand& Builder::peek() const {
  if (next_ >= statement_->operands.size()) fail("an operand is missing");
  return statement_->operands[next_];
}

const Operand& Builder::take() {
  const Operand& operand = peek();
  ++next_;
  return operand;
}

void Builder::end() {
  if (next_ < statement_->operands.size()) fail("too many operands");
}

void Builder::add(Ref ref, Role role) {
  operands_.push_back(ref);
  roles_.push_back(role);
}

Ref Builder::constant(uint64_t value, int bits, bool shared) {
  return loader_->constant(value, bits, shared);
}

Ref Builder::add_constant(uint64_t value, int bits, bool shared) {
  const Ref ref = constant(value, bits, shared);
  add(ref, Role::Read);
  return ref;
}

Ref Builder::add_scratch(int bits) {
  const Ref ref = loader_->new_register(bits);
  add(ref, Role::Write);
  return ref;
}

void Builder::widen(Ref scratch) { loader_->widen(scratch); }

void Builder::add_carry(Role role) { add(loader_->carry(), role); }

// Whether a register may stand where a type is due. `wider`: it may have more bits, up to 64.
static bool fits(const Type& actual, const Type& due, bool wider) {
  return (actual.kind == 'p') == (due.kind == 'p') &&
         (actual.bits == due.bits || (wider && actual.bits > due.bits && actual.bits <= 64));
}

Ref Builder::add_destination(const Operand& operand, Type type, bool wider) {
  if (operand.kind == Operand::Kind::Sink) return add_scratch(type.bits);
  if (operand.kind != Operand::Kind::Register) fail("a destination that is not a register");
  if (operand.negated) fail("a negated destination");
  const Type& actual = loader_->registers()[static_cast<size_t>(operand.reg)];
  if (!fits(actual, type, wider)) {
    fail("a destination of " + std::to_string(actual.bits) + " bits where " +
         std::to_string(type.bits) + " are due");
  }
  add(static_cast<Ref>(operand.reg), Role::Write);
  return static_cast<Ref>(operand.reg);
}

Ref Builder::add_source(const Operand& operand, Type type, bool wider) {
  Ref ref = NO_REF;
  if (type.bits > 64 && operand.kind != Operand::Kind::Register) {
    fail("a literal or address where a register of 128 bits is due");
  }
  switch (operand.kind) {
    case Operand::Kind::Register: {
      const Type& actual = loader_->registers()[static_cast<size_t>(operand.reg)];
      if (!fits(actual, type, wider)) {
        fail("a source of " + std::to_string(actual.bits) + " bits where " +
             std::to_string(type.bits) + " are due");
      }
      if (operand.negated) {
        if (type.kind != 'p') fail("'!' before what is not a predicate");
        instruction.flags |= NEGATED;
      }
      ref = static_cast<Ref>(operand.reg);
      break;
    }
    case Operand::Kind::Special: {
      int bits = 0;
      ref = loader_->special(operand.text, bits, statement_->line);
      if (bits != type.bits) {
        fail("a special register of " + std::to_string(bits) + " bits where " +
             std::to_string(type.bits) + " are due");
      }
      break;
    }
    case Operand::Kind::Integer:
      if (type.kind == 'f') fail("an integer where a floating-point literal is due");
      ref = constant(type.kind == 'p' ? operand.value != 0 : static_cast<uint64_t>(operand.value),
                     type.bits);
      break;
    case Operand::Kind::Float: {
      uint64_t bits = static_cast<uint64_t>(operand.value);
      if (operand.literal_bits == 0) {
        bits = type.bits == 64 ? bits_of(operand.real) : bits_of(static_cast<float>(operand.real));
        if (type.bits < 32) fail("a decimal fraction of 16 bits");
      } else if (operand.literal_bits == 64 && type.bits == 32) {
        bits = bits_of(static_cast<float>(f64_of(bits)));
      } else if (operand.literal_bits == 32 && type.bits == 64) {
        bits = bits_of(static_cast<double>(f32_of(static_cast<uint32_t>(bits))));
      }
      if (type.kind == 'u' || type.kind == 's' || type.kind == 'p') {
        fail("a floating-point literal where an integer is due");
      }
      ref = constant(bits, type.bits);
      break;
    }
    case Operand::Kind::Name: {
      uint64_t address = 0;
      Space space;
      if (!loader_->find_address(operand.text, statement_->scope, address, space)) {
        fail("unknown name " + operand.text);
      }
      ref = constant(address + static_cast<uint64_t>(operand.value), type.bits,
                     space == Space::Shared);
      break;
    }
    default:
      fail("an operand of the wrong kind");
  }
  add(ref, Role::Read);
  return ref;
}

bool Builder::is_predicate(const Operand& operand) const {
  return operand.kind == Operand::Kind::Register &&
         loader_->registers()[static_cast<size_t>(operand.reg)].kind == 'p';
}

int Builder::register_bits(Ref ref) const { return loader_->registers()[ref].bits; }

Ref Builder::destination(Type type) { return add_destination(take(), type); }

int Builder::destination_at_least(Type type) {
  const Operand& operand = take();
  const Ref ref = add_destination(operand, type, true);
  return loader_->registers()[ref].bits;
}

Ref Builder::source(Type type) { return add_source(take(), type); }

int Builder::source_at_least(Type type) {
  const Operand& operand = take();
  const Ref ref = add_source(operand, type, true);
  return ref & CONSTANT ? type.bits : loader_->registers()[ref].bits;
}

Ref Builder::predicate_destination() { return destination({'p', 1}); }
Ref Builder::predicate_source() { return source({'p', 1}); }

void Builder::destination_with_predicate(Type type) {
  const Operand& operand = take();
  if (operand.kind == Operand::Kind::Pair) {
    add_destination(operand.items[0], type);
    add_destination(operand.items[1], {'p', 1});
  } else {
    add_destination(operand, type);
    add_scratch(1);
  }
}

void Builder::predicate_destinations() { destination_with_predicate({'p', 1}); }

int Builder::vector_destination(Type type, bool wider) {
  const Operand& operand = take();
  if (operand.kind != Operand::Kind::Vector) {
    add_destination(operand, type, wider);
    return 1;
  }
  for (const Operand& item : operand.items) add_destination(item, type, wider);
  return static_cast<int>(operand.items.size());
}

int Builder::vector_source(Type type, bool wider) {
  const Operand& operand = take();
  if (operand.kind != Operand::Kind::Vector) {
    add_source(operand, type, wider);
    return 1;
  }
  for (const Operand& item : operand.items) add_source(item, type, wider);
  return static_cast<int>(operand.items.size());
}

int64_t Builder::immediate() {
  const Operand& operand = take();
  if (operand.kind != Operand::Kind::Integer) fail("an operand that must be a literal integer");
  return operand.value;
}

const Operand& Builder::address_items(Space space) {
  const Operand& operand = take();
  if (operand.kind != Operand::Kind::Address) fail("an operand that must be an address");
  const Operand& base = operand.items[0];
  instruction.space = space;
  instruction.offset = operand.value;
  if (base.kind == Operand::Kind::Register && !base.negated) {
    const Type& actual = loader_->registers()[static_cast<size_t>(base.reg)];
    if (actual.bits != 32 && actual.bits != 64) fail("an address of neither 32 nor 64 bits");
    if (actual.bits == 64) instruction.flags |= ADDRESS_64;
    if (actual.bits == 32 && (space == Space::Global || space == Space::Generic)) {
      fail("a 32-bit address of global memory");
    }
    add(static_cast<Ref>(base.reg), Role::Read);
    return operand;
  }
  uint64_t address = 0;
  bool shared = false;
  if (base.kind == Operand::Kind::Name) {
    Space of = space;
    if (!loader_->find_address(base.text, statement_->scope, address, of)) {
      fail("unknown name " + base.text);
    }
    shared = of == Space::Shared;
    if (of != space && !(shared && space == Space::SharedCluster)) {
      if (space != Space::Generic) fail(base.text + " is in another state space");
      const uint64_t window = of == Space::Shared  ? SHARED_WINDOW
                              : of == Space::Local ? LOCAL_WINDOW
                              : of == Space::Const ? CONST_WINDOW
                              : of == Space::Param ? PARAM_WINDOW
                                                   : 0;
      address += window;
    }
    address += static_cast<uint64_t>(base.value);
  } else if (base.kind == Operand::Kind::Integer) {
    address = static_cast<uint64_t>(base.value);
  } else {
    fail("an address of the wrong kind");
  }
  instruction.flags |= ADDRESS_64;
  add_constant(address, 64, shared);
  return operand;
}

void Builder::address(Space space) {
  if (address_items(space).items.size() != 1) fail("an address of too many parts");
}

uint32_t Builder::label() {
  const Operand& operand = take();
  uint32_t index = 0;
  if (operand.kind != Operand::Kind::Name ||
      !loader_->find_label(operand.text, statement_->scope, index)) {
    fail("unknown label");
  }
  return index;
}

std::vector<uint32_t> Builder::target_list() {
  const Operand& operand = take();
  const std::vector<std::string>* names =
      operand.kind == Operand::Kind::Name ? loader_->find_targets(operand.text, statement_->scope)
                                          : nullptr;
  if (names == nullptr) fail("unknown list of branch targets");
  std::vector<uint32_t> result;
  for (const std::string& name : *names) {
    uint32_t index = 0;
    if (!loader_->find_label(name, statement_->scope, index)) fail("unknown label " + name);
    result.push_back(index);
  }
  return result;
}

void Builder::cache_policy(bool expected) {
  if (expected) source({'b', 64});
}

}  // namespace archflash::sim
