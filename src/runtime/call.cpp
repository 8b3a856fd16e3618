#include "runtime/call.h"

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "common/packed_rows.h"
#include "runtime/reading/reading.h"

namespace archflash {
namespace {

using namespace reading;

bool wants_gradient(const Arguments& a) {
  if (a.grad != Grad::IfRequired) return a.grad == Grad::Needed;
  if (requires_grad(a.q) || requires_grad(a.k) || requires_grad(a.v)) return true;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const nb::handle value = a.*ARGUMENTS[i];
    if (OPTIONS[i].differentiable && !value.is_none() && requires_grad(value)) return true;
  }
  return false;
}

// q, k and v, where their dimensions are, and what messages call the last two.
struct Inputs {
  TensorView q, k, v;
  Axes axes, of_keys;
  const char *k_name, *v_name;
};

void check_dtypes(const Arguments& a, const Inputs& in, bool kv_cache) {
  const TensorView &q = in.q, &k = in.k, &v = in.v;
  if (!q.is_float) {
    wrong_type(
        "q has dtype ", dtype_text(a.q),
        ": attention takes float32, float16, bfloat16, float64, float8_e4m3fn and float8_e5m2");
  }
  const bool fp8_cache = kv_cache && k.is_float && v.is_float && is_fp8(k.dtype);
  if (fp8_cache && k.dtype != v.dtype) {
    wrong_type("k_cache and v_cache have dtypes ", dtype_text(a.k), " and ", dtype_text(a.v),
               ": they must be the same");
  }
  if (!fp8_cache && (!k.is_float || k.dtype != q.dtype || !v.is_float || v.dtype != q.dtype)) {
    wrong_type("q, ", in.k_name, " and ", in.v_name, " have dtypes ", dtype_text(a.q), ", ",
               dtype_text(a.k), " and ", dtype_text(a.v),
               ": they must be the same; convert them with .to(q.dtype)");
  }
}

// Heads, rows and columns, but for packed rows of a cache.
void read_sizes(const Arguments& a, const Inputs& in, Problem& p) {
  const TensorView &q = in.q, &k = in.k, &v = in.v;
  const Axes &x = in.axes, &of_keys = in.of_keys;
  p.heads_q = q.shape[x.head];
  p.heads_kv = k.shape[of_keys.head];
  p.nq = q.shape[x.row];
  p.nk = k.shape[of_keys.row];
  p.d = q.shape[x.inner];
  p.dv = v.shape[of_keys.inner];
  if (!a.packed_rows.is_none()) {
    read_packed_rows(a, of_keys, k, v, p);
  } else {
    check_size(k.shape[of_keys.inner], p.d, k, in.k_name, "head dim", "q");
  }
  check_size(v.shape[of_keys.head], p.heads_kv, v, in.v_name, "heads", in.k_name);
  check_size(v.shape[of_keys.row], p.nk, v, in.v_name, "rows", in.k_name);
  if (p.d < 1 || p.dv < 1)
    wrong_value("the head dim is ", p.d, " for q and k and ", p.dv,
                " for v: it must be at least 1");
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    const bool packed = q.ndim == 3;
    const char* const order = packed        ? "tokens, heads, dim"
                              : x.head == 1 ? "batch, heads, rows, dim"
                                            : "batch, rows, heads, dim";
    wrong_value("q has ", p.heads_q, " heads and k has ", p.heads_kv,
                ": the heads of q must be a multiple of those of k and v, where q is (", order,
                ")");
  }
}

void read_addresses(const Inputs& in, Call& call) {
  Problem& p = call.problem;
  p.q = strides_of(in.q, in.axes);
  p.k = strides_of(in.k, in.of_keys);
  p.v = strides_of(in.v, in.of_keys);
  if (p.packed_rows != 0 && p.k.row != 0) p.k.row = p.v.row = PACKED_FORMATS[p.packed_rows].step;
  p.q_column = column_of(in.q, in.axes);
  p.k_column = column_of(in.k, in.of_keys);
  p.v_column = column_of(in.v, in.of_keys);
  p.q_align = alignment(in.q.data);
  p.k_align = alignment(in.k.data);
  p.v_align = alignment(in.v.data);
  set_address(call, Operand::Q, in.q);
  set_address(call, Operand::K, in.k);
  set_address(call, Operand::V, in.v);
}

