// Attention forward on TMA, mbarriers and mma.sync, for compute capability 12.x (and 9.0): fp16,
// bf16 or e4m3 inputs, fp32 scores, sums and output accumulators.
//
// The CTAs share out row tiles (BLOCK_Q query rows of a head, the longest first). For each tile a
// CTA visits the visible blocks of keys from the last one, which may be ragged, back to the first,
// with an online softmax.
//
// clang-format off
//                      each block of K        each block of V             Q of each tile
//
//   producer, 1 warp   wait k_empty           wait v_empty                wait q_empty
//                      load K                 load V                      load Q
//                        | k_full               | v_full                    | q_full
//                        v                      v                           v
//   consumers,         wait k_full            wait v_full                 wait q_full
//   WARPS warps        S = Q K^T              P = 2^(S * scale - base)    Q_IN_REGISTERS: read Q
//                      mask S, raise bases    O += P V                    last: output rows through
//                        | k_empty              | v_empty                   | q_empty   Q's part
//                        v                      v                           v
//   producer           next K of the stage    next V of the stage         Q of the next tile
// clang-format on
//
// A consumer warp owns WARP_ROWS rows: their scores, P and outputs never leave its registers, and
// no consumer warp waits for another one. Blocks that need no care have a loop of their own
// (visit_plain_blocks).
//
// The producer is in load.cuh, a block of keys in mainloop.cuh. The tiles, stages and the memory
// plan are in config.cuh, the barriers and the hazards that they close in tile.cuh, the choice
// among the kernels in plan.cpp, decisions in NOTES.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/config.cuh"
#include "blackwell_consumer/load.cuh"
#include "blackwell_consumer/mainloop.cuh"
#include "blackwell_consumer/params.h"
#include "blackwell_consumer/tile.cuh"
#include "blackwell_consumer/warp_context.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/descales.cuh"
#include "common/device/f32_out.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/fp8_softmax.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_consumer {

