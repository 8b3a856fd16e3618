// What the backward kernels for lists of keys share: where a CTA's list and sums lie, the sums of
// dK and dV, and the kernels before and behind the main one.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/backward_rows.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/key_lists.cuh"
#include "common/device/visible_keys.cuh"
#include "common/list_backward_params.h"
#include "common/ptx/global_order.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/red_global.cuh"
#include "common/ptx/redux.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::device {

// What a CTA knows; it is in shared memory. Element: of the inputs; 16-bit ones travel as bits.
template <class Element = uint16_t>
struct ListBackwardWork {
  Work work;
  VisibleKeys visible;
  KeyList list;
  const Element *k_gmem, *v_gmem;   // the first row of the CTA's head of K
  float *dk_gmem, *dv_gmem;         // and of its sums
  const int32_t* left_before_gmem;  // ListOrder::left_gmem of the CTA before it; null: none
  int32_t* left_gmem;               // and its own
  unsigned long long seeing;        // bit i: row first_row + i sees a key of the list

  // Whether causal and window hide nothing from the rows up to this one.
  __device__ __forceinline__ bool all_see(int last_row) const {
    return !visible.masks(work.first_row, last_row, 0, work.nk - 1);
  }
};

// A lane of mma.sync adds four numbers of a row and of 16 columns: number e is of column
// 8 (e / 2) + 2 t + e % 2 for t = lane % 4. In the sums they are neighbours, which one addition
// takes from 9.0 on. Before, the same numbers of the four lanes are.
__device__ __forceinline__ int list_sum_place(int lane, int number = 0) {
  return ptx::HAS_RED_V4 ? lane % 4 * 4 + number : lane % 4 + 4 * number;
}

// gmem: the row's 16 columns in the sums, from list_sum_place(lane) on.
__device__ __forceinline__ void add_four(float* gmem, float x, float y, float z, float w) {
  if constexpr (ptx::HAS_RED_V4) {
    ptx::red_add_v4_f32(gmem, x, y, z, w);
  } else {
    ptx::red_add_f32(gmem, x);
    ptx::red_add_f32(gmem + 4, y);
    ptx::red_add_f32(gmem + 8, z);
    ptx::red_add_f32(gmem + 12, w);
  }
}

// The tile of a CTA as find_list_work() counts them, and its chain (ListOrder). The CTAs of all
// heads of K take turns, so that those of a chain start far apart.
struct TileInOrder {
  int index, chain;

  __device__ __forceinline__ explicit TileInOrder(const ListOrder& order)
      : index(static_cast<int>(blockIdx.x)), chain(0) {
    if (order.left_gmem == nullptr) return;
    const int of_head = index / order.heads, tiles = static_cast<int>(gridDim.x) / order.heads;
    index = (index - of_head * order.heads) * tiles + of_head;
    chain = of_head % order.chains;
  }
};

template <class Element = uint16_t>
__device__ __forceinline__ ListBackwardWork<Element> find_list_backward_work(
    const ListBackwardParams& params, Work work, int chain) {
  const AttentionParams& attention = params.call.attention;
  const int sequence = work.batch_head / attention.heads_q;
  const int kv_head = work.batch_head % attention.heads_q / attention.heads_per_kv;
  work.nk = attention.nk;
  ListBackwardWork<Element> cta;
  cta.work = work;
  cta.visible = find_visible_keys(attention, work);
  const int last_row = min(work.first_row + params.packed_heads.rows(), work.nq) - 1;
  cta.list = find_key_list(attention, params.lists, work, {0, attention.nk}, cta.visible, last_row);
  cta.k_gmem = static_cast<const Element*>(attention.k_gmem) + sequence * attention.k_batch +
               kv_head * attention.k_head;
  cta.v_gmem = static_cast<const Element*>(attention.v_gmem) + sequence * attention.v_batch +
               kv_head * attention.v_head;
  const int heads_kv = attention.heads_q / attention.heads_per_kv;
  const int64_t head = static_cast<int64_t>(chain) * attention.batch * heads_kv +
                       static_cast<int64_t>(sequence) * heads_kv + kv_head;
  cta.dk_gmem = params.sums.dk_gmem + head * attention.nk * params.sums.dk_columns;
  cta.dv_gmem = params.sums.dv_gmem + head * attention.nk * params.sums.dv_columns;
  const ListOrder& order = params.order;
  cta.left_gmem = order.left_gmem + blockIdx.x;
  const int before = static_cast<int>(blockIdx.x) - order.chains * order.heads;
  cta.left_before_gmem =
      order.left_gmem != nullptr && before >= 0 ? order.left_gmem + before : nullptr;
  cta.seeing = cta.all_see(last_row) ? ~0ull : 0;
  return cta;
}

