// What one call of attention_backward asks for: the gradients of a call of attention. Plain data.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace archflash {

// A tensor that the backward pass reads or writes beside those of the call: strides in elements,
// heads before rows whatever the layout of the call.
struct BackwardTensor {
  Strides strides;
  DType dtype;
  int64_t column;  // elements from one column to the next; 1 where there is one column
  int32_t align;   // the largest power of two, at most 16, that divides the address in bytes
};

struct BackwardProblem {
  Problem call;  // the call itself, with its LSE; its `out` is the output that it gave
  BackwardTensor dout, dq, dk, dv;
  bool accumulate;             // gradients are added to what dq, dk and dv hold
  bool dlse;                   // the LSE has a gradient, too
  bool dsinks;                 // the gradient of the sinks is wanted
  bool deterministic = false;  // the same inputs must always give the same bits
  // The gradient of an added attn_mask is wanted: in fp32, its strides in elements, 0 along a
  // dimension that is broadcast.
  bool dmask = false;
  Strides dmask_strides = {};
  int64_t dmask_key = 0;
  // A part of a call (planning/backward_parts.h) has the number of its first head among all heads
  // of q of the call, and how many of these a sequence has; 0: this is the whole call.
  int64_t first_head = 0, heads_of_sequence = 0;
  // Bytes at the start of the workspace that keep the terms of all rows of the call, to which the
  // part adds those of its rows; 0: they are the part's own.
  int64_t kept_terms = 0;
};

namespace core {

// The sequences of a call as its tensors count them: packed ones are one.
inline int64_t sequences_of(const Problem& call) { return call.varlen ? 1 : call.batch; }

}  // namespace core
}  // namespace archflash
