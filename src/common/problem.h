// What one attention call asks for (Problem) and what it will run on (Device): plain data, no Torch
// or CUDA type. Both are all that planning sees; data pointers are bound later
// (src/runtime/bind.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/dtype.h"

namespace archflash {

// What a caller lets the result differ in from the exact formula.
enum class Approximate : int64_t { Nothing = 0, Int8Qk = 1 };

// Strides in elements. Dimensions of size 1 have stride 0, so that equal problems compare equal.
// With cu_seqlens the batch stride is 0: the rows of all sequences lie along `row`.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

constexpr int64_t UNBOUNDED = INT64_MAX;  // a window side without a limit
constexpr int64_t UNKNOWN = -1;           // max_seqlen_q/k not given

// Plain bytes without padding: compared and hashed as such by the plan cache.
struct Problem {
  // Shapes. With cu_seqlens, batch is the number of sequences and nq, nk are the totals Tq, Tk.
  int64_t batch, heads_q, heads_kv, nq, nk, d, dv;
  // UNKNOWN unless given (cu_seqlens only): a hint, never a bound on memory.
  int64_t max_seqlen_q, max_seqlen_k;

  Strides q, k, v, out;  // `out` is the output that will be written

  // Of the descales, 0 where the same one serves; `row` steps from one block of SCALE_ROWS to the
  // next.
  Strides q_descale, k_descale, v_descale;

  int64_t q_offset;      // position of query 0 among the keys; used by causal and window only
  int64_t window_left;   // keys j >= i + q_offset - left
  int64_t window_right;  // keys j <= i + q_offset + right; causal is right = 0 at most
  double scale;          // multiplies q.k
  double softcap;        // 0: none; otherwise score = softcap * tanh(scale * q.k / softcap)
  int64_t approximate;   // an Approximate: asked for, never implied
  int64_t num_splits;    // shares of the keys at most, 1: no split, 0: the plan chooses

  DType dtype;      // of q, k and v
  DType out_dtype;  // of the output

  // The largest power of two, at most 16, that divides the address in bytes.
  int32_t q_align, k_align, v_align, out_align;
  int32_t q_unit, k_unit, v_unit, out_unit;  // 1: the last dimension is contiguous

  int32_t causal;            // as asked; already folded into window_right
  int32_t varlen;            // cu_seqlens_q and cu_seqlens_k are given
  int32_t q_offset_tensor;   // an int32 device tensor (batch,); q_offset above is ignored
  int32_t q_offset_default;  // q_offset was not given: every sequence uses its own nk - nq
  int32_t sinks;             // 0: none; otherwise 1 + DType of the (heads_q,) tensor
  int32_t mask;              // 0: none, 1: bool, 2: additive
  int32_t descale;           // bit 0: q_descale, bit 1: k_descale, bit 2: v_descale;
                             // bit 3: that of q has one number for each head of k
  int32_t want_lse;          // the log-sum-exp is asked for
  int32_t needs_grad;        // autograd will want gradients of a tensor of the call
  int32_t on_cuda;           // 1: tensors are on a CUDA device, 0: elsewhere (CPU, meta)
};
static_assert(std::is_trivially_copyable_v<Problem>);
static_assert(sizeof(Problem) == 9 * 8 + 21 * 8 + 5 * 8 + 2 * 8 + 20 * 4,
              "Problem must have no padding: it is hashed as bytes");

// A GPU, as the driver reports it or as the table of known devices states it
// (src/runtime/known_devices.cpp).
struct Device {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int sm_count = 0;
  int64_t shared_per_block = 0;  // opt-in maximum, bytes
  int64_t shared_per_sm = 0;     // bytes, shared by the CTAs of an SM
  int64_t l2_bytes = 0;
  int registers_per_sm = 65536;  // 32-bit registers; the same on every capability from 7.5 to 12.1
  int threads_per_sm = 0;        // resident threads per SM

  int capability() const { return 10 * major + minor; }
};

}  // namespace archflash
