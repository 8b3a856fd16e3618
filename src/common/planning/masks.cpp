#include "common/planning/masks.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace archflash::core {

std::array<std::pair<const char*, bool>, 4> masks_of(const Problem& problem) {
  return {{{"attn_mask", problem.mask != 0},
           {"key_ranges", problem.key_ranges != 0},
           {"alibi_slopes", problem.alibi_slopes},
           {"block_mask", problem.block_mask}}};
}

MaskParams mask_params(const Problem& problem) {
  MaskParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  const Strides& mask = problem.mask_strides;
  params.mask_batch = mask.batch, params.mask_head = mask.head, params.mask_row = mask.row;
  params.mask_key = problem.mask_key;
  const Strides& ranges = problem.range_strides;
  params.ranges_batch = ranges.batch, params.ranges_head = ranges.head;
  params.ranges_row = ranges.row;
  params.slopes_batch = problem.alibi_slopes_strides.batch;
  params.slopes_head = problem.alibi_slopes_strides.head;
  const Strides& blocks = problem.block_mask_strides;
  params.blocks_batch = blocks.batch, params.blocks_head = blocks.head;
  params.blocks_row = blocks.row;
  params.ranges = static_cast<int32_t>(problem.key_ranges);
  if (problem.mask == 0) return params;
  const DType dtype = problem.mask == 1 ? DType::F32 : added_dtype(problem);
  params.mask_element = problem.mask == 1     ? MaskElement::Bool
                        : dtype == DType::F32 ? MaskElement::F32
                                              : MaskElement::SixteenBits;
  const int bytes = problem.mask == 1 ? 1 : dtype_bytes(dtype);
  // Kernels load whole groups of elements: that of a row's last ones must not go beyond the row.
  const auto can_read = [&](int64_t step) {
    return problem.mask_key == 1 && problem.mask_align >= step * bytes && problem.nk % step == 0 &&
           mask.batch % step == 0 && mask.head % step == 0 && mask.row % step == 0;
  };
  for (const int step : {16, 4, 2}) {
    const bool exists = (problem.mask == 1) == (step != 2);
    if (exists && params.mask_step == 0 && can_read(step)) params.mask_step = step;
  }
  return params;
}

std::vector<PointerSlot> mask_pointers(const Problem& problem, int offset) {
  std::vector<PointerSlot> slots;
  const auto add = [&](bool given, Operand operand, size_t field) {
    if (given) slots.push_back({operand, static_cast<int32_t>(offset + field), 0});
  };
  add(problem.mask != 0, Operand::Mask, offsetof(MaskParams, mask_gmem));
  add(problem.key_ranges != 0, Operand::KeyRanges, offsetof(MaskParams, ranges_gmem));
  add(problem.alibi_slopes, Operand::AlibiSlopes, offsetof(MaskParams, slopes_gmem));
  add(problem.block_mask, Operand::BlockMask, offsetof(MaskParams, blocks_gmem));
  return slots;
}

DropoutParams dropout_params(const Problem& problem) {
  constexpr double VALUES = 65536;  // that the random bits of an element can have
  const double threshold = std::min(std::round(problem.dropout_p * VALUES), VALUES - 1);
  return {nullptr, static_cast<uint32_t>(threshold),
          static_cast<float>(1 / (1 - problem.dropout_p))};
}

std::vector<PointerSlot> dropout_pointers(const Problem& problem, int offset) {
  if (problem.dropout_p == 0) return {};
  return {
      {Operand::RngState, static_cast<int32_t>(offset + offsetof(DropoutParams, state_gmem)), 0}};
}

}  // namespace archflash::core
