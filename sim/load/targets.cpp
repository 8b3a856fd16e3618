#include "sim/load/targets.h"

#include <algorithm>
#include <charconv>

namespace archflash::sim {

// An instruction with one of these opcodes and, for each word of `modifiers`, one of its
// alternatives needs one of these targets. An empty opcode stands for all.
struct InstructionRule {
  std::string_view opcodes, modifiers, needed;
};

namespace {

constexpr InstructionRule RULES[] = {
    // scopes, spaces, hints about caches
    {"", "cluster|shared::cluster|multicast::cluster", "90"},
    {"", "L2::cache_hint|L2::256B", "80"},
    {"prefetch", "L2::evict_last|L2::evict_normal", "80"},
    {"prefetch", "tensormap", "90"},
    {"discard|createpolicy", "", "80"},
    {"ld|st", "v8", "100"},
    {"ld|st", "v4 b64|u64|s64|f64", "100"},
    {"fence", "async|mbarrier_init", "90"},
    {"atom|red", "v2|v4|v8|bf16|bf16x2|b128", "90"},
    {"st|red", "async", "90"},
    // arithmetic
    {"min|max", "relu", "90"},
    {"min|max", "NaN|f16|f16x2|bf16|bf16x2", "80"},
    {"min|max", "xorsign", "86"},
    {"add|sub|mul|fma", "f32x2", "100"},
    {"add|sub|mul|ex2|tanh|setp|set", "bf16|bf16x2", "90"},
    {"fma|neg|abs", "relu|bf16|bf16x2", "80"},
    {"fma", "oob", "90"},
    {"cvt", "bf16|bf16x2|f16x2|tf32|relu|satfinite", "80"},
    {"cvt", "bf16 u8|s8|u16|s16|u32|s32|u64|s64|f16|f64", "90"},
    {"cvt", "rn|rz tf32", "90"},
    {"cvt", "rn|rz satfinite tf32", "100"},
    {"cvt", "e4m3x2|e5m2x2", "89"},
    {"cvt", "e2m3x2|e3m2x2|e2m1x2|ue8m0x2", "100f|110f|120f"},
    {"redux", "", "80"},
    {"redux", "f32", "100f"},
    {"elect", "", "90"},
    // matrices
    {"stmatrix", "", "90"},
    {"mma", "m16n8k4|m16n8k16|m16n8k32|m16n8k64|m16n8k128|m16n8k256|bf16|tf32|f64|and", "80"},
    {"mma", "e4m3|e5m2", "89"},
    {"mma", "m16n8k4|m16n8k8|m16n8k16 f64", "90"},
    {"mma", "kind::f8f6f4", "100f|110f|120f"},
    {"mma", "block_scale", "120f"},
    {"mma", "e3m2|e2m3|e2m1", "120f"},
    {"wgmma", "", "90a"},
    {"tcgen05", "", "100f|110f"},
    {"tcgen05", "shift", "100a|103a|110a"},
    // copies, barriers, clusters
    {"cp", "async", "80"},
    {"cp", "bulk", "90"},
    {"cp", "bulk cta_group::1|cta_group::2", "100f|110f"},
    {"mbarrier", "", "80"},
    {"mbarrier", "try_wait|expect_tx|complete_tx|relaxed", "90"},
    {"mapa|getctarank|griddepcontrol", "", "90"},
    {"setmaxnreg", "", "90a|100f|110f|120f"},
    {"clusterlaunchcontrol", "", "100"},
    {"clusterlaunchcontrol", "multicast::cluster::all", "100f|110f|120f"},
};

// Takes the text up to the next `separator` out of a list.
std::string_view next(std::string_view& list, char separator) {
  const size_t end = std::min(list.find(separator), list.size());
  const std::string_view word = list.substr(0, end);
  list.remove_prefix(std::min(end + 1, list.size()));
  return word;
}

template <class F>
bool any_of(std::string_view list, F matches) {
  while (!list.empty()) {
    if (matches(next(list, '|'))) return true;
  }
  return false;
}

int number_of(std::string_view target) {
  int number = 0;
  std::from_chars(target.data(), target.data() + target.size(), number);
  return number;
}

}  // namespace

bool target_has(std::string_view target, std::string_view needed) {
  target.remove_prefix(std::min(target.find('_') + 1, target.size()));
  const int number = number_of(target);
  const char suffix = target.empty() ? '\0' : target.back();
  return any_of(needed, [&](std::string_view one) {
    const int least = number_of(one);
    if (one.back() == 'a') return target == one;
    if (one.back() != 'f') return number >= least;
    return (suffix == 'a' || suffix == 'f') && number / 10 == least / 10 && number >= least;
  });
}

LackedInstructions::LackedInstructions(std::string_view target) {
  for (const InstructionRule& rule : RULES) {
    if (!target_has(target, rule.needed)) rules_.push_back(&rule);
  }
}

std::string_view LackedInstructions::needed_by(
    std::string_view opcode, const std::vector<std::string_view>& modifiers) const {
  for (const InstructionRule* const rule : rules_) {
    const auto is_opcode = [&](std::string_view one) { return one == opcode; };
    bool applies = rule->opcodes.empty() || any_of(rule->opcodes, is_opcode);
    for (std::string_view rest = rule->modifiers; applies && !rest.empty();) {
      applies = any_of(next(rest, ' '), [&](std::string_view one) {
        return std::find(modifiers.begin(), modifiers.end(), one) != modifiers.end();
      });
    }
    if (applies) return rule->needed;
  }
  return {};
}

}  // namespace archflash::sim