void read_scale(const Arguments& a, Problem& p) {
  const int64_t multiplied = p.d + (p.qv_align > 0 ? p.dv : 0);  // columns of a score
  p.scale = a.scale.is_none() ? 1.0 / std::sqrt(static_cast<double>(multiplied))
                              : number(a.scale, "scale");
  if (p.dtype != DType::F64 && std::fabs(p.scale) > std::numeric_limits<float>::max())
    wrong_value("scale is ", p.scale, ": it must be finite in float32, which scores are made in");
}

// How many sequences there are, how packed ones or those of a cache lie, and hints of their
// lengths.
void read_sequences(const Arguments& a, const Inputs& in, Call& call) {
  const TensorView &q = in.q, &k = in.k, &v = in.v;
  const Axes &x = in.axes, &of_keys = in.of_keys;
  Problem& p = call.problem;
  p.max_seqlen_q = p.max_seqlen_k = UNKNOWN;
  if (p.kv_cache) {
    p.batch = p.varlen ? 0 : q.shape[x.batch];
    if (p.varlen) {
      TensorView cu_q;
      read_int32(a.cu_seqlens_q, "cu_seqlens_q", -1, "(sequences + 1,)", "", q, call, cu_q);
      p.batch = cu_q.shape[0] - 1;
      set_address(call, Operand::CuSeqlensQ, cu_q);
      p.max_seqlen_q = longest(a.max_seqlen_q, "max_seqlen_q");
    } else if (!a.max_seqlen_q.is_none()) {
      wrong_value("max_seqlen_q is given without cu_seqlens_q: it belongs to packed sequences");
    }
    check_size(v.shape[of_keys.batch], k.shape[of_keys.batch], v, "v_cache", "batch", "k_cache");
    read_cache(a, of_keys, q, k, call);
    read_qv(a, x, q, call);
    read_attention_chunk(a, p);
  } else if (p.varlen) {
    TensorView cu_q, cu_k;
    read_int32(a.cu_seqlens_q, "cu_seqlens_q", -1, "(sequences + 1,)", "", q, call, cu_q);
    read_int32(a.cu_seqlens_k, "cu_seqlens_k", -1, "(sequences + 1,)", "", q, call, cu_k);
    if (cu_q.shape[0] != cu_k.shape[0]) {
      wrong_value("cu_seqlens_q has ", cu_q.shape[0], " entries and cu_seqlens_k ", cu_k.shape[0],
                  ": both must have one more entry than there are sequences");
    }
    p.batch = cu_q.shape[0] - 1;
    set_address(call, Operand::CuSeqlensQ, cu_q);
    set_address(call, Operand::CuSeqlensK, cu_k);
    p.max_seqlen_q = longest(a.max_seqlen_q, "max_seqlen_q");
    p.max_seqlen_k = longest(a.max_seqlen_k, "max_seqlen_k");
  } else {
    p.batch = q.shape[x.batch];
    check_size(k.shape[x.batch], p.batch, k, "k", "batch", "q");
    check_size(v.shape[x.batch], p.batch, v, "v", "batch", "q");
    if (!a.max_seqlen_q.is_none() || !a.max_seqlen_k.is_none()) {
      wrong_value(
          "max_seqlen_q or max_seqlen_k is given without cu_seqlens: they belong to packed "
          "sequences");
    }
  }
}

}  // namespace

Arguments arguments_of(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad) {
  const bool of_cache = PyList_CheckExact(options.ptr());
  const Py_ssize_t count = of_cache                            ? PyList_Size(options.ptr())
                           : PyTuple_CheckExact(options.ptr()) ? PyTuple_Size(options.ptr())
                                                               : 0;
  if (of_cache ? count != CACHE_OPTION_COUNT
               : count != OPTION_COUNT && count != ATTENTION_OPTION_COUNT) {
    wrong_type("options is ", given(options), ": it must be a tuple of ", OPTION_COUNT,
               " values, or of ", ATTENTION_OPTION_COUNT, " without those of a cache");
  }
  Arguments a{.q = q, .k = k, .v = v, .grad = static_cast<Grad>(grad), .options = options};
  Py_ssize_t next = 0;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const bool is_flag = OPTIONS[i].kind == OptionKind::Flag;
    PyObject* const absent = is_flag ? Py_False : Py_None;
    if (of_cache)
      a.*ARGUMENTS[i] = OPTIONS[i].of_cache ? PyList_GetItem(options.ptr(), next++) : absent;
    else
      a.*ARGUMENTS[i] = i < count ? PyTuple_GetItem(options.ptr(), i) : absent;
  }
  return a;
}

