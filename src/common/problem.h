// What one attention call asks for (Problem) and what it will run on (Device): plain data, no Torch
// or CUDA type. Both are all that planning sees; data pointers are bound later
// (src/runtime/bind.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "common/approximate.h"
#include "common/dtype.h"

namespace archflash {

// Strides in elements. Dimensions of size 1 have stride 0, so that equal problems compare equal.
// With cu_seqlens the batch stride is 0: the rows of all sequences lie along `row`.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

constexpr int64_t UNBOUNDED = INT64_MAX;  // a window side without a limit
constexpr int64_t UNKNOWN = -1;           // max_seqlen_q/k not given

// A bool in 64 bits, so that a Problem has no padding however many flags it has.
struct Flag {
  int64_t value;
  constexpr operator bool() const { return value != 0; }
  constexpr Flag& operator=(bool on) {
    value = on;
    return *this;
  }
};

// Plain bytes without padding: compared and hashed as such by the plan cache. for_each_field()
// below lists the fields.
struct Problem {
  // Shapes. With cu_seqlens, batch is the number of sequences and nq, nk are the totals Tq, Tk.
  int64_t batch, heads_q, heads_kv, nq, nk, d, dv;
  // UNKNOWN unless given (cu_seqlens only): a hint, never a bound on memory.
  int64_t max_seqlen_q, max_seqlen_k;

  Strides q, k, v, out;  // `out` is the output that will be written

  // Strides of the descales; 0 along a dimension that shares one descale. `row` is the step from
  // one block of SCALE_ROWS rows to the next. With block scales it is that from one row of scales
  // to the next, of a row of q or k or of SCALED_NUMBERS rows of v.
  Strides q_descale, k_descale, v_descale;

  // Position of query 0 among the keys; used by causal and window only. For caches it is that of
  // full ones; kernels go by the lengths.
  int64_t q_offset;
  int64_t window_left;   // keys j >= i + q_offset - left
  int64_t window_right;  // keys j <= i + q_offset + right; causal is right = 0 at most
  double scale;          // multiplies q.k
  double softcap;        // 0: none; otherwise score = softcap * tanh(scale * q.k / softcap)
  double dropout_p;      // the probability that a weight is dropped; 0: none is
  int64_t approximate;   // an Approximate: asked for, never implied
  int64_t num_splits;    // shares of the keys at most, 1: no split, 0: the plan chooses

  // Masks as data. Strides are 0 along a dimension that is broadcast.
  int64_t mask;  // attn_mask: 0: none, 1: bool, otherwise added: 2 + DType
  Strides mask_strides;
  int64_t mask_key;    // stride of attn_mask from one key to the next
  int64_t mask_align;  // as q_align below; 0 without attn_mask
  int64_t key_ranges;  // ranges of each query; 0: key_ranges is not given
  Strides range_strides;
  // Lists of keys. Query rows i * list_rows and those up to the next list share list i.
  int64_t key_indices;   // entries of a list; 0: key_indices is not given
  int64_t list_rows;     // query rows that share a list, 1 or MASK_BLOCK; 0 without key_indices
  Strides list_strides;  // of key_indices: `head` of heads of k, `row` from one list to the next
  Strides topk_strides;  // of topk_lengths, likewise
  // The strides of strided options (common/options.inc), such as `alibi_slopes_strides`. The `row`
  // of block_mask is the step from one row of blocks to the next.
#define ARCHFLASH_OPTION(...)
#define ARCHFLASH_FLAG(...)
#define ARCHFLASH_TENSOR(...)
#define ARCHFLASH_STRIDED(option, ...) Strides option##_strides;
#include "common/options.inc"

  // Of attention_with_kvcache: 0 for every other call. k and v above are then the caches, nk is the
  // capacity of a sequence in rows, and the lengths are on the device only.
  int64_t cache_batch;      // sequences that the caches hold; with a page table their pages
  int64_t page_size;        // rows of a page; 0: no page table
  int64_t page_table_row;   // entries from one sequence of the page table to the next
  int64_t n_new;            // rows that the call appends to each sequence
  int64_t rotary_dim;       // columns of q and k_new that are rotated; 0: none
  int64_t rotary_rows;      // positions that the tables of cosines and sines have
  Strides k_new, v_new;     // of the appended rows
  Strides qv;               // of the second query, which has dv columns
  int64_t qv_align;         // as q_align below; 0: there is no second query
  int64_t mask_keys;        // last keys of a sequence that attn_mask is about; 0 without one
  int64_t packed_rows;      // a PackedRows (common/packed_rows.h): k and v both are those rows
  int64_t attention_chunk;  // a query sees keys of its own chunk of so many positions; 0: of all