// Finds cta.seeing, by all threads; barriers stand around it.
template <int THREADS, class Element>
__device__ __forceinline__ void find_rows_that_see(ListBackwardWork<Element>& cta, int rows) {
  const KeyList& list = cta.list;
  const int first_row = cta.work.first_row, last_row = min(first_row + rows, cta.work.nq) - 1;
  if (cta.all_see(last_row)) return;
  const unsigned long long all = ~0ull >> (63 - (last_row - first_row));
  unsigned long long seeing = 0;
  for (int i = threadIdx.x; i < list.count && (seeing & all) != all; i += THREADS) {
    const int key = list.entry(i);
    if (key < list.first || key > list.last) continue;
    const int first = max(key - cta.visible.last_shift - first_row, 0);
    const int last = min(key - cta.visible.first_shift - first_row, 63);
    seeing |= (~0ull << first) & (~0ull >> (63 - last));
  }
  seeing = static_cast<unsigned long long>(ptx::or_of_warp(static_cast<uint32_t>(seeing >> 32)))
               << 32 |
           ptx::or_of_warp(static_cast<uint32_t>(seeing));
  if (threadIdx.x % 32 == 0) atomicOr(&cta.seeing, seeing);
}

// row_of(row) of the rows of q or dout that a CTA has: the address of a row by its place in the
// tile; null where there is none. So it is for a row that sees no key of its list: it may hold NaN,
// which would reach the sums of dK and dV, because P and dS of 0 do not silence it.
template <class Element>
__device__ __forceinline__ auto listing_rows(const ListBackwardParams& params,
                                             const ListBackwardWork<Element>& cta, const void* gmem,
                                             int64_t batch, int64_t head, int64_t row_stride) {
  return [=, &params, work = cta.work, seeing = cta.seeing](int row_of_tile) -> const Element* {
    const FewRow row(params.call.attention, params.packed_heads, work, row_of_tile);
    if (!row.wanted || (seeing >> (row.row - work.first_row) & 1) == 0) return nullptr;
    return static_cast<const Element*>(gmem) + row.batch * batch + row.head * head +
           row.packed * row_stride;
  };
}

// The position of this thread's key of a block, counted in blocks.
template <int BLOCK_K>
__device__ __forceinline__ int find_listed_position(const KeyList& list, int block) {
  const int entry = list.entry(block * BLOCK_K + ptx::mov_tid_x_volatile());
  return entry < list.first || entry > list.last ? NO_KEY : entry;
}

// Behind the keys of all lists.
constexpr int NO_KEY_LEFT = INT32_MAX;

// The turns of a CTA, where there is an order (ListOrder). Two threads see to them: thread 0 hands
// turns on, `waiting` waits for those before this CTA. Barriers stand between what they do for a
// block and the additions of other threads.
template <int BLOCK_K, class Element>
class ListTurns {
 public:
  __device__ __forceinline__ ListTurns(const ListBackwardWork<Element>& cta, const ListOrder& order,
                                       int waiting)
      : cta_(cta), order_(order), waits_(static_cast<int>(threadIdx.x) == waiting) {
    takes_turns_ = order.left_gmem != nullptr && (waits_ || threadIdx.x == 0);
    if (takes_turns_ && cta.list.count > 0) last_ = last_of(0);
  }

