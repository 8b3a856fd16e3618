#include "runtime/checks.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "common/block_scales.h"
#include "common/options.h"
#include "common/packed_rows.h"
#include "runtime/text.h"

namespace archflash {
namespace {

constexpr int64_t LIMIT = INTEGER_LIMIT - 1;  // the largest integer of a call
// The most elements that a tensor may have (repeated ones counted), and the most from its first to
// its last in memory: their bytes then fit 63 bits.
constexpr int64_t ELEMENTS = int64_t{1} << 59;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(join(parts...));
}

template <class T>
using Named = std::initializer_list<std::pair<const char*, T>>;

// Reads as the fields do: UNBOUNDED travels as None.
std::string text_of(int64_t value) { return value == UNBOUNDED ? "None" : std::to_string(value); }

struct Checker {
  const std::string& prefix;

  template <class... Parts>
  void require(bool holds, const char* field, const std::string& given,
               const Parts&... must) const {
    if (!holds) refuse("field '", prefix, field, "' is ", given, ": it must be ", must...);
  }
  void range(int64_t low, int64_t high, Named<int64_t> fields) const {
    for (const auto& [field, value] : fields) {
      require(low <= value && value <= high, field, text_of(value), "an integer from ", low, " to ",
              high);
    }
  }
};

// The sizes of one tensor, and the strides that a Problem has of it.
struct Layout {
  const char* name;
  const Strides& strides;
  int64_t batch, heads, rows, inner;
  int64_t column = 1;  // stride of the last dimension
};

// The product of sizes, each counted as 1 at least; more than ELEMENTS where it is too large.
int64_t elements(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product) || product > ELEMENTS)
      return ELEMENTS + 1;
  }
  return product;
}

void check_strides(const Checker& check, const Layout& x) {
  const std::tuple<const char*, int64_t, int64_t> dimensions[] = {
      {".batch", x.strides.batch, x.batch},
      {".head", x.strides.head, x.heads},
      {".row", x.strides.row, x.rows}};
  check.range(0, ELEMENTS, {{(std::string(x.name) + "_column").c_str(), x.column}});
  // The offset of the last element.
  __int128 last = static_cast<__int128>(std::max<int64_t>(x.inner - 1, 0)) * x.column;
  for (const auto& [dimension, stride, size] : dimensions) {
    const std::string field = std::string(x.name) + dimension;
    check.range(0, ELEMENTS, {{field.c_str(), stride}});
    if (size == 1)
      check.require(stride == 0, field.c_str(), text_of(stride), "0, as the dimension has size 1");
    if (size > 1) last += static_cast<__int128>(size - 1) * stride;
  }
  if (last >= ELEMENTS) {
    refuse("field '", check.prefix, x.name, "' has strides (", x.strides.batch, ", ",
           x.strides.head, ", ", x.strides.row, "), whose last element lies beyond 2^59 elements");
  }
}

// A tensor that a call may have: its strides, all 0 where it does not.
void check_strides_of(const Checker& check, const Layout& layout, bool given) {
  check_strides(check, layout);
  const Strides& s = layout.strides;
  if (!given && (s.batch != 0 || s.head != 0 || s.row != 0)) {
    refuse("field '", check.prefix, layout.name,
           "' has strides: they must be 0, as the tensor is not given");
  }
}

// The first dimension of k and v, and their rows: of a sequence, or of a page.
struct Rows {
  int64_t batch, rows;
};
Rows rows_of_keys(const Problem& p) {
  if (!p.kv_cache) return {p.varlen ? 1 : p.batch, p.nk};
  return {p.cache_batch, p.page_size > 0 ? p.page_size : p.nk};
}

