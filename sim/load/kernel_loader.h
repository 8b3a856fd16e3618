// Loads one kernel: places its shared variables, builds each of its statements, places its
// registers.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "sim/load/builder.h"
#include "sim/load/program.h"
#include "sim/load/register_places.h"
#include "sim/load/syntax.h"
#include "sim/load/targets.h"

namespace archflash::sim {

class KernelLoader {
 public:
  KernelLoader(ModuleSyntax& module, KernelSyntax& syntax)
      : module_(module), syntax_(syntax), kernel_(*syntax.kernel), lacked_(module.module->target) {}

  void load();

  // ---- What the builder asks for ----

  // `shared`: the constant is an address of shared memory, which differs between the CTAs of a
  // cluster.
  Ref constant(uint64_t value, int bits, bool shared = false);
  // The register of a special register, and its width. Fails, naming the line, for an unknown name.
  Ref special(const std::string& name, int& bits, int line);
  Ref new_register(int bits);
  void widen(Ref ref);  // makes a register at least 64 bits wide
  Ref carry();          // the register of the carry flag
  const std::string& target() const { return module_.module->target; }
  // Fails unless the module's target is one of `needed` (targets.h). `what` is what needs it.
  void require(std::string_view needed, std::string_view what, int line) const;
  const std::vector<Type>& registers() const { return syntax_.registers; }

  // These look a name up in a scope and the scopes around it; false or nullptr: it is not there.
  // The address is that of a variable or parameter within its space.
  bool find_address(const std::string& name, int scope, uint64_t& address, Space& space) const;
  bool find_label(const std::string& name, int scope, uint32_t& index) const;
  const std::vector<std::string>* find_targets(const std::string& name, int scope) const;

 private:
  const Variable* find_variable(const std::string& name, int scope) const;
  void note_shared_names(const Operand& operand, int scope);
  void place_shared();
  void build(const Statement& statement);
  void finish(Builder& builder, const Statement& statement);
  void note_pinned();

  ModuleSyntax& module_;
  KernelSyntax& syntax_;
  Kernel& kernel_;
  LackedInstructions lacked_;
  std::map<std::tuple<uint64_t, int, bool>, Ref> constants_;
  std::map<const SpecialRegister*, Ref> specials_;
  Ref carry_ = NO_REF;
  std::vector<const Variable*> used_shared_;
  std::unordered_map<const Variable*, uint64_t> shared_places_;
  OperandLists operands_;
};

}  // namespace archflash::sim
