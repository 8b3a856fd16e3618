#include "sim/load/instructions.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "sim/memory/memory.h"
#include "sim/numerics/numeric.h"

namespace archflash::sim {

const char* class_name(Class c) {
  static const char* const NAMES[CLASS_COUNT] = {
      "integer",    "logic",   "float",       "double",  "half",  "convert", "special",
      "move",       "compare", "control",     "barrier", "load",  "store",   "atomic",
      "async_copy", "matrix",  "matrix_load", "shuffle", "fence", "other"};
  return NAMES[static_cast<int>(c)];
}

namespace {

// Sets of alternatives that forms name with $.
struct ModifierSet {
  std::string_view name, alternatives;
};
constexpr ModifierSet SETS[] = {
    {"int", "u16|s16|u32|s32|u64|s64"},
    {"wide", "u16|s16|u32|s32"},
    {"bits", "b16|b32|b64"},
    {"rnd", "rn|rz|rm|rp"},
    {"cmp", "eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan"},
    {"bool", "and|or|xor"},
    {"setp", "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|f16|bf16"},
    {"mem", "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64|b128"},
    {"vec", "v2|v4|v8"},
    {"shared", "shared|shared::cta"},
    {"evict",
     "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|"
     "L1::no_allocate"},
    {"evict2", "L2::evict_normal|L2::evict_first|L2::evict_last"},
    {"prefetch", "L2::64B|L2::128B|L2::256B"},
    {"scope", "cta|cluster|gpu|sys"},
    {"wgmma",
     "m64n8k8|m64n16k8|m64n24k8|m64n32k8|m64n40k8|m64n48k8|m64n56k8|m64n64k8|m64n72k8|"
     "m64n80k8|m64n88k8|m64n96k8|m64n104k8|m64n112k8|m64n120k8|m64n128k8|m64n136k8|"
     "m64n144k8|m64n152k8|m64n160k8|m64n168k8|m64n176k8|m64n184k8|m64n192k8|m64n200k8|"
     "m64n208k8|m64n216k8|m64n224k8|m64n232k8|m64n240k8|m64n248k8|m64n256k8|m64n8k16|"
     "m64n16k16|m64n24k16|m64n32k16|m64n40k16|m64n48k16|m64n56k16|m64n64k16|m64n72k16|"
     "m64n80k16|m64n88k16|m64n96k16|m64n104k16|m64n112k16|m64n120k16|m64n128k16|"
     "m64n136k16|m64n144k16|m64n152k16|m64n160k16|m64n168k16|m64n176k16|m64n184k16|"
     "m64n192k16|m64n200k16|m64n208k16|m64n216k16|m64n224k16|m64n232k16|m64n240k16|"
     "m64n248k16|m64n256k16|m64n8k32|m64n16k32|m64n24k32|m64n32k32|m64n40k32|m64n48k32|"
     "m64n56k32|m64n64k32|m64n72k32|m64n80k32|m64n88k32|m64n96k32|m64n104k32|m64n112k32|"
     "m64n120k32|m64n128k32|m64n136k32|m64n144k32|m64n152k32|m64n160k32|m64n168k32|"
     "m64n176k32|m64n184k32|m64n192k32|m64n200k32|m64n208k32|m64n216k32|m64n224k32|"
     "m64n232k32|m64n240k32|m64n248k32|m64n256k32"},
    {"collector",
     "collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard"},
    {"collector_b",
     "collector::b0::fill|collector::b0::use|collector::b0::lastuse|collector::b0::discard|"
     "collector::b1::fill|collector::b1::use|collector::b1::lastuse|collector::b1::discard|"
     "collector::b2::fill|collector::b2::use|collector::b2::lastuse|collector::b2::discard|"
     "collector::b3::fill|collector::b3::use|collector::b3::lastuse|collector::b3::discard"},
    {"cop", "ca|cg|cs|lu|cv|wb|wt"},
};

std::string_view expand(std::string_view alternatives) {
  if (!alternatives.starts_with('$')) return alternatives;
  for (const ModifierSet& set : SETS) {
    if (set.name == alternatives.substr(1)) return set.alternatives;
  }
  throw LoadError("the instruction table names an unknown set " + std::string(alternatives));
}

bool is_one_of(std::string_view modifier, std::string_view alternatives) {
  while (!alternatives.empty()) {
    const size_t bar = alternatives.find('|');
    if (alternatives.substr(0, bar) == modifier) return true;
    if (bar == std::string_view::npos) break;
    alternatives.remove_prefix(bar + 1);
  }
  return false;
}

struct Slot {
  bool optional;
  std::string_view alternatives;
};

struct PreparedForm {
  const Form* form;
  std::vector<Slot> slots;
};

using Table = std::unordered_map<std::string_view, std::vector<PreparedForm>>;

const Table& table() {
  static const Table instance = [] {
    Table result;
    for (const FormTable& about : form_tables()) {
      for (const Form& form : about.forms) {
        PreparedForm prepared{&form, {}};
        std::string_view rest = form.modifiers;
        while (!rest.empty()) {
          const size_t space = rest.find(' ');
          std::string_view word = rest.substr(0, space);
          rest = space == std::string_view::npos ? std::string_view() : rest.substr(space + 1);
          if (word.empty()) continue;
          const bool optional = word.starts_with('?');
          if (optional) word.remove_prefix(1);
          prepared.slots.push_back({optional, expand(word)});
        }
        result[form.opcode].push_back(std::move(prepared));
      }
    }
    return result;
  }();
  return instance;
}

// Fills `slots`; returns how many modifiers were consumed, all of them on success (`matched`).
size_t match(const PreparedForm& form, const std::vector<std::string_view>& modifiers,
             std::vector<std::string_view>& slots, bool& matched) {
  slots.assign(form.slots.size(), {});
  size_t at = 0;
  matched = false;
  for (size_t i = 0; i < form.slots.size(); ++i) {
    if (at < modifiers.size() && is_one_of(modifiers[at], form.slots[i].alternatives)) {
      slots[i] = modifiers[at++];
    } else if (!form.slots[i].optional) {
      return at;
    }
  }
  matched = at == modifiers.size();
  return at;
}

struct SpecialName {
  const char* name;
  Special special;
  int bits;
};
constexpr SpecialName SPECIALS[] = {
    {"%tid.x", Special::TidX, 32},
    {"%tid.y", Special::TidY, 32},
    {"%tid.z", Special::TidZ, 32},
    {"%ntid.x", Special::NtidX, 32},
    {"%ntid.y", Special::NtidY, 32},
    {"%ntid.z", Special::NtidZ, 32},
    {"%ctaid.x", Special::CtaidX, 32},
    {"%ctaid.y", Special::CtaidY, 32},
    {"%ctaid.z", Special::CtaidZ, 32},
    {"%nctaid.x", Special::NctaidX, 32},
    {"%nctaid.y", Special::NctaidY, 32},
    {"%nctaid.z", Special::NctaidZ, 32},
    {"%laneid", Special::LaneId, 32},
    {"%warpid", Special::WarpId, 32},
    {"%nwarpid", Special::NwarpId, 32},
    {"%smid", Special::SmId, 32},
    {"%nsmid", Special::NsmId, 32},
    {"%gridid", Special::GridId, 64},
    {"%lanemask_eq", Special::LanemaskEq, 32},
    {"%lanemask_le", Special::LanemaskLe, 32},
    {"%lanemask_lt", Special::LanemaskLt, 32},
    {"%lanemask_ge", Special::LanemaskGe, 32},
    {"%lanemask_gt", Special::LanemaskGt, 32},
    {"%dynamic_smem_size", Special::DynamicSmemSize, 32},
    {"%total_smem_size", Special::TotalSmemSize, 32},
    {"%cluster_ctaid.x", Special::ClusterCtaidX, 32},
    {"%cluster_ctaid.y", Special::ClusterCtaidY, 32},
    {"%cluster_ctaid.z", Special::ClusterCtaidZ, 32},
    {"%cluster_nctaid.x", Special::ClusterNctaidX, 32},
    {"%cluster_nctaid.y", Special::ClusterNctaidY, 32},
    {"%cluster_nctaid.z", Special::ClusterNctaidZ, 32},
    {"%cluster_ctarank", Special::ClusterCtarank, 32},
    {"%cluster_nctarank", Special::ClusterNctarank, 32},
    {"%clusterid.x", Special::ClusteridX, 32},
    {"%clusterid.y", Special::ClusteridY, 32},
    {"%clusterid.z", Special::ClusteridZ, 32},
    {"%nclusterid.x", Special::NclusteridX, 32},
    {"%nclusterid.y", Special::NclusteridY, 32},
    {"%nclusterid.z", Special::NclusteridZ, 32},
};

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int slot_bytes(int bits) {
  if (bits == 1) return 4;
  if (bits <= 32) return 4 * LANES;
  return bits / 8 * LANES;
}

// The dynamic part's alignment is what the kernel asks for and no more: code that counts on a
// rounder address than it asked for is to fail here. Banks are as on a card (128 bytes).
uint64_t dynamic_start(uint64_t static_bytes, uint64_t align) {
  constexpr uint64_t BANK_ROW = 128;
  const uint64_t wanted = std::max(align, BANK_ROW);
  uint64_t start = round_up(SHARED_START + static_bytes, wanted);
  if (start % (2 * wanted) == 0) start += wanted;
  return start;
}

}  // namespace

std::span<const FormTable> form_tables() {
  static const FormTable TABLES[] = {
      {"integer", integer_forms()},
      {"floating point", float_forms()},
      {"moves, conversions, comparisons", move_forms()},
      {"memory", memory_forms()},
      {"control, barriers, warps", warp_forms()},
      {"matrices", matrix_forms()},
      {"mbarriers", mbarrier_forms()},
      {"bulk copies", bulk_forms()},
      {"asynchronous stores", store_async_forms()},
      {"clusters, register pools", cluster_forms()},
      {"wgmma", wgmma_forms()},
      {"tcgen05", tcgen05_forms()},
      {"tcgen05 that does not load", tcgen05_refused_forms()},
  };
  return TABLES;
}

const Form* find_form(std::string_view instruction) {
  std::vector<std::string_view> words, slots;
  while (!instruction.empty()) {
    const size_t dot = instruction.find('.');
    words.push_back(instruction.substr(0, dot));
    if (dot == std::string_view::npos) break;
    instruction.remove_prefix(dot + 1);
  }
  if (words.empty()) return nullptr;
  const auto found = table().find(words.front());
  if (found == table().end()) return nullptr;
  words.erase(words.begin());
  for (const PreparedForm& form : found->second) {
    bool matched = false;
    match(form, words, slots, matched);
    if (matched) return form.form;
  }
  return nullptr;
}

std::vector<std::pair<std::string, std::string>> modifier_sets() {
  std::vector<std::pair<std::string, std::string>> sets;
  for (const ModifierSet& set : SETS) sets.emplace_back(set.name, set.alternatives);
  return sets;
}

// ---- Loading one kernel -------------------------------------------------------------------------

class KernelLoader {
 public:
  KernelLoader(ModuleSyntax& module, KernelSyntax& syntax)
      : module_(module), syntax_(syntax), kernel_(*syntax.kernel) {}

