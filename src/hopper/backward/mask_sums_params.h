// The parameter of the launch that adds up the gradient of attn_mask.
#pragma once

#include <cstdint>

#include "common/masked_backward_params.h"
#include "hopper/backward/backward_params.h"

namespace archflash::hopper {

struct MaskSumsParams {
  KeptScoresParams kept;
  MaskGradientParams dmask;
  int32_t batch, heads, nq, nk;
  int32_t by_rows;  // a warp has 16 rows of a block, and not 16 keys
  int32_t adds;     // to what the gradient holds, which is else written
  int32_t shares;   // the groups of threads of a CTA share out what is added up
};
// Threads of a CTA that adds up a part of a block.
constexpr int SUMMING_THREADS = 4 * DENSE_THREADS;

}  // namespace archflash::hopper
