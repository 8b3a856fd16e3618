// quantize_fp8 converts numbers to 8-bit floating point with descales. This header has the
// parameters of its kernels and its planning function, which is pure host code.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::ada {

// A tile is SCALE_ROWS rows of one head. A group is the tiles that share a descale. Strides in
// elements.
struct QuantizeParams {
  const void* x_gmem;   // (batch, heads, rows, d)
  uint8_t* out_gmem;    // the same shape
  float* descale_gmem;  // one for each group of tiles
  float* largest_gmem;  // largest magnitude of each tile; unused if each tile is a group
  int64_t x_batch, x_head, x_row;
  int64_t out_batch, out_head, out_row;
  int64_t heads, rows;
  int64_t tiles_per_head;
  int64_t tiles_per_group;
  int64_t first;  // tile of the launch's first CTA; in the `descale` kernel, its group
  int32_t d;
  DType out_dtype;  // E4M3 or E5M2
};
static_assert(std::is_trivially_copyable_v<QuantizeParams>);

enum class QuantizePer : int32_t { Tensor = 0, Head = 1, Block = 2 };

struct QuantizeProblem {
  int64_t batch, heads, rows, d;
  Strides x, out;
  DType dtype, out_dtype;
  QuantizePer per;
};

constexpr int QUANTIZE_THREADS = 256;
constexpr int QUANTIZE_CHUNK = 8;  // neighbouring elements that a thread reads at once
constexpr int QUANTIZE_MOST_COLUMNS = 256;

// Plans the launches of one call. A kernel that needs more CTAs than a grid can have gets several
// launches.
LaunchPlan plan_quantize(const QuantizeProblem& problem, const Device& device);

}  // namespace archflash::ada
