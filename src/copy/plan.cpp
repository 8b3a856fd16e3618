// Which tensors of a call are copied, and the launches that do it. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/planning/copies.h"
#include "common/planning/launch.h"
#include "common/planning/workspace.h"
#include "copy/params.h"

namespace archflash::copy {
namespace {

constexpr const char* IMAGE = "copy/copy";
constexpr const char* GATHER = "copy_gather";
constexpr const char* SCATTER = "copy_scatter";
constexpr const char* LSE = "copy_lse_for_pytorch";
constexpr int64_t ROW_BYTES = 16;  // rows of kernels start at multiples of it, and are as long

// The columns that kernels take for so many: they are whole chunks in every dtype of the call.
int64_t whole_columns(int64_t columns, const Problem& problem) {
  const int64_t step = is_fp8(problem.dtype) || is_fp8(problem.kv_dtype) ? 16 : 8;
  return core::ceil_div(columns, step) * step;
}

bool starts_rows(const Strides& strides, int64_t column, int32_t align, DType dtype) {
  const int64_t together = strides.batch | strides.head | strides.row;  // low bits decide
  return column == 1 && align >= ROW_BYTES && together * dtype_bytes(dtype) % ROW_BYTES == 0;
}

// Copies a tensor unless kernels take it as it is, and changes its layout to that of the copy. A
// gradient of the output that repeats one row, as that of a sum over rows does, is copied as well:
// the forward call chose a kernel before anybody knew of it, and tensor maps have no such stride.
void consider(Tensor tensor, Strides& strides, int64_t& column, int32_t& align, Copies& copies) {
  const bool repeats_dout = tensor.operand == Operand::DOut && strides.row == 0 && tensor.rows > 1;
  if (!repeats_dout && tensor.columns == tensor.dense_columns &&
      starts_rows(strides, column, align, tensor.dtype))
    return;
  if (column != 1 && align < dtype_bytes(tensor.dtype)) return;  // the kernels will refuse it
  tensor.given = strides, tensor.given_column = column, tensor.given_align = align;
  // Heads and batches that are repeated in memory are copied once. Rows are all copied: kernels
  // that read by tensor maps cannot repeat them.
  if (strides.batch == 0) tensor.batch = std::min<int64_t>(tensor.batch, 1);
  if (strides.head == 0) tensor.heads = std::min<int64_t>(tensor.heads, 1);
  Strides& dense = tensor.dense;
  dense.row = tensor.rows == 1 ? 0 : tensor.dense_columns;
  dense.head = strides.head == 0 ? 0 : tensor.rows * tensor.dense_columns;
  dense.batch = strides.batch == 0 ? 0 : tensor.heads * tensor.rows * tensor.dense_columns;
  strides = dense;
  column = 1;
  align = ROW_BYTES;
  copies.tensors.push_back(tensor);
}

int64_t elements_of(const Tensor& tensor, int64_t columns) {
  return tensor.batch * tensor.heads * tensor.rows * columns;
}

// The largest number of bytes that divides every place where a row's pieces start.
int32_t unit_of(const Tensor& tensor) {
  const int64_t element = dtype_bytes(tensor.dtype);
  const int64_t longest = tensor.given_column == 1 ? 8 : element;
  const int64_t row = tensor.given_column == 1 ? tensor.columns : 0;
  const Strides& given = tensor.given;
  int64_t unit = std::min<int64_t>(longest, tensor.given_align);
  while ((given.batch | given.head | given.row | row) * element % unit != 0) unit /= 2;
  return static_cast<int32_t>(unit);
}

Copy copy_of(const Tensor& tensor) {
  Copy copy{};
  const int64_t element = dtype_bytes(tensor.dtype);
  const Strides& given = tensor.given;
  const Strides& dense = tensor.dense;
  copy.given_batch = given.batch * element, copy.given_head = given.head * element,
  copy.given_row = given.row * element;
  copy.dense_batch = dense.batch * element, copy.dense_head = dense.head * element,
  copy.dense_row = dense.row * element;
  copy.heads = static_cast<int32_t>(tensor.heads);
  copy.rows = static_cast<int32_t>(tensor.rows);
  copy.unit_bytes = unit_of(tensor);
  copy.given_unit = tensor.given_column == 1 ? copy.unit_bytes : tensor.given_column * element;
  copy.units = static_cast<int32_t>(tensor.columns * element / copy.unit_bytes);
  copy.chunks = static_cast<int32_t>(tensor.dense_columns * element / CHUNK_BYTES);
  copy.row_blocks = static_cast<int32_t>(core::ceil_div(tensor.rows, ROWS));
  copy.rows_first = tensor.given_column > given.row && given.row > 0;
  return copy;
}

// The launch that copies those of the tensors which are wanted; `places` are those of the dense
// copies in the workspace.
void add_launch(LaunchPlan& plan, const Copies& copies, const std::vector<int64_t>& places,
                bool gathers) {
  Params params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  Launch launch;
  int64_t blocks = 0;
  for (size_t i = 0; i < copies.tensors.size(); ++i) {
    const Tensor& tensor = copies.tensors[i];
    if (!(gathers ? tensor.gathered : tensor.scattered)) continue;
    const int64_t of_tensor = tensor.batch * tensor.heads * core::ceil_div(tensor.rows, ROWS);
    if (of_tensor == 0) continue;
    const size_t place = offsetof(Params, copy) + params.copies * sizeof(Copy);
    Copy& copy = params.copy[params.copies++];
    copy = copy_of(tensor);
    copy.first_block = static_cast<int32_t>(blocks);
    blocks += of_tensor;
    add_pointer(launch, tensor.operand, place + offsetof(Copy, given_gmem));
    add_pointer(launch, Operand::Workspace, place + offsetof(Copy, dense_gmem), places[i]);
  }
  if (blocks == 0) return;
  launch.kernel = gathers ? GATHER : SCATTER;
  launch.image = IMAGE;
  launch.grid = {blocks, 1, 1};
  launch.block = {THREADS, 1, 1};
  launch.params = core::bytes(params);
  plan.launches.insert(gathers ? plan.launches.begin() : plan.launches.end(), std::move(launch));
}

// Sends what was meant for a tensor to its copy in the workspace.
template <class Slot>
void redirect(std::vector<Slot>& slots, const Tensor& tensor, int64_t place) {
  for (Slot& slot : slots) {
    if (slot.operand != tensor.operand) continue;
    slot.operand = Operand::Workspace;
    slot.addend += place;
  }
}

// "q, k and v"
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

// The tensors of a call. `out_is_read`: by the backward pass.
void consider_call(Problem& p, bool out_is_read, Copies& copies) {
  const int64_t d = p.d, dv = p.dv;
  if (!p.kv_cache) p.d = whole_columns(d, p), p.dv = whole_columns(dv, p);
  const int64_t batch = p.varlen ? 1 : p.batch;
  const auto of = [&](Operand operand, DType dtype, int64_t heads, int64_t rows, int64_t columns,
                      int64_t dense_columns) {
    return Tensor{.operand = operand,
                  .dtype = dtype,
                  .batch = batch,
                  .heads = heads,
                  .rows = rows,
                  .columns = columns,
                  .dense_columns = dense_columns,
                  .gathered = operand != Operand::Out || out_is_read,
                  .scattered = operand == Operand::Out && !out_is_read};
  };
  consider(of(Operand::Q, p.dtype, p.heads_q, p.nq, d, p.d), p.q, p.q_column, p.q_align, copies);
  if (!p.kv_cache && p.nk > 0) {  // an empty k or v is never read
    consider(of(Operand::K, p.dtype, p.heads_kv, p.nk, d, p.d), p.k, p.k_column, p.k_align, copies);
    consider(of(Operand::V, p.dtype, p.heads_kv, p.nk, dv, p.dv), p.v, p.v_column, p.v_align,
             copies);
  }
  consider(of(Operand::Out, p.out_dtype, p.heads_q, p.nq, dv, p.dv), p.out, p.out_column,
           p.out_align, copies);
}

// Whether kernels may be asked for copies: a row of a cache that is no whole number of chunks would
// have to be copied with all others, and no kernel takes float64. Strides of numbers of four bits
// count bytes, and block scales of v have a number for each column that it has.
bool may_copy(const Problem& problem) {
  if (has_stored_nvfp4(problem)) return false;
  if (has_block_scales(problem) && whole_columns(problem.dv, problem) != problem.dv) return false;
  if (problem.qv_align > 0 || problem.dtype == DType::F64 || problem.out_dtype == DType::F64)
    return false;
  if (!problem.kv_cache) return true;
  return whole_columns(problem.d, problem) == problem.d &&
         whole_columns(problem.dv, problem) == problem.dv;
}

}  // namespace

Copies prepare(Problem& problem) {
  Copies copies;
  if (may_copy(problem)) consider_call(problem, false, copies);
  return copies;
}

Copies prepare(BackwardProblem& problem) {
  Copies copies;
  Problem& call = problem.call;
  if (!may_copy(call)) return copies;
  const int64_t d = call.d, dv = call.dv, batch = call.varlen ? 1 : call.batch;
  consider_call(call, true, copies);
  const auto add = [&](Operand operand, BackwardTensor& x, int64_t heads, int64_t rows,
                       int64_t columns, int64_t dense_columns) {
    const bool written = operand != Operand::DOut;
    consider({.operand = operand,
              .dtype = x.dtype,
              .batch = batch,
              .heads = heads,
              .rows = rows,
              .columns = columns,
              .dense_columns = dense_columns,
              .gathered = !written || problem.accumulate,
              .scattered = written},
             x.strides, x.column, x.align, copies);
  };
  add(Operand::DOut, problem.dout, call.heads_q, call.nq, dv, call.dv);
  add(Operand::DQ, problem.dq, call.heads_q, call.nq, d, call.d);
  if (call.nk > 0) {
    add(Operand::DK, problem.dk, call.heads_kv, call.nk, d, call.d);
    add(Operand::DV, problem.dv, call.heads_kv, call.nk, dv, call.dv);
  }
  return copies;
}

void add_to(LaunchPlan& plan, const Copies& copies) {
  if (plan.launches.empty()) return;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);  // what is zeroed stays in front
  std::vector<int64_t> places;
  for (const Tensor& tensor : copies.tensors) {
    const int64_t elements = elements_of(tensor, tensor.dense_columns);
    places.push_back(workspace.add(elements * dtype_bytes(tensor.dtype)));
    for (Launch& launch : plan.launches) {
      redirect(launch.pointers, tensor, places.back());
      redirect(launch.tensor_maps, tensor, places.back());
    }
  }
  plan.workspace_bytes = workspace.bytes();
  add_launch(plan, copies, places, true);
  add_launch(plan, copies, places, false);
}