  void load() {
    place_shared();
    for (const Statement& statement : syntax_.statements) build(statement);
    // Falling off the end is an exit, as `ret` is.
    Instruction exit;
    exit.control = Control::Exit;
    exit.counted = Class::Control;
    kernel_.code.push_back(exit);
    kernel_.texts.push_back(
        {syntax_.statements.empty() ? 0 : syntax_.statements.back().line, -1, "ret", "ret"});
    lists_.emplace_back();
    roles_.emplace_back();
    allocate_registers();
    for (size_t i = 0; i < kernel_.code.size(); ++i) {
      auto list = std::make_unique<Ref[]>(lists_[i].size());
      std::copy(lists_[i].begin(), lists_[i].end(), list.get());
      kernel_.code[i].operands = list.get();
      kernel_.operand_lists.push_back(std::move(list));
    }
    if (kernel_.uses_wgmma || kernel_.uses_tcgen05) note_pinned();
  }

  // `shared`: an address of shared memory, which differs between the CTAs of a cluster.
  Ref constant(uint64_t value, int bits, bool shared = false) {
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

  Ref special(const std::string& name, int& bits, int line) {
    for (const SpecialName& row : SPECIALS) {
      if (name != row.name) continue;
      bits = row.bits;
      const auto [place, added] = specials_.emplace(row.special, 0);
      if (added) {
        place->second = new_register(row.bits);
        kernel_.specials.push_back({row.special, place->second, static_cast<uint32_t>(row.bits)});
      }
      return place->second;
    }
    fail(line, "unknown register or special register " + name);
  }

  Ref new_register(int bits) {
    syntax_.registers.push_back({bits == 1 ? 'p' : 'b', bits});
    return static_cast<Ref>(syntax_.registers.size() - 1);
  }

  void widen(Ref ref) {
    int& bits = syntax_.registers[ref].bits;
    bits = std::max(bits, 64);
  }

  Ref carry() {
    if (carry_ == NO_REF) carry_ = new_register(1);
    return carry_;
  }

  const Variable* find_variable(const std::string& name, int scope) const {
    for (int s = scope; s >= 0; s = syntax_.scopes[static_cast<size_t>(s)].parent) {
      const auto& variables = syntax_.scopes[static_cast<size_t>(s)].variables;
      const auto found = variables.find(name);
      if (found != variables.end()) return &found->second;
    }
    const auto found = module_.variables.find(name);
    return found == module_.variables.end() ? nullptr : &found->second;
  }

  // The address of a variable or parameter within its space.
  bool find_address(const std::string& name, int scope, uint64_t& address, Space& space) const {
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

  bool find_label(const std::string& name, int scope, uint32_t& index) const {
    for (int s = scope; s >= 0; s = syntax_.scopes[static_cast<size_t>(s)].parent) {
      const auto& labels = syntax_.scopes[static_cast<size_t>(s)].labels;
      const auto found = labels.find(name);
      if (found == labels.end()) continue;
      index = found->second;
      return true;
    }
    return false;
  }

  const std::vector<std::string>* find_targets(const std::string& name, int scope) const {
    for (int s = scope; s >= 0; s = syntax_.scopes[static_cast<size_t>(s)].parent) {
      const auto& lists = syntax_.scopes[static_cast<size_t>(s)].target_lists;
      const auto found = lists.find(name);
      if (found != lists.end()) return &found->second;
    }
    return nullptr;
  }

  const std::vector<Type>& registers() const { return syntax_.registers; }

 private:
  void for_each_name(const Operand& operand, int scope) {
    if (operand.kind == Operand::Kind::Name) {
      const Variable* variable = find_variable(operand.text, scope);
      if (variable != nullptr && variable->space == Space::Shared) used_shared_.push_back(variable);
    }
    for (const Operand& item : operand.items) for_each_name(item, scope);
  }

  // Static variables that the kernel names, in the order in which it does, then the dynamic part.
  void place_shared() {
    for (const Statement& statement : syntax_.statements) {
      for (const Operand& operand : statement.operands) for_each_name(operand, statement.scope);
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

  void build(const Statement& statement) {
    const auto found = table().find(statement.opcode);
    if (found == table().end()) {
      fail(statement.line, "unknown instruction " + std::string(statement.opcode));
    }
    size_t furthest = 0;
    std::string trouble;
    for (const PreparedForm& form : found->second) {
      Builder builder;
      bool matched = false;
      const size_t consumed = match(form, statement.modifiers, builder.slots_, matched);
      furthest = std::max(furthest, consumed);
      if (!matched) continue;
      builder.statement_ = &statement;
      builder.syntax_ = &syntax_;
      builder.module_ = &module_;
      builder.kernel_ = &kernel_;
      builder.loader_ = this;
      form.form->build(builder);
      builder.end();
      finish(builder, statement);
      return;
    }
    if (furthest < statement.modifiers.size()) {
      fail(statement.line, std::string(statement.opcode) + " does not take modifier ." +
                               std::string(statement.modifiers[furthest]) +
                               " here: " + std::string(statement.text));
    }
    fail(statement.line,
         std::string(statement.opcode) + " lacks a modifier: " + std::string(statement.text));
  }

  void finish(Builder& builder, const Statement& statement) {
    Instruction& instruction = builder.instruction;
    if (instruction.run == nullptr &&
        (instruction.control == Control::None || instruction.control == Control::Barrier)) {
      fail(statement.line, "no handler for " + std::string(statement.text));
    }
    if (statement.guard >= 0) {
      instruction.guard = static_cast<Ref>(statement.guard);
      instruction.guard_negated = statement.guard_negated;
    }
    std::string opcode(statement.opcode);
    for (const std::string_view modifier : statement.modifiers) {
      opcode += "." + std::string(modifier);
    }
    kernel_.code.push_back(instruction);
    kernel_.texts.push_back(
        {statement.line, statement.location, std::move(opcode), std::string(statement.text)});
    lists_.push_back(std::move(builder.operands_));
    roles_.push_back(std::move(builder.roles_));
  }

  // ---- Registers: those that are never alive together share a place, so that a warp's registers
  // stay in the host's cache.

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

  void allocate_registers() {
    const size_t count = kernel_.code.size();
    const size_t registers = syntax_.registers.size();
    const size_t words = (registers + 63) / 64;
    // Basic blocks.
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
    std::vector<size_t> begin;
    std::vector<size_t> block_of(count);
    for (size_t i = 0; i < count; ++i) {
      if (leader[i]) begin.push_back(i);
      block_of[i] = begin.size() - 1;
    }
    const size_t blocks = begin.size();
    begin.push_back(count);
    using Bits = std::vector<uint64_t>;
    const auto set = [](Bits& bits, Ref r) { bits[r / 64] |= uint64_t{1} << r % 64; };
    const auto test = [](const Bits& bits, Ref r) { return (bits[r / 64] >> r % 64 & 1) != 0; };
    std::vector<Bits> uses(blocks, Bits(words)), defines(blocks, Bits(words)),
        live_in(blocks, Bits(words)), live_out(blocks, Bits(words));
    const auto read = [&](Bits& used, const Bits& defined, Ref r) {
      if (!(r & CONSTANT) && !test(defined, r)) set(used, r);
    };
    for (size_t b = 0; b < blocks; ++b) {
      for (size_t i = begin[b]; i < begin[b + 1]; ++i) {
        const Instruction& instruction = kernel_.code[i];
        const bool guarded = instruction.guard != NO_REF;
        if (guarded) read(uses[b], defines[b], instruction.guard);
        for (size_t k = 0; k < lists_[i].size(); ++k) {
          const Ref r = lists_[i][k];
          if (r & CONSTANT) continue;
          // What a guarded instruction may leave as it was is read by it.
          if (roles_[i][k] == Role::Read || guarded) read(uses[b], defines[b], r);
        }
        for (size_t k = 0; k < lists_[i].size(); ++k) {
          if (roles_[i][k] == Role::Write) set(defines[b], lists_[i][k]);
        }
      }
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t b = blocks; b-- > 0;) {
        successors(begin[b + 1] - 1, next);
        for (const size_t s : next) {
          const Bits& in = live_in[block_of[s]];
          for (size_t w = 0; w < words; ++w) live_out[b][w] |= in[w];
        }
        for (size_t w = 0; w < words; ++w) {
          const uint64_t in = uses[b][w] | (live_out[b][w] & ~defines[b][w]);
          if (in != live_in[b][w]) {
            live_in[b][w] = in;
            changed = true;
          }
        }
      }
    }
    mark_unused_loads(begin, live_out);
    // Intervals over the instructions in order. Both ends belong to the interval, so that an
    // instruction's destination never shares a place with one of its sources of another width.
    constexpr size_t NEVER = SIZE_MAX;
    std::vector<size_t> first(registers, NEVER), last(registers, 0);
    const auto touch = [&](Ref r, size_t at) {
      first[r] = std::min(first[r], at);
      last[r] = std::max(last[r], at);
    };
    for (size_t b = 0; b < blocks; ++b) {
      for (size_t w = 0; w < words; ++w) {
        for (uint64_t rest = live_in[b][w]; rest != 0; rest &= rest - 1) {
          touch(static_cast<Ref>(w * 64 + static_cast<size_t>(std::countr_zero(rest))), begin[b]);
        }
        for (uint64_t rest = live_out[b][w]; rest != 0; rest &= rest - 1) {
          touch(static_cast<Ref>(w * 64 + static_cast<size_t>(std::countr_zero(rest))),
                begin[b + 1] - 1);
        }
      }
      for (size_t i = begin[b]; i < begin[b + 1]; ++i) {
        if (kernel_.code[i].guard != NO_REF) touch(kernel_.code[i].guard, i);
        for (const Ref r : lists_[i]) {
          if (!(r & CONSTANT)) touch(r, i);
        }
      }
    }
    for (const SpecialUse& use : kernel_.specials) touch(use.place, 0);
    for (size_t i = 0; i < count; ++i) {  // a place of their own
      if (!kernel_.code[i].pinned) continue;
      for (const Ref r : lists_[i]) {
        if (r & CONSTANT) continue;
        touch(r, 0);
        touch(r, count - 1);
      }
    }
    std::vector<Ref> order;
    for (Ref r = 0; r < registers; ++r) {
      if (first[r] != NEVER) order.push_back(r);
    }
    std::sort(order.begin(), order.end(),
              [&](Ref a, Ref b) { return first[a] != first[b] ? first[a] < first[b] : a < b; });
    // Free places by size, the most recently used first.
    std::map<int, std::vector<Ref>> free_places;
    std::multimap<size_t, Ref> active;  // by last instruction
    std::vector<Ref> place(registers, 0);
    uint32_t top = 0;
    for (const Ref r : order) {
      while (!active.empty() && active.begin()->first < first[r]) {
        const Ref done = active.begin()->second;
        free_places[slot_bytes(syntax_.registers[done].bits)].push_back(place[done]);
        active.erase(active.begin());
      }
      const int bytes = slot_bytes(syntax_.registers[r].bits);
      std::vector<Ref>& available = free_places[bytes];
      if (!available.empty()) {
        place[r] = available.back();
        available.pop_back();
      } else if (bytes < 64) {  // predicates: a cache line of them at once
        for (int k = 15; k > 0; --k) available.push_back(top + static_cast<uint32_t>(4 * k));
        place[r] = top;
        top += 64;
      } else {
        place[r] = top;
        top += static_cast<uint32_t>(bytes);
      }
      active.emplace(last[r], r);
    }
    kernel_.register_bytes = top;
    for (size_t i = 0; i < count; ++i) {
      Instruction& instruction = kernel_.code[i];
      if (instruction.guard != NO_REF) instruction.guard = place[instruction.guard];
      for (Ref& r : lists_[i]) {
        if (!(r & CONSTANT)) r = place[r];
      }
    }
    for (SpecialUse& use : kernel_.specials) use.place = place[use.place];
  }

  // Which instructions touch registers that a wgmma or a load of tensor memory may have under way.
  void note_pinned() {
    std::unordered_set<Ref> pinned;
    for (size_t i = 0; i < kernel_.code.size(); ++i) {
      if (kernel_.code[i].pinned) pinned.insert(lists_[i].begin(), lists_[i].end());
    }
    for (size_t i = 0; i < kernel_.code.size(); ++i) {
      const bool touches =
          !kernel_.code[i].pinned &&
          std::any_of(lists_[i].begin(), lists_[i].end(), [&](Ref r) { return pinned.count(r); });
      kernel_.touches_pinned.push_back(touches);
      kernel_.operand_counts.push_back(static_cast<uint32_t>(lists_[i].size()));
      std::vector<bool> written;
      for (const Role role : roles_[i]) written.push_back(role == Role::Write);
      kernel_.written_operands.push_back(std::move(written));
    }
  }

  // Compilers load whole structures at once, with parts that nobody has written or will read.
  void mark_unused_loads(const std::vector<size_t>& begin,
                         const std::vector<std::vector<uint64_t>>& live_out) {
    for (size_t b = 0; b + 1 < begin.size(); ++b) {
      std::vector<uint64_t> live = live_out[b];
      const auto set = [&](Ref r) { live[r / 64] |= uint64_t{1} << r % 64; };
      for (size_t i = begin[b + 1]; i-- > begin[b];) {
        Instruction& instruction = kernel_.code[i];
        const bool guarded = instruction.guard != NO_REF;
        int element = 0;
        for (size_t k = 0; k < lists_[i].size(); ++k) {
          const Ref r = lists_[i][k];
          if (roles_[i][k] != Role::Write) continue;
          const bool alive = (live[r / 64] >> r % 64 & 1) != 0;
          if (instruction.counted == Class::Load && !alive && element < 8) {
            instruction.unused |= static_cast<uint8_t>(1u << element);
          }
          ++element;
        }
        for (size_t k = 0; k < lists_[i].size(); ++k) {
          const Ref r = lists_[i][k];
          if (roles_[i][k] == Role::Write && !guarded) live[r / 64] &= ~(uint64_t{1} << r % 64);
        }
        for (size_t k = 0; k < lists_[i].size(); ++k) {
          if (roles_[i][k] == Role::Read && !(lists_[i][k] & CONSTANT)) set(lists_[i][k]);
        }
        if (guarded) set(instruction.guard);
      }
    }
  }

  ModuleSyntax& module_;
  KernelSyntax& syntax_;
  Kernel& kernel_;
  std::map<std::tuple<uint64_t, int, bool>, Ref> constants_;
  std::map<Special, Ref> specials_;
  Ref carry_ = NO_REF;
  std::vector<const Variable*> used_shared_;
  std::unordered_map<const Variable*, uint64_t> shared_places_;
  std::vector<std::vector<Ref>> lists_;
  std::vector<std::vector<Role>> roles_;
};

// ---- Builder ------------------------------------------------------------------------------------

void Builder::fail(const std::string& message) const {
  sim::fail(statement_->line, message + ": " + std::string(statement_->text));
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

// A register that is due as a type; `wider`: it may have up to 64 bits.
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

// ---- Modules ------------------------------------------------------------------------------------

std::unique_ptr<Module> load_module(const std::string& text) {
  ModuleSyntax syntax = parse(text);
  for (KernelSyntax& kernel : syntax.kernels) {
    KernelLoader(syntax, kernel).load();
    const std::string name = kernel.kernel->name;
    syntax.module->kernels[name] = std::move(kernel.kernel);
  }
  return std::move(syntax.module);
}

std::string source_line(const Module& module, const Kernel& kernel, uint32_t pc) {
  std::string text;
  if (pc >= kernel.texts.size()) return text;
  for (int at = kernel.texts[pc].location, depth = 0; at >= 0 && depth < 8; ++depth) {
    const Location& place = kernel.locations[static_cast<size_t>(at)];
    const auto file = module.files.find(place.file);
    if (!text.empty()) text += ", inlined at ";
    text += (file == module.files.end() ? "file " + std::to_string(place.file) : file->second) +
            ":" + std::to_string(place.line);
    at = place.inlined_at;
  }
  return text;
}

std::string describe_instruction(const Module& module, const Kernel& kernel, uint32_t pc) {
  if (pc >= kernel.texts.size()) return "no instruction";
  std::string text =
      "PTX line " + std::to_string(kernel.texts[pc].line) + " (" + kernel.texts[pc].text;
  const std::string source = source_line(module, kernel, pc);
  if (!source.empty()) text += ", " + source;
  return text + ")";
}

}  // namespace archflash::sim
