// simt: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "common/problem.h"
#include "simt/config.cuh"
#include "simt/params.h"

namespace archflash::simt {
namespace {

constexpr int64_t HEAD_DIM_STEP = 8;
constexpr int64_t HEAD_DIM_LIMIT = 256;
constexpr int64_t ROW_BYTES = 16;                   // rows are read and written 16 bytes at a time
constexpr int64_t LENGTH_LIMIT = int64_t{1} << 30;  // positions are 32-bit inside the kernel
// UNBOUNDED inside the kernel: beyond every position there can be, and sums of two cannot overflow.
constexpr int64_t POSITION_LIMIT = int64_t{1} << 60;
constexpr int64_t GRID_LIMIT = INT32_MAX;        // CUDA: CTAs along x
constexpr int64_t RESERVED_SHARED_BYTES = 1024;  // CUDA: taken from the SM by each CTA, from 8.0 on
constexpr const char* USE_TORCH = " or use implementation='torch'";

// One kernel. Rows of VARIANTS stand best first among those that serve the same head dimensions and
// type.
struct Variant {
  const char* kernel;
  const char* image;
  DType dtype;
  int head_dim;  // d and dv up to this
  int block_q, block_k;
  int threads;
  int ctas_per_sm;  // what the registers allow
  int shared_bytes;
  // It serves only where `per_sm` of its CTAs fit an SM and twice its CTAs are more than `fill`
  // times the SMs.
  int per_sm, fill;
  const char* reason;  // why it is there
};

template <class C>
constexpr Variant variant(const char* kernel, const char* image, int per_sm, int fill,
                          const char* reason) {
  return {kernel,     image,          C::DTYPE,        C::HEAD_DIM, C::BLOCK_Q, C::BLOCK_K,
          C::THREADS, C::CTAS_PER_SM, C::SHARED_BYTES, per_sm,      fill,       reason};
}

constexpr const char* ONE_PER_HEAD_DIM = "16-bit inputs: one kernel per head_dim, for every GPU";

// Measured on an H200 (NOTES.md); one CTA per SM there stands for the GPUs with 64 and 99 KB.
constexpr Variant VARIANTS[] = {
    variant<F32D32>("simt_attention_fwd_f32_d32", "simt/fwd_f32", 1, 0,
                    "64 rows fit every GPU and suit short sequences"),
    variant<F32D64Large>("simt_attention_fwd_f32_d64_large", "simt/fwd_f32", 2, 2,
                         "two CTAs per SM: the fastest in every long case"),
    variant<F32D64Medium>(
        "simt_attention_fwd_f32_d64_medium", "simt/fwd_f32", 1, 2,
        "99 KB: one CTA of 8 warps and 128 rows beats one of 4 warps and 64 rows by a fifth"),
    variant<F32D64Small>("simt_attention_fwd_f32_d64_small", "simt/fwd_f32", 1, 0,
                         "64 KB, few CTAs or short sequences: 8 warps share the 64 rows"),
    variant<F32D128Large>("simt_attention_fwd_f32_d128_large", "simt/fwd_f32", 2, 1,
                          "two CTAs per SM from 227 KB on"),
    variant<F32D128Medium>("simt_attention_fwd_f32_d128_medium", "simt/fwd_f32", 1, 1,
                           "99 KB, or two CTAs per SM in 163 KB: 32 keys at a time"),
    variant<F32D128Small>("simt_attention_fwd_f32_d128_small", "simt/fwd_f32", 1, 0,
                          "64 KB, few CTAs or short sequences: 32 rows make twice as many"),
    variant<F32D256Large>("simt_attention_fwd_f32_d256_large", "simt/fwd_f32", 1, 1,
                          "64 rows where 227 KB allow it"),
    variant<F32D256Small>("simt_attention_fwd_f32_d256_small", "simt/fwd_f32", 1, 0,
                          "64 KB, few CTAs or short sequences: 16 rows"),
    variant<HalfD32<DType::F16>>("simt_attention_fwd_f16_d32", "simt/fwd_f16", 1, 0,
                                 ONE_PER_HEAD_DIM),
    variant<HalfD64<DType::F16>>("simt_attention_fwd_f16_d64", "simt/fwd_f16", 1, 0,
                                 ONE_PER_HEAD_DIM),
    variant<HalfD128<DType::F16>>("simt_attention_fwd_f16_d128", "simt/fwd_f16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD256<DType::F16>>("simt_attention_fwd_f16_d256", "simt/fwd_f16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD32<DType::BF16>>("simt_attention_fwd_bf16_d32", "simt/fwd_bf16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD64<DType::BF16>>("simt_attention_fwd_bf16_d64", "simt/fwd_bf16", 1, 0,
                                  ONE_PER_HEAD_DIM),
    variant<HalfD128<DType::BF16>>("simt_attention_fwd_bf16_d128", "simt/fwd_bf16", 1, 0,
                                   ONE_PER_HEAD_DIM),
    variant<HalfD256<DType::BF16>>("simt_attention_fwd_bf16_d256", "simt/fwd_bf16", 1, 0,
                                   ONE_PER_HEAD_DIM),
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
std::string str(int64_t x) { return std::to_string(x); }

// Row tiles of one head, all sequences together; with cu_seqlens the bound that holds whatever the
// lengths are.
int64_t row_tiles(const Problem& problem, int block_q) {
  const int64_t tiles = ceil_div(problem.nq, block_q);
  return problem.varlen ? tiles + problem.batch : tiles * problem.batch;
}

int64_t resident_ctas(const Variant& variant, const Device& device) {
  const int64_t by_shared = device.shared_per_sm / (variant.shared_bytes + RESERVED_SHARED_BYTES);
  return std::clamp<int64_t>(by_shared, 1, variant.ctas_per_sm);
}

int64_t rows_per_sequence(const Problem& problem) {  // on average
  return problem.varlen ? problem.nq / problem.batch : problem.nq;
}

const Variant* choose(const Problem& problem, const Device& device) {
  const int64_t head_dim = std::max(problem.d, problem.dv);
  const Variant* fits = nullptr;
  for (const Variant& variant : VARIANTS) {
    if (variant.dtype != problem.dtype || variant.head_dim < head_dim) continue;
    if (fits != nullptr && variant.head_dim != fits->head_dim)
      break;  // kernels for larger heads follow
    if (variant.shared_bytes > device.shared_per_block) continue;
    fits = &variant;  // the last one of a head_dim serves whatever the ones before it should not
    const bool fills_gpu =
        2 * row_tiles(problem, variant.block_q) * problem.heads_q > variant.fill * device.sm_count;
    const bool rows_mostly_used = rows_per_sequence(problem) > variant.block_q / 2;
    const bool enough_per_sm = resident_ctas(variant, device) >= variant.per_sm;
    if (fills_gpu && rows_mostly_used && enough_per_sm) break;
  }
  return fits;
}

void refuse_head_dim(const char* name, int64_t head_dim, const char* tensors, Reasons& reasons) {
  if (head_dim % HEAD_DIM_STEP != 0 || head_dim < HEAD_DIM_STEP) {
    reasons.push_back(std::string(name) + " " + str(head_dim) +
                      ": simt takes multiples of 8 up to 256; pad " + tensors + "," + USE_TORCH);
  } else if (head_dim > HEAD_DIM_LIMIT) {
    reasons.push_back(std::string(name) + " " + str(head_dim) +
                      ": simt takes multiples of 8 up to 256; split the heads" + USE_TORCH);
  }
}

void refuse_layout(const char* name, const Strides& strides, int32_t unit, int32_t align,
                   const Problem& problem, Reasons& reasons) {
  if (unit != 1) {
    reasons.push_back(
        std::string(name) +
        " has a strided last dimension: simt reads and writes contiguous rows; make " + name +
        " contiguous" + USE_TORCH);
    return;
  }
  const int64_t element_bytes = dtype_bytes(problem.dtype);
  if (align < ROW_BYTES) {
    reasons.push_back(std::string(name) + " starts at an address that is a multiple of " +
                      str(align) + " bytes: simt needs 16; copy " + name + USE_TORCH);
  }
  const std::pair<const char*, int64_t> named_strides[] = {
      {"batch", strides.batch}, {"head", strides.head}, {"row", strides.row}};
  for (const auto& [dimension, stride] : named_strides) {
    if (stride * element_bytes % ROW_BYTES == 0) continue;
    reasons.push_back(std::string(name) + " has a " + dimension + " stride of " +
                      str(stride * element_bytes) + " bytes: simt needs multiples of 16; make " +
                      name + " contiguous or pad its rows," + USE_TORCH);
  }
}

// Whether softcap is a normal float and scale / softcap at least a finite one.
bool fits_float(double softcap, double quotient) {
  const float cap = static_cast<float>(softcap);
  return std::isnormal(cap) && std::isfinite(static_cast<float>(quotient));
}

Reasons why_not(const Problem& problem) {
  Reasons reasons;
  if (problem.dtype != DType::F32 && problem.dtype != DType::F16 && problem.dtype != DType::BF16) {
    reasons.push_back(std::string("dtype ") + dtype_name(problem.dtype) +
                      ": simt takes float32, float16 and bfloat16; convert q, k and v" + USE_TORCH);
  }
  if (problem.out_dtype != problem.dtype) {
    reasons.push_back(std::string("out_dtype ") + dtype_name(problem.out_dtype) + " with " +
                      dtype_name(problem.dtype) +
                      " inputs: simt writes the type of its inputs; leave out_dtype out" +
                      USE_TORCH);
  }
  refuse_head_dim("head_dim", problem.d, "q and k", reasons);
  refuse_head_dim("value head_dim", problem.dv, "v", reasons);
  refuse_layout("q", problem.q, problem.q_unit, problem.q_align, problem, reasons);
  if (problem.nk > 0) {  // an empty k or v is never read
    refuse_layout("k", problem.k, problem.k_unit, problem.k_align, problem, reasons);
    refuse_layout("v", problem.v, problem.v_unit, problem.v_align, problem, reasons);
  }
  refuse_layout("out", problem.out, problem.out_unit, problem.out_align, problem, reasons);
  if (problem.mask != 0)
    reasons.push_back(
        std::string("attn_mask: simt has causal and window masks only; drop attn_mask") +
        USE_TORCH);
  if (problem.descale != 0)
    reasons.push_back(std::string("descales: simt takes no fp8 inputs; drop the descales") +
                      USE_TORCH);
  if (problem.needs_grad) {
    reasons.push_back(std::string("no backward: simt computes the forward only and a tensor of the "
                                  "call needs a gradient; call it under torch.no_grad()") +
                      USE_TORCH);
  }
  if (problem.softcap != 0 && !fits_float(problem.softcap, problem.scale / problem.softcap)) {
    reasons.push_back(std::string("softcap ") + std::to_string(problem.softcap) +
                      " with this scale: simt computes in fp32, where one of the two or their "
                      "quotient has no normal value; choose a softcap nearer to 1," +
                      USE_TORCH);
  }
  if (problem.nq >= LENGTH_LIMIT || problem.nk >= LENGTH_LIMIT) {
    reasons.push_back("lengths " + str(problem.nq) + " and " + str(problem.nk) +
                      ": simt takes fewer than 2^30 rows; split the call" + USE_TORCH);
  }
  return reasons;
}

// The score as the kernel takes it: see Params. An exponent scale must be positive and normal, or
// -inf would meet 0.
void set_scale(const Problem& problem, Params& params) {
  constexpr double LOG2_E = 1.4426950408889634;
  params.exp2_scale = static_cast<float>(problem.scale * LOG2_E);
  if (problem.softcap == 0 && params.exp2_scale >= std::numeric_limits<float>::min()) return;
  params.transform_scores = 1;
  params.exp2_scale = static_cast<float>(LOG2_E);
  params.softcap = static_cast<float>(problem.softcap);
  params.tanh_scale =
      static_cast<float>(problem.softcap == 0 ? problem.scale : problem.scale / problem.softcap);
}

Params make_params(const Problem& problem) {
  Params params;
  std::memset(&params, 0, sizeof params);  // padding too: equal plans are equal bytes
  params.q_batch = problem.q.batch, params.q_head = problem.q.head, params.q_row = problem.q.row;
  params.k_batch = problem.k.batch, params.k_head = problem.k.head, params.k_row = problem.k.row;
  params.v_batch = problem.v.batch, params.v_head = problem.v.head, params.v_row = problem.v.row;
  params.out_batch = problem.out.batch, params.out_head = problem.out.head,
  params.out_row = problem.out.row;
  params.lse_head = problem.nq;
  params.lse_batch = problem.varlen ? 0 : problem.heads_q * problem.nq;
  params.q_offset = problem.q_offset;
  params.window_left = std::min(problem.window_left, POSITION_LIMIT);
  params.window_right = std::min(problem.window_right, POSITION_LIMIT);
  params.batch = static_cast<int32_t>(problem.batch);
  params.heads_q = static_cast<int32_t>(problem.heads_q);
  params.heads_per_kv = static_cast<int32_t>(problem.heads_q / problem.heads_kv);
  params.nq = static_cast<int32_t>(problem.nq);
  params.nk = static_cast<int32_t>(problem.nk);
  params.d = static_cast<int32_t>(problem.d);
  params.dv = static_cast<int32_t>(problem.dv);
  params.offset_mode = problem.q_offset_tensor    ? OffsetMode::PerBatch
                       : problem.q_offset_default ? OffsetMode::KeysMinusQueries
                                                  : OffsetMode::Value;
  params.sinks_dtype = problem.sinks == 0 ? 0 : problem.sinks - 1;
  params.snake_from = INT32_MAX;
  set_scale(problem, params);
  return params;
}

std::vector<PointerSlot> pointer_slots(const Problem& problem) {
  const auto slot = [](Operand operand, size_t offset) {
    return PointerSlot{operand, static_cast<int32_t>(offset), 0};
  };
  std::vector<PointerSlot> slots = {
      slot(Operand::Q, offsetof(Params, q_gmem)), slot(Operand::K, offsetof(Params, k_gmem)),
      slot(Operand::V, offsetof(Params, v_gmem)), slot(Operand::Out, offsetof(Params, out_gmem))};
  if (problem.want_lse) slots.push_back(slot(Operand::Lse, offsetof(Params, lse_gmem)));
  if (problem.sinks) slots.push_back(slot(Operand::Sinks, offsetof(Params, sinks_gmem)));
  if (problem.varlen) {
    slots.push_back(slot(Operand::CuSeqlensQ, offsetof(Params, cu_seqlens_q_gmem)));
    slots.push_back(slot(Operand::CuSeqlensK, offsetof(Params, cu_seqlens_k_gmem)));
  }
  if (problem.q_offset_tensor)
    slots.push_back(slot(Operand::QOffset, offsetof(Params, q_offsets_gmem)));
  return slots;
}

}  // namespace

Description describe() {
  return {
      .name = "simt",
      .summary = "exact fp32 attention on CUDA cores, any GPU from compute capability 7.5 on",
      .home_device = "A100",
      .dtypes = {DType::F32, DType::F16, DType::BF16},
      .head_dims = "multiples of 8 up to 256, d and dv independent",
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse"},
  };
}

PlanResult plan(const Problem& problem, const Device& device) {
  const bool no_rows = problem.batch * problem.heads_q * problem.nq == 0;
  const bool nothing_to_write = no_rows || (problem.dv == 0 && !problem.want_lse);
  Reasons reasons = why_not(problem);
  LaunchPlan result;  // the registry adds what it was made for
  if (nothing_to_write && problem.mask == 0 && !problem.needs_grad) return result;
  if (!reasons.empty()) return reasons;

  const Variant* chosen = choose(problem, device);
  if (chosen == nullptr) {
    return Reasons{
        "shared memory: " + device.name + " gives a CTA " + str(device.shared_per_block) +
        " bytes and simt needs 64 KB at most for every head_dim; use another GPU" + USE_TORCH};
  }
  const int64_t ctas = row_tiles(problem, chosen->block_q) * problem.heads_q;
  if (ctas > GRID_LIMIT) {
    return Reasons{"grid of " + str(ctas) + " CTAs: CUDA takes up to 2147483647; split the batch" +
                   USE_TORCH};
  }

  Params params = make_params(problem);
  const int64_t resident = resident_ctas(*chosen, device);
  const bool uneven_tiles = problem.window_right < problem.nk && !problem.varlen;
  const bool two_per_sm = resident >= 2 && ctas > device.sm_count && ctas <= 2 * device.sm_count;
  if (uneven_tiles && two_per_sm) params.snake_from = device.sm_count;

  Launch launch;
  launch.kernel = chosen->kernel;
  launch.image = chosen->image;
  launch.grid = {ctas, 1, 1};
  launch.block = {chosen->threads, 1, 1};
  launch.shared_bytes = chosen->shared_bytes;
  launch.params.resize(sizeof params);
  std::memcpy(launch.params.data(), &params, sizeof params);
  launch.pointers = pointer_slots(problem);
  result.launches.push_back(std::move(launch));
  return result;
}

Notes notes(const LaunchPlan& plan) {
  if (plan.launches.empty()) return {{"launches", "none: there is nothing to write"}};
  const Launch& launch = plan.launches[0];
  const auto* used = std::find_if(std::begin(VARIANTS), std::end(VARIANTS),
                                  [&](const Variant& v) { return launch.kernel == v.kernel; });
  if (used == std::end(VARIANTS) || launch.params.size() != sizeof(Params)) return {};
  Params params;
  std::memcpy(&params, launch.params.data(), sizeof params);
  return {
      {"tile", str(used->block_q) + " query rows x " + str(used->block_k) +
                   " keys, head_dim up to " + str(used->head_dim)},
      {"variant", used->reason},
      {"warps", str(used->threads / 32)},
      {"CTAs", str(launch.grid[0]) + ", " + str(resident_ctas(*used, plan.device)) + " per SM on " +
                   str(plan.device.sm_count) + " SMs"},
      {"order", params.snake_from == INT32_MAX
                    ? "last row tiles first"
                    : "last row tiles first, then the first ones first: two per SM balance"},
  };
}

}  // namespace archflash::simt
