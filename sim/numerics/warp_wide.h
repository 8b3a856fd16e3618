// The instructions that attention kernels execute most, for all 32 lanes of a warp at once: with
// AVX2 where the machine has it, and with the same bits where it has not. d may be one of the
// operands.
#pragma once

#include <cstdint>

namespace archflash::sim {

inline constexpr int WARP = 32;  // lanes

void fma_rn_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
void fma_rn_ftz_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
void ex2_approx_ftz_f32_warp(uint32_t* d, const uint32_t* a);
void cvt_rn_f16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b);   // a: upper half
void cvt_rn_bf16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b);  // a: upper half

}  // namespace archflash::sim
