// Reads PTX text piece by piece: names, modifiers, literals, single characters. Comments and spaces
// are skipped, and lines are counted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sim/load/syntax.h"

namespace archflash::sim {

bool starts_name(char c);

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { skip(); }

  int line() const { return line_; }
  bool at_end() const { return at_ >= text_.size(); }
  char peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  size_t position() const { return at_; }
  std::string_view since(size_t begin) const;  // without the spaces at its end

  // These take one piece and what is skipped after it; a piece of another kind fails.
  bool accept(char c) {  // false, and nothing is taken: another character comes
    if (peek() != c || at_end()) return false;
    ++at_;
    skip();
    return true;
  }
  void expect(char c);
  std::string_view name();      // an identifier, a register or an opcode: no dots
  std::string_view modifier();  // the word of .word; it may have :: inside
  std::string_view quoted();
  Operand number();  // an integer, decimal or hexadecimal floating-point literal, without a sign

  bool at_modifier() const;
  std::string_view peek_modifier() const;
  // Goes past { ... }, without a look at what is inside.
  void skip_braces();
  bool at_number() const;
  std::string here() const;  // what comes next, for messages

 private:
  bool is_decimal(size_t begin) const;
  void skip();

  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace archflash::sim
