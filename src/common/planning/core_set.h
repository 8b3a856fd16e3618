// What all implementations of the core set say of a call: the reasons why not, the parameters, the
// addresses to bind. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::core {

inline std::string str(int64_t x) { return std::to_string(x); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr const char* USE_TORCH = " or use implementation='torch'";  // ends a reason
constexpr const char* WIDE_HEAD_DIMS = "multiples of 8 up to 512, d and dv independent";
constexpr const char* HEAD_DIMS_WITH_FP8 =
    "multiples of 8 (fp8: 16) up to 256, d and dv independent";

// Why an implementation cannot serve a problem, judged by what it says of itself: its dtypes, and
// its features. Returns no reasons if the call is supported. A folder that offers approximations
// does so for 16-bit inputs.
Reasons why_not(const Problem& problem, const Description& description);

// Adds the reasons why an implementation cannot read or write a tensor because of how it lies in
// memory: strides in elements, `unit` says that the last dimension is contiguous, `align` is the
// largest power of two that divides the address.
void add_layout_reasons(const std::string& implementation, const char* name, const Strides& strides,
                        bool unit, int32_t align, DType dtype, Reasons& reasons);

// What a plan that approximates computes, and the error to expect, for people.
std::pair<std::string, std::string> approximate_note(const Problem& problem);

// Whether fp32 outputs of 16-bit inputs are asked for.
bool writes_f32(const Problem& problem);
// Whether key_indices name rows of a latent cache. Then 16-bit calls may write float32 in any case.
bool has_latent_lists(const Problem& problem);

// Whether no output element and no log-sum-exp is asked for. A plan without launches serves that.
bool nothing_to_write(const Problem& problem);

// A number of a call as reasons name it: 1e-40, not 0.000000.
std::string number_text(double number);

// For kernels that multiply each score by AttentionParams::tanh_scale, whatever the call: sets what
// transform_scores needs.
void always_transform_scores(const Problem& problem, AttentionParams& params);

// Sets the factors for kernels whose scores are logarithms to base 2: exp2_scale is 1 then.
void transform_scores_to_base_2(const Problem& problem, AttentionParams& params);

// All fields, with null addresses. The tiles of all heads make one group.
AttentionParams attention_params(const Problem& problem);

// The addresses to write into a parameter block that starts with AttentionParams.
std::vector<PointerSlot> pointers(const Problem& problem);

// The descales of q, k and v as kernels are told of them, with null addresses; and the addresses to
// write where they lie at `offset` of a parameter block.
Descales descales(const Problem& problem);
std::vector<PointerSlot> descale_pointers(const Problem& problem, int offset);

}  // namespace archflash::core