void check_shapes(const Checker& check, const Problem& p) {
  check.range(0, LIMIT, {{"batch", p.batch}, {"heads_q", p.heads_q}, {"heads_kv", p.heads_kv}});
  check.range(0, LIMIT, {{"nq", p.nq}, {"nk", p.nk}});
  check.range(1, LIMIT, {{"d", p.d}, {"dv", p.dv}});
  check.require(p.heads_kv == 0 ? p.heads_q == 0 : p.heads_q % p.heads_kv == 0, "heads_kv",
                text_of(p.heads_kv), "a divisor of heads_q = ", p.heads_q);
  const int64_t batch = p.varlen ? 1 : p.batch, dim = std::max(p.d, p.dv);
  const Rows keys = rows_of_keys(p);
  const int64_t largest = std::max({elements({batch, p.heads_q, p.nq, dim}),
                                    elements({keys.batch, p.heads_kv, keys.rows, dim}),
                                    elements({p.batch, p.heads_kv, p.n_new, dim}),
                                    elements({p.heads_q, std::max(p.batch, p.nq), 2})});
  if (largest > ELEMENTS) {
    refuse("fields '", check.prefix, "batch', 'heads_q', 'heads_kv', 'nq', 'nk', 'd' and 'dv' are ",
           p.batch, ", ", p.heads_q, ", ", p.heads_kv, ", ", p.nq, ", ", p.nk, ", ", p.d, " and ",
           p.dv, ": a tensor must have at most 2^59 elements");
  }
}

void check_layouts(const Checker& check, const Problem& p) {
  const int64_t batch = p.varlen ? 1 : p.batch;
  const Layout out{"out", p.out, batch, p.heads_q, p.nq, p.dv, p.out_column};
  const Rows keys = rows_of_keys(p);
  for (const Layout& layout :
       {Layout{"q", p.q, batch, p.heads_q, p.nq, p.d, p.q_column},
        Layout{"k", p.k, keys.batch, p.heads_kv, keys.rows, p.d, p.k_column},
        Layout{"v", p.v, keys.batch, p.heads_kv, keys.rows, p.dv, p.v_column}, out}) {
    check_strides(check, layout);
  }
  const int64_t shape[] = {out.batch, out.heads, out.rows, out.inner};
  const int64_t strides[] = {p.out.batch, p.out.head, p.out.row, 1};
  if (p.out_column == 1 && overlaps_itself(shape, strides, 4)) {
    refuse("field '", check.prefix, "out' has strides (", p.out.batch, ", ", p.out.head, ", ",
           p.out.row, "): its elements must not overlap");
  }
  for (const auto& [field, align] : Named<int32_t>{{"q_align", p.q_align},
                                                   {"k_align", p.k_align},
                                                   {"v_align", p.v_align},
                                                   {"out_align", p.out_align}}) {
    const bool power = align >= 1 && align <= 16 && (align & (align - 1)) == 0;
    check.require(power, field, text_of(align), "1, 2, 4, 8 or 16");
  }
}