  // Behind the additions for the block before, and before those for this one. A key that is the
  // last one of a block may be the first one of the next, too, so that it may be left.
  __device__ __forceinline__ void take(int block) {
    if (takes_turns_) {
      const int last = last_;
      last_ = last_of(block + 1);  // for the next block: it takes a while
      if (!waits_) {
        if (block % order_.every == 0 && block > 0) ptx::st_release_s32(cta_.left_gmem, last);
      } else if (cta_.left_before_gmem != nullptr) {
        while (left_ <= last && left_ != NO_KEY_LEFT)
          left_ = ptx::ld_acquire_s32(cta_.left_before_gmem);
      }
    }
    __syncwarp();  // instructions of whole warps follow
  }
  // Behind all additions.
  __device__ __forceinline__ void end() const {
    if (takes_turns_ && !waits_) end_turns(cta_.left_before_gmem, cta_.left_gmem);
  }
  __device__ __forceinline__ static void end_turns(const int32_t* left_before_gmem,
                                                   int32_t* left_gmem) {
    while (left_before_gmem != nullptr && ptx::ld_acquire_s32(left_before_gmem) != NO_KEY_LEFT) {
    }
    ptx::st_release_s32(left_gmem, NO_KEY_LEFT);
  }

 private:
  // The last key of a block, or for the thread that hands turns on of the block before it.
  __device__ __forceinline__ int last_of(int block) const {
    const int end = min((waits_ ? block + 1 : max(block, 1)) * BLOCK_K, cta_.list.count);
    return cta_.list.entries_gmem[end - 1];
  }

  const ListBackwardWork<Element>& cta_;
  const ListOrder& order_;
  bool waits_, takes_turns_;
  int last_ = 0;
  int left_ = 0;  // what the CTA before this one has left, as it was last read
};

// For a CTA without rows.
__device__ __forceinline__ void pass_turns(const ListOrder& order) {
  const int cta = static_cast<int>(blockIdx.x), before = cta - order.chains * order.heads;
  if (order.left_gmem == nullptr || threadIdx.x != 0) return;
  ListTurns<1, uint16_t>::end_turns(before >= 0 ? order.left_gmem + before : nullptr,
                                    order.left_gmem + cta);
}

// Sorts the entries of a list in shared memory, by all threads; `places` of them, a power of two.
__device__ __forceinline__ void sort_bitonic(int* entries, int places) {
  for (int run = 2; run <= places; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();  // the entries that other threads wrote in the last step are there
      for (int i = threadIdx.x; i < places / 2; i += LIST_SORT_THREADS) {
        const int one = 2 * i - (i & (step - 1)), other = one + step;
        const int a = entries[one], b = entries[other];
        if ((a > b) == ((one & run) == 0)) entries[one] = b, entries[other] = a;
      }
    }
  }
  __syncthreads();  // the list is sorted
}

// Sets a bit for each key that a list names, and finds how many keys come before each 32, by all
// threads. Returns how many there are, or -1 if one is named twice.
template <class EntryOf>
__device__ __forceinline__ int count_by_bits(uint32_t* bits, int* before, int words, int count,
                                             const EntryOf& entry_of) {
  __shared__ int of_warp[LIST_SORT_THREADS / 32];
  for (int i = threadIdx.x; i < words; i += LIST_SORT_THREADS) bits[i] = 0;
  __syncthreads();  // all bits are 0
  bool twice = false;
  for (int i = threadIdx.x; i < count; i += LIST_SORT_THREADS) {
    const int key = entry_of(i);
    if (key == NO_KEY_LEFT) continue;
    const uint32_t bit = 1u << key % 32;
    twice |= (atomicOr(&bits[key / 32], bit) & bit) != 0;
  }
  if (__syncthreads_or(twice)) return -1;  // else all bits are there
  const int of_thread = (words + LIST_SORT_THREADS - 1) / LIST_SORT_THREADS;
  const int begin = min(static_cast<int>(threadIdx.x) * of_thread, words);
  const int end = min(begin + of_thread, words);
  int own = 0;
  for (int i = begin; i < end; ++i) own += __popc(bits[i]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int through = own;  // of this thread and those before it
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int other = __shfl_up_sync(~0u, through, lanes);
    if (lane >= lanes) through += other;
  }
  if (lane == 31) of_warp[warp] = through;
  __syncthreads();  // the sums of all warps are there
  int all = 0;
  for (int i = 0; i < LIST_SORT_THREADS / 32; ++i) {
    if (i < warp) through += of_warp[i];
    all += of_warp[i];
  }
  int sum = through - own;
  for (int i = begin; i < end; ++i) {
    before[i] = sum;
    sum += __popc(bits[i]);
  }
  __syncthreads();  // all numbers are there
  return all;
}

