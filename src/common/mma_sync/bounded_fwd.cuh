// Attention forward on mma.sync for calls whose rows see all keys up to one: causal, or all of
// them. Outputs have the type of the inputs; there are no windows, softcap or sinks. The loop is
// that of dense_fwd.cuh, and so are a CTA's short start and end. Two kinds of calls have it:
//
//   few row tiles       CTAs share out the keys of a tile (KeyShares), so that none passes many
//                       more keys than the others. What a tile's shares leave in the workspace
//                       (partials.h) a second launch adds up, combine_key_shares()
//   packed sequences    the grid says which tile of which sequence a CTA has, and no CTA searches
//                       for it
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/key_groups.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/mma_sync/bounded_params.h"
#include "common/mma_sync/dense_load.cuh"
#include "common/mma_sync/dense_step.cuh"
#include "common/mma_sync/store_rows.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/partials.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::mma_sync {

// S, P and O += P V for STEP_KEYS keys. masks: whether a row of the warp does not see all of them;
// row (m, r) of this lane then sees those in front of end_of(m, r), counted from the lane's first
// key. before_v() is called when P is known.
template <class C, class EndOf, class BeforeV>
__device__ __forceinline__ void bounded_step(device::Outputs<C>& o_rmem, device::RowState<C>& state,
                                             const QFragments<C>& q_rmem, uint32_t q_smem,
                                             uint32_t k_smem, uint32_t v_smem, bool masks,
                                             const EndOf& end_of, float exp2_scale,
                                             const BeforeV& before_v) {
  device::Scores<C> s_rmem;
  multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
  if (masks) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int end = end_of(m, r);
#pragma unroll
        for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (8 * n + i >= end) s_rmem[m][n][2 * r + i] = device::MINUS_INFINITY;
          }
        }
      }
    }
  }
  exponentiate_and_multiply<C>(o_rmem, state, s_rmem, v_smem, exp2_scale, before_v);
}

// What a CTA computes. It is read from shared memory where it is used, because outputs and scores
// leave few registers.
struct BoundedContext : DenseContext {
  int first_row, rows;  // of the tile; rows from there to the end of the sequence
  int packed_row;       // the first row in the tensor
  int shift, nk;        // as in KeyShares
  int share;            // negative: the CTA has all keys that the tile sees
};

// What a CTA of a kernel for packed sequences computes, by its place in the grid (tiles of the
// longest sequence, heads, sequences); also writes rows of no sequence. Returns the tile, negative
// if there is none.
template <class C>
__device__ __forceinline__ int find_packed_tile(const AttentionParams& params, KeyShares& shares,
                                                int& q_start, int& k_start) {
  const int sequence = blockIdx.z;
  const int* cu_q = params.cu_seqlens_q_gmem;
  const int* cu_k = params.cu_seqlens_k_gmem;
  // All loads are under way together.
  const int first = cu_q[0], last = cu_q[params.batch];
  const auto start = [](const int* cu_seqlens, int of, int rows) {
    return device::sequence_start(cu_seqlens, of, rows);
  };
  q_start = start(cu_q, sequence, params.nq), k_start = start(cu_k, sequence, params.nk);
  const int nq = max(start(cu_q, sequence + 1, params.nq) - q_start, 0);
  const int nk = max(start(cu_k, sequence + 1, params.nk) - k_start, 0);
  if (first > 0 || last < params.nq) {
    const int places = gridDim.x * gridDim.z;
    for (int tile = sequence * gridDim.x + blockIdx.x; tile * C::BLOCK_Q < params.nq;
         tile += places) {
      device::write_rows_of_no_sequence<C::BLOCK_Q>(params, tile * params.heads_q + blockIdx.y,
                                                    threadIdx.x, C::THREADS);
    }
  }
  shares.nq = nq;
  shares.shift += nk - nq;
  shares.nk = min(nk, nq + shares.shift);  // may be negative: no row sees a key
  return (nq + C::BLOCK_Q - 1) / C::BLOCK_Q - 1 - static_cast<int>(blockIdx.x);
}