void check_descales(const Checker& check, const Problem& p) {
  check.range(0, 39, {{"descale", p.descale}});
  const auto groups = [](int64_t n, int64_t size) { return n / size + (n % size != 0); };
  if (has_stored_nvfp4(p)) {
    check.require(
        p.approximate == static_cast<int64_t>(Approximate::Nvfp4) && dtype_bytes(p.dtype) == 2 &&
            !p.varlen,
        "descale", text_of(p.descale),
        "without bit 5, which belongs to approximate='nvfp4' of 16 bits without cu_seqlens");
    for (const Layout& layout :
         {Layout{"q_descale", p.q_descale, p.batch, p.heads_q, p.nq, groups(p.d, NVFP4_GROUP)},
          Layout{"k_descale", p.k_descale, p.batch, p.heads_kv, p.nk, groups(p.d, NVFP4_GROUP)},
          Layout{"v_descale", p.v_descale, p.batch, p.heads_kv, groups(p.nk, NVFP4_GROUP), p.dv}})
      check_strides_of(check, layout, true);
    return;
  }
  const bool block_scales = has_block_scales(p);
  check.require(
      !block_scales || (p.descale == (7 | 16) && !p.varlen && !p.kv_cache), "descale",
      text_of(p.descale),
      "23 where bit 4 is set, as all three then have block scales, and without cu_seqlens "
      "and a cache");
  check.require((p.descale & 1) == 0 || is_fp8(p.dtype), "descale", text_of(p.descale),
                "without bit 0, as q is ", dtype_name(p.dtype));
  check.require((p.descale & 6) == 0 || is_fp8(p.kv_dtype), "descale", text_of(p.descale),
                "without bits 1 and 2, as k and v are ", dtype_name(p.kv_dtype));
  check.require(!(p.descale & 8) || (p.descale & 1), "descale", text_of(p.descale),
                "without bit 3, as q has no descale");
  const int64_t q_heads = p.descale & 8 ? p.heads_kv : p.heads_q;
  const auto blocks = [&](int64_t rows) {
    return p.varlen || p.kv_cache ? 1 : rows / SCALE_ROWS + (rows % SCALE_ROWS != 0);
  };
  const int64_t q_rows = block_scales ? p.nq : blocks(p.nq);
  const int64_t k_rows = block_scales ? p.nk : blocks(p.nk);
  const int64_t v_rows = block_scales ? groups(p.nk, SCALED_NUMBERS) : blocks(p.nk);
  int bit = 0;
  for (const Layout& layout :
       {Layout{"q_descale", p.q_descale, p.batch, q_heads, q_rows,
               block_scales ? groups(p.d, SCALED_NUMBERS) : 1},
        Layout{"k_descale", p.k_descale, p.batch, p.heads_kv, k_rows,
               block_scales ? groups(p.d, SCALED_NUMBERS) : 1},
        Layout{"v_descale", p.v_descale, p.batch, p.heads_kv, v_rows, block_scales ? p.dv : 1}}) {
    check_strides_of(check, layout, p.descale >> bit++ & 1);
  }
}

void check_masks(const Checker& check, const Problem& p) {
  const bool packed_keys = p.varlen && !p.kv_cache;
  const int64_t most_masks = packed_keys ? 0 : p.kv_cache ? 1 : 1 + DTYPE_COUNT;  // 1: bool alone
  check.range(0, most_masks, {{"mask", p.mask}});
  check.range(0, packed_keys ? 0 : MOST_RANGES, {{"key_ranges", p.key_ranges}});
  check.range(0, p.alibi_slopes ? 1 : 0, {{"slopes_need_grad", p.slopes_need_grad}});
  const int64_t batch = p.varlen ? 1 : p.batch;
  const Layout of_mask{"mask_strides", p.mask_strides, batch, p.heads_q, p.nq, 1};
  const Layout of_ranges{"range_strides", p.range_strides, batch, p.heads_q, p.nq,
                         2 * p.key_ranges};
  check_strides_of(check, of_mask, p.mask != 0);
  check_strides_of(check, of_ranges, p.key_ranges != 0);
  for (const int i : STRIDED_OPTIONS) {
    const Option& option = OPTIONS[i];
    const bool allowed = (option.of_packed || !p.varlen) && (option.of_cache || !p.kv_cache);
    check.range(0, allowed ? 1 : 0, {{option.name, p.*option.present}});
    const std::string name = std::string(option.name) + "_strides";
    Strides sizes{1, 1, 1};
    int64_t keys = 1;
    for (const auto& [extent, repeats] : option.dimensions) {
      int64_t* const size = stride_along(extent, sizes);
      (size ? *size : keys) *= size_of(extent, p);
    }
    const Layout layout{name.c_str(), p.*option.strides, sizes.batch, sizes.head, sizes.row, keys};
    check_strides_of(check, layout, p.*option.present);
  }
  check.range(0, p.mask != 0 ? ELEMENTS : 0, {{"mask_key", p.mask_key}});
  check.require(p.mask_key <= ELEMENTS / std::max<int64_t>(p.nk, 1), "mask_key",
                text_of(p.mask_key), "at most 2^59 / nk");
  const int64_t align = p.mask_align;
  const bool power =
      p.mask == 0 ? align == 0 : align >= 1 && align <= 16 && (align & (align - 1)) == 0;
  check.require(power, "mask_align", text_of(align),
                p.mask == 0 ? "0, as there is no attn_mask" : "1, 2, 4, 8 or 16");
}

