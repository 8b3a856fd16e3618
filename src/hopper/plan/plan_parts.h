// The parts that plan.cpp puts a plan together from. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "common/planning/plan.h"
#include "common/planning/workspace.h"
#include "common/problem.h"
#include "hopper/cache/cache_params.h"
#include "hopper/plan/plan_tiles.h"

namespace archflash::hopper {

// The parameter of a kernel that is told more than the call, so far with the call alone.
template <class AllParams>
AllParams extend_params(const Launch& launch) {
  AllParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(&params.call, launch.params.data(), sizeof params.call);
  return params;
}

// --- a KV cache (plan_cache.cpp) ---

// `given` is the call as it was made, where an 8-bit cache is converted before it is read
// (convert_cache.cuh), and `problem` the call as the attention kernel serves it.

// Whether the cache is converted.
bool converts_cache(const Problem& given);

// The call as the attention kernel serves it: the copy of an 8-bit cache is a contiguous cache of
// q's dtype.
Problem as_kernels_read_it(const Problem& given);

// Adds why a call with a cache cannot or should not be served.
void refuse_cached_call(const Problem& problem, const Problem& given, Reasons& reasons);

// Makes the plan of a call without a cache one that reads a cache. Returns why not.
Reasons read_cache(LaunchPlan& plan, const Problem& problem, const Problem& given,
                   const Device& device, const KernelTile& tile);

// What the kernels that read a cache are told of it. `launch` gets the addresses and tensor maps.
void tell_of_cache(CacheParams& params, Launch& launch, const Problem& problem,
                   const KernelTile& tile);

// The plan of a call of mixed lengths (mixed_params.h), with a tile that was chosen for it.
PlanResult plan_mixed(const Problem& problem, const Device& device, const KernelTile& tile);

// What explain tells of a converted cache.
void note_converted_cache(const Problem& given, Notes& lines);

// --- 8-bit inputs (plan_fp8.cpp), whose V has to have the keys of a column side by side ---

// Adds why a call with 8-bit inputs cannot be served.
void refuse_fp8(const Problem& problem, Reasons& reasons);

// Keys of a column of 8-bit V in the workspace.
int64_t v_columns(const Problem& problem);

// CTAs of the kernel that transposes V before the attention kernel.
int64_t transpose_ctas(const Problem& problem);

// Whether the CTAs of a kernel transpose 8-bit V themselves.
bool transposes_v(const Problem& problem, const KernelTile& tile);

// Puts the launch that transposes V before that of `plan`, which starts early and then reads V from
// the workspace.
void transpose_v(LaunchPlan& plan, const Problem& problem, const KernelTile& tile,
                 core::Workspace& workspace);

// Puts a kernel that clears the counter of tiles, `counter` bytes into the workspace, before the
// launch of `plan`. They start early both, which takes 3 us less than with the memory cleared by
// the driver.
void clear_counter(LaunchPlan& plan, const Problem& problem, int64_t counter);

// A list of tiles of packed sequences: where it is in the workspace, for how many tiles of a head,
// and which sequences it has (PackedListsParams).
struct TileList {
  int64_t start = 0, tiles = 0;
  int32_t tile_rows = 0;
  int64_t rows = 0;  // of a sequence, at most
};

// Puts a kernel before the one or two launches of `plan` that lists their tiles
// (plan_packed.cpp).
void list_tiles(LaunchPlan& plan, const Problem& problem, const TileList& many,
                const TileList& few);

// Whether a kernel of such CTAs may start early: they start where those of the kernel before have
// ended. Where they do not fill the places that SMs have for them, they would lie unevenly: several
// on some SMs and none on others.
bool fills_places(const LaunchPlan& plan, const Device& device);

// --- masks as data (plan_masks.cpp) ---

// Whether the kernels that read a summary can serve a call: attn_mask, key_ranges or alibi_slopes,
// which need none, are the only mask as data, and a tensor map describes the elements of attn_mask
// if they are added.
bool reads_summary(const Problem& problem);

// Whether such a call has an attn_mask of 16 bits alone, each element of which is read for one
// head, and scores that need nothing but a scale.
bool adds_alone(const Problem& problem);

// Whether such a call's elements are best copied by the warps that add them: there are whole tiles
// of rows, two neighbours are a word, no other sequence reads them, and TMA cannot bring them as
// they lie.
bool copies_own(const Problem& problem);

// Whether TMA can bring the elements of attn_mask: it is added, and its rows are aligned.
bool tma_reads_mask(const Problem& problem);

// Whether an added attn_mask of 16 bits is copied to where TMA can read it: its rows are not
// aligned, or its keys are no neighbours.
bool copies_mask(const Problem& problem);

// That copy in the workspace: (batches, heads, rows, row_words), with size 1 along dimensions of
// stride 0. A word has two elements.
struct CopiedMask {
  static constexpr int64_t MOST_BYTES = int64_t{1} << 28;
  int64_t batches, heads, rows, row_words;

  explicit CopiedMask(const Problem& problem);
  int64_t bytes() const;
  // The map of the copy that is `start` bytes into the workspace, as mask_map() describes the mask.
  TensorMapSpec map(const Problem& problem, int64_t box_rows, size_t offset, int64_t start) const;
  // The launch that makes it. counter: where the counter of tiles is that it clears, if any.
  Launch launch(const Problem& problem, int64_t start, std::optional<int64_t> counter) const;
};

// The map at `offset` of a parameter block by which it does, in boxes of so many rows and as many
// keys as fill a swizzle span: (keys, rows, heads, batch). A dimension of stride 0 has size 1.
TensorMapSpec mask_map(const Problem& problem, int64_t rows, size_t offset);

// Whether the kernels for tables of blocks can serve a call: block_mask is the only mask as data,
// or with a bool attn_mask of which all rows are the same one, and the scores need nothing but a
// scale.
bool reads_table(const Problem& problem);

// Turns the launch of `plan` into that of a kernel that takes masks as data, and puts a launch
// before it that summarizes them or orders tiles, where there is one. Returns whether the counter
// of tiles is there: a launch before has zeroed it, or it is zeroed.
bool add_masks(LaunchPlan& plan, const Problem& problem, const Device& device,
               const KernelTile& tile);

// --- a latent cache (plan_mla.cpp) ---

// Whether a call has a second query, so that its cache holds latent rows.
bool has_latent_cache(const Problem& problem);

// The plan of such a call, which describe() has no reason against; or the reasons why not.
PlanResult plan_latent_cache(const Problem& problem, const Device& device);

// --- chosen rows: of a latent cache (plan_mla_gather.cpp), of K and V (plan_gather.cpp) ---

// The plan of a call with key_indices, which describe() has no reason against; or the reasons why
// not.
PlanResult plan_latent_lists(const Problem& problem, const Device& device);
PlanResult plan_lists(const Problem& problem, const Device& device);

}  // namespace archflash::hopper
