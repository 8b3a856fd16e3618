// Attention backward where a head has few query rows, for compute capability 9.0.
//
// A CTA has all query rows of a head, whose Q and dO stay in shared memory, and goes over blocks of
// 64 keys. dK and dV of a block are complete when the block is, and dQ stays in registers, so that
// nothing has to be cleared before or rounded behind. Where heads are few, or too few are left for
// the last round of CTAs, several CTAs share out the keys of one: each writes a share of dQ in
// fp32, and a launch behind adds them up. The order of all sums is fixed. CTAs stay: they take one
// head after another, whose rows and first keys come meanwhile.
// clang-format off
//                      each head                    each block of keys
//
//   loader, 1 warp     wait rows_empty, load Q, dO  wait empty     load K, V
//                        | work_full                  | k_full
//                        | q_full, dout_full          | v_full
//                        v                            v
//   consumers,         terms of the rows            P = 2^(S - LSE)       -> shared memory
//   2 warpgroups of                                 start S = Q K^T of the next block
//   128 threads                                     wait for all products
//                                                   dV, dK of the block before: rounded and written  | empty
//                                                   dS = P (dP - delta)   -> shared memory
//                                                   start dQ += dS K, dP = dO V^T of the next block
//                                                   bar.sync: both have stored P and dS
//                                                   start dV = P^T dO (first one), dK = dS^T Q (second one)
// clang-format on
//
// A consumer warpgroup has 64 query rows of each tile of 128. S, P and dP lie in its registers with
// a query in each row, so that dS in 16 bits is the operand A of the product for dQ as it lies. For
// dV and dK, which sum over the rows of both warpgroups, P and dS pass through shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/backward_rows.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/min.cuh"
#include "common/ptx/named_barrier.cuh"
#include "hopper/backward/backward_epilogue.cuh"
#include "hopper/backward/backward_products.cuh"
#include "hopper/backward/backward_scores.cuh"
#include "hopper/backward/rows_load.cuh"
#include "hopper/backward/rows_masks.cuh"

namespace archflash::hopper {

// The terms of a row: those that a launch before has made, or else the four lanes of a quad make
// them together, where there is no cu_seqlens. A row behind the last one has no weights.
template <class C>
__device__ __forceinline__ device::RowTerms terms_of_row(const BackwardParams& params,
                                                         const RowsWork& work, int row) {
  const AttentionParams& attention = params.attention;
  const bool exists = row < work.nq;
  if (params.terms_gmem != nullptr) {
    const device::RowTerms* const terms_gmem =
        device::terms_of(params, work.batch, work.head, work.q_start);
    return exists ? terms_gmem[row] : device::RowTerms{-device::MINUS_INFINITY, 0.0f};
  }
  const auto chunks_of = [&](const void* gmem, int64_t batch, int64_t head, int64_t stride) {
    return reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(gmem) + work.batch * batch +
                                          work.head * head + row * stride);
  };
  const uint4* const out_gmem =
      chunks_of(attention.out_gmem, attention.out_batch, attention.out_head, attention.out_row);
  const uint4* const dout_gmem =
      chunks_of(params.dout_gmem, params.dout_batch, params.dout_head, params.dout_row);
  constexpr int CHUNKS = C::HEAD_DIM / 32;  // of a lane
  uint4 out[CHUNKS], dout[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int chunk = 4 * c + static_cast<int>(threadIdx.x) % 4;
    const bool reads = exists && chunk < attention.dv / 8;
    out[c] = reads ? out_gmem[chunk] : uint4{};
    dout[c] = reads ? dout_gmem[chunk] : uint4{};
  }
  const int64_t index =
      (static_cast<int64_t>(work.batch) * attention.heads_q + work.head) * attention.nq + row;
  const float lse = exists ? attention.lse_gmem[index] : device::MINUS_INFINITY;
  const float dlse = exists && params.dlse_gmem != nullptr ? params.dlse_gmem[index] : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const uint32_t o[4] = {out[c].x, out[c].y, out[c].z, out[c].w};
    const uint32_t d[4] = {dout[c].x, dout[c].y, dout[c].z, dout[c].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = fmaf(device::element_of_chunk<C::DTYPE>(o, i), device::element_of_chunk<C::DTYPE>(d, i),
                 sum);
    }
  }