// What a call with key_indices says of its lists; all of it is 0 for other calls.
void check_key_lists(const Checker& check, const Problem& p) {
  check.range(0, LIMIT, {{"key_indices", p.key_indices}});
  const bool given = p.key_indices > 0;
  check.require(given ? p.list_rows == 1 || p.list_rows == MASK_BLOCK : p.list_rows == 0,
                "list_rows", text_of(p.list_rows), given ? "1 or 64" : "0, as there are no lists");
  check.range(0, given, {{"topk_lengths", p.topk_lengths}});
  check.range(0, given && p.kv_cache, {{"physical_indices", p.physical_indices}});
  const int64_t rows = std::max<int64_t>(p.list_rows, 1), lists = (p.nq + rows - 1) / rows;
  check_strides_of(
      check, {"list_strides", p.list_strides, p.batch, p.heads_kv, lists, p.key_indices}, given);
  check_strides_of(check, {"topk_strides", p.topk_strides, p.batch, p.heads_kv, lists, 1},
                   p.topk_lengths);
  check.range(0, given ? PACKED_FORMAT_COUNT - 1 : 0, {{"packed_rows", p.packed_rows}});
  check.require(p.packed_rows == 0 || (p.kv_dtype == DType::E4M3 && p.dtype == DType::BF16 &&
                                       p.qv_align > 0 && p.heads_kv == 1 && p.n_new == 0),
                "packed_rows", text_of(p.packed_rows),
                "0 but for qv of bfloat16 with an e4m3 cache of one head, without an append");
  if (!given) return;
  const bool alone = !is_masked(p) && p.dropout_p == 0 && !p.varlen && !p.batch_invariant &&
                     p.attention_chunk == 0 && p.rotary_dim == 0;
  check.require(alone, "key_indices", text_of(p.key_indices),
                "0 beside masks as data, dropout_p, packed sequences, batch_invariant, "
                "attention_chunk and a rotary embedding");
}

