#include "common/planning/core_set.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

#include "common/planning/masks.h"

namespace archflash::core {
namespace {

constexpr int64_t FP8_HEAD_DIM_LIMIT = 256;
constexpr int64_t QV_HEAD_DIM = 64, QV_HEAD_DIM_V = 512;  // those of the kernels for qv
constexpr int64_t ROW_BYTES = 16;                   // rows are read and written 16 bytes at a time
constexpr int64_t LENGTH_LIMIT = int64_t{1} << 30;  // positions are 32-bit inside the kernel
// UNBOUNDED inside the kernel. A q_offset is within +-2^60 and a key within 2^30: their sums with
// this lie beyond every position and do not overflow.
constexpr int64_t POSITION_LIMIT = int64_t{1} << 62;

// "float32, float16 and bfloat16"
std::string names(std::span<const DType> dtypes) {
  std::string text;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (i > 0) text += i + 1 == dtypes.size() ? " and " : ", ";
    text += dtype_name(dtypes[i]);
  }
  return text;
}

// Collects the reasons of one implementation: each ends with the way out that always works.
struct Refusals {
  const Problem& problem;
  const std::string& implementation;
  Reasons reasons;

  void add(const std::string& given, const std::string& allowed_and_what_to_do) {
    reasons.push_back(given + ": " + implementation + " " + allowed_and_what_to_do + USE_TORCH);
  }

  void head_dim(const char* name, int64_t head_dim, int64_t largest, const char* tensors) {
    const bool fp8 = is_fp8(problem.dtype) || is_fp8(problem.kv_dtype);
    const int64_t step = fp8 ? 16 : 8;
    if (fp8) largest = std::min(largest, FP8_HEAD_DIM_LIMIT);
    const bool whole = head_dim % step == 0 && head_dim >= step;
    if (whole && head_dim <= largest) return;
    const std::string what_to_do = whole ? "split the heads" : std::string("pad ") + tensors + ",";
    add(std::string(name) + " " + str(head_dim),
        "takes multiples of " + str(step) + " up to " + str(largest) + "; " + what_to_do);
  }

  // Checks out_dtype where the inputs are not 8-bit. writes_f32: whether the folder can write fp32.
  void out_dtype(bool writes_f32) {
    const std::string given = std::string("out_dtype ") + dtype_name(problem.out_dtype);
    if (!writes_f32 || !core::writes_f32(problem)) {
      add(given + " with " + dtype_name(problem.dtype) + " inputs",
          "writes the type of its inputs; leave out_dtype out");
      return;
    }
    const auto alone = [&](bool is_given, const char* what) {
      if (is_given) add(given + " with " + what, "takes either alone; leave out_dtype out");
    };
    const bool latent_lists = core::has_latent_lists(problem);
    alone(problem.kv_cache && !latent_lists, "a KV cache");
    alone(problem.dropout_p != 0, "dropout_p");
    alone(problem.num_splits > 1 && !latent_lists, "num_splits");
    alone(problem.batch_invariant, "batch_invariant");
  }