// Sorts a list by its keys, for each CTA; entries that name none or do not count come last, as
// NO_KEY_LEFT. Keys are bits in shared memory, or where one is named twice or there are too many
// of them, sorted there by exchanges.
__device__ __forceinline__ void sort_list(const ListBackwardParams& params) {
  ptx::griddepcontrol_launch_dependents();
  extern __shared__ int entries[];
  const AttentionParams& attention = params.call.attention;
  const KeyLists& lists = params.lists;
  const int number_of_lists = (attention.nq + lists.list_rows - 1) / lists.list_rows;
  const bool of_heads = lists.head != 0 || lists.lengths_head != 0;
  const int heads = of_heads ? attention.heads_q / attention.heads_per_kv : 1;
  const int list = static_cast<int>(blockIdx.x) % number_of_lists;
  const int batch_head = static_cast<int>(blockIdx.x) / number_of_lists;
  const int batch = batch_head / heads, head = batch_head % heads;
  const int topk = lists.topk;
  int count = topk;
  if (lists.lengths_gmem != nullptr) {
    count = min(count, lists.lengths_gmem[batch * lists.lengths_batch + head * lists.lengths_head +
                                          list * lists.lengths_row]);
  }
  const int32_t* const list_gmem =
      lists.indices_gmem + batch * lists.batch + head * lists.head + list * lists.row;
  const auto entry_of = [&](int i) {
    const int key = i < count ? list_gmem[i] : NO_KEY_LEFT;
    return key < 0 || key >= attention.nk ? NO_KEY_LEFT : key;
  };
  int32_t* const sorted_gmem = params.order.sorted_gmem + static_cast<int64_t>(blockIdx.x) * topk;
  const int words = (attention.nk + 31) / 32;
  static_assert(KEPT_KEYS == 32);
  int32_t* const starts_gmem =
      params.kept.starts_gmem == nullptr
          ? nullptr
          : params.kept.starts_gmem + static_cast<int64_t>(blockIdx.x) * (words + 1);
  uint32_t* const bits = reinterpret_cast<uint32_t*>(entries);
  int* const before = entries + words;
  int named = -1;
  if (sorts_by_bits(attention.nk)) named = count_by_bits(bits, before, words, topk, entry_of);
  if (named >= 0) {
    for (int i = threadIdx.x; i < words; i += LIST_SORT_THREADS) {
      int place = before[i];
      if (starts_gmem != nullptr) starts_gmem[i] = place;
      for (uint32_t left = bits[i]; left != 0; left &= left - 1)
        sorted_gmem[place++] = 32 * i + __ffs(static_cast<int>(left)) - 1;
    }
    if (starts_gmem != nullptr && threadIdx.x == 0) starts_gmem[words] = named;
    for (int i = named + static_cast<int>(threadIdx.x); i < topk; i += LIST_SORT_THREADS)
      sorted_gmem[i] = NO_KEY_LEFT;
  } else {
    const int places = list_sort_places(topk);
    for (int i = threadIdx.x; i < places; i += LIST_SORT_THREADS)
      entries[i] = i < topk ? entry_of(i) : NO_KEY_LEFT;
    sort_bitonic(entries, places);
    for (int i = threadIdx.x; i < topk; i += LIST_SORT_THREADS) sorted_gmem[i] = entries[i];
    for (int i = threadIdx.x; starts_gmem != nullptr && i <= topk; i += LIST_SORT_THREADS) {
      const int last_before = i == 0 ? -1 : min(entries[i - 1] / KEPT_KEYS, words);
      const int last = i == topk ? words : min(entries[i] / KEPT_KEYS, words);
      for (int group = last_before + 1; group <= last; ++group) starts_gmem[group] = i;
    }
  }
  ptx::griddepcontrol_wait();  // this kernel has started early, and ends behind the one before
}

