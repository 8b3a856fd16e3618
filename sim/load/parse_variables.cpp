#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>

#include "sim/load/parser.h"

namespace archflash::sim {
namespace {

constexpr int64_t MAX_REGISTERS = 1 << 20;
constexpr uint64_t MAX_VARIABLE_BYTES = uint64_t{1} << 30;  // also for all .global ones together
constexpr uint64_t MAX_CONST_BYTES = 64 * 1024, MAX_LOCAL_BYTES = 512 * 1024;  // as on a card
constexpr uint64_t MAX_PARAMETER_ALIGN = 1024;

}  // namespace

bool parse_type(std::string_view word, Type& type) {
  struct Row {
    const char* name;
    Type type;
  };
  static const Row ROWS[] = {
      {"b8", {'b', 8}},    {"b16", {'b', 16}},    {"b32", {'b', 32}},   {"b64", {'b', 64}},
      {"u8", {'u', 8}},    {"u16", {'u', 16}},    {"u32", {'u', 32}},   {"u64", {'u', 64}},
      {"s8", {'s', 8}},    {"s16", {'s', 16}},    {"s32", {'s', 32}},   {"s64", {'s', 64}},
      {"f16", {'f', 16}},  {"f32", {'f', 32}},    {"f64", {'f', 64}},   {"f16x2", {'f', 32}},
      {"bf16", {'f', 16}}, {"bf16x2", {'f', 32}}, {"b128", {'b', 128}}, {"pred", {'p', 1}}};
  for (const Row& row : ROWS) {
    if (word == row.name) {
      type = row.type;
      return true;
    }
  }
  return false;
}

// Reads what follows the state space: {.align N} {.v2|.v4} .type name{[N]...}{= initialiser}{,
// ...} ;
void Parser::variables(std::string_view space_word, bool external, KernelSyntax* kernel) {
  const int line = lexer_.line();
  uint64_t align = 0, vector = 1;
  Type type;
  bool typed = false;
  while (lexer_.at_modifier()) {
    const std::string_view word = lexer_.modifier();
    if (word == "align") {
      align = static_cast<uint64_t>(lexer_.number().value);
      if (!std::has_single_bit(align) || align > 1024 * 1024) fail(line, "bad .align");
    } else if (word == "v2" || word == "v4") {
      vector = word == "v2" ? 2 : 4;
    } else if (word == "attribute" || word == "unified" || word == "managed") {
      fail(line, "." + std::string(word) + " is not simulated");
    } else if (parse_type(word, type) && type.kind != 'p') {
      typed = true;
    } else {
      fail(line, "unknown type ." + std::string(word) + " of a variable");
    }
  }
  if (!typed) fail(line, "a variable without a type");
  do {
    Variable variable;
    variable.name = std::string(lexer_.name());
    const uint64_t element = vector * static_cast<uint64_t>(type.bits) / 8;
    variable.bytes = element;
    while (lexer_.accept('[')) {
      if (lexer_.peek() == ']') {
        variable.dynamic = true;
        variable.bytes = 0;
      } else {
        const int64_t count = lexer_.number().value;
        if (count < 0 || static_cast<uint64_t>(count) > MAX_VARIABLE_BYTES ||
            variable.bytes * static_cast<uint64_t>(count) > MAX_VARIABLE_BYTES) {
          fail(line, "variable " + variable.name + " is too large");
        }
        variable.bytes *= static_cast<uint64_t>(count);
      }
      lexer_.expect(']');
    }
    variable.align = std::max<uint64_t>(align, element);
    if (lexer_.accept('=')) initialiser(variable, type, line);
    if (variable.dynamic && variable.initialised) {
      variable.bytes = variable.initial.size();
      variable.dynamic = false;
    }
    add_variable(std::move(variable), space_word, external, kernel, line);
  } while (lexer_.accept(','));
  lexer_.expect(';');
}

void Parser::initialiser(Variable& variable, const Type& type, int line) {
  const size_t element = static_cast<size_t>(type.bits) / 8;
  std::vector<uint8_t> bytes;
  int depth = 0;
  do {
    if (lexer_.accept('{')) {
      ++depth;
    } else if (lexer_.accept('}')) {
      --depth;
    } else if (depth > 0 && lexer_.accept(',')) {
    } else {
      const bool negative = lexer_.accept('-');
      if (!lexer_.at_number()) {
        fail(line,
             "an initialiser of " + variable.name + " that is not a number: " + lexer_.here());
      }
      const Operand number = lexer_.number();
      uint64_t bits = literal_bits(number, type, negative, line);
      for (size_t i = 0; i < element && i < 8; ++i) {
        bytes.push_back(static_cast<uint8_t>(bits >> (8 * i)));
      }
      if (bytes.size() > MAX_VARIABLE_BYTES) fail(line, "an initialiser is too long");
    }
  } while (depth > 0 && !lexer_.at_end());
  if (!variable.dynamic) {
    if (bytes.size() > variable.bytes) {
      fail(line, "the initialiser of " + variable.name + " is longer than it");
    }
    bytes.resize(variable.bytes);
  }
  variable.initial = std::move(bytes);
  variable.initialised = true;
}

uint64_t Parser::literal_bits(const Operand& number, const Type& type, bool negative, int line) {
  if (number.kind == Operand::Kind::Integer) {
    return negative ? 0 - static_cast<uint64_t>(number.value) : static_cast<uint64_t>(number.value);
  }
  if (number.literal_bits != 0) return static_cast<uint64_t>(number.value);
  const double value = negative ? -number.real : number.real;
  if (type.bits == 64) return std::bit_cast<uint64_t>(value);
  if (type.bits == 32) return std::bit_cast<uint32_t>(static_cast<float>(value));
  fail(line, "a decimal fraction for a type that is not .f32 or .f64");
}

void Parser::add_variable(Variable variable, std::string_view space_word, bool external,
                          KernelSyntax* kernel, int line) {
  auto& table = kernel ? scope().variables : result_.variables;
  if (table.count(variable.name)) fail(line, variable.name + " is declared twice");
  Module& module = *result_.module;
  if (space_word == "global") {
    if (variable.dynamic || external) {
      fail(line, "external .global variable " + variable.name + " is not simulated");
    }
    variable.space = Space::Global;
    variable.address = module.globals.size();
    global_bytes_ += variable.bytes;
    if (global_bytes_ > MAX_VARIABLE_BYTES) fail(line, "the .global variables are too large");
    module.globals.push_back(variable);
  } else if (space_word == "const") {
    variable.space = Space::Const;
    variable.address = round_up(module.const_memory.size(), variable.align);
    if (variable.address + variable.bytes > MAX_CONST_BYTES) {
      fail(line, "more than 64 KB of .const variables");
    }
    module.const_memory.resize(variable.address + variable.bytes);
    std::copy(variable.initial.begin(), variable.initial.end(),
              module.const_memory.begin() + static_cast<int64_t>(variable.address));
  } else if (space_word == "shared") {
    variable.space = Space::Shared;  // placed when a kernel that names it is finished
  } else if (space_word == "local") {
    variable.space = Space::Local;
    variable.address = round_up(kernel->kernel->local_bytes, variable.align);
    kernel->kernel->local_bytes = variable.address + variable.bytes;
    if (kernel->kernel->local_bytes > MAX_LOCAL_BYTES) {
      fail(line, "more than 512 KB of .local variables");
    }
  }
  const std::string name = variable.name;
  table.emplace(name, std::move(variable));
}

void Parser::parameter(KernelSyntax& syntax) {
  const int line = lexer_.line();
  if (lexer_.modifier() != "param") fail(line, "a kernel's parameters are .param");
  Type type;
  uint64_t align = 0;
  bool typed = false, pointer = false;
  while (lexer_.at_modifier()) {
    const std::string_view word = lexer_.modifier();
    if (word == "align") {
      const auto value = static_cast<uint64_t>(lexer_.number().value);
      if (!std::has_single_bit(value) || value > MAX_PARAMETER_ALIGN) fail(line, "bad .align");
      if (!pointer) align = value;  // after .ptr it is the alignment of the target
    } else if (word == "ptr") {
      pointer = true;
    } else if (word == "global" || word == "shared" || word == "const" || word == "local") {
    } else if (parse_type(word, type) && type.kind != 'p') {
      typed = true;
    } else {
      fail(line, "unknown type ." + std::string(word) + " of a parameter");
    }
  }
  if (!typed) fail(line, "a parameter without a type");
  const std::string name(lexer_.name());
  uint64_t bytes = static_cast<uint64_t>(type.bits) / 8;
  align = std::max(align, bytes);
  if (lexer_.accept('[')) {
    const int64_t count = lexer_.number().value;
    if (count < 0 || count > 65536) fail(line, "parameter " + name + " is too large");
    bytes *= static_cast<uint64_t>(count);
    lexer_.expect(']');
  }
  const uint64_t offset = round_up(syntax.kernel->parameter_bytes, align);
  syntax.parameters[name] = static_cast<uint32_t>(offset);
  syntax.kernel->parameter_bytes = static_cast<uint32_t>(offset + bytes);
  if (offset + bytes > 65536) fail(line, "the parameters are too large");
}

void Parser::registers() {
  const int line = lexer_.line();
  Type type;
  const std::string_view word = lexer_.modifier();
  if (!parse_type(word, type)) fail(line, "unknown register type ." + std::string(word));
  do {
    const std::string name(lexer_.name());
    const int first = static_cast<int>(kernel_->registers.size());
    int64_t count = 1;
    if (lexer_.accept('<')) {
      count = lexer_.number().value;
      lexer_.expect('>');
      if (count < 0 || first + count > MAX_REGISTERS) fail(line, "too many registers");
      scope().ranges.push_back({name, first, static_cast<int>(count)});
    } else {
      if (first + 1 > MAX_REGISTERS) fail(line, "too many registers");
      if (!scope().registers.emplace(name, first).second) {
        fail(line, "register " + name + " is declared twice");
      }
    }
    kernel_->registers.insert(kernel_->registers.end(), static_cast<size_t>(count), type);
  } while (lexer_.accept(','));
  lexer_.expect(';');
}

int Parser::find_register(std::string_view name) const {
  size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
  for (int s = current_; s >= 0; s = kernel_->scopes[static_cast<size_t>(s)].parent) {
    const Scope& scope = kernel_->scopes[static_cast<size_t>(s)];
    if (!scope.registers.empty()) {
      const auto found = scope.registers.find(std::string(name));
      if (found != scope.registers.end()) return found->second;
    }
    for (const Scope::Range& range : scope.ranges) {
      // The number is what follows the prefix, without leading zeros.
      if (name.size() <= range.prefix.size() || digits > range.prefix.size() ||
          !name.starts_with(range.prefix)) {
        continue;
      }
      const std::string_view tail = name.substr(range.prefix.size());
      int index = -1;
      const auto [end, error] = std::from_chars(tail.data(), tail.data() + tail.size(), index);
      if (error != std::errc() || end != tail.data() + tail.size()) continue;
      if (tail.size() > 1 && tail[0] == '0') continue;
      if (index < range.count) return range.first + index;
    }
  }
  return -1;
}

}  // namespace archflash::sim