  void layout(const char* given_name, const Strides& strides, bool unit, int32_t align,
              DType dtype) {
    const auto whole = [&](int64_t stride) { return stride * dtype_bytes(dtype) % ROW_BYTES == 0; };
    if (unit && align >= ROW_BYTES && whole(strides.batch) && whole(strides.head) &&
        whole(strides.row))
      return;
    const std::string name = given_name;
    if (!unit) {
      add(name + " has a strided last dimension",
          "reads and writes contiguous rows; make " + name + " contiguous");
      return;
    }
    if (align < ROW_BYTES) {
      add(name + " starts at an address that is a multiple of " + str(align) + " bytes",
          "needs 16; copy " + name);
    }
    const std::pair<const char*, int64_t> named_strides[] = {
        {"batch", strides.batch}, {"head", strides.head}, {"row", strides.row}};
    for (const auto& [dimension, stride] : named_strides) {
      if (whole(stride)) continue;
      const int64_t bytes = stride * dtype_bytes(dtype);
      add(name + " has a " + dimension + " stride of " + str(bytes) + " bytes",
          "needs multiples of 16; make " + name + " contiguous or pad its rows,");
    }
  }
};

// Not a division by zero: a call without heads may be asked for its reasons too.
int64_t heads_per_kv(const Problem& problem) {
  return problem.heads_q / std::max<int64_t>(problem.heads_kv, 1);
}

// Whether softcap is a normal float and scale / softcap at least a finite one.
bool fits_float(double softcap, double quotient) {
  const float cap = static_cast<float>(softcap);
  return std::isnormal(cap) && std::isfinite(static_cast<float>(quotient));
}

constexpr double LOG2_E = 1.4426950408889634;

constexpr size_t USUAL_POINTERS = 16;  // of a launch: room for those that a folder adds

void transform_scores(const Problem& problem, AttentionParams& params) {
  params.transform_scores = 1;
  params.exp2_scale = static_cast<float>(LOG2_E);
  params.rule.softcap = static_cast<float>(problem.softcap);
  params.rule.tanh_scale =
      static_cast<float>(problem.softcap == 0 ? problem.scale : problem.scale / problem.softcap);
}

// The score as the kernel takes it: see AttentionParams. An exponent scale must be positive and
// normal, or -inf would meet 0.
void set_scale(const Problem& problem, AttentionParams& params) {
  params.exp2_scale = static_cast<float>(problem.scale * LOG2_E);
  if (problem.softcap == 0 && params.exp2_scale >= std::numeric_limits<float>::min()) return;
  transform_scores(problem, params);
}

bool has(const Description& description, const char* feature) {
  const std::vector<std::string>& features = description.features;
  return std::find(features.begin(), features.end(), feature) != features.end();
}

// The types that an implementation takes where the problem asks for an approximation of its, or has
// scales of blocks, or neither.
std::span<const DType> dtypes_of(const Problem& problem, const Description& description,
                                 bool approximates) {
  static constexpr DType SIXTEEN_BITS[] = {DType::F16, DType::BF16},
                         EIGHT_BITS[] = {DType::E4M3, DType::E5M2};
  if (approximates) return SIXTEEN_BITS;
  if (has_block_scales(problem) && has(description, "block_scales")) return EIGHT_BITS;
  return description.dtypes;
}

void check_head_dims(const Problem& problem, const Description& description, Refusals& refuse) {
  const bool with_qv = problem.qv_align > 0;
  if (with_qv && has(description, "qv")) {
    if (problem.d != QV_HEAD_DIM || problem.dv != QV_HEAD_DIM_V) {
      refuse.add("qv with head_dim " + str(problem.d) + " and value head_dim " + str(problem.dv),
                 "takes qv where they are 64 and 512");
    }
    refuse.layout("qv", problem.qv, problem.qv_unit, static_cast<int32_t>(problem.qv_align),
                  problem.dtype);
  } else {
    if (with_qv) refuse.add("qv", "has no second query; concatenate q and qv, and k and v,");
    refuse.head_dim("head_dim", problem.d, description.largest_head_dim, "q and k");
    refuse.head_dim("value head_dim", problem.dv, description.largest_head_dim, "v");
  }
}

void check_cache(const Problem& problem, const Description& description, Refusals& refuse) {
  const bool with_qv = problem.qv_align > 0;
  const bool fp8_cache = problem.kv_dtype != problem.dtype;
  // A folder may read caches for queries of many rows only, or of latent rows only.
  const char* feature = with_qv ? "qv" : "kv_cache_prefill";
  if (problem.kv_cache && !has(description, "kv_cache") && !has(description, feature)) {
    refuse.add("a KV cache",
               "reads no cache, whose lengths are on the device; leave the implementation out");
  }
  const auto takes_fp8_cache = [&] {
    return has(description, "fp8_cache") || (!with_qv && has(description, "fp8_cache_prefill")) ||
           (problem.packed_rows != 0 && has(description, "packed_rows"));
  };
  if (fp8_cache && !takes_fp8_cache()) {
    refuse.add(std::string("a cache of dtype ") + dtype_name(problem.kv_dtype) +
                   " for q of dtype " + dtype_name(problem.dtype),
               "takes a cache of q's dtype; convert one of them");
  }
  if (problem.n_new > 0 && (problem.nq == 0 || problem.heads_q == 0))
    refuse.add("k_new without a query row", "appends beside query rows only; pass one");
}

void check_masks(const Problem& problem, const Description& description, Refusals& refuse) {
  const bool fp8_cache = problem.kv_dtype != problem.dtype;
  for (const auto& [name, given] : masks_of(problem)) {
    if (given && !has(description, name))
      refuse.add(name, std::string("has causal and window masks only; drop ") + name);
  }
  if (has_cache_masks(problem) && !has(description, "cache_masks")) {
    refuse.add("attn_mask or key_ranges with a KV cache",
               "has causal and window masks there; leave the implementation out");
  } else if (has_cache_masks(problem) && (fp8_cache || problem.qv_align > 0)) {
    refuse.add(std::string("attn_mask or key_ranges with ") + (fp8_cache ? "a float8 cache" : "qv"),
               "takes them with a cache of q's dtype; drop the mask");
  }
  if (problem.dropout_p != 0 && !has(description, "dropout_p"))
    refuse.add("dropout_p", "drops no weights; drop dropout_p");
  if (problem.mask > 1 && has(description, "attn_mask")) {
    const DType dtype = added_dtype(problem);
    if (dtype != DType::F32 && dtype != problem.dtype) {
      refuse.add(std::string("attn_mask of dtype ") + dtype_name(dtype) + " with " +
                     dtype_name(problem.dtype) + " inputs",
                 "takes bool, float32 and the type of its inputs; convert attn_mask");
    }
  }
}

// Numbers beyond what a kernel computes with.
void check_numbers(const Problem& problem, Refusals& refuse) {
  if (problem.softcap != 0 && !fits_float(problem.softcap, problem.scale / problem.softcap)) {
    refuse.add("softcap " + number_text(problem.softcap) + " with this scale",
               "computes in fp32, where one of the two or their quotient has no normal value; "
               "choose a softcap nearer to 1,");
  }
  if (problem.cache_batch >= LENGTH_LIMIT || problem.n_new >= LENGTH_LIMIT) {
    refuse.add("a cache of " + str(problem.cache_batch) + " sequences or pages and " +
                   str(problem.n_new) + " new rows",
               "takes fewer than 2^30; split the call");
  }
  if (problem.nq >= LENGTH_LIMIT || problem.nk >= LENGTH_LIMIT) {
    refuse.add("lengths " + str(problem.nq) + " and " + str(problem.nk),
               "takes fewer than 2^30 rows; split the call");
  }
}

}  // namespace