#pragma unroll
  for (int lanes = 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(device::FULL_WARP, sum, lanes);
  return {lse == device::MINUS_INFINITY ? -device::MINUS_INFINITY : lse * device::LOG2_E,
          sum - dlse};
}

// C for the store of dV or dK of a block, which has 16 keys for each warp of a warpgroup.
template <class C>
struct BlockOf : C {
  static constexpr int KEY_WARPS = C::BLOCK / C::WARP_ROWS;
};

// What a kernel is given.
template <class C>
using RowsParamsOf = std::conditional_t<C::MASKED, MaskedRowsParams, BackwardKernelParams>;

template <class C>
__device__ __forceinline__ const BackwardKernelParams& call_of_rows(const RowsParamsOf<C>& params) {
  if constexpr (C::MASKED) {
    return params.call;
  } else {
    return params;
  }
}

// Where the consumers are in the blocks of all heads of a CTA.
template <class C>
struct RowsPosition {
  RingPosition<C::ROW_STAGES> row_ring;
  RingPosition<C::KEY_STAGES> ring;
  uint32_t weight_stage = 0;  // of P and dS
  [[maybe_unused]] ElementSumsOf<C> elements;
};

// Goes over the blocks of keys of a head; returns whether it is the CTA's last one.
template <class C>
__device__ __forceinline__ bool consume_keys(const RowsParamsOf<C>& all_params,
                                             unsigned char* shared, uint32_t shared_smem,
                                             RowsPosition<C>& position) {
  const BackwardKernelParams& params = call_of_rows<C>(all_params);
  using QTile = typename C::QTile;
  using KTile = typename C::KTile;
  using DsTile = typename C::DsTile;
  constexpr int SCORES = C::BLOCK / 2, SUMS = C::HEAD_DIM / 2, WORDS = C::BLOCK / 4;
  const RowsBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const AttentionParams& attention = params.backward.attention;
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;
  const int lane_row = warp * C::WARP_ROWS + lane / 4;
  const int row_stage = uniform(position.row_ring.stage);
  const uint32_t row_parity = uniform(static_cast<int>(position.row_ring.parity));
  ptx::mbarrier_wait_parity(barriers.work_full(row_stage), row_parity);
  const RowsWork& work = rows_work<C>(shared, row_stage);
  const int begin = uniform(work.begin), end = uniform(work.end);
  const device::VisibleKeys visible = visible_of(attention, work);

  [[maybe_unused]] MaskWords<C> elements;  // of the next step
  const auto read_ahead = [&](int tile, int of_block, bool any) {
    if constexpr (C::MASKED)
      read_elements<C>(elements, all_params.masks, work, tile, of_block, any);
  };
  read_ahead(0, begin, begin < end);

  // Each warp makes the terms of its own rows.
  float2* const terms =
      reinterpret_cast<float2*>(shared + C::TERMS_SMEM) + row_stage * C::MOST_ROWS + lane_row;
#pragma unroll 1
  for (int row = 0; row < C::MOST_ROWS; row += C::TILE_ROWS) {
#pragma unroll 1
    for (int r = 0; r < C::WARP_ROWS; r += 8) {
      const device::RowTerms of_row = terms_of_row<C>(params.backward, work, row + lane_row + r);
      if (lane % 4 == 0) terms[row + r] = {of_row.lse_log2, of_row.delta};
    }
  }
  __syncwarp();

  KeyGradient<KTile> dq_rmem[C::ROW_TILES] = {};
  // The gradients of a block of keys: dV, or dK, or both.
  constexpr int PASSED = 2 / C::WARPGROUPS;
  KeyGradient<KTile> dx_rmem[PASSED] = {};
  KeysByQueries<C> s_rmem, dp_rmem, own_p_rmem;
  KeysByQueries<C>& p_rmem = C::S_AHEAD ? own_p_rmem : s_rmem;
  KeysByQueries<C>& ds_rmem = C::S_AHEAD ? own_p_rmem : dp_rmem;
  KeysByQueries16<C> a_rmem;  // dS, as operand A
  float* const s = &s_rmem[0][0];
  float* const dp = &dp_rmem[0][0];
  float* const p = &p_rmem[0][0];
  uint32_t* const a = &a_rmem[0][0];

  const int own_rows = group * C::GROUP_ROWS * QTile::ROW_BYTES;
  const auto rows_of = [&](int offset, int tile) {
    return describe_tile<QTile>(
        shared_smem + offset + row_stage * C::ROW_BYTES + tile * QTile::BYTES + own_rows, 16);
  };
  const auto keys_at = [&](int offset, int stage) {
    return shared_smem + offset + stage * KTile::BYTES;
  };
  // With KEEPS_ROWS, Q and dO of the warp's rows, as operand A.
  constexpr int STEPS = C::HEAD_DIM / 16;
  uint32_t q_rmem[STEPS][4], dout_rmem[STEPS][4];
  const auto keep_rows = [&](uint32_t (&x_rmem)[STEPS][4], int offset) {
    const uint32_t first_smem = shared_smem + offset + row_stage * C::ROW_BYTES +
                                QTile::offset(warp * C::WARP_ROWS + lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) ptx::ldmatrix_x4(x_rmem[i], QTile::advance(first_smem, 2 * i));
  };
  const auto start_rows_by_keys = [&](KeysByQueries<C>& x_rmem,
                                      const uint32_t (&rows_rmem)[STEPS][4], int offset, int tile,
                                      int stage) {
    const int keys_offset = offset == C::Q_SMEM ? C::K_SMEM : C::V_SMEM;
    ptx::registers_change<SCORES>(&x_rmem[0][0]);
    ptx::wgmma_fence();  // the last uses of the registers come before the product
    if constexpr (C::KEEPS_ROWS) {
      using Product = ptx::Wgmma<C::DTYPE, C::BLOCK>;
      const ptx::WgmmaDescriptor keys = describe_tile<KTile>(keys_at(keys_offset, stage), 16);
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        Product::template rs<false>(&x_rmem[0][0], rows_rmem[i],
                                    advance(keys, column_step<KTile>(i)), i != 0);
      }
      ptx::wgmma_commit_group();
    } else {
      start_keys_by_queries<C, QTile, KTile>(x_rmem, rows_of(offset, tile),
                                             keys_at(keys_offset, stage));
    }
  };
  const auto begin_s = [&](int tile, int stage) {
    start_rows_by_keys(s_rmem, q_rmem, C::Q_SMEM, tile, stage);
  };
  const auto begin_dp = [&](int tile, int stage) {
    start_rows_by_keys(dp_rmem, dout_rmem, C::DOUT_SMEM, tile, stage);
  };
  const auto dx_change = [&] {
#pragma unroll
    for (int x = 0; x < PASSED; ++x) ptx::registers_change<SUMS>(&dx_rmem[x][0][0]);
  };
  // dV of a block, of the first warpgroup, or dK, of the second one; one alone makes both. Where P
  // and dO, or dS and Q lie:
  const uint32_t weights_smem = shared_smem + C::WEIGHTS_SMEM + group * DsTile::BYTES;
  const uint32_t passing_smem =
      shared_smem + (group == 0 ? C::DOUT_SMEM : C::Q_SMEM) + row_stage * C::ROW_BYTES;
  const auto begin_dx = [&]<int TILE>(uint32_t weight_stage) {
    using Product = ptx::Wgmma<C::DTYPE, C::HEAD_DIM>;
    dx_change();
    ptx::wgmma_fence();  // the last uses of the sums come before the product
#pragma unroll
    for (int x = 0; x < PASSED; ++x) {
      const ptx::WgmmaDescriptor a = describe_tile<DsTile>(
          weights_smem + weight_stage * (2 * DsTile::BYTES) + x * DsTile::BYTES, 16);
      const ptx::WgmmaDescriptor b =
          describe_tile<QTile>(passing_smem + x * (C::Q_SMEM - C::DOUT_SMEM) + TILE * QTile::BYTES,
                               QTile::SLABS > 1 ? QTile::SLAB_BYTES : 0);
#pragma unroll
      for (int i = 0; i < C::TILE_ROWS / 16; ++i) {
        Product::template ss<true>(&dx_rmem[x][0][0], advance(a, column_step<DsTile>(i)),
                                   advance(b, 16 * i * QTile::ROW_BYTES), i != 0 || TILE != 0);
      }
    }
    ptx::wgmma_commit_group();
  };
  const auto store_dx = [&](int block) {
    CtaWork keys;
    keys.batch = work.batch, keys.gradient_head = work.head;
    keys.first_row = block * C::BLOCK;
    keys.own_rows = work.nk, keys.own_start = work.k_start;
#pragma unroll
    for (int x = 0; x < PASSED; ++x) {
      const bool is_dv = group + x == 0;
      store_gradient<BlockOf<C>, KTile>(dx_rmem[x], is_dv ? params.backward.dv : params.backward.dk,
                                        keys, is_dv ? attention.dv : attention.d,
                                        is_dv ? 1.0f : params.backward.scale);
    }
  };
  const auto clear_hidden = [&](KeysByQueries<C>& x_rmem, int tile, int block) {
    const int thread = ptx::mov_tid_x_volatile();
    const int first_key = block * C::BLOCK + thread % 4 * 2;
    const int first_row = tile * C::TILE_ROWS + thread / 32 * C::WARP_ROWS + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      const int first = visible.first(row) - first_key, last = visible.last(row) - first_key;
#pragma unroll
      for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = 8 * n + i;
          // Selecting makes the old value irrelevant, even if it was NaN.
          if (key < first || key > last) x_rmem[n][2 * r + i] = 0.0f;
        }
      }
    }
  };

  RingPosition<C::KEY_STAGES> ring{uniform(position.ring.stage),
                                   static_cast<uint32_t>(uniform(position.ring.parity))};
  int block = begin;
  uint32_t weight_stage = uniform(position.weight_stage);
  if (begin < end) {
    ptx::mbarrier_wait_parity(barriers.q_full(row_stage), row_parity);
    ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);
    if constexpr (C::KEEPS_ROWS) keep_rows(q_rmem, C::Q_SMEM);
    begin_s(0, ring.stage);
    ptx::mbarrier_wait_parity(barriers.dout_full(row_stage), row_parity);
    ptx::mbarrier_wait_parity(barriers.v_full(ring.stage), ring.parity);
    if constexpr (C::KEEPS_ROWS) keep_rows(dout_rmem, C::DOUT_SMEM);
    begin_dp(0, ring.stage);
    ptx::wgmma_wait_group<0>();
    ptx::registers_change<SCORES>(s);
    ptx::registers_change<SCORES>(dp);
  }
  // A tile of rows and a block of keys, whose S is there, and whose dP may be unfinished. dV or dK
  // and dQ of the step before may be unfinished, and those of this one are left so. Behind the last
  // step S and dP are those of the same block once more, which nobody uses: a branch would make
  // ptxas wait for each product.
  const auto step = [&]<int TILE>() {
    constexpr bool LAST = TILE + 1 == C::ROW_TILES;
    constexpr int NEXT_TILE = LAST ? 0 : TILE + 1;
    const bool more = block + 1 < end;
    RingPosition<C::KEY_STAGES> next = ring;
    if (LAST && more) next.advance();
    const int first_row = TILE * C::TILE_ROWS + warp * C::WARP_ROWS;
    const bool masks = visible.masks(first_row, first_row + C::WARP_ROWS - 1, block * C::BLOCK,
                                     block * C::BLOCK + C::BLOCK - 1);
    const float2 of_rows[2] = {terms[TILE * C::TILE_ROWS], terms[TILE * C::TILE_ROWS + 8]};
    if constexpr (C::MASKED) {
      exponentiate_with_elements<C>(p_rmem, s_rmem, elements, all_params.masks,
                                    attention.exp2_scale, of_rows[0].x, of_rows[1].x);
      read_ahead(NEXT_TILE, LAST ? block + 1 : block, !LAST || more);
    } else {
#pragma unroll
      for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float exponent = fmaf(s_rmem[n][i], attention.exp2_scale, -of_rows[i / 2].x);
          // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite.
          p_rmem[n][i] = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
        }
      }
    }
    if (masks) clear_hidden(p_rmem, TILE, block);
    ptx::registers_change<SCORES>(p);
    if constexpr (C::S_AHEAD) {
      ptx::mbarrier_wait_parity(barriers.k_full(next.stage), next.parity);
      begin_s(NEXT_TILE, next.stage);
    }
    const uint32_t stage_smem = shared_smem + C::WEIGHTS_SMEM + weight_stage * (2 * DsTile::BYTES);
    {
      KeysByQueries16<C> words;
      round_to_16_bits<C>(words, p_rmem);
      store_ds<C>(stage_smem, words);
    }
    ptx::wgmma_wait_group<0>();  // dP, S of the next step, and the products of the step before
    ptx::registers_change<SCORES>(dp);
    if constexpr (C::S_AHEAD) ptx::registers_change<SCORES>(s);
    dx_change();
    ptx::registers_change<WORDS>(a);