// Writes a warp's rows and their ends for combine_key_shares().
template <class C>
__device__ __forceinline__ void store_share(const device::Outputs<C>& o_rmem,
                                            const device::RowState<C>& state,
                                            const Partials& partials, int columns, int share,
                                            int64_t first_row, int rows) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = device::sum_of_quad(state.sum[m][r]);
      const int row = 16 * m + 8 * r + lane / 4;
      if (row >= rows) continue;
      const int64_t index = partials.index(share, first_row + row);
      if (lane % 4 == 0) partials.ends_gmem[index] = {state.base[m][r], sum};
      float* row_gmem = partials.rows_gmem + index * columns;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        const int column = 8 * n + lane % 4 * 2;
        const float* o = &o_rmem[m][n][2 * r];
        if (column < columns) *reinterpret_cast<float2*>(row_gmem + column) = {o[0], o[1]};
      }
    }
  }
}

template <class C, bool PACKED>
__device__ __forceinline__ void bounded_fwd(const BoundedParams& all_params) {
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  static_assert(sizeof(BoundedContext) <= C::CONTEXT_BYTES);
  BoundedContext& cta = *reinterpret_cast<BoundedContext*>(shared + C::CONTEXT_SMEM);
  uint32_t head, batch = 0;
  KeyShares shares = all_params.shares;
  int tile, begin = 0, q_start = 0, k_start = 0;
  if constexpr (PACKED) {
    ptx::griddepcontrol_wait();  // what comes before this call is done: cu_seqlens
    head = blockIdx.y;
    tile = find_packed_tile<C>(params, shares, q_start, k_start);
    if (tile < 0) return;
  } else {
    // The grid is (heads of a group, CTAs of a head, groups).
    const uint32_t heads_q = params.heads_q, of_all = blockIdx.z * gridDim.x + blockIdx.x;
    batch = of_all / heads_q, head = of_all - batch * heads_q;
    if (batch >= params.batch) return ptx::griddepcontrol_wait();  // the last group is smaller
    const KeyShares::Place place = shares.find(params.order.from_last(blockIdx.y), C::BLOCK_Q);
    tile = place.tile, begin = place.share * shares.keys;
  }
  const int first_row = tile * C::BLOCK_Q, rows = shares.nq - first_row;
  const int end = shares.end(tile, C::BLOCK_Q);  // of the keys that the tile sees
  const int last_key = (PACKED ? end : min(end, begin + shares.keys)) - 1;
  // First key of the last block; before `begin` if no row sees a key.
  const int last = last_key < begin ? begin - C::BLOCK_K : last_key / C::BLOCK_K * C::BLOCK_K;
  {
    const uint32_t kv_head = head / static_cast<uint32_t>(params.heads_per_kv);
    const auto at = [&](const void* gmem, int64_t of_batch, int64_t of_head, uint32_t head) {
      return static_cast<const uint16_t*>(gmem) + batch * of_batch + head * of_head;
    };
    const uint16_t* q_gmem = at(params.q_gmem, params.q_batch, params.q_head, head);
    BoundedContext own;
    own.k_gmem = at(params.k_gmem, params.k_batch, params.k_head, kv_head);
    own.v_gmem = at(params.v_gmem, params.v_batch, params.v_head, kv_head);
    if (PACKED) own.k_gmem += k_start * params.k_row, own.v_gmem += k_start * params.v_row;
    own.first_row = first_row, own.rows = rows, own.packed_row = q_start + first_row;
    own.shift = shares.shift, own.nk = shares.nk;
    own.share = !PACKED && end > shares.keys ? begin / shares.keys : -1;
    if (threadIdx.x == 0) cta = own;
    if (!PACKED) ptx::griddepcontrol_wait();  // what comes before this call is done
    if (!PACKED || last >= 0) {
      start_last_rows<C, QKTile, C::BLOCK_Q>(shared_smem + C::Q_SMEM,
                                             q_gmem + own.packed_row * params.q_row, params.q_row,
                                             rows, params.d);
      start_last_rows<C, QKTile, C::BLOCK_K>(shared_smem + C::K_SMEM,
                                             own.k_gmem + last * params.k_row, params.k_row,
                                             shares.nk - last, params.d);
    }
    ptx::cp_async_commit_group();
    if (!PACKED || last >= 0) {
      start_last_rows<C, VTile, C::BLOCK_K>(shared_smem + C::V_SMEM,
                                            own.v_gmem + last * params.v_row, params.v_row,
                                            shares.nk - last, params.dv);
    }
    ptx::cp_async_commit_group();
    clear_columns_of_tiles<C>(shared, params);
  }
  if (PACKED && last < 0) __syncthreads();  // `cta` is written; the loop has no barrier then
  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);

  uint32_t stage_smem = shared_smem;  // K at stage_smem + K_SMEM, V at stage_smem + V_SMEM
  QFragments<C> q_rmem;