template <class C>
__device__ __forceinline__ void consume(const Params& params, unsigned char* shared,
                                        uint32_t shared_smem) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  using Context = WarpContextOf<C>;
  static_assert(C::CONTEXT_IN_REGISTERS || sizeof(Context) <= C::CONTEXT_BYTES);
  Context in_registers;
  Context& context = C::CONTEXT_IN_REGISTERS
                         ? in_registers
                         : *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM +
                                                       threadIdx.x / 32 * C::CONTEXT_BYTES);
  RingPosition<C> ring;
  uint32_t q_parity = 0;

  for (device::TileIndex index; index.more(params.tiles); ++index.round) {
    {  // The tile's context.
      write_rows_of_no_sequence<C>(params, static_cast<int>(index.value()));
      const device::Work work = find_tile<C>(params, index);
      if (work.first_row < 0) continue;
      const device::VisibleKeys visible = device::find_visible_keys(attention, work);
      // In shared memory one lane writes the context for its warp. All lanes have read the previous
      // tile's context: release(), at the end of that tile, has synchronised them.
      if (C::CONTEXT_IN_REGISTERS || threadIdx.x % 32 == 0) {
        static_cast<WarpContext&>(context) =
            make_warp_context<C>(params, index, work, visible, threadIdx.x / 32);
        if constexpr (C::BLOCK_SCALES)
          context.key_scales = find_key_scales(params.descales, attention, work);
        if constexpr (HAS_DESCALES<C>) {
          context.key_descales = device::find_key_descales(params.descales, attention, work);
          context.warp_descale = device::find_warp_descale(
              params.descales, attention, work,
              work.first_row + static_cast<int>(threadIdx.x / 32) * C::WARP_ROWS);
        }
        context.round = index.round;
        context.q_parity = q_parity;
        context.large_bases = 0;
      }
      // The context is written before any lane reads it.
      if constexpr (!C::CONTEXT_IN_REGISTERS) __syncwarp();
    }
    mma_sync::QFragments<C> q_rmem;
    device::Outputs<C> o_rmem = {};
    device::RowState<C, std::conditional_t<C::CONTEXT_IN_REGISTERS, bool, WarpFlag>> state;
    if constexpr (C::CONTEXT_IN_REGISTERS) {
      state.large = false;
    } else {
      state.large.flag_smem = &context.large_bases;
    }
    device::clear(state);
    ptx::mbarrier_wait_parity(barriers.q_full(), q_parity);  // Q has landed
    const bool any_block = context.blocks.first <= context.blocks.last;
    if (C::Q_IN_REGISTERS && any_block)
      mma_sync::load_all_q<C>(q_rmem, lane_q_smem<C>(shared_smem));

    ScalesOf<C> scales;
    if constexpr (C::BLOCK_SCALES) {
      scales.read_q(params.descales, attention, context.work,
                    static_cast<int>(threadIdx.x / 32) * C::WARP_ROWS);
      if (context.seen_last >= context.seen_first) {
        scales.read_k(context.key_scales, attention,
                      min(device::block_start<C::BLOCK_K>(context.seen_last), context.blocks.last));
      }
    }

    // The blocks, from the last to the first: those after the last one that this warp sees, those
    // that it sees, and those before.
    int block = context.blocks.last;
#pragma unroll 1
    for (; block >= context.blocks.first && block > context.seen_last; block -= C::BLOCK_K)
      skip_block<C>(barriers, ring);
#pragma unroll 1
    while (block >= context.seen_first) {
      if constexpr (C::HAS_PLAIN_LOOP) {
        if (block >= context.clear_first && block <= context.clear_last &&
            !attention.transform_scores && !state.large) {
          const int first = context.clear_first;
          visit_plain_blocks<C>(params, barriers, ring, state, o_rmem, q_rmem, block, first,
                                shared_smem);
          continue;
        }
      }
      visit_block<C>(params, barriers, ring, context, state, o_rmem, q_rmem, scales, block,
                     shared_smem);
      block -= C::BLOCK_K;
    }
#pragma unroll 1
    for (; block >= context.blocks.first; block -= C::BLOCK_K) skip_block<C>(barriers, ring);

    const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
    bool stored = false;
    if constexpr (C::CAN_SPLIT) {
      const Partials& partials = params.partials;
      index.round = context.round;
      if (partials.wanted()) {
        device::store_partials<C>(o_rmem, state, attention, partials, params.packed_heads,
                                  context.work, static_cast<int>(index.value()) % partials.splits,
                                  warp_row);
        stored = true;
      } else if (params.packed_heads.count > 1) {
        device::store_packed_out<C>(o_rmem, state, attention, params.packed_heads, context.work,
                                    warp_row);
        stored = true;
      }
    }
    if constexpr (C::FP8) {
      __syncwarp();  // lane 0 has written warp_descale.v (change_unit) before any lane reads it
      device::store_fp8_out<C>(o_rmem, state, attention, params.out_dtype, context.work, warp_row,
                               unit_of_outputs(context));
    } else if (!stored && params.out_dtype == DType::F32) {
      device::store_f32_out<C>(o_rmem, state, attention, context.work, warp_row);
    } else if (!stored) {
      device::store_out<C, QTile>(o_rmem, state, attention, context.work, warp_row,
                                  shared + C::Q_SMEM + warp_row * QTile::ROW_BYTES);
    }
    // This thread's reads and writes of output rows in Q's part come before TMA's next write there.
    ptx::fence_proxy_async_shared();
    // Both come from the context, so that no register holds them during the loops above.
    index.round = context.round;
    q_parity = context.q_parity ^ 1;
    release(barriers.q_empty());
  }
}

// Initialises the barriers and runs the roles of a CTA's warps: the consumers, and behind them the
// producer, a warp. Both get the address of `shared`.
template <class C, class Consume, class Produce>
__device__ __forceinline__ void run_roles(unsigned char* shared, const Consume& consume,
                                          const Produce& produce) {
  // Opaque to the compiler, which otherwise computes the address anew at each use.
  const uint32_t shared_smem =
      ptx::mov_b32_volatile(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  if (threadIdx.x == 0) Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise();
  __syncthreads();  // the barriers are initialised before any warp uses them

  if (threadIdx.x < C::CONSUMER_THREADS) {
    if constexpr (C::REGISTERS == Registers::Roles) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume(shared_smem);
  } else {
    if constexpr (C::REGISTERS == Registers::Roles) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) produce(shared_smem);
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  run_roles<C>(
      shared, [&](uint32_t shared_smem) { consume<C>(params, shared, shared_smem); },
      [&](uint32_t shared_smem) { produce<C>(params, shared_smem); });
}

}  // namespace archflash::blackwell_consumer