void add_lse_for_pytorch(LaunchPlan& plan) {
  const Problem& problem = plan.problem;
  const int64_t batch = problem.varlen ? 1 : problem.batch;
  LseParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  params.count = batch * problem.heads_q * problem.nq;
  Launch launch;
  launch.kernel = LSE;
  launch.image = IMAGE;
  launch.grid = {core::ceil_div(params.count, THREADS), 1, 1};
  launch.block = {THREADS, 1, 1};
  launch.params = core::bytes(params);
  launch.pointers = {{Operand::Lse, static_cast<int32_t>(offsetof(LseParams, lse_gmem)), 0}};
  plan.launches.push_back(std::move(launch));
}

std::string text_of(const LaunchPlan& plan) {
  std::vector<std::string> into, back;
  int64_t bytes = 0;
  for (const Launch& launch : plan.launches) {
    if (launch.image != IMAGE || launch.kernel == LSE) continue;
    Params params;
    std::memcpy(&params, launch.params.data(), sizeof params);
    for (int i = 0; i < params.copies; ++i) {
      const Copy& copy = params.copy[i];
      const int64_t given = int64_t{copy.units} * copy.unit_bytes;
      const int64_t dense = int64_t{copy.chunks} * CHUNK_BYTES;
      const int64_t end = i + 1 < params.copies ? params.copy[i + 1].first_block : launch.grid[0];
      bytes += (end - copy.first_block) / copy.row_blocks * copy.rows * (given + dense);
      const std::string why =
          given != dense ? "rows of " + std::to_string(given) + " bytes as " + std::to_string(dense)
          : copy.given_unit != copy.unit_bytes ? "a strided last dimension"
                                               : "rows at no multiples of 16 bytes";
      // The addresses of a copy are the given one and its place in the workspace.
      const Operand operand = launch.pointers[2 * i].operand;
      std::vector<std::string>& names = launch.kernel == GATHER ? into : back;
      const std::string name = std::string(operand_name(operand)) + " (" + why + ")";
      // Each part of a call copies what it has of a tensor.
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  if (into.empty() && back.empty()) return "";
  std::string text = into.empty() ? "" : listed(into) + " into the workspace";
  if (!back.empty()) text += (text.empty() ? "" : ", ") + listed(back) + " from there";
  return text + ": " + std::to_string((bytes + 500'000) / 1'000'000) +
         " MB are read and written beside the call's own";
}

}  // namespace archflash::copy