#pragma unroll
    for (int tile = 0; tile < C::ROW_TILES; ++tile)
      ptx::registers_change<SUMS>(&dq_rmem[tile][0][0]);
    if constexpr (TILE == 0) {
      if (block > begin) {
        release(barriers.empty((ring.stage == 0 ? C::KEY_STAGES : ring.stage) - 1));
        store_dx(block - 1);
      }
    }
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds_rmem[n][i] = p_rmem[n][i] * (dp_rmem[n][i] - of_rows[i / 2].y);
    }
    if constexpr (C::MASKED) {
      clear_where_p_is_0<C>(ds_rmem, p_rmem);
      take_mask_gradient<C>(ds_rmem, all_params, work, position.elements, TILE, block);
    } else if (masks) {
      clear_hidden(ds_rmem, TILE, block);
    }
    round_to_16_bits<C>(a_rmem, ds_rmem);
    ptx::registers_change<WORDS>(a);
    store_ds<C>(stage_smem + DsTile::BYTES, a_rmem);
    ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
    ptx::wgmma_fence();               // dS is rounded before the product
    start_gradient<C, KTile>(dq_rmem[TILE], a_rmem, keys_at(C::K_SMEM, ring.stage));
    if constexpr (!C::S_AHEAD) {
      ptx::mbarrier_wait_parity(barriers.k_full(next.stage), next.parity);
      begin_s(NEXT_TILE, next.stage);
    }
    ptx::mbarrier_wait_parity(barriers.v_full(next.stage), next.parity);
    begin_dp(NEXT_TILE, next.stage);
    ptx::bar_sync(WEIGHTS_BARRIER, C::CONSUMER_THREADS);  // both have stored P and dS
    begin_dx.template operator()<TILE>(weight_stage);
    weight_stage ^= 1;
    ring = next;
    if constexpr (!C::S_AHEAD) {
      ptx::wgmma_wait_group<2>();  // S of the next step
      ptx::registers_change<SCORES>(s);
    }
  };
