// How the folders with kernels on mma.sync choose among their tiles: one table each, read here.
// Pure host code.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/plan.h"
#include "common/problem.h"

namespace archflash::mma_sync {

// One kernel of each type of inputs. The rows of a table stand best first among those that serve
// the same head dimensions, and those for larger heads follow.
struct Variant {
  const char* name;
  int head_dim, head_dim_v;  // d and dv up to these
  int block_q, block_k;
  int threads, m_tiles, stages;
  int ctas_per_sm;  // what the registers allow
  int shared_bytes;
  // It serves only where `per_sm` of its CTAs fit an SM, twice its CTAs are more than `fill` times
  // the SMs, and there are `min_keys` keys.
  int per_sm, fill, min_keys;
  const char* reason;  // why it is there
};

template <class C>
constexpr Variant variant(const char* name, int per_sm, int fill, int min_keys,
                          const char* reason) {
  return {.name = name,
          .head_dim = C::HEAD_DIM,
          .head_dim_v = C::HEAD_DIM_V,
          .block_q = C::BLOCK_Q,
          .block_k = C::BLOCK_K,
          .threads = C::THREADS,
          .m_tiles = C::M_TILES,
          .stages = C::STAGES,
          .ctas_per_sm = C::CTAS_PER_SM,
          .shared_bytes = C::SHARED_BYTES,
          .per_sm = per_sm,
          .fill = fill,
          .min_keys = min_keys,
          .reason = reason};
}

// The kernels of one folder for one kind of inputs.
struct Family {
  const char* folder;
  std::span<const Variant> variants;

  // "<folder>_attention_fwd_f16_<variant>" in the image "<folder>/fwd_f16".
  std::string kernel_name(const Variant& variant, DType dtype) const;
  std::string image_name(DType dtype) const;
  // The first that serves; null: none fits the device's shared memory.
  const Variant* choose(const Problem& problem, const Device& device) const;
};

// A plan of one launch, or the reason why not. `params` is the kernel's parameter block, which
// starts with AttentionParams; its order of CTAs is set here.
PlanResult plan(const Family& family, const Problem& problem, const Device& device,
                std::vector<uint8_t> params);

Notes notes(const Family& family, const LaunchPlan& plan);

}  // namespace archflash::mma_sync
