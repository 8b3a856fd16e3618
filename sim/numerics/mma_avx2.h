// The matrix products in which attention kernels spend their time, with AVX2. They give the same
// bits as the functions of mma.h.
#pragma once

#include "sim/numerics/mma.h"

namespace archflash::sim {

// The function for m16n8k16 and m16n8k8 of f16 or bf16 with f32 accumulators; nullptr for other
// shapes, or if AVX2 is not in use.
MmaFunction find_avx2_mma(const MmaShape& shape);

// The products m16n8k16 of one A with several B, which lie side by side as in wgmma.
struct WideOperands {
  const void* a[4];
  const uint32_t (*b)[2][32];  // the registers of each B
  void* const* d;              // four registers for each B, which are added to
};
using WideMmaFunction = void (*)(const WideOperands& operands, int count, const TensorCore& core);

// For the types of find_avx2_mma; nullptr for others.
WideMmaFunction find_wide_mma(const MmaShape& shape);

}  // namespace archflash::sim