// What a call with a cache says of it; all of it is 0 for other calls.
void check_cache(const Checker& check, const Problem& p) {
  const int64_t most = p.kv_cache ? LIMIT : 0;
  check.range(0, most,
              {{"cache_batch", p.cache_batch},
               {"page_size", p.page_size},
               {"page_table_row", p.page_table_row},
               {"n_new", p.n_new},
               {"cache_batch_idx", p.cache_batch_idx},
               {"leftpad_k", p.leftpad_k}});
  if (p.page_size == 0) {
    check.require(p.page_table_row == 0, "page_table_row", text_of(p.page_table_row),
                  "0, as there is no page table");
    const bool one_each = p.cache_batch_idx || !p.kv_cache || p.cache_batch == p.batch;
    check.require(one_each, "cache_batch", text_of(p.cache_batch), "batch = ", p.batch,
                  ", as neither a page table nor cache_batch_idx is given");
  } else {
    check.require(p.nk % p.page_size == 0, "nk", text_of(p.nk),
                  "a multiple of page_size = ", p.page_size);
    check.require(!p.cache_batch_idx, "cache_batch_idx", "1", "0, as a page table is given");
  }
  check.require(!p.kv_cache || p.cache_batch > 0 || p.nk == 0, "nk", text_of(p.nk),
                "0, as cache_batch is 0");
  check_strides(check, {"k_new", p.k_new, p.batch, p.heads_kv, p.n_new, p.d});
  check_strides(check, {"v_new", p.v_new, p.batch, p.heads_kv, p.n_new, p.dv});
  check_strides(check, {"qv", p.qv, p.varlen ? 1 : p.batch, p.heads_q, p.nq, p.dv});
  const bool power = p.qv_align <= 16 && (p.qv_align & (p.qv_align - 1)) == 0;
  check.range(0, std::min<int64_t>(most, 16), {{"qv_align", p.qv_align}});
  check.require(power, "qv_align", text_of(p.qv_align), "0, 1, 2, 4, 8 or 16");
  check.require(
      p.qv_align > 0 || (!p.qv_unit && p.qv.batch == 0 && p.qv.head == 0 && p.qv.row == 0),
      "qv_align", "0", "at least 1, as strides of qv are given");
  check.range(0, most == 0 ? 0 : LIMIT, {{"attention_chunk", p.attention_chunk}});
  const bool mask_of_cache = p.kv_cache && p.mask != 0;
  check.range(mask_of_cache ? 1 : 0, mask_of_cache ? std::max<int64_t>(p.nk, 1) : 0,
              {{"mask_keys", p.mask_keys}});
  check.range(0, std::min(most, p.d), {{"rotary_dim", p.rotary_dim}});
  check.range(p.rotary_dim > 0 ? 1 : 0, p.rotary_dim > 0 ? LIMIT : 0,
              {{"rotary_rows", p.rotary_rows}});
  check.require(p.rotary_dim % 2 == 0, "rotary_dim", text_of(p.rotary_dim), "even");
  const DType table = static_cast<DType>(p.rotary_dtype - 1);
  const bool known =
      p.rotary_dim == 0 ? p.rotary_dtype == 0 : table == DType::F32 || table == p.dtype;
  check.require(known && !(p.rotary_dim > 0 && is_fp8(table)), "rotary_dtype",
                text_of(p.rotary_dtype),
                "1 plus the code of float32 (0) or of q's dtype, or 0 where rotary_dim is 0");
  check.require(!p.rotary_interleaved || p.rotary_dim > 0, "rotary_interleaved", "1",
                "0, as rotary_dim is 0");
  check.require(p.kv_dtype == p.dtype || (p.kv_cache && is_fp8(p.kv_dtype)), "kv_dtype",
                dtype_name(p.kv_dtype), dtype_name(p.dtype), " as dtype is");
  if (!p.kv_cache) return;
  check.require(p.q_offset_default, "q_offset_default", "0", "1, as kv_cache is 1");
  check.range(0, 0,
              {{"slopes_need_grad", p.slopes_need_grad},
               {"approximate", p.approximate},
               {"needs_grad", p.needs_grad}});
  check.range(UNKNOWN, UNKNOWN, {{"max_seqlen_k", p.max_seqlen_k}});
}

}  // namespace

bool overlaps_itself(const int64_t* shape, const int64_t* strides, int ndim) {
  constexpr int MOST = 64;  // dimensions of a tensor
  int order[MOST];          // innermost first
  int count = 0;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return false;
    if (shape[i] == 1) continue;
    int place = count++;
    for (; place > 0 && strides[i] < strides[order[place - 1]]; --place)
      order[place] = order[place - 1];
    order[place] = i;
  }
  int64_t last = 0;  // offset of the last element of the dimensions so far
  for (int i = 0; i < count; ++i) {
    if (strides[order[i]] <= last) return true;
    last += (shape[order[i]] - 1) * strides[order[i]];
  }
  return false;
}

