#include <tuple>
#include <utility>

#include "common/packed_rows.h"
#include "runtime/reading/reading.h"

namespace archflash::reading {
namespace {

// The rows that a call appends to a cache.
void read_new_rows(nb::handle object, const char* name, Operand operand, const Axes& x, int64_t dim,
                   const TensorView& q, Call& call, Strides& strides) {
  Problem& p = call.problem;
  TensorView view;
  read(object, name, call, view);
  check_same_device(view, name, q);
  if (!view.is_float || view.dtype != p.kv_dtype) {
    wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.",
               dtype_name(p.kv_dtype), " as the cache is");
  }
  const bool has_rows = view.ndim == 4;
  if (operand == Operand::KNew && has_rows) p.n_new = view.shape[x.row];
  if (!has_rows || view.shape[x.batch] != p.batch || view.shape[x.head] != p.heads_kv ||
      view.shape[x.row] != p.n_new || view.shape[x.inner] != dim) {
    TensorView expected = view;
    expected.ndim = 4;
    int64_t shape[4];
    shape[x.batch] = p.batch, shape[x.head] = p.heads_kv, shape[x.inner] = dim;
    shape[x.row] = has_rows ? p.n_new : 1;
    expected.shape = shape;
    wrong_value(name, " has shape ", describe_shape(view), ": it must be ",
                describe_shape(expected), ", with as many new rows as k_new");
  }
  if (!has_unit_inner(view, x))
    wrong_value(name, " has a strided last dimension: call .contiguous() on it");
  strides = strides_of(view, x);
  set_address(call, operand, view);
}

void read_rotary(const Arguments& a, const TensorView& q, Call& call) {
  if (a.rotary_cos.is_none()) return;
  Problem& p = call.problem;
  TensorView cos, sin;
  read(a.rotary_cos, "rotary_cos", call, cos);
  read(a.rotary_sin, "rotary_sin", call, sin);
  const std::tuple<const char*, nb::handle, const TensorView&> tables[] = {
      {"rotary_cos", a.rotary_cos, cos}, {"rotary_sin", a.rotary_sin, sin}};
  for (const auto& [name, object, view] : tables) {
    check_same_device(view, name, q);
    if (!view.is_float || view.dtype != cos.dtype ||
        (view.dtype != DType::F32 && (view.dtype != q.dtype || is_fp8(q.dtype)))) {
      wrong_type(name, " has dtype ", dtype_text(object),
                 ": rotary_cos and rotary_sin must both be float32 or of q's dtype, not float8");
    }
    if (view.ndim != 2 || view.shape[0] < 1 || view.shape[1] < 1 || 2 * view.shape[1] > p.d ||
        view.shape[0] != cos.shape[0] || view.shape[1] != cos.shape[1]) {
      wrong_value(name, " has shape ", describe_shape(view),
                  ": rotary_cos and rotary_sin must both be (positions, rotary_dim / 2), with at "
                  "least one position and rotary_dim at most the head dim ",
                  p.d);
    }
    if ((view.shape[1] > 1 && view.strides[1] != 1) ||
        (view.shape[0] > 1 && view.strides[0] != view.shape[1]))
      wrong_value(name, " is not contiguous: call .contiguous() on it");
  }
  p.rotary_dim = 2 * cos.shape[1];
  p.rotary_rows = cos.shape[0];
  p.rotary_dtype = 1 + static_cast<int32_t>(cos.dtype);
  set_address(call, Operand::RotaryCos, cos);
  set_address(call, Operand::RotarySin, sin);
}

}  // namespace

void check_cache_options(const Arguments& a, bool kv_cache) {
  if (!kv_cache) {
    for (int i = ATTENTION_OPTION_COUNT; i < OPTION_COUNT; ++i) {
      const nb::handle value = a.*ARGUMENTS[i];
      if (value.is_none() || value.is(Py_False)) continue;
      wrong_value(OPTIONS[i].name,
                  " is given without cache_seqlens: it belongs to attention_with_kvcache");
    }
    return;
  }
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const nb::handle value = a.*ARGUMENTS[i];
    if (OPTIONS[i].of_cache || value.is_none() || value.is(Py_False)) continue;
    wrong_value(OPTIONS[i].name,
                " is given with cache_seqlens: attention_with_kvcache has no such option");
  }
  const auto both = [](const char* one, nb::handle a, const char* other, nb::handle b) {
    if (a.is_none() != b.is_none()) {
      wrong_value(a.is_none() ? one : other, " is missing: ", one, " and ", other,
                  " are given together");
    }
  };
  both("k_new", a.k_new, "v_new", a.v_new);
  both("rotary_cos", a.rotary_cos, "rotary_sin", a.rotary_sin);
  if (!a.rotary_cos.is_none() && a.k_new.is_none())
    wrong_value("rotary_cos is given without k_new: a call rotates q and the keys that it appends");
  if (a.rotary_interleaved.is(Py_True) && a.rotary_cos.is_none())
    wrong_value("rotary_interleaved is True without rotary_cos and rotary_sin: pass them");
  if (!a.page_table.is_none() && !a.cache_batch_idx.is_none()) {
    wrong_value(
        "cache_batch_idx is given with page_table: the page table says where each sequence is");
  }
}

