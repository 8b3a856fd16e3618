#include "common/planning/key_lists.h"

#include <bit>
#include <cstddef>
#include <cstring>

#include "common/planning/core_set.h"

namespace archflash::core {

KeyLists key_lists(const Problem& problem) {
  KeyLists lists;
  std::memset(static_cast<void*>(&lists), 0, sizeof lists);
  const Strides &indices = problem.list_strides, &lengths = problem.topk_strides;
  lists.batch = indices.batch, lists.head = indices.head, lists.row = indices.row;
  lists.lengths_batch = lengths.batch, lists.lengths_head = lengths.head;
  lists.lengths_row = lengths.row;
  lists.topk = static_cast<int32_t>(problem.key_indices);
  lists.list_rows = static_cast<int32_t>(problem.list_rows);
  lists.physical = problem.physical_indices;
  return lists;
}

std::vector<PointerSlot> key_list_pointers(const Problem& problem, int offset) {
  std::vector<PointerSlot> slots;
  const auto add = [&](bool given, Operand operand, size_t field) {
    if (given) slots.push_back({operand, static_cast<int32_t>(offset + field), 0});
  };
  add(problem.key_indices > 0, Operand::KeyIndices, offsetof(KeyLists, indices_gmem));
  add(problem.topk_lengths, Operand::TopkLengths, offsetof(KeyLists, lengths_gmem));
  return slots;
}

Problem lists_as_sequences(const Problem& problem) {
  Problem lists = problem;
  lists.batch = problem.batch * ceil_div(problem.nq, problem.list_rows);
  lists.nq = problem.list_rows;
  lists.nk = problem.key_indices;
  lists.page_size = 0;
  lists.window_left = lists.window_right = UNBOUNDED;
  lists.q_offset = lists.nk - lists.nq;
  lists.q_offset_tensor = false;
  if (has_latent_lists(problem)) lists.out_dtype = lists.dtype;  // shares are combined to either
  return lists;
}

std::variant<SplitChoice<Tile>, Reasons> choose_for_lists(const std::string& folder,
                                                          std::span<const Tile> tiles,
                                                          const Problem& problem,
                                                          const Device& device) {
  const Problem lists = lists_as_sequences(problem);
  const auto [tile, reasons] = choose(folder, tiles, lists, device);
  if (tile == nullptr) return reasons;
  SplitChoice<Tile> chosen{*tile};
  const int group = static_cast<int>(problem.heads_q / std::max<int64_t>(problem.heads_kv, 1));
  const device::PackedHeads packed = device::pack_heads(tile->block_q, group);
  chosen.tile.packed_heads = packed.count;
  // Rows of different lists see different keys: a tile has those of one list.
  chosen.tile.block_q = problem.list_rows == 1 ? 1 : packed.rows();
  const int64_t ctas = list_tiles(problem, chosen.tile);
  const int64_t rounds = ceil_div(ctas, workers_of(chosen.tile, device));
  chosen.splits =
      choose_splits(lists, device, chosen.tile, rounds * visited_keys(lists, chosen.tile));
  const int64_t largest = std::max(ctas * chosen.splits, combine_ctas(problem));
  if (largest > GRID_LIMIT) return grid_too_large(largest);
  return chosen;
}

int64_t list_tiles(const Problem& problem, const Tile& tile) {
  const Problem lists = lists_as_sequences(problem);
  return lists.batch * (problem.heads_q / tile.packed_heads) * ceil_div(lists.nq, tile.block_q);
}

}  // namespace archflash::core