#pragma unroll 1
  for (; block < end; ++block) {
    step.template operator()<0>();
    if constexpr (C::ROW_TILES > 1) step.template operator()<1>();
    if constexpr (C::ROW_TILES > 2) step.template operator()<2>();
    if constexpr (C::ROW_TILES > 3) step.template operator()<3>();
  }
  ptx::wgmma_wait_group<0>();
  dx_change();
#pragma unroll
  for (int tile = 0; tile < C::ROW_TILES; ++tile) ptx::registers_change<SUMS>(&dq_rmem[tile][0][0]);
  if (begin < end) {
    release(barriers.empty(ring.stage));
    store_dx(end - 1);
    ring.advance();
  }
  GradientParams dq = params.backward.dq;
  CtaWork rows;
  rows.batch = work.batch, rows.gradient_head = work.head;
  rows.own_rows = work.nq, rows.own_start = work.q_start;
  if (const int share = work.share; share >= 0) {
    dq = {params.dq_sums_gmem, 0, int64_t{attention.nq} * attention.d, attention.d, DType::F32, 0};
    rows.gradient_head = share;
  }
#pragma unroll
  for (int tile = 0; tile < C::ROW_TILES; ++tile) {
    rows.first_row = tile * C::TILE_ROWS;
    store_gradient<C, KTile>(dq_rmem[tile], dq, rows, attention.d, params.backward.scale);
  }
  const bool last = work.last;
  if constexpr (C::SUMS_ELEMENTS) {
    if (last) position.elements.flush(all_params.dmask, work);
  }
  release(barriers.rows_empty(row_stage));
  position.ring = ring;
  position.weight_stage = weight_stage;
  position.row_ring.advance();
  return last;
}

