// Makes the plan of a call from the tile that was chosen: parameters, addresses, tensor maps and
// the launch. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/attention_params.h"
#include "common/planning/core_set.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

constexpr size_t MOST_OF_NAME = 64;  // characters of most names of kernels

// A folder's Params is AttentionParams, or a struct that starts with it. By their names these
// members of it are filled in here too: `out_dtype`; `descales`, for 8-bit inputs; `q_map`,
// `k_map`, `v_map` and `out_map`, the tensor maps of the tile's boxes.
template <class Params>
AttentionParams& attention_of(Params& params) {
  if constexpr (requires { params.attention; }) {
    static_assert(offsetof(Params, attention) == 0, "addresses are counted from the block's start");
    return params.attention;
  } else {
    return params;
  }
}

// Sets what all kernels are told of a call; everything else is 0, padding too: equal plans are
// equal bytes.
template <class Params>
void init_params(const Problem& problem, Params& params) {
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  attention_of(params) = attention_params(problem);
  if constexpr (requires { params.out_dtype; }) params.out_dtype = problem.out_dtype;
  if constexpr (requires { params.descales; }) {
    if (!is_fp8(problem.dtype)) return;
    AttentionParams& attention = attention_of(params);
    // Kernels for 8-bit inputs multiply by it whether or not there is a softcap.
    if (!attention.transform_scores) attention.rule.tanh_scale = static_cast<float>(problem.scale);
    params.descales = descales(problem);
  }
}

// Whether a block starts with AttentionParams, from whose start addresses are counted, or with the
// block that it extends.
template <class Params>
consteval bool starts_with_call() {
  if constexpr (requires(Params p) { p.attention; }) return offsetof(Params, attention) == 0;
  if constexpr (requires(Params p) { p.call; }) return offsetof(Params, call) == 0;
  if constexpr (requires(Params p) { p.backward; }) return offsetof(Params, backward) == 0;
  if constexpr (requires(Params p) { p.mla; }) return offsetof(Params, mla) == 0;
  return true;
}

// A parameter block as a plan holds it.
template <class Params>
std::vector<uint8_t> bytes(const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params> && starts_with_call<Params>());
  std::vector<uint8_t> block(sizeof params);
  std::memcpy(block.data(), &params, sizeof params);
  return block;
}

// Where a parameter block has what bind() writes; -1: nowhere.
struct Offsets {
  int descales = -1;
  int q_map = -1, k_map = -1, v_map = -1, out_map = -1;
};

template <class Params>
Offsets offsets_of() {
  Offsets offsets;
  if constexpr (requires(Params p) { p.descales; }) offsets.descales = offsetof(Params, descales);
  if constexpr (requires(Params p) { p.q_map; }) {
    offsets.q_map = offsetof(Params, q_map);
    offsets.k_map = offsetof(Params, k_map);
    offsets.v_map = offsetof(Params, v_map);
  }
  if constexpr (requires(Params p) { p.out_map; }) offsets.out_map = offsetof(Params, out_map);
  return offsets;
}

// "f16": as the names of kernels and files spell it.
const char* dtype_word(DType dtype);

// The plan of one launch: the kernel "<folder>_attention_fwd_<dtype>_<tile>" of the image
// "<folder>/fwd_<dtype>" on `ctas` CTAs.
LaunchPlan one_launch(const std::string& folder, const Problem& problem, const Device& device,
                      const Tile& tile, int64_t ctas, const TileOrder& order,
                      std::vector<uint8_t> params, const Offsets& offsets);

template <class Params>
LaunchPlan one_launch(const std::string& folder, const Problem& problem, const Device& device,
                      const Tile& tile, int64_t ctas, Params& params) {
  return one_launch(folder, problem, device, tile, ctas, attention_of(params).order, bytes(params),
                    offsets_of<Params>());
}

// What explain tells of a plan, from its data. `own` are the lines that the folder adds, or words
// in its own way.
Notes notes(const LaunchPlan& plan, const Notes& own);

}  // namespace archflash::core
