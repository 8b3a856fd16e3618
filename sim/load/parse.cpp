#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>

#include "sim/load/lexer.h"
#include "sim/load/syntax.h"

namespace archflash::sim {

namespace {

// Turns any bytes into plain ASCII, since a message may cut a character in two.
std::string printable(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = c == '\n' || c == '\t' ? ' ' : '?';
  }
  return text;
}

}  // namespace

void fail(int line, const std::string& message) {
  throw LoadError(printable("PTX line " + std::to_string(line) + ": " + message));
}

namespace {

constexpr int MAX_NESTING = 64;
constexpr int64_t MAX_REGISTERS = 1 << 20;
constexpr uint64_t MAX_VARIABLE_BYTES = uint64_t{1} << 30;  // also for all .global ones together
constexpr uint64_t MAX_CONST_BYTES = 64 * 1024, MAX_LOCAL_BYTES = 512 * 1024;  // as on a card
constexpr uint64_t MAX_PARAMETER_ALIGN = 1024;

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

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : lexer_(text) {
    result_.module = std::make_unique<Module>();
  }

  ModuleSyntax run() {
    while (!lexer_.at_end()) module_item();
    if (result_.module->version.empty()) fail(1, "no .version directive: this is not PTX");
    name_functions();
    return std::move(result_);
  }

 private:
  // ---- Module scope ----

  void module_item() {
    const int line = lexer_.line();
    if (lexer_.accept(';')) return;
    std::string_view word = lexer_.modifier();
    if (word == "version") {
      const size_t begin = lexer_.position();
      lexer_.number();
      result_.module->version = std::string(lexer_.since(begin));
    } else if (word == "target") {
      result_.module->target = std::string(lexer_.name());
      while (lexer_.accept(',')) lexer_.name();
    } else if (word == "address_size") {
      if (lexer_.number().value != 64) fail(line, ".address_size must be 64");
    } else if (word == "file") {
      file();
    } else if (word == "section") {
      const std::string_view section = lexer_.peek() == '.' ? lexer_.modifier() : lexer_.name();
      if (section == "debug_str")
        debug_strings();
      else
        skip_braces();
    } else if (word == "pragma") {
      lexer_.quoted();
      lexer_.expect(';');
    } else {
      bool external = false;
      while (word == "extern" || word == "visible" || word == "weak" || word == "common") {
        external = external || word == "extern";
        word = lexer_.modifier();
      }
      if (word == "entry") {
        entry();
      } else if (word == "func") {
        function();
      } else if (word == "global" || word == "const" || word == "shared") {
        variables(word, external, nullptr);
      } else if (word == "alias" || word == "loc") {
        while (!lexer_.at_end() && !lexer_.accept(';')) skip_token();
      } else {
        fail(line, "unknown directive ." + std::string(word));
      }
    }
  }

  void file() {
    const int64_t index = lexer_.number().value;
    result_.module->files[static_cast<int>(index)] = std::string(lexer_.quoted());
    while (lexer_.accept(',')) lexer_.number();
  }

  void skip_token() {
    if (lexer_.peek() == '"')
      lexer_.quoted();
    else if (lexer_.at_modifier())
      lexer_.modifier();
    else if (starts_name(lexer_.peek()))
      lexer_.name();
    else if (lexer_.at_number())
      lexer_.number();
    else
      lexer_.accept(lexer_.peek());
  }

  // Reads the names of inlined functions from { label: .b8 byte, byte, ... 0 ... }.
  void debug_strings() {
    const int line = lexer_.line();
    lexer_.expect('{');
    while (!lexer_.accept('}')) {
      if (lexer_.at_end()) fail(line, "a '{' has no '}'");
      if (starts_name(lexer_.peek())) {
        const std::string_view label = lexer_.name();
        if (lexer_.accept(':')) debug_labels_[std::string(label)] = debug_bytes_.size();
      } else if (lexer_.peek_modifier() == "b8") {
        lexer_.modifier();
        do {
          debug_bytes_ += static_cast<char>(lexer_.number().value);
        } while (lexer_.accept(','));
      } else {
        skip_token();
      }
    }
  }

  void name_functions() {
    for (const auto& [label, offset] : functions_) {
      const auto found = debug_labels_.find(label);
      std::string name;
      if (found != debug_labels_.end() && offset < debug_bytes_.size() - found->second) {
        name = printable(short_function_name(debug_bytes_.c_str() + found->second + offset));
      }
      result_.module->functions.push_back(std::move(name));
    }
  }

