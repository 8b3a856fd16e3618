// A PTX module as the simulator executes it: its variables and kernels, with instructions whose
// operands are places in a warp's registers, and the source lines that instructions came from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace archflash::sim {

constexpr int LANES = 32;
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

// Malformed or unknown PTX, or a launch that a driver would refuse.
struct LoadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The place of an operand's 32 lanes: a byte offset in the warp's registers or, with CONSTANT set,
// in the kernel's constants. While a kernel is being loaded it is the number of a register instead.
using Ref = uint32_t;
constexpr Ref CONSTANT = 0x80000000u;
constexpr Ref NO_REF = 0x7FFFFFFFu;

// SharedCluster is the shared memory of any CTA of the cluster.
enum class Space : uint8_t { Generic, Global, Shared, Local, Param, Const, SharedCluster };

// What a warp does with an instruction besides calling its handler.
enum class Control : uint8_t {
  None,
  Branch,
  BranchIndexed,
  Exit,
  Trap,
  Barrier,  // the handler may block the fragment
};

// Which lanes must have arrived before an instruction executes.
enum class Converge : uint8_t {
  No,
  Aligned,  // every lane of the warp that has not exited
  Whole,    // all 32 lanes, none of which may have exited: the instruction uses all their registers
  Members,  // every lane of the member mask (operand `converge_operand`) that has not exited
};

// The classes by which a report counts instructions.
enum class Class : uint8_t {
  Integer,
  Logic,
  Float,
  Double,
  Half,
  Convert,
  Special,
  Move,
  Compare,
  Control,
  Barrier,
  Load,
  Store,
  Atomic,
  AsyncCopy,
  Matrix,
  MatrixLoad,
  Shuffle,
  Fence,
  Other,
};
constexpr int CLASS_COUNT = 20;
const char* class_name(Class c);

class Warp;
struct Instruction;
using Handler = void (*)(Warp& warp, const Instruction& instruction, uint32_t mask);

struct Instruction {
  Handler run = nullptr;
  const Ref* operands = nullptr;  // in the handler's own order
  const void* extra = nullptr;    // data for this kind of instruction, which the kernel owns
  int64_t offset = 0;             // it is added to an address, or it is an immediate
  Ref guard = NO_REF;             // a predicate; NO_REF: always
  uint32_t target = 0;            // a branch goes to the instruction with this index
  uint32_t flags = 0;             // each handler defines its own
  bool guard_negated = false;
  Control control = Control::None;
  Converge converge = Converge::No;
  uint8_t converge_operand = 0;
  Class counted = Class::Other;
  Space space = Space::Generic;
  uint8_t count = 1;    // how many elements a vector has
  uint8_t bytes = 0;    // the size of an element in memory
  uint8_t unused = 0;   // bit k is set if nothing reads element k of a load
  bool pinned = false;  // it uses its registers after it has executed: nothing shares their places
};

// A place in a source file, as .loc states it.
struct Location {
  int file = 0, line = 0, column = 0;
  int inlined_at = -1;  // the index of the call's location; -1: the code is not inlined
  int function = -1;    // the index in Module::functions; -1: not stated, as for code not inlined
};

// The text of an instruction, for reports and tools: parts of the module's.
struct InstructionText {
  int line = 0;                // in the PTX text, from 1
  int location = -1;           // index in Kernel::locations
  std::string_view text;       // opcode with modifiers
  std::string_view statement;  // the whole statement
};

struct Variable {
  std::string name;
  Space space = Space::Shared;
  uint64_t bytes = 0;
  uint64_t align = 1;
  uint64_t address = 0;  // within its space; for .global, the index among the module's globals
  bool dynamic = false;  // .extern .shared name[]
  std::vector<uint8_t> initial;
  bool initialised = false;
};

struct Dim3 {
  int64_t x = 1, y = 1, z = 1;
  int64_t count() const { return x * y * z; }
};

