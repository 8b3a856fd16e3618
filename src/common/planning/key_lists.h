// What calls with key_indices plan alike: how kernels are told of the lists, and their tiles. Pure
// host code.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "common/key_lists.h"
#include "common/planning/plan.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

// The lists of a call, with null addresses; and the addresses to write where they lie at `offset`
// of a parameter block.
KeyLists key_lists(const Problem& problem);
std::vector<PointerSlot> key_list_pointers(const Problem& problem, int offset);

// The call as one whose sequences are the lists of the call: so much work it has.
Problem lists_as_sequences(const Problem& problem);

// The tile of a table for such a call, with the heads that share a head of K packed into it: rows
// of one list, of so many heads. device::find_list_work() finds the tiles of a list by them. And
// the shares into which the lists are split.
std::variant<SplitChoice<Tile>, Reasons> choose_for_lists(const std::string& folder,
                                                          std::span<const Tile> tiles,
                                                          const Problem& problem,
                                                          const Device& device);

// The CTAs of its launch, without a split.
int64_t list_tiles(const Problem& problem, const Tile& tile);

}  // namespace archflash::core
