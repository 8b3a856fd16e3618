// Arithmetic of .f16 and .bf16, which are their bits in a uint16_t.
#pragma once

#include <cstdint>

#include "sim/numerics/bits.h"

namespace archflash::sim {

// mode.round is RN throughout.

enum class Relu : uint8_t { NONE, RELU, OOB, OOB_RELU };  // .relu is max(0, x); a NaN stays a NaN

// Rounds a value to .f16, with the modifiers of an instruction.
uint16_t finish_f16(double value, FloatMode mode);

uint16_t add_f16(uint16_t a, uint16_t b, FloatMode mode = {});
uint16_t sub_f16(uint16_t a, uint16_t b, FloatMode mode = {});
uint16_t mul_f16(uint16_t a, uint16_t b, FloatMode mode = {});
uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c, FloatMode mode = {}, Relu relu = Relu::NONE);
uint16_t min_f16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t max_f16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t neg_f16(uint16_t a, bool ftz = false);
uint16_t abs_f16(uint16_t a, bool ftz = false);

uint16_t add_bf16(uint16_t a, uint16_t b);
uint16_t sub_bf16(uint16_t a, uint16_t b);
uint16_t mul_bf16(uint16_t a, uint16_t b);
uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c, Relu relu = Relu::NONE);
uint16_t min_bf16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t max_bf16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t neg_bf16(uint16_t a);
uint16_t abs_bf16(uint16_t a);

// Applies a function to each half of packed operands (.f16x2, .bf16x2).
template <class Function, class... Operands>
uint32_t packed(Function function, Operands... operands) {
  const uint32_t lower = function(static_cast<uint16_t>(operands)...);
  const uint32_t upper = function(static_cast<uint16_t>(operands >> 16)...);
  return lower | upper << 16;
}

}  // namespace archflash::sim
