#include "sim/load/program.h"

#include "sim/load/kernel_loader.h"
#include "sim/load/parser.h"

namespace archflash::sim {

struct Source {
  Source(std::string from, Module& module) : text(std::move(from)), parser(text, module) {}

  std::string text;
  Parser parser;
};

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

std::unique_ptr<Module> load_module(std::string text, bool when_asked) {
  auto module = std::make_unique<Module>();
  module->source = std::make_shared<Source>(std::move(text), *module);
  module->source->parser.read_module();
  if (!when_asked) {
    for (const auto& [name, kernel] : module->kernels) find_kernel(*module, name);
  }
  return module;
}

const Kernel* find_kernel(Module& module, const std::string& name) {
  const auto found = module.kernels.find(name);
  if (found == module.kernels.end()) return nullptr;
  if (found->second == nullptr) {
    Parser& parser = module.source->parser;
    KernelSyntax syntax = parser.read_kernel(name);
    KernelLoader(parser.syntax(), syntax).load();
    found->second = std::move(syntax.kernel);
  }
  return found->second.get();
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
  std::string text = "PTX line " + std::to_string(kernel.texts[pc].line) + " (";
  text += kernel.texts[pc].text;
  const std::string source = source_line(module, kernel, pc);
  if (!source.empty()) text += ", " + source;
  return text + ")";
}

}  // namespace archflash::sim
