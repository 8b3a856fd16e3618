// What calls with a KV cache plan alike: how kernels are told of the cache, and the launch that
// appends to it. Pure host code.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/kv_cache.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

// The cache of a call, with null addresses; and the addresses to write where it lies at `offset` of
// a parameter block. For a call without a cache it has no lengths: see mma_sync/decode_fwd.cuh.
KvCache kv_cache(const Problem& problem);
std::vector<PointerSlot> kv_cache_pointers(const Problem& problem, int offset);

// alibi_slopes as kernels are told of them, with a null address.
AlibiSlopes alibi_slopes(const Problem& problem);

// attention_chunk as kernels are told of it.
int32_t chunk_of(const Problem& problem);

// Whether a call has a launch before the attention, which appends k_new and v_new or rotates q.
bool has_append(const Problem& problem);

// Puts the launch that appends k_new and v_new before those of a plan whose first launch reads the
// cache. With a rotary embedding those then read the rotated copy of q, which is left in the
// workspace. `kernel` is an entry of `image`. Returns the reasons why it cannot be launched; empty
// if it was added, or if the call appends nothing.
Reasons add_append(LaunchPlan& plan, const Problem& problem, const std::string& image,
                   const std::string& kernel);

}  // namespace archflash::core

namespace archflash::mma_sync {

// What serves the sequences of few rows of a packed call whose others have a launch of their own:
// lengths are on the device, so that each launch passes over the sequences of the other one.
struct FewRowsPlan {
  int64_t rows;  // it serves sequences of at most so many rows
  LaunchPlan plan;
};

// The plan for the sequences of few rows of a packed call, with the tiles of decode_fwd.cuh; none
// if the call may not be served so, or if it can have no sequence of few rows.
std::optional<FewRowsPlan> plan_few_rows(const std::string& folder,
                                         std::span<const core::Tile> tiles, const Problem& problem,
                                         const Device& device);

// plan_few_rows() for a folder that has no kernels for few rows, by the folder of the build that
// lends its own; none if this build has no code of it for the device. The registry, which knows
// the folders, fills it in at start.
inline std::optional<FewRowsPlan> (*plan_few_rows_apart)(const Problem& problem,
                                                         const Device& device) = nullptr;

// Whether sequences have shares of their keys by their lengths (unlike_lengths.cuh).
bool shares_by_length(const LaunchPlan& plan);

// Puts its launches behind those of `plan`.
void add_few_rows(LaunchPlan& plan, FewRowsPlan few);

// The plan of a call with a cache, for the kernels of mma_sync/decode_fwd.cuh, and those of
// mma_sync/attention_fwd.cuh with CACHE; or of a call without one, for the former. The former are
// in the image "<folder>/decode_<dtype>", the others and "<folder>_append_<dtype>" in
// "<folder>/cache_<dtype>"; for a cache of 8-bit numbers all and "<folder>_append_<dtype>_fp8" are
// in "<folder>/cache_fp8_<dtype>". Where keys are split, "<folder>_combine_<dtype>_decode" of
// "<folder>/decode_<dtype>" follows the former, "<folder>_combine_<dtype>" of
// "<folder>/fwd_<dtype>" the others.
//
// Shares of a tile with most_joined are a cluster, without a second launch; its kernel is in the
// image "<folder>/decode_joined_<dtype>".
//
// for_few_rows: the tiles of plan_few_rows(), whose launches are then added.
PlanResult plan_with_cache(const std::string& folder, std::span<const core::Tile> tiles,
                           const Problem& problem, const Device& device,
                           std::span<const core::Tile> for_few_rows = {});

}  // namespace archflash::mma_sync