  // Elements from one column to the next; 1 where there is one column. Kernels take 1 alone:
  // tensors with another step are copied first (planning/copies.h).
  int64_t q_column, k_column, v_column, out_column;

  DType dtype;           // of q, and of k and v but for caches
  DType kv_dtype;        // of k and v
  DType out_dtype;       // of the output
  int32_t rotary_dtype;  // 0: no rotation; otherwise 1 + DType of the tables
  // The largest power of two, at most 16, that divides the address in bytes.
  int32_t q_align, k_align, v_align, out_align;
  int32_t sinks;    // 0: none; otherwise 1 + DType of the (heads_q,) tensor
  int32_t descale;  // bit 0: q_descale, bit 1: k_descale, bit 2: v_descale;
                    // bit 3: that of q has one number for each head of k
                    // bit 4: all three are block scales, of type ue8m0 (common/block_scales.h)
                    // bit 5: q, k and v have four bits as they come (NVFP4); bits 0 to 2 then say
                    // that each head of q, k, v has a unit, and strides of q, k and v count bytes

  Flag varlen;  // cu_seqlens_q is given: q is packed, and so are k and v unless they are caches
  Flag q_offset_tensor;   // an int32 device tensor (batch,); q_offset above is ignored
  Flag q_offset_default;  // q_offset was not given: every sequence uses its own nk - nq
  Flag needs_grad;        // autograd will want gradients of a tensor of the call
  Flag on_cuda;           // whether tensors are on a CUDA device, or elsewhere (CPU, meta)
  Flag kv_cache;          // k and v are caches: a call of attention_with_kvcache
  Flag cache_batch_idx, leftpad_k;  // these tensors of it are given
  Flag slopes_need_grad;            // autograd will want the gradient of alibi_slopes
  Flag topk_lengths;                // is given
  Flag qv_unit;                     // the last dimension of qv is contiguous; 0 without qv
  // `approximate` is asked for by archflash.approximate(), where a kernel offers it: where none
  // does, the call is served exactly.
  Flag approximate_if_served;
  // Flags of options (common/options.inc), as asked, and whether strided ones are given. `causal`
  // is already folded into window_right.
#define ARCHFLASH_OPTION(...)
#define ARCHFLASH_TENSOR(...)
#define ARCHFLASH_STRIDED(option, ...) Flag option;
#define ARCHFLASH_FLAG(option, field, ...) Flag field;
#include "common/options.inc"
};

// Calls f(name, field) for every field of a Problem. Saving, loading, range checks of flags and the
// attributes that Python sees go by this list.
template <class P, class F>
  requires std::is_same_v<std::remove_const_t<P>, Problem>
constexpr void for_each_field(P& p, F&& f) {
  f("dtype", p.dtype), f("kv_dtype", p.kv_dtype), f("out_dtype", p.out_dtype);
  f("batch", p.batch), f("heads_q", p.heads_q), f("heads_kv", p.heads_kv);
  f("nq", p.nq), f("nk", p.nk), f("d", p.d), f("dv", p.dv);
  f("max_seqlen_q", p.max_seqlen_q), f("max_seqlen_k", p.max_seqlen_k);
  f("q", p.q), f("k", p.k), f("v", p.v), f("out", p.out);
  f("q_descale", p.q_descale), f("k_descale", p.k_descale), f("v_descale", p.v_descale);
  f("q_offset", p.q_offset), f("window_left", p.window_left), f("window_right", p.window_right);
  f("scale", p.scale), f("softcap", p.softcap), f("dropout_p", p.dropout_p);
  f("approximate", p.approximate), f("approximate_if_served", p.approximate_if_served);
  f("num_splits", p.num_splits);
  f("q_align", p.q_align), f("k_align", p.k_align), f("v_align", p.v_align);
  f("out_align", p.out_align);
  f("q_column", p.q_column), f("k_column", p.k_column), f("v_column", p.v_column);
  f("out_column", p.out_column);
  f("varlen", p.varlen), f("q_offset_tensor", p.q_offset_tensor);
  f("q_offset_default", p.q_offset_default), f("sinks", p.sinks), f("mask", p.mask);
  f("mask_strides", p.mask_strides), f("mask_key", p.mask_key), f("mask_align", p.mask_align);
  f("key_ranges", p.key_ranges), f("range_strides", p.range_strides);
  f("key_indices", p.key_indices), f("list_rows", p.list_rows);
  f("list_strides", p.list_strides), f("topk_lengths", p.topk_lengths);
  f("topk_strides", p.topk_strides);
  f("slopes_need_grad", p.slopes_need_grad);
  f("descale", p.descale);
  f("needs_grad", p.needs_grad), f("on_cuda", p.on_cuda), f("kv_cache", p.kv_cache);
  f("cache_batch", p.cache_batch), f("page_size", p.page_size);
  f("page_table_row", p.page_table_row), f("n_new", p.n_new);
  f("k_new", p.k_new), f("v_new", p.v_new);
  f("cache_batch_idx", p.cache_batch_idx), f("leftpad_k", p.leftpad_k);
  f("rotary_dim", p.rotary_dim), f("rotary_rows", p.rotary_rows);
  f("rotary_dtype", p.rotary_dtype);
  f("qv", p.qv), f("qv_align", p.qv_align), f("qv_unit", p.qv_unit);
  f("mask_keys", p.mask_keys), f("attention_chunk", p.attention_chunk);
  f("packed_rows", p.packed_rows);
#define ARCHFLASH_OPTION(...)
#define ARCHFLASH_TENSOR(...)
#define ARCHFLASH_STRIDED(option, ...) \
  f(#option, p.option), f(#option "_strides", p.option##_strides);
#define ARCHFLASH_FLAG(option, field, ...) f(#field, p.field);
#include "common/options.inc"
}

// Whether a call has a window beside what `causal` says.
constexpr bool has_window(const Problem& p) {
  return p.window_left != UNBOUNDED || (!p.causal && p.window_right != UNBOUNDED);
}
// Whether a call has numbers with block scales: MXFP8.
constexpr bool has_block_scales(const Problem& p) { return (p.descale & 16) != 0; }
constexpr bool has_stored_nvfp4(const Problem& p) { return (p.descale & 32) != 0; }
// Whether a call has masks as data.
constexpr bool is_masked(const Problem& p) {
  return p.mask != 0 || p.key_ranges != 0 || p.alibi_slopes || p.block_mask;
}
// Whether a call has masks of a cache: its rows and keys are those of a sequence whose length is on
// the device. (alibi_slopes alone are served without them.)
constexpr bool has_cache_masks(const Problem& p) {
  return p.kv_cache && (p.mask != 0 || p.key_ranges != 0);
}
// Whether attn_mask is the only mask as data, and nothing is dropped.
constexpr bool has_attn_mask_alone(const Problem& p) {
  return p.mask != 0 && p.key_ranges == 0 && !p.alibi_slopes && !p.block_mask && p.dropout_p == 0;
}
// Whether a call takes the kernels with masks as data, which have dropout, too.
constexpr bool takes_masked_kernels(const Problem& p) { return is_masked(p) || p.dropout_p != 0; }

constexpr size_t bytes_of_listed_fields() {
  size_t bytes = 0;
  Problem problem{};
  for_each_field(problem, [&](const char*, const auto& field) { bytes += sizeof field; });
  return bytes;
}
static_assert(std::is_trivially_copyable_v<Problem>);
static_assert(bytes_of_listed_fields() == sizeof(Problem),
              "a field is missing from for_each_field(), or Problem has padding, which it must not "
              "have: it is hashed as bytes");

// A GPU, as the driver reports it or as the table of known devices states it
// (src/runtime/known_devices.cpp).
struct Device {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int sm_count = 0;
  int64_t shared_per_block = 0;  // opt-in maximum, bytes
  int64_t shared_per_sm = 0;     // bytes, shared by the CTAs of an SM
  int64_t l2_bytes = 0;
  int registers_per_sm = 65536;  // 32-bit registers; the same on every capability from 7.5 to 12.1
  int threads_per_sm = 0;        // resident threads per SM
  bool present = false;          // in this machine: a plan needs machine code of this build

  int capability() const { return 10 * major + minor; }
};
template <class F>
void for_each_field(Device& d, F&& f) {
  f("name", d.name), f("major", d.major), f("minor", d.minor), f("sm_count", d.sm_count);
  f("shared_per_block", d.shared_per_block), f("shared_per_sm", d.shared_per_sm);
  f("l2_bytes", d.l2_bytes);
  f("registers_per_sm", d.registers_per_sm), f("threads_per_sm", d.threads_per_sm);
}

}  // namespace archflash