#pragma unroll 1
  for (int block = last; block >= begin; block -= C::BLOCK_K) {
    const bool first = block == last;
    // Each thread waits for its own copies: Q and K, or K and V. The barrier makes those of all
    // threads visible, and `cta`. After it no warp still reads the other stage.
    if (first) {
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();
    const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
    if (block > begin) {
      const uint32_t next = block - C::BLOCK_K;
      start_load<C, QKTile, C::BLOCK_K>(other_stage + C::K_SMEM, cta.k_gmem, next, params.k_row * 2,
                                        params.d);
      start_load<C, VTile, C::BLOCK_K>(other_stage + C::V_SMEM, cta.v_gmem, next, params.v_row * 2,
                                       params.dv);
    }
    ptx::cp_async_commit_group();
    const unsigned thread = ptx::mov_tid_x_volatile();
    const int warp_row =
        C::KEY_GROUPS > 1 ? device::warp_first_row<C>(thread) : thread / 32 * C::WARP_ROWS;
    const uint32_t q_smem = shared_smem + C::Q_SMEM + warp_row * QKTile::ROW_BYTES +
                            rows_first_offset<QKTile>(thread % 32);
    const uint32_t k_smem = stage_smem + C::K_SMEM + columns_first_offset<QKTile>(thread % 32);
    const uint32_t v_smem = stage_smem + C::V_SMEM + rows_first_offset<VTile>(thread % 32);
    if (first) load_all_q<C>(q_rmem, q_smem);

    bool awaits_v = first;
    const auto await_v = [&] {  // once by each warp, and in the first round alone
      if (!awaits_v) return;
      ptx::cp_async_wait_group<1>();
      __syncthreads();
      awaits_v = false;
    };
    // How many keys of the block a row of the warp sees.
    const auto seen_by = [&](int row) {
      return min(cta.first_row + warp_row + row + 1 + cta.shift, cta.nk) - block;
    };
    const int seen = seen_by(C::WARP_ROWS - 1);
    const int keys = warp_row < cta.rows ? min(seen, C::BLOCK_K) : 0;
    // A warp takes the steps with keys that its rows see, or of them the one of its group. Without
    // one it skips the work, but not the barriers.
    const int first_step = C::KEY_GROUPS > 1 ? device::key_group<C>(thread) * C::STEP_KEYS : 0;
    const int last_step = C::KEY_GROUPS > 1 ? first_step : (keys - 1) / C::STEP_KEYS * C::STEP_KEYS;
    if (keys <= first_step) await_v();
#pragma unroll 1
    for (int step = last_step; step >= first_step && keys > step; step -= C::STEP_KEYS) {
      bounded_step<C>(
          o_rmem, state, q_rmem, q_smem, k_smem + step * QKTile::ROW_BYTES,
          v_smem + step * VTile::ROW_BYTES, seen_by(0) < step + C::STEP_KEYS,
          [&](int m, int r) {
            const int lane = ptx::mov_tid_x_volatile() % 32;
            return seen_by(16 * m + 8 * r + lane / 4) - step - lane % 4 * 2;
          },
          params.exp2_scale, await_v);
    }
    stage_smem = other_stage;
  }

  if constexpr (C::KEY_GROUPS > 1) {
    static_assert(device::MERGE_BYTES<C> <= C::STAGES * C::STAGE_BYTES);
    __syncthreads();  // every warp has read K and V, before outputs overwrite them
    device::merge_key_groups<C>(o_rmem, state, shared + C::K_SMEM, [] { __syncthreads(); });
    if (device::key_group<C>(threadIdx.x) > 0) return;
  }

  const int warp_row = ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
  const int warp_rows = cta.rows - warp_row;
  const int64_t row = cta.packed_row + warp_row;
  if constexpr (!PACKED && C::M_TILES == 1) {
    if (cta.share >= 0) {
      // The CTAs that combine shares may come. Other launches would take their places on the SMs
      // unevenly.
      ptx::griddepcontrol_launch_dependents();
      const int64_t head_row = static_cast<int64_t>(batch * params.heads_q + head) * params.nq;
      store_share<C>(o_rmem, state, all_params.partials, params.dv, cta.share, head_row + row,
                     warp_rows);
      return;
    }
  }
  store_head_rows<C>(o_rmem, state, shared, params, batch, head, row, warp_row, warp_rows);
}

