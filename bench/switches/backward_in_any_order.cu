// A backward kernel of blackwell_dc that does not rely on the order in which products are issued.
// The compiler's command line defines these macros:
//   ARCHFLASH_DTYPE  dtype of that Config
//   KERNEL           name of the kernel in src/blackwell_dc/kernels
//   WHEEL_CONFIG     its Config there
#include "blackwell_dc/attention_bwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

namespace {

struct Variant : WHEEL_CONFIG {
  static constexpr bool TRUST_ISSUE_ORDER = false;
};

}  // namespace

ARCHFLASH_KERNEL(KERNEL, backward::attention_bwd, Variant)