Reasons why_not(const Problem& problem, const Description& description) {
  Refusals refuse{problem, description.name, {}};
  const char* approximate =
      problem.approximate == 0 ? nullptr : approximation(problem.approximate).name;
  const bool approximates = approximate != nullptr && has(description, approximate);
  const std::span<const DType> dtypes = dtypes_of(problem, description, approximates);
  const bool takes = std::find(dtypes.begin(), dtypes.end(), problem.dtype) != dtypes.end();
  const bool takes_fp8 = takes && is_fp8(problem.dtype);
  if (!takes)
    refuse.add(std::string("dtype ") + dtype_name(problem.dtype),
               "takes " + names(dtypes) + "; convert q, k and v");
  if (takes_fp8 && problem.out_dtype != DType::F16 && problem.out_dtype != DType::BF16) {
    refuse.add(std::string("out_dtype ") + dtype_name(problem.out_dtype),
               "writes float16 or bfloat16; choose one of them");
  } else if (!is_fp8(problem.dtype) && problem.out_dtype != problem.dtype) {
    refuse.out_dtype(has(description, "out_dtype"));
  }
  check_head_dims(problem, description, refuse);
  if (problem.attention_chunk != 0 && !has(description, "attention_chunk"))
    refuse.add("attention_chunk", "has no chunks; leave attention_chunk out");
  refuse.layout("q", problem.q, problem.q_column == 1, problem.q_align, problem.dtype);
  if (problem.nk > 0) {  // an empty k or v is never read
    refuse.layout("k", problem.k, problem.k_column == 1, problem.k_align, problem.kv_dtype);
    refuse.layout("v", problem.v, problem.v_column == 1, problem.v_align, problem.kv_dtype);
  }
  refuse.layout("out", problem.out, problem.out_column == 1, problem.out_align, problem.out_dtype);
  if (approximate != nullptr && !approximates) {
    refuse.add(std::string("approximate='") + approximate + "'",
               "has no such kernel; leave approximate out");
  }
  if (problem.num_splits > 1 && !has(description, "num_splits")) {
    refuse.add("num_splits " + str(problem.num_splits),
               "does not split the keys; leave num_splits out or pass 1");
  }
  check_cache(problem, description, refuse);
  check_masks(problem, description, refuse);
  if (has_block_scales(problem) && !has(description, "block_scales") && takes_fp8) {
    refuse.add("descales of dtype float8_e8m0fnu",
               "takes descales of a tensor, a head or 64 rows, in float32; quantise anew");
  }
  if (problem.needs_grad) {
    refuse.add("no backward",
               "computes the forward only and a tensor of the call needs a gradient; call it under "
               "torch.no_grad()");
  }
  check_numbers(problem, refuse);
  return refuse.reasons;
}

void add_layout_reasons(const std::string& implementation, const char* name, const Strides& strides,
                        bool unit, int32_t align, DType dtype, Reasons& reasons) {
  static const Problem unused{};
  Refusals refuse{unused, implementation, {}};
  refuse.layout(name, strides, unit, align, dtype);
  reasons.insert(reasons.end(), refuse.reasons.begin(), refuse.reasons.end());
}