void set_batch(Arguments& arguments, nb::handle batch) {
  constexpr auto COUNT = static_cast<Py_ssize_t>(std::size(BATCH));
  if (!PyTuple_CheckExact(batch.ptr()) || PyTuple_Size(batch.ptr()) != COUNT)
    wrong_type("batch is ", given(batch), ": it must be a tuple of ", COUNT, " values");
  for (Py_ssize_t i = 0; i < COUNT; ++i) arguments.*BATCH[i] = PyTuple_GetItem(batch.ptr(), i);
}

void build_call(const Arguments& a, Call& call) {
  std::memset(static_cast<void*>(&call), 0, sizeof(call));
  Problem& p = call.problem;
  p.kv_cache = !a.cache_seqlens.is_none() || a.physical_indices.is(Py_True);
  Inputs in;
  in.k_name = p.kv_cache ? "k_cache" : "k";
  in.v_name = p.kv_cache ? "v_cache" : "v";
  const TensorView& q = in.q;
  read(a.q, "q", call, in.q);
  read(a.k, in.k_name, call, in.k);
  read(a.v, in.v_name, call, in.v);

  check_cache_options(a, p.kv_cache);
  p.varlen = !a.cu_seqlens_q.is_none();
  if (!p.kv_cache && p.varlen != !a.cu_seqlens_k.is_none()) {
    wrong_value(p.varlen ? "cu_seqlens_k" : "cu_seqlens_q",
                " is missing: packed sequences need both cu_seqlens_q and cu_seqlens_k");
  }
  const bool packed_keys = p.varlen && !p.kv_cache;
  in.axes = axes_of(a, p.varlen);
  in.of_keys = axes_of(a, packed_keys);
  check_rank(q, "q", p.varlen ? 3 : 4, p.varlen);
  check_rank(in.k, in.k_name, packed_keys ? 3 : 4, packed_keys);
  check_rank(in.v, in.v_name, packed_keys ? 3 : 4, packed_keys);
  check_dtypes(a, in, p.kv_cache);
  check_same_device(in.k, in.k_name, q);
  check_same_device(in.v, in.v_name, q);
  p.dtype = q.dtype;
  p.kv_dtype = in.k.dtype;
  p.on_cuda = q.device_kind == DeviceKind::Cuda;
  call.device_kind = q.device_kind;
  call.device_index = p.on_cuda ? q.device_index : -1;

  read_sizes(a, in, p);
  read_sequences(a, in, call);
  read_addresses(in, call);
  read_flags(a, p);
  p.window_left = p.window_right = UNBOUNDED;
  read_window(a.window, p);
  if (p.causal) p.window_right = 0;  // a right side >= 0 adds nothing to causal
  read_scale(a, p);
  read_softcap(a, p);
  read_q_offset(a, q, call);
  read_sinks(a, q, call);
  read_masks(a, q, call);
  read_key_indices(a, q, call);
  read_dropout(a, q, call);
  read_descales(a, q, call);
  p.needs_grad = wants_gradient(a);
  p.slopes_need_grad =
      a.grad != Grad::Off && !a.alibi_slopes.is_none() && requires_grad(a.alibi_slopes);
  if (p.kv_cache && p.needs_grad) {
    throw Unsupported(
        "attention_with_kvcache has no backward and a tensor of the call requires a gradient: call "
        "it under torch.no_grad(), or detach() the tensors");
  }
  read_out_dtype(a, p);
  read_approximate(a, p);
  read_num_splits(a, p);
  read_output(a, q, in.axes, call);
}

}  // namespace archflash
