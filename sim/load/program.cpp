#include "sim/load/program.h"

#include "sim/load/kernel_loader.h"
#include "sim/load/syntax.h"

namespace archflash::sim {

const char* class_name(Class c) {
  static const char* const NAMES[CLASS_COUNT] = {
      "integer",    "logic",   "float",       "double",  "half",  "convert", "special",
      "move",       "compare", "control",     "barrier", "load",  "store",   "atomic",
      "async_copy", "matrix",  "matrix_load", "shuffle", "fence", "other"};
  return NAMES[static_cast<int>(c)];
}

int Module::capability() const {
  int number = 0;
  for (const char c : target) {
    if (c >= '0' && c <= '9') number = 10 * number + (c - '0');
  }
  return number;
}

std::unique_ptr<Module> load_module(const std::string& text) {
  ModuleSyntax syntax = parse(text);
  for (KernelSyntax& kernel : syntax.kernels) {
    KernelLoader(syntax, kernel).load();
    const std::string name = kernel.kernel->name;
    syntax.module->kernels[name] = std::move(kernel.kernel);
  }
  return std::move(syntax.module);
}

std::string source_line(const Module& module, const Kernel& kernel, uint32_t pc) {
  std::string text;
  if (pc >= kernel.texts.size()) return text;
  for (int at = kernel.texts[pc].location, depth = 0; at >= 0 && depth < 8; ++depth) {
    const Location& place = kernel.locations[static_cast<size_t>(at)];
    const auto file = module.files.find(place.file);
    if (!text.empty()) text += ", inlined at ";
    text += (file == module.files.end() ? "file " + std::to_string(place.file) : file->second) +
            ":" + std::to_string(place.line);
    at = place.inlined_at;
  }
  return text;
}

std::string describe_instruction(const Module& module, const Kernel& kernel, uint32_t pc) {
  if (pc >= kernel.texts.size()) return "no instruction";
  std::string text =
      "PTX line " + std::to_string(kernel.texts[pc].line) + " (" + kernel.texts[pc].text;
  const std::string source = source_line(module, kernel, pc);
  if (!source.empty()) text += ", " + source;
  return text + ")";
}

}  // namespace archflash::sim
