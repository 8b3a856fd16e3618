#include "common/planning/tensor_maps.h"

#include <algorithm>

#include "common/planning/core_set.h"

namespace archflash::core {
namespace {

// TMA: strides are multiples of 16 bytes below 2^40.
constexpr int64_t STRIDE_UNIT = 16;
constexpr int64_t STRIDE_LIMIT = int64_t{1} << 40;

}  // namespace

void add_stride_reasons(const char* name, const Strides& strides, int64_t rows, DType dtype,
                        const std::string& implementation, Reasons& reasons) {
  if (strides.row == 0 && rows > 1) {
    reasons.push_back(std::string(name) + " repeats one row (a row stride of 0): " +
                      implementation + " copies by tensor maps, which have no such stride; make " +
                      name + " contiguous" + USE_TORCH);
  }
  const int64_t largest = std::max({strides.batch, strides.head, strides.row}) * dtype_bytes(dtype);
  if (largest >= STRIDE_LIMIT) {
    reasons.push_back(std::string(name) + " has a stride of " + std::to_string(largest) +
                      " bytes: " + implementation +
                      " copies by tensor maps, whose strides are below 2^40; split the call" +
                      USE_TORCH);
  }
}

void add_tma_reasons(const Problem& problem, const std::string& implementation, bool stores,
                     Reasons& reasons) {
  const auto check = [&](const char* name, const Strides& strides, int64_t rows, DType dtype) {
    add_stride_reasons(name, strides, rows, dtype, implementation, reasons);
  };
  check("q", problem.q, problem.nq, problem.dtype);
  check("k", problem.k, problem.nk, problem.dtype);
  check("v", problem.v, problem.nk, problem.dtype);
  if (stores) check("out", problem.out, problem.nq, problem.out_dtype);
}

TensorMapSpec tensor_map(const Problem& problem, Operand operand, int offset, const Box& box) {
  const bool of_q = operand == Operand::Q || operand == Operand::Out;
  const bool of_v = operand == Operand::V || operand == Operand::Out;
  const Strides& strides = operand == Operand::Q   ? problem.q
                           : operand == Operand::K ? problem.k
                           : operand == Operand::V ? problem.v
                                                   : problem.out;
  TensorMapSpec map{};
  map.operand = operand;
  map.offset = offset;
  map.dtype = operand == Operand::Out ? problem.out_dtype : problem.dtype;
  map.swizzle = box.swizzle;
  map.box = {box.columns, box.rows, box.heads, 1};
  const int64_t sizes[] = {of_q ? problem.nq : problem.nk,
                           of_q ? problem.heads_q : problem.heads_kv,
                           problem.varlen ? 1 : problem.batch};
  const int64_t steps[] = {strides.row, strides.head, strides.batch};
  map.dims = {of_v ? problem.dv : problem.d};
  for (int i = 0; i < 3; ++i) {
    map.dims.push_back(steps[i] == 0 ? 1 : sizes[i]);
    map.strides.push_back(steps[i] == 0 ? STRIDE_UNIT : steps[i] * dtype_bytes(map.dtype));
  }
  return map;
}

}  // namespace archflash::core