std::pair<std::string, std::string> approximate_note(const Problem& problem) {
  const Approximation& row = approximation(problem.approximate);
  return {"approximate",
          std::string(row.what) + "; " + row.error + "; its speed on 8.x and 12.x is unmeasured"};
}

bool writes_f32(const Problem& problem) {
  const bool of_16_bits = problem.dtype == DType::F16 || problem.dtype == DType::BF16;
  return of_16_bits && problem.out_dtype == DType::F32;
}

bool has_latent_lists(const Problem& problem) {
  return problem.key_indices > 0 && problem.qv_align > 0;
}

bool nothing_to_write(const Problem& problem) {
  const bool no_rows = problem.batch == 0 || problem.heads_q == 0 || problem.nq == 0;
  const bool nothing = no_rows || (problem.dv == 0 && !problem.want_lse);
  const bool appends = problem.n_new > 0 && problem.batch > 0 && problem.heads_kv > 0;
  return nothing && !appends && !problem.needs_grad;
}

std::string number_text(double number) {
  std::ostringstream text;
  text << number;
  return text.str();
}

AttentionParams attention_params(const Problem& problem) {
  AttentionParams params;
  // Padding, too: equal plans are equal bytes.
  std::memset(static_cast<void*>(&params), 0, sizeof params);
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
  params.heads_per_kv = static_cast<int32_t>(heads_per_kv(problem));
  params.nq = static_cast<int32_t>(problem.nq);
  params.nk = static_cast<int32_t>(problem.nk);
  params.d = static_cast<int32_t>(problem.d);
  params.dv = static_cast<int32_t>(problem.dv);
  params.offset_mode = problem.q_offset_tensor    ? OffsetMode::PerBatch
                       : problem.q_offset_default ? OffsetMode::KeysMinusQueries
                                                  : OffsetMode::Value;
  params.sinks_dtype = problem.sinks == 0 ? 0 : problem.sinks - 1;
  params.order.heads_per_group = static_cast<int32_t>(problem.batch * problem.heads_q);
  set_scale(problem, params);
  return params;
}

void always_transform_scores(const Problem& problem, AttentionParams& params) {
  transform_scores(problem, params);
}

void transform_scores_to_base_2(const Problem& problem, AttentionParams& params) {
  transform_scores(problem, params);
  // With a softcap its result is scaled, else q.k.
  (problem.softcap == 0 ? params.rule.tanh_scale : params.rule.softcap) *= params.exp2_scale;
  params.exp2_scale = 1.0f;
}

std::vector<PointerSlot> pointers(const Problem& problem) {
  using P = AttentionParams;
  const auto slot = [](Operand operand, size_t offset) {
    return PointerSlot{operand, static_cast<int32_t>(offset), 0};
  };
  std::vector<PointerSlot> slots;
  slots.reserve(USUAL_POINTERS);
  slots = {slot(Operand::Q, offsetof(P, q_gmem)), slot(Operand::K, offsetof(P, k_gmem)),
           slot(Operand::V, offsetof(P, v_gmem)), slot(Operand::Out, offsetof(P, out_gmem))};
  if (problem.want_lse) slots.push_back(slot(Operand::Lse, offsetof(P, lse_gmem)));
  if (problem.sinks) slots.push_back(slot(Operand::Sinks, offsetof(P, sinks_gmem)));
  if (problem.varlen) {
    slots.push_back(slot(Operand::CuSeqlensQ, offsetof(P, cu_seqlens_q_gmem)));
    if (!problem.kv_cache)
      slots.push_back(slot(Operand::CuSeqlensK, offsetof(P, cu_seqlens_k_gmem)));
  }
  if (problem.q_offset_tensor) slots.push_back(slot(Operand::QOffset, offsetof(P, q_offsets_gmem)));
  return slots;
}

Descales descales(const Problem& problem) {
  const auto descale = [](const Strides& strides) {
    return Descale{nullptr, strides.batch, strides.head, strides.row};
  };
  return {descale(problem.q_descale), descale(problem.k_descale), descale(problem.v_descale),
          problem.descale & 8 ? heads_per_kv(problem) : 1};
}

std::vector<PointerSlot> descale_pointers(const Problem& problem, int offset) {
  const std::pair<Operand, size_t> operands[] = {{Operand::QDescale, offsetof(Descales, q)},
                                                 {Operand::KDescale, offsetof(Descales, k)},
                                                 {Operand::VDescale, offsetof(Descales, v)}};
  std::vector<PointerSlot> slots;
  for (int i = 0; i < 3; ++i) {
    if ((problem.descale >> i & 1) == 0) continue;
    const auto& [operand, descale] = operands[i];
    slots.push_back({operand, static_cast<int32_t>(offset + descale + offsetof(Descale, gmem)), 0});
  }
  return slots;
}

}  // namespace archflash::core