// Clears the sums, and what CTAs have left, by all threads of the grid.
__device__ __forceinline__ void clear_key_sums(const ListBackwardParams& params) {
  const AttentionParams& attention = params.call.attention;
  const int64_t rows = static_cast<int64_t>(params.order.chains) * attention.batch *
                       (attention.heads_q / attention.heads_per_kv) * attention.nk;
  clear_by_grid(params.order.left_gmem, params.order.left_bytes);
  clear_by_grid(params.sums.dk_gmem, rows * params.sums.dk_columns * 4);
  clear_by_grid(params.sums.dv_gmem, rows * params.sums.dv_columns * 4);
}

// The terms of BACKWARD_ROWS query rows for each CTA, and cleared sums.
template <DType DTYPE>
__device__ __forceinline__ void list_rows(const ListBackwardParams& params) {
  ptx::griddepcontrol_launch_dependents();  // lists are sorted beside this, and others wait
  backward_rows<DTYPE>(params.call, [&] { clear_key_sums(params); });
}

// dK and dV of their sums, 16 columns of a row for each thread. Sums of fp32 inputs have their
// columns in order.
template <DType DTYPE>
__device__ __forceinline__ void list_gradients(const ListBackwardParams& params) {
  const AttentionParams& attention = params.call.attention;
  const KeySums& sums = params.sums;
  const int dk_parts = sums.dk_columns / LIST_SUM_COLUMNS;
  const int parts = dk_parts + sums.dv_columns / LIST_SUM_COLUMNS;
  const int heads_kv = attention.heads_q / attention.heads_per_kv;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * LIST_SUMS_THREADS + threadIdx.x;
  const int64_t row_of_all = index / parts;
  ptx::griddepcontrol_wait();  // the sums are complete
  int part = static_cast<int>(index - row_of_all * parts);
  const int64_t head_of_all = row_of_all / attention.nk;
  const int64_t row = row_of_all - head_of_all * attention.nk;
  if (head_of_all >= static_cast<int64_t>(attention.batch) * heads_kv) return;
  const bool is_dk = part < dk_parts;
  if (!is_dk) part -= dk_parts;
  const GradientParams& gradient = is_dk ? params.call.dk : params.call.dv;
  const int columns = is_dk ? sums.dk_columns : sums.dv_columns;
  const float* all_gmem = is_dk ? sums.dk_gmem : sums.dv_gmem;
  const float factor = is_dk ? params.call.scale : 1.0f;
  float x[LIST_SUM_COLUMNS] = {};
  const int chains = all_gmem == nullptr ? 0 : params.order.chains;
  const int64_t rows = static_cast<int64_t>(attention.batch) * heads_kv * attention.nk;
  for (int chain = 0; chain < chains; ++chain) {
    const float* row_gmem =
        all_gmem + (chain * rows + row_of_all) * columns + part * LIST_SUM_COLUMNS;
#pragma unroll
    for (int i = 0; i < LIST_SUM_COLUMNS; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row_gmem + i);
      x[i] += four.x, x[i + 1] += four.y, x[i + 2] += four.z, x[i + 3] += four.w;
    }
  }
  const int64_t start = head_of_all / heads_kv * gradient.batch +
                        head_of_all % heads_kv * gradient.head + row * gradient.row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = part * LIST_SUM_COLUMNS + 8 * half;
    if (column >= (is_dk ? attention.d : attention.dv)) continue;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int place =
          DTYPE == DType::F32 ? 8 * half + i : list_sum_place(i / 2, 2 * half + i % 2);
      y[i] = x[place] * factor;
    }
    if constexpr (DTYPE != DType::F32) {
      store_gradient_chunk<DTYPE>(gradient, start + column, y);
    } else {
      float* gmem = static_cast<float*>(gradient.gmem) + start + column;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        float4* four_gmem = reinterpret_cast<float4*>(gmem + i);
        const float4 old = gradient.accumulate ? *four_gmem : float4{};
        *four_gmem = {old.x + y[i], old.y + y[i + 1], old.z + y[i + 2], old.w + y[i + 3]};
      }
    }
  }
}

}  // namespace archflash::device
