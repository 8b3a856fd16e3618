// The parser: one function for each construct of PTX text.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/load/lexer.h"
#include "sim/load/syntax.h"

namespace archflash::sim {

// The type that a word such as f16x2 names. Returns false if it names none.
bool parse_type(std::string_view word, Type& type);

class Parser {
 public:
  // What is parsed has views of `text`. Each function throws LoadError naming the line.
  Parser(std::string_view text, Module& module) : lexer_(text) { result_.module = &module; }

  // Reads all but the kernels, whose names it gives the module.
  void read_module();
  KernelSyntax read_kernel(const std::string& name);
  ModuleSyntax& syntax() { return result_; }

 private:
  // parse.cpp: module scope and the heads of kernels
  void module_item();
  void file();
  void skip_token();
  void debug_strings();
  void name_functions();
  int function_named(const std::string& label, uint64_t offset);
  void function();
  void entry();
  void performance_directive(Kernel& kernel);

  // parse_variables.cpp: what has a name and a type
  void variables(std::string_view space_word, bool external, KernelSyntax* kernel);
  void initialiser(Variable& variable, const Type& type, int line);
  static uint64_t literal_bits(const Operand& number, const Type& type, bool negative, int line);
  void add_variable(Variable variable, std::string_view space_word, bool external,
                    KernelSyntax* kernel, int line);
  void parameter(KernelSyntax& syntax);
  void registers();
  int find_register(std::string_view name) const;

  // parse_statements.cpp: the body of a kernel
  void body();
  void body_directive();
  Location read_place();
  void location();
  void statement();
  void label(const std::string& name, int line);
  Operand operand(int depth);
  Operand simple_operand(int depth);
  int64_t addend();

  Scope& scope() { return kernel_->scopes[static_cast<size_t>(current_)]; }

  Lexer lexer_;
  ModuleSyntax result_;
  std::map<std::string, Lexer> entries_;  // where the name of each kernel stands
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

}  // namespace archflash::sim