  int function_named(const std::string& label, uint64_t offset) {
    const auto key = std::make_pair(label, offset);
    const auto [found, added] =
        function_index_.try_emplace(key, static_cast<int>(functions_.size()));
    if (added) functions_.push_back(key);
    return found->second;
  }

  void skip_braces() {
    const int line = lexer_.line();
    lexer_.expect('{');
    for (int depth = 1; depth > 0;) {
      if (lexer_.at_end()) fail(line, "a '{' has no '}'");
      if (lexer_.accept('{'))
        ++depth;
      else if (lexer_.accept('}'))
        --depth;
      else
        skip_token();
    }
  }

  // Skips a function. No kernel can call it, since the table has no call instruction.
  void function() {
    while (!lexer_.at_end() && lexer_.peek() != '{' && lexer_.peek() != ';') skip_token();
    if (lexer_.peek() == '{')
      skip_braces();
    else
      lexer_.expect(';');
  }

  // ---- Variables ----

  // Reads what follows the state space: {.align N} {.v2|.v4} .type name{[N]...}{= initialiser}{,
  // ...} ;
  void variables(std::string_view space_word, bool external, KernelSyntax* kernel) {
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

  void initialiser(Variable& variable, const Type& type, int line) {
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

  static uint64_t literal_bits(const Operand& number, const Type& type, bool negative, int line) {
    if (number.kind == Operand::Kind::Integer) {
      return negative ? 0 - static_cast<uint64_t>(number.value)
                      : static_cast<uint64_t>(number.value);
    }
    if (number.literal_bits != 0) return static_cast<uint64_t>(number.value);
    const double value = negative ? -number.real : number.real;
    if (type.bits == 64) return std::bit_cast<uint64_t>(value);
    if (type.bits == 32) return std::bit_cast<uint32_t>(static_cast<float>(value));
    fail(line, "a decimal fraction for a type that is not .f32 or .f64");
  }

  void add_variable(Variable variable, std::string_view space_word, bool external,
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

  // ---- Kernels ----

  Scope& scope() { return kernel_->scopes[static_cast<size_t>(current_)]; }

  void entry() {
    const int line = lexer_.line();
    KernelSyntax syntax;
    syntax.kernel = std::make_unique<Kernel>();
    syntax.kernel->name = std::string(lexer_.name());
    syntax.scopes.emplace_back();
    kernel_ = &syntax;
    current_ = 0;
    location_ = -1;
    place_index_.clear();
    if (lexer_.accept('(')) {
      while (!lexer_.accept(')')) {
        parameter(syntax);
        lexer_.accept(',');
      }
    }
    while (lexer_.at_modifier()) performance_directive(*syntax.kernel);
    if (lexer_.accept(';')) return;  // a declaration only
    body();
    for (const KernelSyntax& other : result_.kernels) {
      if (other.kernel->name == syntax.kernel->name) {
        fail(line, "kernel " + other.kernel->name + " is defined twice");
      }
    }
    result_.kernels.push_back(std::move(syntax));
    kernel_ = nullptr;
  }

  void parameter(KernelSyntax& syntax) {
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

  void performance_directive(Kernel& kernel) {
    const int line = lexer_.line();
    const std::string_view word = lexer_.modifier();
    if (word == "pragma") {
      lexer_.quoted();
      lexer_.accept(';');
      return;
    }
    if (word == "explicitcluster" || word == "blocksareclusters" || word == "noreturn") return;
    if (word != "maxntid" && word != "reqntid" && word != "minnctapersm" && word != "maxnreg" &&
        word != "maxclusterrank" && word != "reqnctapercluster" && word != "maxnctapersm") {
      fail(line, "unknown directive ." + std::string(word));
    }
    int64_t values[3] = {1, 1, 1};
    int count = 0;
    do {
      if (count == 3) fail(line, "too many values of ." + std::string(word));
      values[count++] = lexer_.number().value;
      if (values[count - 1] < 1 || values[count - 1] > 65536)
        fail(line, "bad ." + std::string(word));
    } while (lexer_.accept(','));
    if (word == "maxntid") {
      kernel.max_threads =
          static_cast<int>(std::min<int64_t>(values[0] * values[1] * values[2], 65536));
    } else if (word == "minnctapersm") {
      kernel.min_ctas = static_cast<int>(values[0]);
    } else if (word == "maxnreg") {
      kernel.max_registers = static_cast<int>(values[0]);
    } else if (word == "reqntid") {
      for (int i = 0; i < 3; ++i) kernel.required_threads[i] = static_cast<int>(values[i]);
    }
  }

  void body() {
    const int line = lexer_.line();
    lexer_.expect('{');
    int depth = 1;
    while (depth > 0) {
      if (lexer_.at_end()) fail(line, "the kernel's '{' has no '}'");
      if (lexer_.accept('{')) {
        if (++depth > MAX_NESTING) fail(lexer_.line(), "scopes are nested too deeply");
        Scope inner;
        inner.parent = current_;
        current_ = static_cast<int>(kernel_->scopes.size());
        kernel_->scopes.push_back(std::move(inner));
      } else if (lexer_.accept('}')) {
        --depth;
        if (depth > 0) current_ = scope().parent;
      } else if (lexer_.accept(';')) {
      } else if (lexer_.peek() == '.') {
        body_directive();
      } else {
        statement();
      }
    }
  }

  void body_directive() {
    const int line = lexer_.line();
    const std::string_view word = lexer_.modifier();
    if (word == "reg") {
      registers();
    } else if (word == "loc") {
      location();
    } else if (word == "file") {
      file();
    } else if (word == "pragma") {
      lexer_.quoted();
      lexer_.expect(';');
    } else if (word == "local" || word == "shared") {
      variables(word, false, kernel_);
    } else if (word == "extern") {
      if (lexer_.modifier() != "shared") fail(line, "only .shared may be .extern in a kernel");
      variables("shared", true, kernel_);
    } else {
      fail(line, "unknown directive ." + std::string(word));
    }
  }

  void registers() {
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

  int find_register(std::string_view name) const {
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

  Location read_place() {
    Location place;
    place.file = static_cast<int>(lexer_.number().value);
    place.line = static_cast<int>(lexer_.number().value);
    place.column = static_cast<int>(lexer_.number().value);
    return place;
  }

  void location() {
    std::vector<Location>& locations = kernel_->kernel->locations;
    Location place = read_place();
    const auto key = std::make_tuple(place.file, place.line, place.column);
    if (lexer_.accept(',')) {
      lexer_.name();  // function_name
      const std::string label(lexer_.name());
      const int64_t offset = lexer_.accept('+') ? lexer_.number().value : 0;
      place.function = function_named(label, static_cast<uint64_t>(offset));
      lexer_.expect(',');
      lexer_.name();  // inlined_at
      const Location call = read_place();
      const auto found = place_index_.find(std::make_tuple(call.file, call.line, call.column));
      if (found != place_index_.end() && found->second < static_cast<int>(locations.size())) {
        place.inlined_at = found->second;
      } else {
        place.inlined_at = static_cast<int>(locations.size());
        locations.push_back(call);
      }
    }
    locations.push_back(place);
    location_ = static_cast<int>(locations.size()) - 1;
    place_index_[key] = location_;
  }

  // ---- Statements ----

  void statement() {
    Statement s;
    s.line = lexer_.line();
    s.scope = current_;
    const size_t begin = lexer_.position();
    if (lexer_.accept('@')) {
      s.guard_negated = lexer_.accept('!');
      const std::string_view name = lexer_.name();
      s.guard = find_register(name);
      if (s.guard < 0) fail(s.line, "guard " + std::string(name) + " is not a register");
      if (kernel_->registers[static_cast<size_t>(s.guard)].kind != 'p') {
        fail(s.line, "guard " + std::string(name) + " is not a predicate");
      }
    }
    s.opcode = lexer_.name();
    if (s.guard < 0 && lexer_.peek() == ':') {
      lexer_.expect(':');
      label(std::string(s.opcode), s.line);
      return;
    }
    while (lexer_.at_modifier()) s.modifiers.push_back(lexer_.modifier());
    if (lexer_.peek() != ';') {
      do {
        s.operands.push_back(operand(0));
      } while (lexer_.accept(','));
    }
    s.text = lexer_.since(begin);
    s.location = location_ < static_cast<int>(kernel_->kernel->locations.size()) ? location_ : -1;
    lexer_.expect(';');
    kernel_->statements.push_back(std::move(s));
  }

  void label(const std::string& name, int line) {
    if (lexer_.peek_modifier() == "branchtargets") {  // LIST: .branchtargets A, B;
      lexer_.modifier();
      std::vector<std::string> targets;
      do {
        targets.emplace_back(lexer_.name());
      } while (lexer_.accept(','));
      lexer_.expect(';');
      scope().target_lists[name] = std::move(targets);
      return;
    }
    const auto index = static_cast<uint32_t>(kernel_->statements.size());
    if (!scope().labels.emplace(name, index).second) {
      fail(line, "label " + name + " is defined twice");
    }
  }

  Operand operand(int depth) {
    if (depth > 4) fail(lexer_.line(), "operands are nested too deeply");
    Operand result = simple_operand(depth);
    if (lexer_.peek() == '|') {
      lexer_.accept('|');
      Operand pair;
      pair.kind = Operand::Kind::Pair;
      pair.items.push_back(std::move(result));
      pair.items.push_back(simple_operand(depth));
      return pair;
    }
    return result;
  }

  Operand simple_operand(int depth) {
    Operand result;
    if (lexer_.accept('!')) {
      result = simple_operand(depth + 1);
      if (result.kind != Operand::Kind::Register) fail(lexer_.line(), "'!' before no register");
      result.negated = true;
      return result;
    }
    if (lexer_.accept('{')) {
      result.kind = Operand::Kind::Vector;
      if (lexer_.accept('}')) return result;
      do {
        result.items.push_back(operand(depth + 1));
      } while (lexer_.accept(','));
      lexer_.expect('}');
      return result;
    }
    if (lexer_.accept('[')) {
      result.kind = Operand::Kind::Address;
      result.items.push_back(operand(depth + 1));
      result.value = result.items[0].kind == Operand::Kind::Name ? 0 : addend();
      while (lexer_.accept(',')) result.items.push_back(operand(depth + 1));
      lexer_.expect(']');
      return result;
    }
    if (lexer_.peek() == '-' || lexer_.peek() == '+') {
      const bool negative = lexer_.accept('-');
      if (!negative) lexer_.accept('+');
      if (!lexer_.at_number()) fail(lexer_.line(), "a sign before no number");
      result = lexer_.number();
      if (negative && result.kind == Operand::Kind::Integer) {
        result.value = static_cast<int64_t>(0 - static_cast<uint64_t>(result.value));
      } else if (negative && result.literal_bits != 0) {
        fail(lexer_.line(), "a sign before a hexadecimal floating-point literal");
      } else if (negative) {
        result.real = -result.real;
      }
      return result;
    }
    if (lexer_.at_number()) return lexer_.number();
    const std::string_view name = lexer_.name();
    if (name == "_") {
      result.kind = Operand::Kind::Sink;
      return result;
    }
    result.reg = find_register(name);
    if (result.reg >= 0) {
      result.kind = Operand::Kind::Register;
      return result;
    }
    result.text = std::string(name);
    if (name.starts_with('%')) {
      result.kind = Operand::Kind::Special;
      while (lexer_.at_modifier()) result.text += "." + std::string(lexer_.modifier());
      return result;
    }
    result.kind = Operand::Kind::Name;
    result.value = addend();
    return result;
  }

  // {+|-} number {...}, as in [%r1+16] or [%rd1+-36].
  int64_t addend() {
    uint64_t sum = 0;
    while (lexer_.peek() == '+' || lexer_.peek() == '-') {
      bool negative = lexer_.accept('-');
      if (!negative) {
        lexer_.accept('+');
        negative = lexer_.accept('-');
      }
      if (!lexer_.at_number()) fail(lexer_.line(), "an address offset that is not a number");
      const Operand number = lexer_.number();
      if (number.kind != Operand::Kind::Integer) fail(lexer_.line(), "a fractional offset");
      const auto value = static_cast<uint64_t>(number.value);
      sum += negative ? 0 - value : value;
    }
    return static_cast<int64_t>(sum);
  }

  Lexer lexer_;
  ModuleSyntax result_;
  KernelSyntax* kernel_ = nullptr;
  int current_ = 0;
  int location_ = -1;
  std::map<std::tuple<int, int, int>, int> place_index_;
  std::vector<std::pair<std::string, uint64_t>> functions_;  // label and offset of their names
  std::map<std::pair<std::string, uint64_t>, int> function_index_;
  std::unordered_map<std::string, size_t> debug_labels_;
  std::string debug_bytes_;
  uint64_t global_bytes_ = 0;
};

}  // namespace

ModuleSyntax parse(const std::string& text) { return Parser(text).run(); }

}  // namespace archflash::sim
