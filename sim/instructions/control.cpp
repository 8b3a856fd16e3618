// Control flow: branches, exits and traps.
#include <vector>

#include "sim/load/builder.h"

namespace archflash::sim {
namespace {

void build_branch(Builder& b) {
  b.instruction.control = Control::Branch;
  b.instruction.counted = Class::Control;
  b.instruction.target = b.label();
}
void build_branch_indexed(Builder& b) {
  b.instruction.control = Control::BranchIndexed;
  b.instruction.counted = Class::Control;
  b.source({'u', 32});
  std::vector<uint32_t> targets = b.target_list();
  if (targets.empty()) b.fail("no targets");
  b.instruction.extra = b.keep(std::move(targets));
}
void build_exit(Builder& b) {
  b.instruction.control = Control::Exit;
  b.instruction.counted = Class::Control;
}
void build_trap(Builder& b) {
  b.instruction.control = Control::Trap;
  b.instruction.counted = Class::Control;
}
void run_nothing(Warp&, const Instruction&, uint32_t) {}
void build_nanosleep(Builder& b) {
  b.source({'u', 32});
  b.handler(&run_nothing, Class::Control);
}
void build_pmevent(Builder& b) {
  b.immediate();
  b.handler(&run_nothing, Class::Other);
}

constexpr Form FORMS[] = {
    {"bra", "?uni", build_branch},
    {"brx", "idx ?uni", build_branch_indexed},
    {"ret", "?uni", build_exit},
    {"exit", "", build_exit},
    {"trap", "", build_trap},
    {"brkpt", "", build_trap},
    {"nanosleep", "u32", build_nanosleep},
    {"pmevent", "?mask", build_pmevent},
};

}  // namespace

std::span<const Form> control_forms() { return FORMS; }

}  // namespace archflash::sim