// Where a thread stands in its launch.
struct ThreadPosition {
  Dim3 block, grid, cluster, cta;
  int64_t thread, cta_index;
  uint64_t dynamic_shared, shared_bytes;
};

struct SpecialRegister {
  const char* name;
  uint64_t (*value)(const ThreadPosition&);
  int bits = 32;
};

// A special register, whose value every thread finds in an ordinary register when it starts.
struct SpecialUse {
  const SpecialRegister* special;
  Ref place;
};

// A constant that is an address of shared memory. It has `bytes` bytes for each lane, at `offset`.
struct SharedConstant {
  size_t offset;
  size_t bytes;
};

struct Kernel {
  std::string name;
  uint32_t parameter_bytes = 0;
  int max_threads = 0;                  // .maxntid, the product of its dimensions; 0: not stated
  int required_threads[3] = {0, 0, 0};  // .reqntid; 0: not stated
  uint64_t static_variable_bytes = 0;   // the size of all static variables in shared memory
  uint64_t static_shared_bytes = 0;     // the offset at which the dynamic part begins
  uint64_t dynamic_shared_align = 16;
  bool uses_dynamic_shared = false;
  uint64_t local_bytes = 0;  // per thread
  // The kernel has atomics or fences beyond the CTA, so that its CTAs run one after another.
  bool orders_globally = false;
  bool takes_unstarted = false;  // it has clusterlaunchcontrol
  // The race detector treats so many bytes (log2) of shared and of global memory as one.
  int race_granule_log2 = 2, global_granule_log2 = 2;
  int min_ctas = 1;       // .minnctapersm
  int max_registers = 0;  // .maxnreg; 0: not stated
  bool uses_wgmma = false;
  bool uses_tcgen05 = false;
  int tcgen05_group = 0;  // the number that its .cta_group states; 0: none is stated
  // For each instruction of a kernel with wgmma or tcgen05: whether it uses a register of a wgmma
  // or of a load of tensor memory, how many operands it has, and which of them it writes.
  std::vector<uint8_t> touches_pinned;
  std::vector<uint32_t> operand_counts;
  std::vector<std::vector<bool>> written_operands;

  std::vector<Instruction> code;
  std::vector<InstructionText> texts;  // one for each instruction
  std::vector<Location> locations;
  std::vector<uint8_t> constants;  // 32 lanes for each constant
  std::vector<SharedConstant> shared_constants;
  uint32_t register_bytes = 0;  // the size of one warp's registers
  std::vector<SpecialUse> specials;

  std::vector<std::unique_ptr<Ref[]>> operand_lists;
  std::vector<std::shared_ptr<const void>> extras;
};

struct Source;

struct Module {
  std::string version, target;
  int capability() const;                                  // of the target: 90 for "sm_90a"
  std::map<std::string, std::unique_ptr<Kernel>> kernels;  // nullptr: not yet loaded
  std::map<int, std::string> files;
  std::vector<std::string> functions;  // inlined ones, without namespaces and arguments
  std::vector<Variable> globals;       // the .global variables
  std::vector<uint8_t> const_memory;   // holds all .const variables
  std::shared_ptr<Source> source;      // its text
};

// Parses PTX text and resolves every instruction of every kernel, or of each kernel when
// find_kernel is first asked for it. Throws LoadError naming the line.
std::unique_ptr<Module> load_module(std::string text, bool when_asked = false);

// The kernel of that name; nullptr: there is none.
const Kernel* find_kernel(Module& module, const std::string& name);

// "line 12: ld.shared.u32 (attention_fwd.cuh:33)"
std::string describe_instruction(const Module& module, const Kernel& kernel, uint32_t pc);
std::string source_line(const Module& module, const Kernel& kernel, uint32_t pc);
// Makes "multiply_qk" of "_ZN9archflash6ampere11multiply_qkI...", and "lambda" of a lambda.
std::string short_function_name(const std::string& linkage_name);

}  // namespace archflash::sim
