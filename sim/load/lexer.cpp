#include "sim/load/lexer.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>

namespace archflash::sim {
namespace {

bool continues_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$';
}

bool parse_digits(const std::string& digits, int base, uint64_t& value) {
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  return error == std::errc() && end == digits.data() + digits.size() && !digits.empty();
}

}  // namespace

bool starts_name(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

std::string_view Lexer::since(size_t begin) const {
  std::string_view piece = text_.substr(begin, at_ - begin);
  while (!piece.empty() && std::isspace(static_cast<unsigned char>(piece.back()))) {
    piece.remove_suffix(1);
  }
  return piece;
}

void Lexer::expect(char c) {
  if (!accept(c)) {
    fail(line_, std::string("expected '") + c + "' before " + here());
  }
}

std::string_view Lexer::name() {
  if (!starts_name(peek())) fail(line_, "expected a name before " + here());
  const size_t begin = at_++;
  while (continues_name(peek())) ++at_;
  const std::string_view result = text_.substr(begin, at_ - begin);
  skip();
  return result;
}

bool Lexer::at_modifier() const { return peek() == '.' && continues_name(peek(1)); }

std::string_view Lexer::modifier() {
  if (!at_modifier()) fail(line_, "expected a directive or modifier before " + here());
  const size_t begin = ++at_;
  while (continues_name(peek()) || (peek() == ':' && peek(1) == ':' && continues_name(peek(2)))) {
    at_ += peek() == ':' ? 2 : 1;
  }
  const std::string_view result = text_.substr(begin, at_ - begin);
  skip();
  return result;
}

std::string_view Lexer::peek_modifier() const {
  size_t end = at_ + 1;
  while (end < text_.size() && continues_name(text_[end])) ++end;
  return peek() == '.' ? text_.substr(at_ + 1, end - at_ - 1) : std::string_view();
}

std::string_view Lexer::quoted() {
  if (peek() != '"') fail(line_, "expected a string before " + here());
  const size_t begin = ++at_;
  while (!at_end() && peek() != '"' && peek() != '\n') ++at_;
  if (peek() != '"') fail(line_, "a string does not end");
  const std::string_view result = text_.substr(begin, at_ - begin);
  ++at_;
  skip();
  return result;
}

void Lexer::skip_braces() {
  const int line = line_;
  if (peek() != '{') expect('{');
  for (int depth = 0; !at_end();) {
    const char c = text_[at_++];
    if (c == '{') {
      ++depth;
    } else if (c == '}') {
      if (--depth == 0) return skip();
    } else if (c == '\n') {
      ++line_;
    } else if (c == '"') {
      while (!at_end() && peek() != '"' && peek() != '\n') ++at_;
      at_ += peek() == '"' ? 1 : 0;
    } else if (c == '/' && (peek() == '/' || peek() == '*')) {
      --at_;
      skip();
    }
  }
  fail(line, "a '{' has no '}'");
}

bool Lexer::at_number() const { return std::isdigit(static_cast<unsigned char>(peek())); }

Operand Lexer::number() {
  Operand result;
  const size_t begin = at_;
  while (continues_name(peek()) || peek() == '.' ||
         ((peek() == '-' || peek() == '+') && (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E') &&
          is_decimal(begin))) {
    ++at_;
  }
  std::string word(text_.substr(begin, at_ - begin));
  skip();
  const char prefix = word.size() > 1 && word[0] == '0'
                          ? static_cast<char>(std::tolower(static_cast<unsigned char>(word[1])))
                          : '\0';
  if (prefix == 'f' || prefix == 'd') {
    const size_t digits = prefix == 'f' ? 8 : 16;
    uint64_t bits = 0;
    if (word.size() != digits + 2 || !parse_digits(word.substr(2), 16, bits)) {
      fail(line_, "malformed floating-point literal " + word);
    }
    result.kind = Operand::Kind::Float;
    result.literal_bits = prefix == 'f' ? 32 : 64;
    result.value = static_cast<int64_t>(bits);
    return result;
  }
  if (prefix != 'x' && word.find_first_of(".eE") != std::string::npos) {
    char* end = nullptr;
    result.kind = Operand::Kind::Float;
    result.real = std::strtod(word.c_str(), &end);
    if (*end != '\0') fail(line_, "malformed number " + word);
    return result;
  }
  std::string digits = word;
  if (!digits.empty() && (digits.back() == 'U' || digits.back() == 'u')) digits.pop_back();
  int base = 10;
  if (prefix == 'x')
    base = 16, digits = digits.substr(2);
  else if (prefix == 'b')
    base = 2, digits = digits.substr(2);
  else if (digits.size() > 1 && digits[0] == '0')
    base = 8;
  uint64_t value = 0;
  if (!parse_digits(digits, base, value)) fail(line_, "malformed number " + word);
  result.kind = Operand::Kind::Integer;
  result.value = static_cast<int64_t>(value);
  return result;
}

std::string Lexer::here() const {
  if (at_end()) return "the end of the text";
  std::string rest(text_.substr(at_, 24));
  rest = rest.substr(0, rest.find('\n'));
  return "\"" + rest + "\"";
}

// Whether the literal that begins at `begin` has no prefix such as 0x, so that "e-" is an exponent.
bool Lexer::is_decimal(size_t begin) const {
  return !(text_[begin] == '0' && at_ > begin + 1 &&
           std::isalpha(static_cast<unsigned char>(text_[begin + 1])));
}

void Lexer::skip() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '\n') ++line_;
    if (std::isspace(static_cast<unsigned char>(c))) {
      ++at_;
    } else if (c == '/' && peek(1) == '/') {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else if (c == '/' && peek(1) == '*') {
      const size_t end = text_.find("*/", at_ + 2);
      if (end == std::string_view::npos) fail(line_, "a comment does not end");
      line_ += static_cast<int>(std::count(text_.begin() + at_, text_.begin() + end, '\n'));
      at_ = end + 2;
    } else {
      return;
    }
  }
}

}  // namespace archflash::sim
