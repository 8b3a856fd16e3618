// The matrix product that attention kernels spend their time in, with the same bits as find_mma's.
#pragma once

#include "sim/numerics/mma.h"

namespace archflash::sim {

// For m16n8k16 and m16n8k8 of f16 or bf16 with f32 accumulators, where the machine has AVX2 and its
// use is enabled; nullptr for anything else.
MmaFunction find_hot_mma(const MmaShape& shape);

// Products m16n8k16 of one A with several B, side by side as in wgmma.
struct WideOperands {
  const void* a[4];
  const uint32_t (*b)[2][32];  // the registers of each B
  void* const* d;              // four registers for each B, which are added to
};
using WideMmaFunction = void (*)(const WideOperands& operands, int count);

// For types as above; nullptr for others.
WideMmaFunction find_wide_mma(const MmaShape& shape);

}  // namespace archflash::sim
