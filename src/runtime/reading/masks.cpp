#include <algorithm>
#include <iterator>

#include "common/block_scales.h"
#include "common/mask_params.h"
#include "runtime/reading/reading.h"

namespace archflash::reading {
namespace {

// Packed keys have no masks whose rows are queries: they would be relative to the sequence.
void refuse_packed(const char* name, const Problem& p) {
  if (!p.varlen || p.kv_cache) return;
  wrong_value(name,
              " is given with cu_seqlens: packed sequences take no mask; use causal or window");
}

// The stride of a dimension counted from the last one, 1, and 0 where the tensor lacks it.
int64_t stride_from_end(const TensorView& t, int number) {
  return number > t.ndim ? 0 : stride_of(t, t.ndim - number);
}

// The strides and the address of an attn_mask whose shape fits.
void set_mask(const TensorView& view, Call& call) {
  Problem& p = call.problem;
  p.mask = view.is_bool ? 1 : 2 + static_cast<int64_t>(view.dtype);
  p.mask_align = alignment(view.data);
  p.mask_strides = {stride_from_end(view, 4), stride_from_end(view, 3), stride_from_end(view, 2)};
  p.mask_key = stride_from_end(view, 1);
  set_address(call, Operand::Mask, view);
}

// With a cache the lengths are on the device: a mask is about the last keys of each sequence, as
// many as it has columns.
void read_mask_of_cache(const Arguments& a, const TensorView& view, Call& call) {
  Problem& p = call.problem;
  if (!view.is_bool) {
    wrong_type("attn_mask has dtype ", dtype_text(a.attn_mask),
               ": with a cache it must be torch.bool (True keeps)");
  }
  const int64_t full[3] = {p.varlen ? 1 : p.batch, p.heads_q, p.nq};
  bool fits = view.ndim == 4 && view.shape[3] >= 1 && view.shape[3] <= std::max<int64_t>(p.nk, 1);
  for (int i = 0; fits && i < 3; ++i) fits = view.shape[i] == 1 || view.shape[i] == full[i];
  if (!fits) {
    wrong_value("attn_mask has shape ", describe_shape(view), ": with a cache it must be (",
                full[0], " or 1, ", full[1], " or 1, ", full[2],
                " or 1, n), for the last n keys of each sequence, n from 1 to ", p.nk);
  }
  p.mask_keys = view.shape[3];
  set_mask(view, call);
}

void read_mask(const Arguments& a, const TensorView& q, Call& call) {
  if (a.attn_mask.is_none()) return;
  TensorView view;
  read(a.attn_mask, "attn_mask", call, view);
  Problem& p = call.problem;
  refuse_packed("attn_mask", p);
  if (!view.is_bool && !view.is_float) {
    wrong_type("attn_mask has dtype ", dtype_text(a.attn_mask),
               ": it must be torch.bool (True keeps) or a floating dtype (added)");
  }
  check_same_device(view, "attn_mask", q);
  if (p.kv_cache) {
    read_mask_of_cache(a, view, call);
    return;
  }
  const int64_t full[4] = {p.batch, p.heads_q, p.nq, p.nk};
  bool fits = view.ndim <= 4;
  for (int i = 0; fits && i < view.ndim; ++i) {
    const int64_t size = view.shape[view.ndim - 1 - i];
    fits = size == 1 || size == full[3 - i];
  }
  if (!fits) {
    wrong_value("attn_mask has shape ", describe_shape(view),
                ": it must broadcast to (batch, heads, nq, nk) = (", full[0], ", ", full[1], ", ",
                full[2], ", ", full[3], ")");
  }
  set_mask(view, call);
}

void read_key_ranges(const Arguments& a, const TensorView& q, Call& call) {
  if (a.key_ranges.is_none()) return;
  TensorView view;
  read(a.key_ranges, "key_ranges", call, view);
  Problem& p = call.problem;
  refuse_packed("key_ranges", p);
  if (!view.is_int32)
    wrong_type("key_ranges has dtype ", dtype_text(a.key_ranges), ": it must be torch.int32");
  check_same_device(view, "key_ranges", q);
  const int64_t full[3] = {p.varlen ? 1 : p.batch, p.heads_q, p.nq};
  bool fits =
      view.ndim == 5 && view.shape[4] == 2 && view.shape[3] >= 1 && view.shape[3] <= MOST_RANGES;
  for (int i = 0; fits && i < 3; ++i) fits = view.shape[i] == 1 || view.shape[i] == full[i];
  if (!fits) {
    wrong_value("key_ranges has shape ", describe_shape(view), ": it must be (", full[0], " or 1, ",
                full[1], " or 1, ", full[2], " or 1, n, 2), with n from 1 to ", MOST_RANGES,
                " ranges of keys for each query");
  }
  if (view.strides[4] != 1 || (view.shape[3] > 1 && view.strides[3] != 2))
    wrong_value("key_ranges has strided ranges: call .contiguous() on it");
  p.key_ranges = view.shape[3];
  p.range_strides = {stride_of(view, 0), stride_of(view, 1), stride_of(view, 2)};
  set_address(call, Operand::KeyRanges, view);
}

// The shapes that a strided tensor may have: "(4,) or (2, 4)", "(2 or 1, 4 or 1, 8, 8)".
std::string shapes_of(const Option& option, const Problem& p) {
  const int most = dimensions_of(option);
  std::string shapes;
  for (int first = most - 1; first >= 0; --first) {
    if (first > 0 && option.dimensions[first - 1].repeats != Repeats::IfLeftOut) continue;
    std::string sizes;
    for (int i = first; i < most; ++i) {
      const auto& [extent, repeats] = option.dimensions[i];
      sizes += join(i == first ? "" : ", ", size_of(extent, p),
                    repeats == Repeats::IfOne ? " or 1" : "");
    }
    shapes += join(shapes.empty() ? "(" : " or (", sizes, first == most - 1 ? ",)" : ")");
  }
  return shapes;
}

// A tensor as its row of the table of options describes it.
void read_strided(const Option& option, nb::handle object, const TensorView& q, Call& call) {
  TensorView view;
  read(object, option.name, call, view);
  Problem& p = call.problem;
  if (!option.of_packed) refuse_packed(option.name, p);
  const std::pair<bool, const char*> dtypes[] = {
      {view.is_float && view.dtype == DType::F32, "torch.float32"},
      {view.is_bool, "torch.bool"},
      {view.is_int8, "torch.int8"}};
  std::string allowed;
  bool is_allowed = false;
  for (size_t i = 0; i < std::size(dtypes); ++i) {
    if (!(option.dtypes >> i & 1)) continue;
    is_allowed = is_allowed || dtypes[i].first;
    allowed += join(allowed.empty() ? "" : " or ", dtypes[i].second);
  }
  if (!is_allowed)
    wrong_type(option.name, " has dtype ", dtype_text(object), ": it must be ", allowed);
  check_same_device(view, option.name, q);

  const int most = dimensions_of(option), left_out = most - view.ndim;
  bool fits = left_out >= 0;
  for (int i = 0; fits && i < most; ++i) {
    const auto& [extent, repeats] = option.dimensions[i];
    const int64_t size = i < left_out ? 0 : view.shape[i - left_out];
    fits = i < left_out ? repeats == Repeats::IfLeftOut
                        : size == size_of(extent, p) || (size == 1 && repeats == Repeats::IfOne);
  }
  if (!fits) {
    std::string doc = option.doc;
    std::erase(doc, '`');  // the mark-up of docstrings
    wrong_value(option.name, " has shape ", describe_shape(view), ": it must be ",
                shapes_of(option, p), ": ", doc);
  }
  Strides& strides = p.*option.strides;
  for (int i = left_out; i < most; ++i) {
    const int axis = i - left_out;
    if (int64_t* stride = stride_along(option.dimensions[i].extent, strides))
      *stride = stride_of(view, axis);
    else if (view.shape[axis] > 1 && view.strides[axis] != 1)
      wrong_value(option.name, " has a strided last dimension: call .contiguous() on it");
  }
  p.*option.present = true;
  set_address(call, *option.operand, view);
}

// One number for the tensor, each of `heads` (or of `other_heads`), each of those of every batch,
// or each block of SCALE_ROWS of `rows` rows of them.
void read_descale(nb::handle object, const TensorView& view, const char* name, Operand operand,
                  int bit, int64_t heads, int64_t other_heads, int64_t rows, const TensorView& q,
                  Call& call, Strides& strides) {
  Problem& p = call.problem;
  if (!view.is_float || view.dtype != DType::F32)
    wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.float32");
  check_same_device(view, name, q);
  const DType dtype = bit == 0 ? p.dtype : p.kv_dtype;
  if (!is_fp8(dtype)) {
    wrong_value(name, " is given but ", p.kv_cache && bit > 0 ? "the cache is " : "q is ",
                dtype_name(dtype), ": descales belong to float8 inputs");
  }
  const bool per_tensor = view.ndim == 0 || (view.ndim == 1 && view.shape[0] == 1);
  if (!per_tensor) {
    const int head_axis = view.ndim == 1 ? 0 : 1;
    const int64_t blocks = (rows + SCALE_ROWS - 1) / SCALE_ROWS;
    const bool fits = view.ndim <= 3 && (view.ndim == 1 || view.shape[0] == p.batch) &&
                      (view.shape[head_axis] == heads || view.shape[head_axis] == other_heads) &&
                      (view.ndim < 3 || (!p.varlen && !p.kv_cache && view.shape[2] == blocks));
    if (!fits) {
      const std::string other = other_heads == heads ? "" : join(" (or ", other_heads, ")");
      const std::string in_blocks =
          p.kv_cache ? "; with a cache there are no descales of blocks"
          : p.varlen ? "; packed sequences take no descales of blocks"
                     : join(" or (", p.batch, ", ", heads, ", ", blocks, ")", other,
                            ", the last of these one for each block of ", SCALE_ROWS, " rows");
      wrong_value(name, " has shape ", describe_shape(view), ": it must be (), (1,), (", heads,
                  ",)", other, ", (", p.batch, ", ", heads, ")", other, in_blocks);
    }
    strides.head = stride_of(view, head_axis);
    if (view.ndim > 1) strides.batch = stride_of(view, 0);
    if (view.ndim > 2) strides.row = stride_of(view, 2);
    if (view.shape[head_axis] != heads) p.descale |= 8;
  }
  p.descale |= 1 << bit;
  set_address(call, operand, view);
}

// Block scales. The tensor is laid out as the one that it belongs to, but for the dimension along
// which SCALED_NUMBERS numbers share a scale: the columns of q and k, the rows of v.
void read_block_scales(nb::handle object, const TensorView& view, const char* name, Operand operand,
                       bool along_rows, int64_t heads, int64_t rows, int64_t columns,
                       const Axes& axes, const TensorView& q, Call& call, Strides& strides) {
  const Problem& p = call.problem;
  constexpr char ALL_THREE[] =
      ": with block scales q_descale, k_descale and v_descale must all be torch.float8_e8m0fnu, as "
      "archflash.quantize_mxfp8 makes them";
  if (object.is_none()) wrong_value(name, " is None", ALL_THREE);
  if (!view.is_e8m0) wrong_type(name, " has dtype ", dtype_text(object), ALL_THREE);
  check_same_device(view, name, q);
  int64_t& shared = along_rows ? rows : columns;
  shared = (shared + SCALED_NUMBERS - 1) / SCALED_NUMBERS;
  int64_t shape[4];
  shape[axes.batch] = p.batch, shape[axes.head] = heads;
  shape[axes.row] = rows, shape[axes.inner] = columns;
  if (view.ndim != 4 || !std::equal(shape, shape + 4, view.shape)) {
    wrong_value(name, " has shape ", describe_shape(view), ": with block scales it must be (",
                shape[0], ", ", shape[1], ", ", shape[2], ", ", shape[3], "), a scale for ",
                SCALED_NUMBERS, along_rows ? " rows of a column" : " columns of a row");
  }
  if (columns > 1 && view.strides[axes.inner] != 1)
    wrong_value(name, " has a strided last dimension: call .contiguous() on it");
  strides = strides_of(view, axes);
  set_address(call, operand, view);
}

constexpr const char* NOT_BESIDE_LISTS =
    " is given with key_indices: only causal, window, softcap, sinks, scale and q_offset may be; "
    "leave it out";

// What a query sees is said once: by its list, and by where causal and window end.
void refuse_beside_key_indices(const Arguments& a, const Problem& p) {
  const std::pair<const char*, nb::handle> refused[] = {
      {"attn_mask", a.attn_mask},       {"key_ranges", a.key_ranges},
      {"block_mask", a.block_mask},     {"alibi_slopes", a.alibi_slopes},
      {"cu_seqlens_q", a.cu_seqlens_q}, {"attention_chunk", a.attention_chunk},
      {"rotary_cos", a.rotary_cos}};
  for (const auto& [name, value] : refused) {
    if (!value.is_none()) wrong_value(name, NOT_BESIDE_LISTS);
  }
  if (p.batch_invariant)
    wrong_value("batch_invariant is True with key_indices: no kernel promises it; leave it out");
  if (is_fp8(p.dtype) || (is_fp8(p.kv_dtype) && p.packed_rows == 0)) {
    wrong_type("q and k have dtypes ", dtype_name(p.dtype), " and ", dtype_name(p.kv_dtype),
               " with key_indices: they must not be float8; convert them");
  }
}

// The sizes that key_indices and topk_lengths may have before the last dimension of the former.
std::string sizes_of_lists(const Problem& p, bool may_repeat) {
  const int64_t blocks = (p.nq + MASK_BLOCK - 1) / MASK_BLOCK;
  const int64_t lists = p.list_rows == MASK_BLOCK ? blocks : p.nq;
  std::string text = join(p.batch, " or 1, ", p.heads_kv, " or 1, ", lists);
  if (may_repeat) return text + " or 1";
  return p.list_rows == 0 ? text + join(" or ", blocks) : text;
}

}  // namespace

void read_masks(const Arguments& a, const TensorView& q, Call& call) {
  read_mask(a, q, call);
  read_key_ranges(a, q, call);
  for (const int i : STRIDED_OPTIONS) {
    if (!(a.*ARGUMENTS[i]).is_none()) read_strided(OPTIONS[i], a.*ARGUMENTS[i], q, call);
  }
}

void read_key_indices(const Arguments& a, const TensorView& q, Call& call) {
  Problem& p = call.problem;
  if (a.key_indices.is_none()) {
    if (!a.topk_lengths.is_none())
      wrong_value("topk_lengths is given without key_indices: pass the lists that it cuts short");
    return;
  }
  refuse_beside_key_indices(a, p);
  const auto read_lists = [&](nb::handle object, const char* name, TensorView& view) {
    read(object, name, call, view);
    if (!view.is_int32)
      wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.int32");
    check_same_device(view, name, q);
  };
  const auto fits = [](int64_t size, int64_t full) { return size == full || size == 1; };
  TensorView lists;
  read_lists(a.key_indices, "key_indices", lists);
  const int64_t blocks = (p.nq + MASK_BLOCK - 1) / MASK_BLOCK;
  if (lists.ndim != 4 || !fits(lists.shape[0], p.batch) || !fits(lists.shape[1], p.heads_kv) ||
      (lists.shape[2] != p.nq && lists.shape[2] != blocks) || lists.shape[3] < 1) {
    wrong_value("key_indices has shape ", describe_shape(lists), ": it must be (",
                sizes_of_lists(p, false),
                ", n), n at least 1: a list of keys for each query row or for each ", MASK_BLOCK,
                " of them");
  }
  if (lists.shape[3] > 1 && lists.strides[3] != 1)
    wrong_value("key_indices has a strided last dimension: call .contiguous() on it");
  p.key_indices = lists.shape[3];
  p.list_rows = lists.shape[2] == p.nq ? 1 : MASK_BLOCK;
  p.list_strides = {stride_of(lists, 0), stride_of(lists, 1), stride_of(lists, 2)};
  set_address(call, Operand::KeyIndices, lists);
  if (a.topk_lengths.is_none()) return;
  TensorView lengths;
  read_lists(a.topk_lengths, "topk_lengths", lengths);
  if (lengths.ndim != 3 || !fits(lengths.shape[0], p.batch) ||
      !fits(lengths.shape[1], p.heads_kv) || !fits(lengths.shape[2], lists.shape[2])) {
    wrong_value("topk_lengths has shape ", describe_shape(lengths), ": it must be (",
                sizes_of_lists(p, true), "): how many entries of each list count");
  }
  p.topk_lengths = true;
  p.topk_strides = {stride_of(lengths, 0), stride_of(lengths, 1), stride_of(lengths, 2)};
  set_address(call, Operand::TopkLengths, lengths);
}

void read_sinks(const Arguments& a, const TensorView& q, Call& call) {
  if (a.sinks.is_none()) return;
  Problem& p = call.problem;
  TensorView sinks;
  read(a.sinks, "sinks", call, sinks);
  const bool allowed = sinks.dtype == DType::F32 || sinks.dtype == DType::F16 ||
                       sinks.dtype == DType::BF16 || sinks.dtype == q.dtype;
  if (!sinks.is_float || !allowed || dtype_bytes(sinks.dtype) == 1) {
    wrong_type("sinks has dtype ", dtype_text(a.sinks),
               ": it must be float32, float16, bfloat16 or q's own dtype, not float8");
  }
  check_same_device(sinks, "sinks", q);
  if (sinks.ndim != 1 || sinks.shape[0] != p.heads_q) {
    wrong_value("sinks has shape ", describe_shape(sinks), ": it must be (", p.heads_q,
                ",), one per query head");
  }
  if (p.heads_q > 1 && sinks.strides[0] != 1)
    wrong_value("sinks is not contiguous: call .contiguous() on it");
  p.sinks = 1 + static_cast<int32_t>(sinks.dtype);
  set_address(call, Operand::Sinks, sinks);
}

void read_q_offset(const Arguments& a, const TensorView& q, Call& call) {
  Problem& p = call.problem;
  p.q_offset_default = a.q_offset.is_none();
  p.q_offset = p.varlen ? 0 : p.nk - p.nq;
  if (!p.q_offset_default) {
    if (PyLong_CheckExact(a.q_offset.ptr()) || !is_tensor(a.q_offset)) {
      p.q_offset = integer(a.q_offset, "q_offset", "an int, an int32 tensor (batch,) or None");
    } else {
      TensorView offset;
      read_int32(a.q_offset, "q_offset", p.batch, "an int or ", "", q, call, offset);
      p.q_offset = 0;
      p.q_offset_tensor = true;
      set_address(call, Operand::QOffset, offset);
    }
  }
}

// The state says on the device which weights are dropped: only tensors can change in a CUDA graph.
void read_dropout(const Arguments& a, const TensorView& q, Call& call) {
  Problem& p = call.problem;
  if (!a.dropout_p.is_none()) {
    p.dropout_p = number(a.dropout_p, "dropout_p");
    if (p.dropout_p < 0 || p.dropout_p >= 1)
      wrong_value("dropout_p is ", p.dropout_p, ": it must be at least 0 and less than 1");
    if (p.dropout_p != 0 && p.key_indices > 0) wrong_value("dropout_p", NOT_BESIDE_LISTS);
  }
  if (p.dropout_p != 0 && p.batch_invariant) {
    wrong_value("dropout_p is ", p.dropout_p,
                " with batch_invariant=True: what is dropped depends on the place in the batch");
  }
  if (a.rng_state.is_none()) {
    if (p.dropout_p != 0) {
      wrong_value("dropout_p is ", p.dropout_p,
                  " and rng_state is None: pass the state that archflash.dropout_state gives");
    }
    return;
  }
  TensorView view;
  read(a.rng_state, "rng_state", call, view);
  if (!view.is_int64)
    wrong_type("rng_state has dtype ", dtype_text(a.rng_state), ": it must be torch.int64");
  check_same_device(view, "rng_state", q);
  if (view.ndim != 1 || view.shape[0] != 2 || view.strides[0] != 1) {
    wrong_value("rng_state has shape ", describe_shape(view),
                ": it must be (2,), contiguous, seed and offset");
  }
  set_address(call, Operand::RngState, view);
}

void read_descales(const Arguments& a, const TensorView& q, Call& call) {
  if (a.q_descale.is_none() && a.k_descale.is_none() && a.v_descale.is_none()) return;
  Problem& p = call.problem;
  struct Given {
    nb::handle object;
    const char* name;
    Operand operand;
    int64_t heads, rows, columns;
    Strides& strides;
    TensorView view = {};
  } all[] = {{a.q_descale, "q_descale", Operand::QDescale, p.heads_q, p.nq, p.d, p.q_descale},
             {a.k_descale, "k_descale", Operand::KDescale, p.heads_kv, p.nk, p.d, p.k_descale},
             {a.v_descale, "v_descale", Operand::VDescale, p.heads_kv, p.nk, p.dv, p.v_descale}};
  bool block_scales = false;
  for (Given& x : all) {
    if (x.object.is_none()) continue;
    read(x.object, x.name, call, x.view);
    block_scales = block_scales || x.view.is_e8m0;
  }
  if (!block_scales) {
    for (int i = 0; i < 3; ++i) {
      const Given& x = all[i];
      if (!x.object.is_none())
        read_descale(x.object, x.view, x.name, x.operand, i, x.heads, p.heads_kv, x.rows, q, call,
                     x.strides);
    }
    return;
  }
  if (p.varlen || p.kv_cache) {
    wrong_value("a descale has dtype torch.float8_e8m0fnu ",
                p.kv_cache ? "with a cache" : "with cu_seqlens",
                ": block scales of 32 rows of v belong to calls with one length; use float32");
  }
  if (!is_fp8(p.dtype)) {
    wrong_value("a descale is given but q is ", dtype_name(p.dtype),
                ": descales belong to float8 inputs");
  }
  const Axes axes = axes_of(a, false);
  for (const Given& x : all) {
    read_block_scales(x.object, x.view, x.name, x.operand, &x == &all[2], x.heads, x.rows,
                      x.columns, axes, q, call, x.strides);
  }
  p.descale = 7 | 16;
}

}  // namespace archflash::reading
