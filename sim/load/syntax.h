// The result of parsing PTX text, before instructions are matched with the table: statements with
// modifiers and operands. Registers have numbers already; other names are not resolved yet.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sim/load/forms.h"
#include "sim/load/program.h"

namespace archflash::sim {

// The first multiple that is not below a value.
inline uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Type {
  char kind = 'b';  // b, u, s, f (f16, f32, f64, bf16, ...), p (predicate)
  int bits = 32;
};

struct Operand {
  enum class Kind : uint8_t {
    Register,
    Special,  // `text` is %tid.x or the like
    Integer,
    Float,    // a literal, as `real` or as exact bits in `value`
    Name,     // a variable or label `text`, plus `value`
    Address,  // [items[0] + value], and further items after commas inside the brackets
    Vector,   // {items}
    Pair,     // items[0]|items[1]
    Sink,     // _
  };
  Kind kind = Kind::Integer;
  bool negated = false;      // !%p
  uint8_t literal_bits = 0;  // 32 or 64 for a Float in hexadecimal; 0: it is decimal
  int reg = -1;
  int64_t value = 0;
  double real = 0;
  std::string text;
  std::vector<Operand> items;
};

struct Scope {
  int parent = -1;
  std::unordered_map<std::string, int> registers;
  struct Range {
    std::string prefix;
    int first = 0, count = 0;
  };
  std::vector<Range> ranges;
  std::unordered_map<std::string, uint32_t> labels;
  std::unordered_map<std::string, Variable> variables;
  std::unordered_map<std::string, std::vector<std::string>> target_lists;  // .branchtargets
};

struct Statement {
  std::string_view opcode;
  std::vector<std::string_view> modifiers;  // without their dots
  std::vector<Operand> operands;
  std::string_view name;  // the opcode with its modifiers
  std::string_view text;
  int guard = -1;  // a predicate register
  bool guard_negated = false;
  int line = 0;
  int location = -1;
  int scope = 0;
};

struct KernelSyntax {
  std::unique_ptr<Kernel> kernel;
  std::vector<Type> registers;
  std::vector<Scope> scopes;
  std::vector<Statement> statements;
  std::unordered_map<std::string, uint32_t> parameters;  // their offsets in the parameter block
};

// What the statements of one name have in common.
struct StatementForm {
  FormMatch match;
  std::string_view missing;  // what the target must be; empty: it has the instruction
};

struct ModuleSyntax {
  Module* module = nullptr;
  std::unordered_map<std::string_view, StatementForm> forms;  // by the names of statements
  std::unordered_map<std::string, Variable> variables;        // those of module scope
};

// Throws LoadError with the line and a message.
[[noreturn]] void fail(int line, const std::string& message);

}  // namespace archflash::sim