// The kernel behind one that shares out keys: adds up the shares of the rows that have several. The
// grid is (warps of rows, heads, batch); a warp has a row.
template <DType DTYPE>
__device__ __forceinline__ void combine_key_shares(const BoundedParams& all_params) {
  constexpr int MOST_COLUMNS = 256, STEPS = MOST_COLUMNS / 128;
  constexpr int AT_ONCE = 4;  // shares that are loaded together
  const AttentionParams& params = all_params.attention;
  const Partials& partials = all_params.partials;
  const KeyShares& shares = all_params.shares;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int row = shares.first_combined + static_cast<int>(blockIdx.x) * COMBINE_WARPS +
                  static_cast<int>(threadIdx.x) / 32;
  ptx::griddepcontrol_wait();  // all shares are in the workspace
  if (row >= params.nq) return;
  const int keys = min(row + 1 + shares.shift, shares.nk);
  const int count = (keys + shares.keys - 1) / shares.keys;
  const int64_t row_of_all = static_cast<int64_t>(batch * params.heads_q + head) * params.nq + row;
  float base = device::LOWEST, sum = 0.0f;
  float4 o_rmem[STEPS] = {};
#pragma unroll 1
  for (int first = 0; first < count; first += AT_ONCE) {
    PartialEnd ends[AT_ONCE];
    float4 x_rmem[AT_ONCE][STEPS] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      ends[i] = {device::LOWEST, 0.0f};
      if (first + i >= count) continue;
      const int64_t index = partials.index(first + i, row_of_all);
      ends[i] = partials.ends_gmem[index];
      const float* row_gmem = partials.rows_gmem + index * params.dv;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int column = 4 * (lane + 32 * step);
        if (column < params.dv)
          x_rmem[i][step] = *reinterpret_cast<const float4*>(row_gmem + column);
      }
    }
    const float before = base;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) base = fmaxf(base, ends[i].base);
    const float keep = ptx::ex2_approx_ftz(before - base);
    sum *= keep;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      float4& o = o_rmem[step];
      o = {o.x * keep, o.y * keep, o.z * keep, o.w * keep};
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float weight = ptx::ex2_approx_ftz(ends[i].base - base);
      sum = fmaf(ends[i].sum, weight, sum);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const float4 x = x_rmem[i][step];
        float4& o = o_rmem[step];
        o = {fmaf(x.x, weight, o.x), fmaf(x.y, weight, o.y), fmaf(x.z, weight, o.z),
             fmaf(x.w, weight, o.w)};
      }
    }
  }
  const device::RowEnd end =
      device::finish_row(base * device::LN_2, sum, device::MINUS_INFINITY /* no sink */);
  uint16_t* out_gmem = static_cast<uint16_t*>(params.out_gmem) + batch * params.out_batch +
                       head * params.out_head + row * params.out_row;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int column = 4 * (lane + 32 * step);
    const float4 o = o_rmem[step];
    if (column < params.dv) {
      ptx::st_global_v2_b32(out_gmem + column,
                            ptx::cvt_rn_x2_f32<DTYPE>(o.x * end.factor, o.y * end.factor),
                            ptx::cvt_rn_x2_f32<DTYPE>(o.z * end.factor, o.w * end.factor));
    }
  }
  if (params.lse_gmem != nullptr && lane == 0)
    params.lse_gmem[batch * params.lse_batch + head * params.lse_head + row] = end.lse;
}

template <class C>
__device__ __forceinline__ void shares_fwd(const BoundedParams& params) {
  bounded_fwd<C, false>(params);
}
template <class C>
__device__ __forceinline__ void packed_fwd(const BoundedParams& params) {
  bounded_fwd<C, true>(params);
}

}  // namespace archflash::mma_sync
