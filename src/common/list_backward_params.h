// The parameter of the kernels that compute gradients of calls with lists of keys.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/host_device.h"
#include "common/device/packed_heads.cuh"
#include "common/key_lists.h"

namespace archflash {

// dK and dV in fp32, to which the CTAs of all lists add: a row for each key of each head of K, of
// so many columns (a multiple of LIST_SUM_COLUMNS), which device::list_sum_place() permutes.
struct KeySums {
  float* dk_gmem;  // (chains, batch, heads_kv, nk, dk_columns); null: no list names a key
  float* dv_gmem;
  int32_t dk_columns, dv_columns;
};

// In which order CTAs add, where the same inputs must give the same bits. Lists have their keys in
// ascending order then, which a launch sees to. The CTAs of a head of K form chains, each
// with sums of its own. A CTA adds to the sums of a key when those before it in its chain have only
// later keys left. With KeptKeys there are no chains.
struct ListOrder {
  int32_t* sorted_gmem;  // (batch, heads, lists, topk), each 1 where one serves all; the launch
                         // that writes them has the lists as they came
  int32_t* left_gmem;    // the first key that a CTA, or one before it in its chain, may have left,
                         // for each CTA; null: any order
  int32_t left_bytes;    // a multiple of 16
  int32_t heads;         // of K, of all sequences
  int32_t chains;        // of a head, at least 1; with KeptKeys 0
  int32_t every;         // a CTA says what is left whenever it has added so many blocks
};

// What CTAs keep in 16 bits in place of sums, where the same inputs must give the same bits: for
// each entry of a sorted list a row, its key's dK and behind it dV, in order of the CTAs. A launch
// behind adds up the rows of each key. Lists may come in several launches, between which KeySums
// hold what there is; their columns are multiples of KEPT_COLUMNS.
struct KeptKeys {
  void* rows_gmem;       // null: none are kept
  int32_t* starts_gmem;  // (sorted lists, groups of KEPT_KEYS keys and one more): the first entry
                         // that names a key of the group or of a later one
  int32_t first_list, end_list;  // of the launch, of all heads of K
  int32_t first_tile;            // of these lists
};

struct ListBackwardParams {
  BackwardParams call;
  KeyLists lists;
  KeySums sums;
  ListOrder order;
  device::PackedHeads packed_heads;
  KeptKeys kept;
};

constexpr int LIST_SUM_COLUMNS = 16;
constexpr int LIST_SUMS_THREADS = 256;  // of a CTA that makes dK and dV of their sums
constexpr int LIST_SORT_THREADS = 256;  // of a CTA that sorts a list
constexpr int KEPT_KEYS = 32;           // of a group
constexpr int KEPT_COLUMNS = 32;
constexpr int KEPT_SUMS_THREADS = 256;  // of a CTA that adds up kept rows
constexpr int KEPT_MOST_KEYS = 16;      // whose rows it adds up

// The integers in shared memory of a CTA that sorts a list of `topk` of nk keys: the smallest power
// of two of entries, or a bit for each key and how many come before each 32, where these are no
// more than MOST_LIST_BITS.
constexpr int64_t MOST_LIST_BITS = 131072;
ARCHFLASH_HOST_DEVICE constexpr bool sorts_by_bits(int64_t nk) { return nk <= MOST_LIST_BITS; }
ARCHFLASH_HOST_DEVICE constexpr int list_sort_places(int64_t topk) {
  int places = 32;
  while (places < topk) places *= 2;
  return places;
}
ARCHFLASH_HOST_DEVICE constexpr int64_t list_sort_ints(int64_t topk, int64_t nk) {
  const int64_t places = list_sort_places(topk);
  const int64_t bits = sorts_by_bits(nk) ? (nk + 31) / 32 * 2 : 0;
  return places > bits ? places : bits;
}

}  // namespace archflash
