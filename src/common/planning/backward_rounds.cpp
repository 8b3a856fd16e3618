#include "common/planning/backward_rounds.h"

#include <string>

namespace archflash::core {

Reasons refuse_rounds(const BackwardProblem& problem, const std::string& implementation) {
  const Problem& call = problem.call;
  Reasons reasons;
  add_tma_reasons(call, implementation, false, reasons);
  if (problem.dout.strides.row == 0 && call.nq > 1) {
    reasons.push_back("dout repeats one row (a row stride of 0): " + implementation +
                      " copies by tensor maps, which have no such stride; make dout contiguous" +
                      USE_TORCH);
  }
  if (is_fp8(call.dtype)) {
    reasons.push_back(std::string("gradients of ") + dtype_name(call.dtype) + " inputs: " +
                      implementation + " computes those of float16 and bfloat16" + USE_TORCH);
  }
  return reasons;
}

TensorMapSpec dout_map(const BackwardProblem& problem, int offset, const Box& box) {
  Problem call = problem.call;
  call.out = problem.dout.strides;
  call.out_dtype = call.dtype;
  TensorMapSpec map = tensor_map(call, Operand::Out, offset, box);
  map.operand = Operand::DOut;
  return map;
}

int64_t count_rounds(const Problem& call, int64_t round_rows) {
  const int64_t rounds = ceil_div(call.nq, round_rows);
  if (!call.varlen) return call.batch * call.heads_q * rounds;
  return rounds == 0 ? 0 : (rounds + call.batch) * call.heads_q;
}

float exponent_scale(const AttentionParams& attention) {
  const bool folds = attention.transform_scores && attention.softcap == 0;
  return folds ? attention.exp2_scale * attention.tanh_scale : attention.exp2_scale;
}

}  // namespace archflash::core
