#include "sim/load/forms.h"

#include <algorithm>
#include <unordered_map>

#include "sim/load/program.h"

namespace archflash::sim {
namespace {

// The sets of alternatives that forms name with $.
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
     "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate"},
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

// Gives each modifier its slot in the form and fills `slots`. Returns how many modifiers have found
// one; `matched` says whether all of them have and no slot that must be filled is empty.
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

}  // namespace

std::span<const FormTable> form_tables() {
  static const FormTable TABLES[] = {
      {"integer arithmetic", integer_forms()},
      {"logic, shifts, bit fields", logic_forms()},
      {"floating point", float_forms()},
      {"moves, addresses", move_forms()},
      {"conversions", convert_forms()},
      {"comparisons, selections", compare_forms()},
      {"loads and stores", load_store_forms()},
      {"atomics", atomic_forms()},
      {"cp.async", cp_async_forms()},
      {"fences, hints about caches", fence_forms()},
      {"control flow", control_forms()},
      {"barriers", barrier_forms()},
      {"exchanges between lanes", exchange_forms()},
      {"matrices", matrix_forms()},
      {"wmma", wmma_forms()},
      {"mbarriers", mbarrier_forms()},
      {"bulk copies", bulk_forms()},
      {"asynchronous stores", store_async_forms()},
      {"clusters, register pools", cluster_forms()},
      {"cluster launch control", launch_control_forms()},
      {"wgmma", wgmma_forms()},
      {"tcgen05", tcgen05_forms()},
      {"tcgen05 that does not load", tcgen05_refused_forms()},
  };
  return TABLES;
}

FormMatch match_form(std::string_view opcode, const std::vector<std::string_view>& modifiers) {
  FormMatch result;
  const auto found = table().find(opcode);
  if (found == table().end()) return result;
  result.known_opcode = true;
  for (const PreparedForm& form : found->second) {
    bool matched = false;
    result.consumed = std::max(result.consumed, match(form, modifiers, result.slots, matched));
    if (!matched) continue;
    result.form = form.form;
    return result;
  }
  return result;
}

const Form* find_form(std::string_view instruction) {
  std::vector<std::string_view> modifiers;
  const std::string_view opcode = instruction.substr(0, instruction.find('.'));
  while (instruction.find('.') != std::string_view::npos) {
    instruction.remove_prefix(instruction.find('.') + 1);
    modifiers.push_back(instruction.substr(0, instruction.find('.')));
  }
  return match_form(opcode, modifiers).form;
}

std::vector<std::pair<std::string, std::string>> modifier_sets() {
  std::vector<std::pair<std::string, std::string>> sets;
  for (const ModifierSet& set : SETS) sets.emplace_back(set.name, set.alternatives);
  return sets;
}

}  // namespace archflash::sim
