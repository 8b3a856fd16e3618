#include "sim/load/kernel_loader.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "sim/load/forms.h"
#include "sim/load/special_registers.h"
#include "sim/load/targets.h"
#include "sim/memory/memory.h"

namespace archflash::sim {
namespace {

// Where the dynamic part of shared memory starts. It is aligned to what the kernel asks for and to
// no more, so that code which relies on a rounder address fails here. Banks are as on a card: a row
// of them has 128 bytes.
uint64_t dynamic_start(uint64_t static_bytes, uint64_t align) {
  constexpr uint64_t BANK_ROW = 128;
  const uint64_t wanted = std::max(align, BANK_ROW);
  uint64_t start = round_up(SHARED_START + static_bytes, wanted);
  if (start % (2 * wanted) == 0) start += wanted;
  return start;
}

}  // namespace

void KernelLoader::load() {
  place_shared();
  for (const Statement& statement : syntax_.statements) build(statement);
  // Falling off the end is an exit, as `ret` is.
  Instruction exit;
  exit.control = Control::Exit;
  exit.counted = Class::Control;
  kernel_.code.push_back(exit);
  kernel_.texts.push_back(
      {syntax_.statements.empty() ? 0 : syntax_.statements.back().line, -1, "ret", "ret"});
  operands_.refs.emplace_back();
  operands_.roles.emplace_back();
  place_registers(kernel_, syntax_.registers, operands_);
  for (size_t i = 0; i < kernel_.code.size(); ++i) {
    auto list = std::make_unique<Ref[]>(operands_.refs[i].size());
    std::copy(operands_.refs[i].begin(), operands_.refs[i].end(), list.get());
    kernel_.code[i].operands = list.get();
    kernel_.operand_lists.push_back(std::move(list));
  }
  if (kernel_.uses_wgmma || kernel_.uses_tcgen05) note_pinned();
}

Ref KernelLoader::constant(uint64_t value, int bits, bool shared) {
  if (bits < 64) value &= (uint64_t{1} << bits) - 1;
  const int bytes = bits == 1 ? 4 : bits <= 32 ? 4 : 8;
  const auto key = std::make_tuple(value, bits == 1 ? 1 : bytes, shared);
  const auto found = constants_.find(key);
  if (found != constants_.end()) return found->second;
  std::vector<uint8_t>& memory = kernel_.constants;
  const auto offset = static_cast<Ref>(round_up(memory.size(), 64));
  if (bits == 1) {
    memory.resize(offset + 4);
    const uint32_t mask = value ? ALL_LANES : 0;
    std::memcpy(&memory[offset], &mask, 4);
  } else {
    memory.resize(offset + static_cast<size_t>(bytes) * LANES);
    for (int i = 0; i < LANES; ++i) {
      std::memcpy(&memory[offset + static_cast<size_t>(bytes * i)], &value,
                  static_cast<size_t>(bytes));
    }
  }
  if (shared) kernel_.shared_constants.push_back({offset, static_cast<size_t>(bytes)});
  constants_[key] = offset | CONSTANT;
  return offset | CONSTANT;
}

Ref KernelLoader::special(const std::string& name, int& bits, int line) {
  const SpecialRegister* const row = find_special_register(name);
  if (row == nullptr) fail(line, "unknown register or special register " + name);
  if (name.find("cluster") != std::string::npos) require("90", name, line);
  bits = row->bits;
  const auto [place, added] = specials_.emplace(row, 0);
  if (added) {
    place->second = new_register(row->bits);
    kernel_.specials.push_back({row, place->second});
  }
  return place->second;
}

Ref KernelLoader::new_register(int bits) {
  syntax_.registers.push_back({bits == 1 ? 'p' : 'b', bits});
  return static_cast<Ref>(syntax_.registers.size() - 1);
}

void KernelLoader::widen(Ref ref) {
  int& bits = syntax_.registers[ref].bits;
  bits = std::max(bits, 64);
}

Ref KernelLoader::carry() {
  if (carry_ == NO_REF) carry_ = new_register(1);
  return carry_;
}

const Variable* KernelLoader::find_variable(const std::string& name, int scope) const {
  for (int s = scope; s >= 0; s = syntax_.scopes[static_cast<size_t>(s)].parent) {
    const auto& variables = syntax_.scopes[static_cast<size_t>(s)].variables;
    const auto found = variables.find(name);
    if (found != variables.end()) return &found->second;
  }
  const auto found = module_.variables.find(name);
  return found == module_.variables.end() ? nullptr : &found->second;
}

bool KernelLoader::find_address(const std::string& name, int scope, uint64_t& address,
                                Space& space) const {
  if (const auto shared = shared_places_.find(find_variable(name, scope));
      shared != shared_places_.end() && shared->first != nullptr) {
    address = shared->second;
    space = Space::Shared;
    return true;
  }
  if (const Variable* variable = find_variable(name, scope)) {
    address = variable->address;
    space = variable->space;
    if (space == Space::Global) {
      address = GLOBAL_BASE + ((GLOBAL_SLOTS / 2 + variable->address) << GLOBAL_SLOT_LOG2) +
                GLOBAL_RED_ZONE;
    }
    return true;
  }
  const auto parameter = syntax_.parameters.find(name);
  if (parameter == syntax_.parameters.end()) return false;
  address = parameter->second;
  space = Space::Param;
  return true;
}

bool KernelLoader::find_label(const std::string& name, int scope, uint32_t& index) const {
  for (int s = scope; s >= 0; s = syntax_.scopes[static_cast<size_t>(s)].parent) {
    const auto& labels = syntax_.scopes[static_cast<size_t>(s)].labels;
    const auto found = labels.find(name);
    if (found == labels.end()) continue;
    index = found->second;
    return true;
  }
  return false;
}

const std::vector<std::string>* KernelLoader::find_targets(const std::string& name,
                                                           int scope) const {
  for (int s = scope; s >= 0; s = syntax_.scopes[static_cast<size_t>(s)].parent) {
    const auto& lists = syntax_.scopes[static_cast<size_t>(s)].target_lists;
    const auto found = lists.find(name);
    if (found != lists.end()) return &found->second;
  }
  return nullptr;
}

void KernelLoader::note_shared_names(const Operand& operand, int scope) {
  if (operand.kind == Operand::Kind::Name) {
    const Variable* variable = find_variable(operand.text, scope);
    if (variable != nullptr && variable->space == Space::Shared) used_shared_.push_back(variable);
  }
  for (const Operand& item : operand.items) note_shared_names(item, scope);
}

// Static variables that the kernel names come first, in the order in which it names them; the
// dynamic part follows.
void KernelLoader::place_shared() {
  for (const Statement& statement : syntax_.statements) {
    for (const Operand& operand : statement.operands) note_shared_names(operand, statement.scope);
  }
  uint64_t size = 0, align = 1;
  for (const Variable* variable : used_shared_) {
    if (shared_places_.count(variable)) continue;
    if (variable->dynamic) {
      kernel_.uses_dynamic_shared = true;
      align = std::max(align, variable->align);
      continue;
    }
    size = round_up(SHARED_START + size, variable->align) - SHARED_START;
    shared_places_[variable] = SHARED_START + size;
    size += variable->bytes;
  }
  kernel_.dynamic_shared_align = align;
  kernel_.static_variable_bytes = size;
  kernel_.static_shared_bytes = size;
  const uint64_t start = dynamic_start(size, align);
  if (kernel_.uses_dynamic_shared) kernel_.static_shared_bytes = start - SHARED_START;
  for (const Variable* variable : used_shared_) {
    if (variable->dynamic) shared_places_[variable] = start;
  }
}

void KernelLoader::require(std::string_view needed, std::string_view what, int line) const {
  if (target_has(target(), needed)) return;
  std::string names;
  for (const char c : needed) names += c == '|' ? ", sm_" : std::string(1, c);
  const char* const others = needed.back() == 'a'   ? ""
                             : needed.back() == 'f' ? ", or a higher one of such a family"
                                                    : " or higher";
  fail(line,
       std::string(what) + " needs target sm_" + names + others + ", and this is " + target());
}

void KernelLoader::build(const Statement& statement) {
  const auto [known, added] = module_.forms.try_emplace(statement.name);
  auto& [match, missing] = known->second;
  if (added) {
    match = match_form(statement.opcode, statement.modifiers);
    missing = lacked_.needed_by(statement.opcode, statement.modifiers);
  }
  if (match.form == nullptr) {
    const std::string opcode(statement.opcode);
    if (!match.known_opcode) fail(statement.line, "unknown instruction " + opcode);
    const std::string text(statement.text);
    if (match.consumed < statement.modifiers.size()) {
      fail(statement.line, opcode + " does not take modifier ." +
                               std::string(statement.modifiers[match.consumed]) + " here: " + text);
    }
    fail(statement.line, opcode + " lacks a modifier: " + text);
  }
  if (!missing.empty()) require(missing, statement.text, statement.line);
  Builder builder;
  builder.statement_ = &statement;
  builder.kernel_ = &kernel_;
  builder.loader_ = this;
  builder.slots_ = match.slots;
  match.form->build(builder);
  builder.end();
  finish(builder, statement);
}

void KernelLoader::finish(Builder& builder, const Statement& statement) {
  Instruction& instruction = builder.instruction;
  if (instruction.run == nullptr &&
      (instruction.control == Control::None || instruction.control == Control::Barrier)) {
    fail(statement.line, "no handler for " + std::string(statement.text));
  }
  if (statement.guard >= 0) {
    instruction.guard = static_cast<Ref>(statement.guard);
    instruction.guard_negated = statement.guard_negated;
  }
  kernel_.code.push_back(instruction);
  kernel_.texts.push_back({statement.line, statement.location, statement.name, statement.text});
  operands_.refs.push_back(std::move(builder.operands_));
  operands_.roles.push_back(std::move(builder.roles_));
}

// Notes which instructions use registers that a wgmma or a load of tensor memory may have under
// way.
void KernelLoader::note_pinned() {
  std::unordered_set<Ref> pinned;
  for (size_t i = 0; i < kernel_.code.size(); ++i) {
    if (kernel_.code[i].pinned) pinned.insert(operands_.refs[i].begin(), operands_.refs[i].end());
  }
  for (size_t i = 0; i < kernel_.code.size(); ++i) {
    const bool touches =
        !kernel_.code[i].pinned && std::any_of(operands_.refs[i].begin(), operands_.refs[i].end(),
                                               [&](Ref r) { return pinned.count(r); });
    kernel_.touches_pinned.push_back(touches);
    kernel_.operand_counts.push_back(static_cast<uint32_t>(operands_.refs[i].size()));
    std::vector<bool> written;
    for (const Role role : operands_.roles[i]) written.push_back(role == Role::Write);
    kernel_.written_operands.push_back(std::move(written));
  }
}

}  // namespace archflash::sim
