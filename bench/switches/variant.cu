// A kernel of blackwell_dc with one setting that is not the wheel's. The compiler's command line
// defines these macros:
//   ARCHFLASH_DTYPE  dtype of that Config
//   KERNEL           name of the kernel in src/blackwell_dc/kernels
//   WHEEL_CONFIG     its Config there
//   SETTING          an assignment to a member of Settings, such as `switches.split_p = false`
#include "blackwell_dc/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

namespace {

struct Settings {
  Switches switches = WHEEL_CONFIG::SWITCHES;
  Registers registers = WHEEL_CONFIG::REGISTERS;
};
constexpr Settings SETTINGS = [] {
  Settings settings;
  settings.SETTING;
  return settings;
}();

struct Variant : WHEEL_CONFIG {
  static constexpr Switches SWITCHES = SETTINGS.switches;
  static constexpr Registers REGISTERS = SETTINGS.registers;
  static_assert(4 * 32 * (2 * REGISTERS.softmax + REGISTERS.correction + REGISTERS.other) <= 65536,
                "CUDA: 65536 registers of an SM");
};

}  // namespace

ARCHFLASH_KERNEL(KERNEL, attention_fwd, Variant)
