#include "runtime/kinds.h"

#include <algorithm>
#include <cmath>

namespace archflash {
namespace {

double rounded_up(int64_t size, int64_t multiple) {
  return std::ceil(static_cast<double>(size) / static_cast<double>(multiple)) *
         static_cast<double>(multiple);
}

// Sets what says where elements lie to 0.
void forget_places(Problem& p) {
  p.q = p.k = p.v = p.out = p.mask_strides = p.range_strides = p.list_strides = p.topk_strides = {};
  p.q_descale = p.k_descale = p.v_descale = p.k_new = p.v_new = p.qv = {};
#define ARCHFLASH_OPTION(...)
#define ARCHFLASH_FLAG(...)
#define ARCHFLASH_TENSOR(...)
#define ARCHFLASH_STRIDED(option, ...) p.option##_strides = {};
#include "common/options.inc"
  p.mask_key = p.page_table_row = 0;
  p.q_column = p.k_column = p.v_column = p.out_column = 0;
  p.q_align = p.k_align = p.v_align = p.out_align = 0;
  p.mask_align = std::min<int64_t>(p.mask_align, 1);
  p.qv_align = std::min<int64_t>(p.qv_align, 1);
}

}  // namespace

int64_t octave(double size) {
  if (size <= 0) return -1;
  int exponent = 0;
  const double mantissa = std::frexp(size, &exponent);
  return 2 * int64_t{exponent} - (mantissa == 0.5 ? 1 : 0);
}

Kind kind_of(const Problem& p) {
  const auto real = [](int64_t size) { return static_cast<double>(size); };
  const double sequences = real(std::max<int64_t>(p.batch, 1));
  const double all_rows = p.varlen ? real(p.nq) : real(p.batch) * real(p.nq);
  const double of_sequence = all_rows / sequences;
  const double heads = real(p.batch) * real(p.heads_q);
  const int64_t columns = std::max(p.d, p.dv);
  Kind kind{};
  kind.problem = p;
  forget_places(kind.problem);
  kind.rows = octave(real(p.heads_q) * all_rows);
  kind.least_rows = octave(std::floor(of_sequence));
  kind.most_rows = octave(std::ceil(of_sequence));
  kind.elements = octave(heads * real(std::max(p.nq, p.nk)) * real(columns));
  kind.dq_elements =
      octave(heads * rounded_up(p.nq, 128) * rounded_up(columns, p.d <= 128 ? 32 : 64));
  kind.scores = octave(real(p.nq) * real(p.nk));
  kind.keys_left = p.nk % 64 == 0 ? p.nk % 128 : 1;
  kind.square = p.nq == p.nk ? 1 : 0;
  Problem& sizes = kind.problem;
  sizes.batch = octave(real(p.batch));
  sizes.nq = octave(real(p.nq));
  sizes.nk = octave(real(p.nk));
  sizes.max_seqlen_q = sizes.max_seqlen_k = sizes.q_offset = 0;
  sizes.cache_batch = sizes.rotary_rows = 0;
  sizes.scale = p.scale > 0 ? 1 : 0;
  sizes.dropout_p = p.dropout_p > 0 ? 1 : 0;
  return kind;
}

}  // namespace archflash
