#include "sim/load/parser.h"

namespace archflash::sim {
namespace {

constexpr int MAX_NESTING = 64;

}  // namespace

void Parser::body() {
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

void Parser::body_directive() {
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

Location Parser::read_place() {
  Location place;
  place.file = static_cast<int>(lexer_.number().value);
  place.line = static_cast<int>(lexer_.number().value);
  place.column = static_cast<int>(lexer_.number().value);
  return place;
}

void Parser::location() {
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

void Parser::statement() {
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
  const std::string_view last = s.modifiers.empty() ? s.opcode : s.modifiers.back();
  s.name = {s.opcode.data(), static_cast<size_t>(last.data() + last.size() - s.opcode.data())};
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

void Parser::label(const std::string& name, int line) {
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

Operand Parser::operand(int depth) {
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

Operand Parser::simple_operand(int depth) {
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
int64_t Parser::addend() {
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

}  // namespace archflash::sim
