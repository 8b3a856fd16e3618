// The table of all instructions. A form is one row: an opcode, the modifiers that it takes, and the
// function that reads its operands and chooses a handler. The rows stand in sim/instructions/. A
// statement that no form matches does not load.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace archflash::sim {

class Builder;

struct Form {
  const char* opcode;
  // The modifiers in order, separated by spaces. | separates alternatives, ? precedes a modifier
  // that may be missing, and $name stands for a set of alternatives (forms.cpp lists the sets).
  const char* modifiers;
  void (*build)(Builder& b);
};

std::span<const Form> integer_forms();
std::span<const Form> logic_forms();
std::span<const Form> float_forms();
std::span<const Form> move_forms();
std::span<const Form> convert_forms();
std::span<const Form> compare_forms();
std::span<const Form> load_store_forms();
std::span<const Form> atomic_forms();
std::span<const Form> cp_async_forms();
std::span<const Form> fence_forms();
std::span<const Form> control_forms();
std::span<const Form> barrier_forms();
std::span<const Form> exchange_forms();
std::span<const Form> matrix_forms();
std::span<const Form> mbarrier_forms();
std::span<const Form> bulk_forms();
std::span<const Form> cluster_forms();
std::span<const Form> launch_control_forms();
std::span<const Form> wgmma_forms();
std::span<const Form> wmma_forms();
std::span<const Form> tcgen05_forms();
std::span<const Form> store_async_forms();
std::span<const Form> tcgen05_refused_forms();

// The rows of one kind of instruction, under the heading that the generated documentation gives
// them.
struct FormTable {
  const char* name;
  std::span<const Form> forms;
};
std::span<const FormTable> form_tables();

// The form of a spelled instruction such as "ld.global.v4.f32"; nullptr if the simulator has none.
const Form* find_form(std::string_view instruction);

struct FormMatch {
  const Form* form = nullptr;  // nullptr: no form of the opcode takes these modifiers
  bool known_opcode = false;
  // For each modifier of the form, the alternative that the statement spells; empty: it is missing.
  std::vector<std::string_view> slots;
  size_t consumed = 0;  // without a form: how many modifiers the best form took before it failed
};
FormMatch match_form(std::string_view opcode, const std::vector<std::string_view>& modifiers);

// The sets that forms name with $: (name, "u16|s16|...").
std::vector<std::pair<std::string, std::string>> modifier_sets();

}  // namespace archflash::sim
