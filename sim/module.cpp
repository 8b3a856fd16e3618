// The extension module archflash._archflash_sim.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>

#include "sim/load/forms.h"
#include "sim/numerics/cpu.h"
#include "sim/run/launch.h"
#include "sim/units/tensor_map.h"

namespace archflash::sim {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

constexpr int MAX_INLINED = 64;  // calls of calls; a guard against rings

// A loaded module with the storage of its .global variables, which outlive a launch.
struct LoadedModule {
  std::unique_ptr<Module> module;
  std::vector<std::vector<uint8_t>> globals;

  const Kernel& kernel(const std::string& name) const {
    const Kernel* const found = find_kernel(*module, name);
    if (found == nullptr) throw LoadError("no kernel is called " + name);
    return *found;
  }
};

std::unique_ptr<LoadedModule> load(const std::string& text, bool when_asked) {
  auto result = std::make_unique<LoadedModule>();
  {
    const nb::gil_scoped_release release;
    result->module = load_module(text, when_asked);
  }
  for (const Variable& variable : result->module->globals) {
    std::vector<uint8_t> bytes(variable.bytes);
    std::copy(variable.initial.begin(), variable.initial.end(), bytes.begin());
    result->globals.push_back(std::move(bytes));
  }
  return result;
}

// Where an instruction comes from: (function, file, line), innermost first. What nothing is inlined
// into has no function name.
nb::list calls(const Module& module, const Kernel& kernel, int location) {
  nb::list result;
  for (int depth = 0; location >= 0 && depth < MAX_INLINED; ++depth) {
    const Location& place = kernel.locations[static_cast<size_t>(location)];
    const auto file = module.files.find(place.file);
    result.append(nb::make_tuple(
        place.function >= 0 ? module.functions[static_cast<size_t>(place.function)] : std::string(),
        file == module.files.end() ? std::string() : file->second, place.line));
    location = place.inlined_at;
  }
  return result;
}

nb::list instructions(const LoadedModule& loaded, const std::string& name) {
  const Kernel& kernel = loaded.kernel(name);
  nb::list result;
  for (size_t i = 0; i < kernel.code.size(); ++i) {
    const InstructionText& text = kernel.texts[i];
    nb::dict row;
    row["line"] = text.line;
    row["opcode"] = text.text;
    row["statement"] = text.statement;
    row["source"] = source_line(*loaded.module, kernel, static_cast<uint32_t>(i));
    row["calls"] = calls(*loaded.module, kernel, text.location);
    row["class"] = class_name(kernel.code[i].counted);
    result.append(row);
  }
  return result;
}

Mode mode_named(const std::string& name) {
  if (name == "lazy") return Mode::Lazy;
  if (name == "eager") return Mode::Eager;
  if (name == "random") return Mode::Random;
  if (name == "priority") return Mode::Priority;
  if (name == "shuffled") return Mode::Shuffled;
  throw nb::value_error(("mode " + name + ": lazy, eager, random, priority or shuffled").c_str());
}

nb::list findings_of(const LaunchReport& report, const Module& module, const Kernel& kernel) {
  nb::list findings;
  for (const Finding& f : report.findings.list()) {
    nb::dict row;
    row["severity"] = f.severity == Severity::Error ? "error" : "lint";
    row["kind"] = f.kind;
    row["message"] = f.message;
    row["cta"] = f.cta;
    row["warp"] = f.warp;
    row["lane"] = f.lane;
    row["pc"] = f.pc;
    row["address"] = f.address;
    row["count"] = f.count;
    row["fatal"] = f.fatal;
    const bool known = f.pc >= 0 && static_cast<size_t>(f.pc) < kernel.texts.size();
    row["line"] = known ? kernel.texts[static_cast<size_t>(f.pc)].line : 0;
    row["instruction"] = known ? kernel.texts[static_cast<size_t>(f.pc)].statement : "";
    row["source"] = known ? source_line(module, kernel, static_cast<uint32_t>(f.pc)) : "";
    findings.append(row);
  }
  return findings;
}

// What the instructions did, one by one and summed up.
void add_counts(const LaunchReport& report, const Kernel& kernel, nb::dict& result) {
  nb::list executed;
  std::map<std::string, uint64_t> by_class;
  std::map<std::string_view, uint64_t> by_opcode;
  std::map<std::string_view, std::pair<uint64_t, uint64_t>>
      shared;  // wavefronts, and without conflicts
  uint64_t wavefronts = 0, transactions = 0, local = 0;
  for (size_t i = 0; i < kernel.code.size(); ++i) {
    const uint64_t count = report.counts.executed[i];
    executed.append(count);
    if (count == 0) continue;
    const auto& memory_counts = report.counts.memory[i];
    const std::string_view opcode = kernel.texts[i].text;
    by_class[class_name(kernel.code[i].counted)] += count;
    by_opcode[opcode] += count;
    if (memory_counts.ideal != 0) {
      auto& [taken, least] = shared[opcode];
      taken += memory_counts.wavefronts;
      least += memory_counts.ideal;
    }
    wavefronts += memory_counts.wavefronts;
    transactions += memory_counts.transactions;
    local += memory_counts.local;
  }
  result["executed"] = nb::tuple(executed);
  result["instructions"] = by_class;
  result["opcodes"] = by_opcode;
  result["bank_conflicts"] = shared;
  result["wavefronts"] = wavefronts;
  result["transactions"] = transactions;
  result["local"] = local;
}

nb::dict traces_of(const LaunchReport& report) {
  nb::dict traces;
  for (const auto& [cta, trace] : report.traces) {
    nb::list rows;
    for (const TraceEvent& event : trace.events) {
      static const char* const KINDS[] = {"run", "wait", "async"};
      rows.append(nb::make_tuple(KINDS[static_cast<int>(event.kind)], event.track, event.begin,
                                 event.end, event.pc, event.bytes, event.seen, event.cause,
                                 event.label, nb::tuple(nb::cast(event.operands))));
    }
    traces[nb::int_(cta)] = nb::make_tuple(trace.tracks, rows);
  }
  return traces;
}

using Sizes = std::array<int64_t, 3>;

nb::dict run(LoadedModule& loaded, const std::string& kernel_name, const Sizes& grid,
             const Sizes& cluster, const Sizes& block, uint64_t shared_bytes, nb::bytes parameters,
             GlobalMemory& memory, const std::string& mode, uint64_t seed, bool race, int threads,
             uint64_t max_instructions, int capability, uint64_t shared_limit,
             const std::vector<int64_t>& traced_ctas, uint64_t stretch, int64_t resident_ctas,
             bool starts_early, bool next_starts_early) {
  LaunchRequest request;
  request.kernel = kernel_name;
  request.grid = {grid[0], grid[1], grid[2]};
  request.cluster = {cluster[0], cluster[1], cluster[2]};
  request.block = {block[0], block[1], block[2]};
  request.dynamic_shared = shared_bytes;
  request.capability = capability;
  request.shared_limit = shared_limit;
  const auto* bytes = reinterpret_cast<const uint8_t*>(parameters.c_str());
  request.parameters.assign(bytes, bytes + parameters.size());
  request.options.mode = mode_named(mode);
  request.options.seed = seed;
  request.options.race = race;
  request.options.threads = threads;
  request.options.max_instructions = max_instructions;
  request.options.stretch = stretch;
  request.options.resident_ctas = resident_ctas;
  request.traced_ctas = traced_ctas;
  request.starts_early = starts_early;
  request.next_starts_early = next_starts_early;
  // Ctrl-C: Python's handlers of signals run here, and their exception stays set in this thread.
  request.wants_to_stop = [] {
    const nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
  };
  // A kernel that is new is read here, so that its time is not the run's.
  find_kernel(*loaded.module, kernel_name);
  LaunchReport report;
  double seconds = 0;
  bool interrupted = false;
  {
    const nb::gil_scoped_release release;
    const auto begin = std::chrono::steady_clock::now();
    try {
      report = launch(*loaded.module, request, memory, loaded.globals);
    } catch (const Interrupted&) {
      interrupted = true;
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  if (interrupted) throw nb::python_error();
  const Kernel& kernel = loaded.kernel(kernel_name);
  nb::dict result;
  result["findings"] = findings_of(report, *loaded.module, kernel);
  result["dropped"] = report.findings.dropped();
  result["complete"] = report.complete;
  result["overlaps_checked"] = report.overlaps_checked;
  result["ctas"] = report.counts.ctas;
  result["barrier_waits"] = report.counts.barrier_waits;
  add_counts(report, kernel, result);
  result["seconds"] = seconds;
  result["traces"] = traces_of(report);
  return result;
}

}  // namespace

NB_MODULE(_archflash_sim, m) {
  m.doc() = "The PTX simulator: loads PTX text and runs its kernels on the host.";
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const LoadError& failure) {
      PyErr_SetString(nb::module_::import_("archflash._errors").attr("LaunchError").ptr(),
                      failure.what());
    }
  });

  nb::class_<GlobalMemory>(m, "Memory", "The buffers that kernels may touch.")
      .def(nb::init<>())
      .def(
          "add",
          [](GlobalMemory& memory, const std::string& name, uintptr_t host, uint64_t bytes,
             bool writable, bool initialised) {
            return memory.add(name, reinterpret_cast<uint8_t*>(host), bytes, writable, initialised);
          },
          "name"_a, "host"_a, "bytes"_a, "writable"_a, "initialised"_a,
          "Registers host memory, which must outlive this; returns its simulated address.")
      .def("forbid", &GlobalMemory::forbid, "address"_a, "Forbids all bytes of a buffer.")
      .def("allow", &GlobalMemory::allow, "address"_a, "starts"_a, "length"_a, "initialised"_a,
           "Allows `length` bytes from each start on again.")
      .def("remove", &GlobalMemory::remove, "address"_a)
      .def(
          "state",
          [](GlobalMemory& memory, uint64_t address) {
            const Buffer* buffer = memory.find(address);
            if (buffer == nullptr) throw LoadError("no buffer at the address given");
            return nb::bytes(reinterpret_cast<const char*>(buffer->state.data()),
                             buffer->state.size());
          },
          "address"_a,
          "For each byte 0: not written, 1: holds a value, 3: no element; empty: all 1.");

  nb::class_<LoadedModule>(m, "Module", "A PTX module, every instruction resolved.")
      .def_prop_ro("kernels",
                   [](const LoadedModule& loaded) {
                     std::vector<std::string> names;
                     for (const auto& [name, kernel] : loaded.module->kernels)
                       names.push_back(name);
                     return names;
                   })
      .def_prop_ro("target", [](const LoadedModule& loaded) { return loaded.module->target; })
      .def(
          "classes",
          [](const LoadedModule& loaded, const std::string& kernel) {
            std::set<std::string> classes;
            for (const Instruction& instruction : loaded.kernel(kernel).code)
              classes.insert(class_name(instruction.counted));
            return classes;
          },
          "kernel"_a, "The classes of the kernel's instructions.")
      .def("instructions", &instructions, "kernel"_a,
           nb::sig("def instructions(self, kernel: str) -> list[dict[str, typing.Any]]"))
      .def(
          "parameter_bytes",
          [](const LoadedModule& loaded, const std::string& name) {
            return loaded.kernel(name).parameter_bytes;
          },
          "kernel"_a)
      .def(
          "register_bytes",
          [](const LoadedModule& loaded, const std::string& name) {
            return loaded.kernel(name).register_bytes;
          },
          "kernel"_a, "What a warp's registers take on the host.")
      .def("run", &run, "kernel"_a, "grid"_a, "cluster"_a, "block"_a, "shared_bytes"_a,
           "parameters"_a, "memory"_a, "mode"_a, "seed"_a, "race"_a, "threads"_a,
           "max_instructions"_a, "capability"_a, "shared_limit"_a, "traced_ctas"_a, "stretch"_a,
           "resident_ctas"_a, "starts_early"_a, "next_starts_early"_a,
           nb::sig("def run(self, kernel: str, grid: collections.abc.Sequence[int], cluster: "
                   "collections.abc.Sequence[int], block: collections.abc.Sequence[int], "
                   "shared_bytes: int, parameters: bytes, memory: Memory, mode: str, seed: int, "
                   "race: bool, threads: int, max_instructions: int, capability: int, "
                   "shared_limit: int, traced_ctas: collections.abc.Sequence[int], stretch: int, "
                   "resident_ctas: int, starts_early: bool, next_starts_early: bool) -> dict[str, "
                   "typing.Any]"));

  m.def("load", &load, "text"_a, "when_asked"_a = false,
        "Parses PTX text and resolves every instruction of every kernel, or of a kernel when it is "
        "first asked for; LaunchError names the line of what it does not know.");
  m.def(
      "forms",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> rows;
        for (const FormTable& table : form_tables()) {
          for (const Form& form : table.forms) {
            rows.emplace_back(table.name, form.opcode, form.modifiers);
          }
        }
        return rows;
      },
      "The instruction table: (what it is about, opcode, modifiers in order: alternatives with |, "
      "? before what may be missing, $name for a set of `modifier_sets`).");
  m.def(
      "find_form",
      [](const std::string& instruction) {
        const Form* const form = find_form(instruction);
        int64_t index = 0;
        for (const FormTable& table : form_tables()) {
          const auto forms = static_cast<int64_t>(table.forms.size());
          if (form >= table.forms.data() && form < table.forms.data() + forms) {
            return index + (form - table.forms.data());
          }
          index += forms;
        }
        return int64_t{-1};
      },
      "instruction"_a, "Index in `forms` of a spelled instruction; -1: there is none.");
  m.def("modifier_sets", &modifier_sets, "Sets of alternatives: (name, \"a|b|c\").");
  m.def(
      "encode_tensor_map",
      [](uint64_t address, const std::string& type, const std::vector<int64_t>& dims,
         const std::vector<int64_t>& strides, const std::vector<int64_t>& box,
         const std::vector<int64_t>& element_steps, int swizzle, bool nan_fill) {
        if (swizzle < 0 || swizzle > 3) throw LoadError("a tensor map: no such swizzle");
        const auto bytes =
            encode(make_tensor_map(address, map_type_named(type), dims, strides, box, element_steps,
                                   static_cast<MapSwizzle>(swizzle), nan_fill));
        return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      },
      "address"_a, "type"_a, "dims"_a, "strides"_a, "box"_a, "element_steps"_a, "swizzle"_a,
      "nan_fill"_a, "The simulator's tensor map, after the driver's checks: 128 bytes.");
  m.def(
      "tensor_cores",
      [] {
        using Row = std::tuple<int, std::string, std::pair<int, int>, std::pair<int, int>,
                               std::pair<int, int>>;
        std::vector<Row> rows;
        for (const TensorCore& core : tensor_cores()) {
          const auto sums = [](const Sums& s) { return std::pair(s.bytes, s.fraction_bits); };
          rows.emplace_back(core.first, core.source, sums(core.wide), sums(core.fp8_mma),
                            sums(core.fp8_async));
        }
        return rows;
      },
      "How tensor cores add up: (the first capability, 10 * major + minor; the source; for 16 bits "
      "and tf32, for FP8 in mma.sync, for FP8 in wgmma and tcgen05: the bytes of a row of A in one "
      "addition, 0 where there is no instruction, and the bits kept below the largest exponent).");
  m.def("uses_avx2", &uses_avx2);
  m.def("set_avx2", &set_avx2, "enabled"_a,
        "Chooses the code that modules loaded from now on use; both give the same bits.");
}

}  // namespace archflash::sim