void check_problem(const Problem& p, const std::string& prefix) {
  const Checker check{prefix};
  for_each_field(p, [&](const char* name, const auto& field) {
    if constexpr (std::is_same_v<decltype(field), const Flag&>)
      check.range(0, 1, {{name, field.value}});
  });
  check.range(0, APPROXIMATION_COUNT, {{"approximate", p.approximate}});
  check.require(!p.approximate_if_served || p.approximate != 0, "approximate_if_served", "1",
                "0, as approximate is 0");
  check_shapes(check, p);
  check_layouts(check, p);
  check_descales(check, p);
  check_cache(check, p);
  check.require(!is_fp8(p.out_dtype), "out_dtype", dtype_name(p.out_dtype),
                "float32, float16, bfloat16 or float64");

  check_masks(check, p);
  check_key_lists(check, p);
  const int64_t longest = p.varlen ? LIMIT : UNKNOWN;
  check.range(UNKNOWN, longest,
              {{"max_seqlen_q", p.max_seqlen_q}, {"max_seqlen_k", p.max_seqlen_k}});
  check.range(0, LIMIT, {{"num_splits", p.num_splits}});
  check.require(!(p.batch_invariant && p.num_splits > 0), "num_splits", text_of(p.num_splits),
                "0, as batch_invariant is 1");
  for (const auto& [field, side] :
       Named<int64_t>{{"window_left", p.window_left}, {"window_right", p.window_right}}) {
    if (side != UNBOUNDED) check.range(0, LIMIT, {{field, side}});
  }
  check.require(!p.causal || p.window_right == 0, "window_right", text_of(p.window_right),
                "0, as causal is 1");
  check.require(p.dropout_p >= 0 && p.dropout_p < 1 && (p.dropout_p == 0 || !p.kv_cache),
                "dropout_p", join(p.dropout_p), "at least 0 and less than 1, and 0 with a cache");
  for (const auto& [field, value] : Named<double>{{"scale", p.scale}, {"softcap", p.softcap}})
    check.require(std::isfinite(value), field, join(value), "finite");
  check.require(p.softcap >= 0, "softcap", join(p.softcap), "at least 0");

  check.range(-LIMIT, LIMIT, {{"q_offset", p.q_offset}});
  check.require(!(p.q_offset_tensor && p.q_offset_default), "q_offset_tensor", "1",
                "0, as q_offset_default is 1");
  if (p.q_offset_tensor || p.q_offset_default) {
    const int64_t expected = p.q_offset_tensor || p.varlen ? 0 : p.nk - p.nq;
    check.require(p.q_offset == expected, "q_offset", text_of(p.q_offset), expected,
                  ", as it was not given as a number");
  }
  check.range(0, DTYPE_COUNT, {{"sinks", p.sinks}});
  if (p.sinks != 0) {
    const DType dtype = static_cast<DType>(p.sinks - 1);
    const bool allowed = !is_fp8(dtype) && (dtype != DType::F64 || p.dtype == DType::F64);
    check.require(allowed, "sinks", text_of(p.sinks),
                  "1 plus the code of float32 (0), float16 (1), bfloat16 (2) or of q's dtype, or 0 "
                  "for none");
  }
}

void check_device(const Device& d, const std::string& prefix) {
  const Checker check{prefix};
  const bool printable = std::none_of(d.name.begin(), d.name.end(), [](char letter) {
    return static_cast<unsigned char>(letter) < ' ' || letter == '\x7f';
  });
  constexpr size_t LONGEST_NAME = 256;  // of cudaDeviceProp
  check.require(printable && d.name.size() <= LONGEST_NAME, "name",
                join("a text of ", d.name.size(), " bytes"), "printable and at most ", LONGEST_NAME,
                " bytes long");
  const int64_t numbers[] = {d.major,         d.minor,    d.sm_count,         d.shared_per_block,
                             d.shared_per_sm, d.l2_bytes, d.registers_per_sm, d.threads_per_sm};
  // All zeros stand for a GPU that the driver could not describe. No plan is made for it: no kernel
  // has code for its compute capability, 0.0.
  if (std::all_of(std::begin(numbers), std::end(numbers), [](int64_t n) { return n == 0; })) return;
  // Beyond every GPU there is, and small enough that no product of planning overflows.
  check.range(1, 99, {{"major", d.major}});
  check.range(0, 9, {{"minor", d.minor}});
  check.range(1, int64_t{1} << 20, {{"sm_count", d.sm_count}});
  check.range(0, int64_t{1} << 30,
              {{"shared_per_block", d.shared_per_block},
               {"shared_per_sm", d.shared_per_sm},
               {"registers_per_sm", d.registers_per_sm},
               {"threads_per_sm", d.threads_per_sm}});
  check.range(0, int64_t{1} << 32, {{"l2_bytes", d.l2_bytes}});
}

}  // namespace archflash
