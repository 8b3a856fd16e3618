// The rows of the tables of tiles from which hopper's backward kernels are planned. Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/backward_rounds.h"
#include "common/planning/plan.h"
#include "hopper/backward/backward_config.cuh"

namespace archflash::hopper {

struct BackwardTile : core::RoundsTile {
  // The names of the kernels for calls with a softcap and with dropout; null: there is none.
  const char* with_softcap;
  const char* with_dropout;
  bool stays;  // its CTAs can take one tile of keys after another
  bool swaps_keys;
  bool takes_uneven_shares;
  const char* with_parts;  // the name of the kernel for calls with parts of tiles; null: none
  int ctas_per_sm;
};

template <class C>
constexpr BackwardTile backward_tile(const char* name, const char* with_softcap,
                                     const char* with_dropout) {
  BackwardTile tile{core::rounds_tile<C>(name),
                    with_softcap,
                    with_dropout,
                    C::STAYS,
                    C::SWAPS_KEYS,
                    C::UNEVEN_SHARES,
                    C::MERGES_PARTS ? name : nullptr,
                    C::CTAS_PER_SM};
  tile.reads_many_chains = true;
  if constexpr (requires { typename C::DqTile; }) tile.dq_box = core::box<typename C::DqTile>(1);
  return tile;
}

// The main launch; null: there is no key.
inline Launch* main_launch(LaunchPlan& plan) {
  for (Launch& launch : plan.launches) {
    if (launch.kernel.starts_with("hopper_attention_bwd_")) return &launch;
  }
  return nullptr;
}

}  // namespace archflash::hopper