namespace {

// Caches whose rows are named by their places alone: pages, or sequences of equal size.
void read_places(const Arguments& a, const Axes& x, const TensorView& k, Call& call) {
  Problem& p = call.problem;
  if (a.key_indices.is_none())
    wrong_value("physical_indices is True without key_indices: pass the places of the keys");
  const std::pair<const char*, nb::handle> needless[] = {{"cache_seqlens", a.cache_seqlens},
                                                         {"page_table", a.page_table},
                                                         {"k_new", a.k_new},
                                                         {"leftpad_k", a.leftpad_k},
                                                         {"cache_batch_idx", a.cache_batch_idx},
                                                         {"window", a.window}};
  for (const auto& [name, value] : needless) {
    if (!value.is_none()) {
      wrong_value(name,
                  " is given with physical_indices=True: key_indices alone say which rows of "
                  "the caches a query sees; leave it out");
    }
  }
  if (!a.causal.is(Py_False)) {
    wrong_value(
        "causal is True with physical_indices=True: a place in the caches is no position; "
        "leave out of key_indices what a query must not see");
  }
  p.cache_batch = k.shape[x.batch];
  p.page_size = k.shape[x.row];
  if (__builtin_mul_overflow(p.cache_batch, p.page_size, &p.nk) || p.nk >= INTEGER_LIMIT)
    wrong_value("k_cache has shape ", describe_shape(k), ": it must have fewer than 2^60 rows");
}

}  // namespace

void read_cache(const Arguments& a, const Axes& x, const TensorView& q, const TensorView& k,
                Call& call) {
  Problem& p = call.problem;
  if (a.physical_indices.is(Py_True)) {
    read_places(a, x, k, call);
    return;
  }
  const auto read_numbers = [&](nb::handle object, const char* name, Operand operand) {
    TensorView view;
    read_int32(object, name, p.batch, "", ", one number for each sequence", q, call, view);
    set_address(call, operand, view);
  };
  read_numbers(a.cache_seqlens, "cache_seqlens", Operand::CacheSeqlens);
  p.cache_batch = k.shape[x.batch];
  if (!a.page_table.is_none()) {
    TensorView table;
    read(a.page_table, "page_table", call, table);
    if (!table.is_int32)
      wrong_type("page_table has dtype ", dtype_text(a.page_table), ": it must be torch.int32");
    check_same_device(table, "page_table", q);
    if (table.ndim != 2 || table.shape[0] != p.batch) {
      wrong_value("page_table has shape ", describe_shape(table), ": it must be (", p.batch,
                  ", pages of a sequence)");
    }
    if (table.shape[1] > 1 && table.strides[1] != 1)
      wrong_value("page_table has a strided last dimension: call .contiguous() on it");
    p.page_size = k.shape[x.row];
    if (p.page_size < 1) {
      wrong_value("k_cache has shape ", describe_shape(k),
                  ", pages of no rows: a page must have at least one");
    }
    if (__builtin_mul_overflow(table.shape[1], p.page_size, &p.nk) || p.nk >= INTEGER_LIMIT) {
      wrong_value("page_table has shape ", describe_shape(table), " for pages of ", p.page_size,
                  " rows: a sequence must have fewer than 2^60");
    }
    p.page_table_row = stride_of(table, 0);
    set_address(call, Operand::PageTable, table);
  } else if (!a.cache_batch_idx.is_none()) {
    read_numbers(a.cache_batch_idx, "cache_batch_idx", Operand::CacheBatchIdx);
    p.cache_batch_idx = true;
  } else if (p.cache_batch != p.batch) {
    wrong_value("k_cache has ", p.cache_batch, " sequences and cache_seqlens is for ", p.batch,
                ": pass k_cache[:", p.batch, "] and v_cache[:", p.batch, "], or cache_batch_idx");
  }
  if (p.cache_batch == 0) p.nk = 0;  // there is no row that a page table could name
  if (!a.leftpad_k.is_none()) {
    read_numbers(a.leftpad_k, "leftpad_k", Operand::LeftpadK);
    p.leftpad_k = true;
  }
  if (!a.k_new.is_none()) {
    read_new_rows(a.k_new, "k_new", Operand::KNew, x, p.d, q, call, p.k_new);
    read_new_rows(a.v_new, "v_new", Operand::VNew, x, p.dv, q, call, p.v_new);
  }
  read_rotary(a, q, call);
}

