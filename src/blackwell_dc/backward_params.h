// The parameter of blackwell_dc's backward kernels, but that of the sinks.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/tensor_map.h"

namespace archflash::blackwell_dc {

struct BackwardKernelParams {
  BackwardParams backward;
  // The sums of dQ before its scale, to which all CTAs add: of each round of each head of q, 32
  // columns after the others; of these, four columns of all rows after the others.
  float* dq_sums_gmem;
  int64_t cleared_bytes;  // of the sums, or in turns of these, which the first launch clears
  // In turns, behind which tile of keys the next one may add to each sum; null: no turns.
  int32_t* turns_gmem;
  float uncap;            // from a score, as a logarithm to base 2, to its tanh
  int32_t rounds;         // of a head, without cu_seqlens
  int32_t sums_of_round;  // of dQ: one, two, or one for each chain of tiles
  TensorMap q_map, k_map, v_map, dout_map;
};

}  // namespace archflash::blackwell_dc