template <class C>
__device__ __forceinline__ void rows_bwd(const RowsParamsOf<C>& all_params) {
  const BackwardKernelParams& params = call_of_rows<C>(all_params);
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  static_assert(sizeof(RowsWork) <= C::WORK_BYTES);
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == C::CONSUMER_THREADS) {
    ptx::prefetch_tensormap(params.q_map);
    ptx::prefetch_tensormap(params.k_map);
    ptx::prefetch_tensormap(params.v_map);
    ptx::prefetch_tensormap(params.dout_map);
    RowsBarriers<C>{shared_smem + C::BARRIER_SMEM}.initialise();
  }
  __syncthreads();             // the barriers are initialised before any warp uses them
  ptx::griddepcontrol_wait();  // what comes before is done
  if (threadIdx.x < C::CONSUMER_THREADS) {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    RowsPosition<C> position;
#pragma unroll 1
    while (!consume_keys<C>(all_params, shared, shared_smem, position)) {
    }
  } else {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) {
      load_for_rows<C>(params, shared, shared_smem);
    } else if constexpr (C::PACKED) {
      clear_keys_of_none<C>(params);
    }
  }
}

// What comes behind where CTAs share out keys: adds up their shares of dQ, 8 columns a thread.
template <DType DTYPE>
__device__ __forceinline__ void add_dq_shares(const BackwardKernelParams& params) {
  const AttentionParams& attention = params.backward.attention;
  const int chunks = attention.d / 8, rows = attention.nq;
  const int64_t number = int64_t{blockIdx.x} * BACKWARD_DQ_THREADS + threadIdx.x;
  const auto row_of_all = static_cast<int>(number / chunks);
  const int column = 8 * static_cast<int>(number % chunks);
  const int shared_head = row_of_all / rows, row = row_of_all - shared_head * rows;
  const int head_of_all = params.first_shared_head + shared_head;
  const int batch = head_of_all / attention.heads_q;
  if (batch >= attention.batch) return;
  ptx::griddepcontrol_wait();  // all CTAs have written their shares
  const int64_t share_floats = int64_t{rows} * attention.d;
  const int64_t first = shared_head * params.shares * share_floats + row * attention.d + column;
  const float* share_gmem = params.dq_sums_gmem + first;
  float x[8] = {};
  for (int share = 0; share < params.shares; ++share, share_gmem += share_floats) {
    const float4* const chunk_gmem = reinterpret_cast<const float4*>(share_gmem);
    const float4 low = chunk_gmem[0], high = chunk_gmem[1];
    x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
    x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
  }
  const GradientParams& dq = params.backward.dq;
  const int head = head_of_all - batch * attention.heads_q;
  const int64_t start = batch * dq.batch + head * dq.head + row * dq.row + column;
  device::store_gradient_chunk<DTYPE>(dq, start, x);
}

}  // namespace archflash::hopper
