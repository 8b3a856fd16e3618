#include "sim/numerics/tensor_core_models.h"

#include <climits>

namespace archflash::sim {
namespace {

// MMA-Sim (Xie and others, arXiv 2511.10909; github.com/microsoft/MMA-Sim) states bytes and bits
// for each generation, which its authors have compared with cards. Where an H200 was recorded
// (tests/sim/vectors, tests/sim/protocols), it agrees; subnormals of FP8 in wgmma and its sums in
// .f16 were not recorded. That 8.0 to 8.8, 10.x with 11.x, and 12.x
// with what follows are each one generation is assumed. That FP8 mma.sync is made of .f16 products
// is what ptxas 13.0 does.
constexpr Sums NONE{};
constexpr const char* MMA_SIM = "MMA-Sim, a third-party model (arXiv 2511.10909)";
// clang-format off
constexpr TensorCore TENSOR_CORES[] = {
    //                 16 bits    FP8       FP8 in wgmma
    // capabilities    and tf32   mma.sync  and tcgen05
    { 75,  79,         {16, 24},  NONE,     NONE,        MMA_SIM},
    { 80,  88,         {16, 24},  NONE,     NONE,        MMA_SIM},
    { 89,  89,         {16, 24},  {16, 13}, NONE,        MMA_SIM},
    { 90,  99,         {32, 25},  NONE,     {32, 13},    "recorded on an H200"},
    {100, 119,         {32, 25},  NONE,     {32, 25},    MMA_SIM},
    {120, INT_MAX,     {32, 25},  {32, 25}, NONE,        MMA_SIM},
};
// clang-format on

}  // namespace

std::span<const TensorCore> tensor_cores() { return TENSOR_CORES; }

const TensorCore& tensor_core_of(int capability) {
  const TensorCore* row = TENSOR_CORES;
  while (capability > row->last) ++row;
  return *row;
}

}  // namespace archflash::sim
