// What PTX's arithmetic instructions compute, one value at a time: pure functions without state.
// This header includes them all.
//
// .f32 is float and .f64 is double; .f16 and .bf16 are their bits in a uint16_t; packed pairs
// (.f16x2, .bf16x2) are a uint32_t with element 0 in the lower half; FP8 is its bits in a uint8_t.
// Operands come in PTX's order. A name says the instruction and the type: fma_f32 is fma.*.f32.
//
// Everything but approximate.h is exact. A NaN result is PTX's canonical NaN (0x7FFFFFFF, 0x7FFF).
// Where PTX leaves bits open (NaN of .f64, fields beyond the top, division by zero) they are those
// of an H200.
//
// The functions expect the default floating-point environment (FloatEnvironment in cpu.h).
#pragma once

#include "sim/numerics/approximate.h"
#include "sim/numerics/bits.h"
#include "sim/numerics/convert.h"
#include "sim/numerics/cpu.h"
#include "sim/numerics/float.h"
#include "sim/numerics/half.h"
#include "sim/numerics/integer.h"
#include "sim/numerics/warp_wide.h"
