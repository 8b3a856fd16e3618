// The parameter of the kernels that compute gradients of calls with lists of keys.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
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
// ascending order then, which the first launch sees to. The CTAs of a head of K form chains, each
// with sums of its own. A CTA adds to the sums of a key when those before it in its chain have only
// later keys left.
struct ListOrder {
  int32_t* sorted_gmem;  // (batch, heads, lists, topk), each 1 where one serves all; the first
                         // launch writes them, whose `lists` are as they came
  int32_t* left_gmem;    // the first key that a CTA, or one before it in its chain, may have left,
                         // for each CTA; null: any order
  int32_t left_bytes;    // a multiple of 16
  int32_t heads;         // of K, of all sequences
  int32_t chains;        // of a head, at least 1
  int32_t every;         // a CTA says what is left whenever it has added so many blocks
};

struct ListBackwardParams {
  BackwardParams call;
  KeyLists lists;
  KeySums sums;
  ListOrder order;
  device::PackedHeads packed_heads;
};

constexpr int LIST_SUM_COLUMNS = 16;
constexpr int LIST_SUMS_THREADS = 256;  // of a CTA that makes dK and dV of their sums
constexpr int LIST_SORT_THREADS = 256;  // of a CTA that sorts a list

}  // namespace archflash
