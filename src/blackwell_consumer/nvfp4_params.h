// The one parameter of the kernels for approximate="nvfp4".
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/dtype.h"

namespace archflash::blackwell_consumer {

// The number behind the scales of a tensor, or of each of its heads.
struct Nvfp4Unit {
  const float* gmem;
  int32_t batch, head;  // strides; 0 along a dimension that shares one
};

struct Nvfp4Params {
  AttentionParams attention;
  DType dtype;  // of q, k, v and out
  int32_t heads_kv;
  int32_t k_blocks;  // of a head of K and V
  float scale;       // of the scores
  // In the workspace, for each head of K: the mean of K's keys, (HEAD_DIM,); the unit of V; for
  // each block the unit of K, and the chunks of K and of V (nvfp4_config.cuh). A stored number
  // times its scale times its unit is the number that it stands for.
  float* k_mean_gmem;
  float* v_unit_gmem;
  float* k_units_gmem;
  unsigned char* k_chunks_gmem;
  unsigned char* v_chunks_gmem;
  // Scales of inputs that come with four bits: the strides of q, k and v count bytes then, and the
  // mean and the units above are not used. A scale, of type ue4m3, is that of 16 columns of q or k,
  // or of 16 rows of v; its `block` is the step from one row of scales to the next.
  Descales scales;
  Nvfp4Unit q_unit, k_unit, v_unit;
};

}  // namespace archflash::blackwell_consumer
