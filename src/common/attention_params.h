// The parameters that every attention kernel has. core_set.cpp writes them when a call is planned,
// bind() fills in the addresses, and the kernel reads them. A folder's own parameters follow in its
// parameter block.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"
#include "common/score_rule.h"

namespace archflash {

enum class OffsetMode : int32_t {
  Value = 0,             // AttentionParams::q_offset for all sequences
  KeysMinusQueries = 1,  // nk - nq of each sequence
  PerBatch = 2,          // q_offsets_gmem[batch]
};

// The order of row tiles without cu_seqlens: all of heads_per_group heads, then those of the next
// ones. Heads whose tiles are computed at the same time share L2.
struct TileOrder {
  int32_t heads_per_group;
  // The tiles of a head come from the last one to the first. Those at the places [turned_begin,
  // turned_end) of this order come in the opposite direction.
  int32_t turned_begin = 0, turned_end = 0;

  // How many tiles of a head lie behind the one at a place.
  ARCHFLASH_HOST_DEVICE int from_last(int place) const {
    const bool turned = place >= turned_begin && place < turned_end;
    return turned ? turned_begin + turned_end - 1 - place : place;
  }
};

struct AttentionParams {
  const void* q_gmem;                // (batch, heads_q, nq, d), or (tq, heads_q, d) with cu_seqlens
  const void* k_gmem;                // (batch, heads_kv, nk, d), or (tk, heads_kv, d)
  const void* v_gmem;                // (batch, heads_kv, nk, dv), or (tk, heads_kv, dv)
  void* out_gmem;                    // as q, with dv columns
  float* lse_gmem;                   // (batch, heads_q, nq) or (heads_q, tq); null: not requested
  const void* sinks_gmem;            // (heads_q,); null: none
  const int32_t* cu_seqlens_q_gmem;  // (batch + 1,); null: equal lengths
  const int32_t* cu_seqlens_k_gmem;  // (batch + 1,)
  const int32_t* q_offsets_gmem;     // (batch,), used with OffsetMode::PerBatch only

  // Strides in elements; the batch strides are 0 with cu_seqlens.
  int64_t q_batch, q_head, q_row;
  int64_t k_batch, k_head, k_row;
  int64_t v_batch, v_head, v_row;
  int64_t out_batch, out_head, out_row;
  int64_t lse_batch, lse_head;

  int64_t q_offset;                   // used with OffsetMode::Value only
  int64_t window_left, window_right;  // within +-2^62

  int32_t batch, heads_q;
  int32_t heads_per_kv;  // heads_q / heads_kv
  int32_t nq, nk;        // with cu_seqlens the totals tq, tk
  int32_t d, dv;
  OffsetMode offset_mode;
  int32_t sinks_dtype;  // DType of sinks_gmem

  // p = 2^(t * exp2_scale - max) with exp2_scale > 0. The score t is q.k, or what the rule makes of
  // it if transform_scores is set.
  int32_t transform_scores;
  float exp2_scale;
  ScoreRule rule;

  TileOrder order;
};

}  // namespace archflash
