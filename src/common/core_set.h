// What implementations of the core set plan alike: the reasons why not, the parameters, the
// addresses to bind. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/plan.h"
#include "common/problem.h"

namespace archflash::core {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr const char* USE_TORCH = " or use implementation='torch'";  // ends a reason
constexpr const char* HEAD_DIMS = "multiples of 8 up to 256, d and dv independent";

// Why `implementation`, which serves the whole core set for `dtypes`, cannot serve the problem.
// Empty: it can. approximate: what it may be asked for; splits_keys: whether num_splits > 1 may be.
Reasons why_not(const Problem& problem, const std::string& implementation,
                std::initializer_list<DType> dtypes, Approximate approximate = Approximate::Nothing,
                bool splits_keys = false);

// No output element and no LSE is asked for: a plan without launches serves the problem.
bool nothing_to_write(const Problem& problem);

// All fields, addresses null; the order of CTAs is that of all heads together.
AttentionParams params(const Problem& problem);

// A parameter block as a plan holds it.
template <class Params>
std::vector<uint8_t> bytes(const Params& params) {
  std::vector<uint8_t> block(sizeof params);
  std::memcpy(block.data(), &params, sizeof params);
  return block;
}

// The addresses to write into a parameter block that starts with AttentionParams.
std::vector<PointerSlot> pointers(const Problem& problem);

// The same for descales of q, k and v, which lie at `offset` of a parameter block.
Descales descales(const Problem& problem);
std::vector<PointerSlot> descale_pointers(const Problem& problem, size_t offset);

// Row tiles of one head, all sequences together; with cu_seqlens the bound that holds whatever the
// lengths are.
int64_t row_tiles(const Problem& problem, int block_q);

int64_t rows_per_sequence(const Problem& problem);  // on average

// CTAs of an SM that shared memory and `by_registers` allow; at least 1.
int64_t resident_ctas(const Device& device, int64_t shared_bytes, int64_t by_registers);

constexpr int64_t GRID_LIMIT = INT32_MAX;  // CUDA: CTAs along x
std::string grid_too_large(int64_t ctas);

}  // namespace archflash::core
