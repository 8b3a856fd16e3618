#include "runtime/reading/reading.h"

namespace archflash::reading {
namespace {

constexpr Axes BHND{0, 1, 2, 3}, BNHD{0, 2, 1, 3}, PACKED{-1, 1, 0, 2};

}  // namespace

Axes axes_of(const Arguments& a, bool varlen) {
  const bool is_text = PyUnicode_Check(a.layout.ptr());
  if (is_text && PyUnicode_CompareWithASCIIString(a.layout.ptr(), "bhnd") == 0)
    return varlen ? PACKED : BHND;
  if (is_text && PyUnicode_CompareWithASCIIString(a.layout.ptr(), "bnhd") == 0)
    return varlen ? PACKED : BNHD;
  wrong_value(
      "layout is ", given(a.layout),
      ": it must be 'bhnd' for (batch, heads, rows, dim) or 'bnhd' for (batch, rows, heads, dim)");
}

void read(nb::handle object, const char* name, Call& call, TensorView& view) {
  read_tensor(object, name, view);
  if (view.lazy && !call.lazy) call.lazy = name;
  if (!view.has_storage && !call.without_storage) call.without_storage = name;
}

void check_same_device(const TensorView& t, const char* name, const TensorView& q) {
  if (t.device_kind != q.device_kind || t.device_index != q.device_index) {
    auto text = [](const TensorView& view) {
      return view.device_kind == DeviceKind::Cuda
                 ? join("cuda:", view.device_index)
                 : std::string(view.device_kind == DeviceKind::Cpu    ? "cpu"
                               : view.device_kind == DeviceKind::Meta ? "meta"
                                                                      : "another device");
    };
    wrong_type(name, " is on ", text(t), " but q is on ", text(q), ": move them to one device");
  }
}

void check_rank(const TensorView& t, const char* name, int rank, bool varlen) {
  if (t.ndim == rank) return;
  wrong_value(name, " has shape ", describe_shape(t), ": ",
              varlen ? "with cu_seqlens it must have 3 dimensions (tokens, heads, dim)"
                     : "it must have 4 dimensions, (batch, heads, rows, dim) or with layout='bnhd' "
                       "(batch, rows, heads, dim); "
                       "packed (tokens, heads, dim) needs cu_seqlens_q and cu_seqlens_k");
}

void check_size(int64_t given, int64_t expected, const TensorView& t, const char* name,
                const char* what, const char* other) {
  if (given != expected) {
    wrong_value(name, " has shape ", describe_shape(t), ", ", what, " ", given, ": it must be ",
                expected, " as in ", other);
  }
}

void read_int32(nb::handle object, const char* name, int64_t length, const char* before,
                const char* behind, const TensorView& q, Call& call, TensorView& view) {
  read(object, name, call, view);
  if (!view.is_int32)
    wrong_type(name, " has dtype ", dtype_text(object), ": it must be torch.int32");
  check_same_device(view, name, q);
  if (view.ndim != 1 || (length >= 0 ? view.shape[0] != length : view.shape[0] < 1)) {
    const std::string shape = length >= 0 ? join("(", length, ",)") : "";
    wrong_value(name, " has shape ", describe_shape(view), ": it must be ", before, shape, behind);
  }
  if (view.shape[0] > 1 && view.strides[0] != 1)
    wrong_value(name, " is not contiguous: call .contiguous() on it");
}

}  // namespace archflash::reading
