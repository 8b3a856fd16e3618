// Which instructions a target lacks. What is stated here is what ptxas 13.0 refuses.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace archflash::sim {

// Targets that have something: "80" is sm_80 and everything newer; "90a" is sm_90a alone; "100f" is
// the family of sm_100: those of 10.x with the suffix f or a. Alternatives are separated by |.
bool target_has(std::string_view target, std::string_view needed);

struct InstructionRule;

// The instructions that a target lacks.
class LackedInstructions {
 public:
  explicit LackedInstructions(std::string_view target);

  // What a target must be for an instruction with these modifiers; empty if this target has it.
  std::string_view needed_by(std::string_view opcode,
                             const std::vector<std::string_view>& modifiers) const;

 private:
  std::vector<const InstructionRule*> rules_;
};

}  // namespace archflash::sim
