// What the plan of a call with a KV cache has besides that of a call without one. Pure host code.
// `given` is the call as it was made, where an 8-bit cache is converted before it is read
// (convert_cache.cuh), and `problem` the call as the attention kernel serves it.
#pragma once

#include "common/planning/plan.h"
#include "common/problem.h"
#include "hopper/plan_tiles.h"

namespace archflash::hopper {

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

// What explain tells of a converted cache.
void note_converted_cache(const Problem& given, Notes& lines);

}  // namespace archflash::hopper
