#include <algorithm>

#include "sim/load/parser.h"

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

void Parser::read_module() {
  while (!lexer_.at_end()) module_item();
  if (result_.module->version.empty()) fail(1, "no .version directive: this is not PTX");
}

void Parser::module_item() {
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
      lexer_.skip_braces();
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

void Parser::file() {
  const int64_t index = lexer_.number().value;
  result_.module->files[static_cast<int>(index)] = std::string(lexer_.quoted());
  while (lexer_.accept(',')) lexer_.number();
}

void Parser::skip_token() {
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
void Parser::debug_strings() {
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

void Parser::name_functions() {
  for (size_t i = result_.module->functions.size(); i < functions_.size(); ++i) {
    const auto& [label, offset] = functions_[i];
    const auto found = debug_labels_.find(label);
    std::string name;
    if (found != debug_labels_.end() && offset < debug_bytes_.size() - found->second) {
      name = printable(short_function_name(debug_bytes_.c_str() + found->second + offset));
    }
    result_.module->functions.push_back(std::move(name));
  }
}

int Parser::function_named(const std::string& label, uint64_t offset) {
  const auto key = std::make_pair(label, offset);
  const auto [found, added] = function_index_.try_emplace(key, static_cast<int>(functions_.size()));
  if (added) functions_.push_back(key);
  return found->second;
}

// Skips a function. No kernel can call it, since the table has no call instruction.
void Parser::function() {
  while (!lexer_.at_end() && lexer_.peek() != '{' && lexer_.peek() != ';') skip_token();
  if (lexer_.peek() == '{')
    lexer_.skip_braces();
  else
    lexer_.expect(';');
}

// Notes where a kernel stands, and goes past it.
void Parser::entry() {
  const int line = lexer_.line();
  const Lexer at_name = lexer_;
  const std::string name(lexer_.name());
  while (!lexer_.at_end() && lexer_.peek() != '{' && lexer_.peek() != ';') skip_token();
  if (lexer_.accept(';')) return;  // a declaration only
  lexer_.skip_braces();
  if (!entries_.emplace(name, at_name).second) fail(line, "kernel " + name + " is defined twice");
  result_.module->kernels.emplace(name, nullptr);
}

KernelSyntax Parser::read_kernel(const std::string& name) {
  lexer_ = entries_.at(name);
  lexer_.name();
  KernelSyntax syntax;
  syntax.kernel = std::make_unique<Kernel>();
  syntax.kernel->name = name;
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
  body();
  kernel_ = nullptr;
  name_functions();
  return syntax;
}

void Parser::performance_directive(Kernel& kernel) {
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
    if (values[count - 1] < 1 || values[count - 1] > 65536) fail(line, "bad ." + std::string(word));
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

}  // namespace archflash::sim