void read_packed_rows(const Arguments& a, const Axes& x, const TensorView& k, const TensorView& v,
                      Problem& p) {
  for (int i = 1; i < PACKED_FORMAT_COUNT; ++i) {
    if (PyUnicode_Check(a.packed_rows.ptr()) &&
        PyUnicode_CompareWithASCIIString(a.packed_rows.ptr(), PACKED_FORMATS[i].name) == 0)
      p.packed_rows = i;
  }
  if (p.packed_rows == 0)
    wrong_value("packed_rows is ", given(a.packed_rows), ": it must be 'fp8_656' or 'fp8_584'");
  if (a.key_indices.is_none())
    wrong_value("packed_rows is given without key_indices: pass the rows that each query sees");
  if (a.qv.is_none() || !a.k_new.is_none() || x.row != 1) {
    wrong_value("packed_rows is given ",
                a.qv.is_none() ? "without qv" : "with k_new or layout=bhnd",
                ": it belongs to a latent cache in the layout bnhd, to which nothing is appended");
  }
  for (const nb::handle descale : {a.q_descale, a.k_descale, a.v_descale}) {
    if (!descale.is_none())
      wrong_value("a descale is given with packed_rows: each row has its own scales; leave it out");
  }
  const int64_t row_bytes = PACKED_FORMATS[p.packed_rows].row_bytes;
  if (p.kv_dtype != DType::E4M3 || p.dtype != DType::BF16 || k.shape[x.head] != 1 ||
      k.shape[x.inner] != row_bytes || (k.shape[x.row] > 1 && k.strides[x.row] != row_bytes) ||
      k.strides[x.inner] != 1) {
    wrong_value("k_cache is ", dtype_name(p.kv_dtype), " ", describe_shape(k), " for q of ",
                dtype_name(p.dtype), " and packed_rows=", given(a.packed_rows),
                ": it must be float8_e4m3fn (pages, page_size, 1, ", row_bytes,
                "), contiguous within a page, for q of bfloat16");
  }
  if (v.shape[x.inner] != row_bytes) {
    wrong_value("v_cache is ", describe_shape(v),
                " with packed_rows: rows of k_cache hold V, too; pass k_cache, or leave it out");
  }
  p.dv = 512;
}

void read_qv(const Arguments& a, const Axes& x, const TensorView& q, Call& call) {
  if (a.qv.is_none()) return;
  Problem& p = call.problem;
  TensorView view;
  read(a.qv, "qv", call, view);
  check_same_device(view, "qv", q);
  if (!view.is_float || view.dtype != p.dtype)
    wrong_type("qv has dtype ", dtype_text(a.qv), ": it must be torch.", dtype_name(p.dtype),
               " as q is");
  if (is_fp8(p.dtype))
    throw Unsupported("qv with float8 q: not built yet; convert both or leave qv at None");
  bool fits = view.ndim == q.ndim;
  for (int i = 0; fits && i < q.ndim; ++i)
    fits = view.shape[i] == (i == x.inner ? p.dv : q.shape[i]);
  if (!fits) {
    TensorView expected = q;
    int64_t shape[4];
    for (int i = 0; i < q.ndim; ++i) shape[i] = i == x.inner ? p.dv : q.shape[i];
    expected.shape = shape;
    wrong_value("qv has shape ", describe_shape(view), ": it must be ", describe_shape(expected),
                ", as q with the head dim of v_cache");
  }
  p.qv = strides_of(view, x);
  p.qv_unit = has_unit_inner(view, x);
  p.qv_align = alignment(view.data);
  set_address(call, Operand::Qv, view);
}

}  // namespace archflash::reading
