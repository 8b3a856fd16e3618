// Latent attention (mla_fwd.cuh) over chosen keys: each query has a list of them, so the rows of a
// tile are the heads of one query. Scores, softmax, P V and the exchange of P between the two
// warpgroups are those of mla_fwd.cuh, on blocks of 64 places of the list.
//
// clang-format off
//   producers,     find the next tile | message | wait q_empty, copy Q | for each block: look its     by cp.async
//   4 warps        entries up | wait empty of a half | gather the rows
//   consumers, 2   wait message, q_full | pairs of blocks as in mla_fwd.cuh | Q of K alone of the next tile |
//   warpgroups     sums of both | output rows
// clang-format on
//
// CTAs stay and take every gridDim.x-th tile: the first blocks of a tile come while the last one is
// computed and written. The entries of a list come in any order; what counts as no key is copied as
// zeros and hidden by a bit.
//
// The producers are in mla_gather_load.cuh, the barriers in mla_gather_pipeline.cuh, the tile and
// the memory plan in mla_gather_config.cuh, and the plan in plan_mla_gather.cpp.
#pragma once

#include <cstdint>

#include "hopper/mla_gather_config.cuh"
#include "hopper/mla_gather_load.cuh"
#include "hopper/mla_gather_pipeline.cuh"
#include "hopper/mla_mainloop.cuh"

namespace archflash::hopper {

template <class C, int GROUP>
struct MlaGatherConsumer : MlaConsumer<C, GROUP> {
  using Base = MlaConsumer<C, GROUP>;

  // phases: bit s is the parity of the phase of stage s.
  __device__ __forceinline__ void run_pairs(uint32_t& phases) {
    Base::clear();
    const int first = uniform(this->tile.blocks.first);
    int key = uniform(this->tile.blocks.last);
#pragma unroll 1
    for (; key - C::BLOCK_K >= first; key -= 2 * C::BLOCK_K) {
      const int left = key - 2 * C::BLOCK_K - first;  // the first key of the next pair, if there
      this->last_scores = GROUP == 0 ? left < 0 : left < C::BLOCK_K;
      Base::template visit_pair<true>(key, phases & 1, phases >> 1);
      phases ^= 3;
    }
    if (key >= first) {
      this->last_scores = true;
      Base::template visit_pair<false>(key, phases & 1, phases >> 1);
      phases ^= 1;
    }
    // No scores have released Q.
    const int count = (uniform(this->tile.blocks.last) - first) / C::BLOCK_K + 1;
    if (count <= GROUP) release(this->barriers.q_empty());
  }

  // Writes the rows through the part of shared memory of this warp's P, which no product reads any
  // more (add_sums() has waited for both warpgroups), so that 8 lanes write 128 bytes of a row.
  __device__ __forceinline__ void store_rows() {
    using OutTile = typename C::OutTile;
    using G = typename C::Group;
    constexpr int LANES = 8;
    const AttentionParams& attention = this->params.call.attention;
    const device::Work& work = this->tile.work;
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));
    asm volatile("" : "+r"(this->warp_row));
    const int batch = work.batch_head / attention.heads_q;
    const int first_head = work.batch_head % attention.heads_q;
    const int heads = this->params.call.packed_heads.count;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = this->warp_row + lane / 4 + 8 * r;
      const int head = first_head + (row < heads ? row : 0);
      const device::RowEnd end =
          device::finish_lane_row<G>(this->state, 0, r, device::load_sink(attention, head));
      factors[r] = end.factor;
      if (row < heads && attention.lse_gmem != nullptr && GROUP == 0 && lane % 4 == 0) {
        attention
            .lse_gmem[batch * attention.lse_batch + head * attention.lse_head + work.first_row] =
            end.lse;
      }
    }
    const int out_smem = C::P_SMEM + GROUP * C::PTile::BYTES + this->warp_row * C::PTile::ROW_BYTES;
    const uint32_t row_smem =
        this->shared_smem + out_smem + OutTile::offset(lane % C::WARP_ROWS, lane / C::WARP_ROWS);
    const int own_row = lane / LANES;
    uint16_t* const out_gmem =
        static_cast<uint16_t*>(attention.out_gmem) + batch * attention.out_batch +
        (first_head + this->warp_row + own_row) * attention.out_head +
        work.first_row * attention.out_row + GROUP * G::HEAD_DIM_V + 8 * (lane % LANES);
#pragma unroll
    for (int column = 0; column < G::HEAD_DIM_V; column += OutTile::COLUMNS) {
      __syncwarp();  // the other lanes have read the columns before
#pragma unroll
      for (int i = 0; i < OutTile::COLUMNS / 16; ++i) {
        const float (&left)[4] = this->o_rmem[0][column / 8 + 2 * i];
        const float (&right)[4] = this->o_rmem[0][column / 8 + 2 * i + 1];
        const uint32_t x[4] = {
            ptx::cvt_rn_x2_f32<C::DTYPE>(left[0] * factors[0], left[1] * factors[0]),
            ptx::cvt_rn_x2_f32<C::DTYPE>(left[2] * factors[1], left[3] * factors[1]),
            ptx::cvt_rn_x2_f32<C::DTYPE>(right[0] * factors[0], right[1] * factors[0]),
            ptx::cvt_rn_x2_f32<C::DTYPE>(right[2] * factors[1], right[3] * factors[1])};
        ptx::stmatrix_x4(OutTile::advance(row_smem, 2 * i), x);
      }
      __syncwarp();  // the other lanes have stored before a lane reads
#pragma unroll
      for (int row = 0; row < C::WARP_ROWS; row += 32 / LANES) {
        if (this->warp_row + row + own_row >= heads) continue;
        *reinterpret_cast<uint4*>(out_gmem + row * attention.out_head + column) =
            *reinterpret_cast<const uint4*>(this->shared + out_smem +
                                            OutTile::offset(row + own_row, lane % LANES));
      }
    }
  }
};

template <class C, int GROUP>
__device__ __forceinline__ void consume_chosen_rows(const MlaGatherParams& params,
                                                    unsigned char* shared, uint32_t shared_smem) {
  const MlaGatherBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int warp_row = static_cast<int>(threadIdx.x) % C::WARPGROUP / 32 * C::WARP_ROWS;
  uint32_t phases = 0;
  MlaQuery q_rmem;
  // Whether there is a tile of this number; then the query's columns of K alone are on their way.
  const auto meet = [&](int number) {
    ptx::mbarrier_wait_parity(barriers.tile_full(number % 2), number / 2 % 2);
    const MlaGatherTile& tile = tile_message_of<C>(shared, number);
    if (uniform(tile.work.first_row) < 0) return false;
    load_q<C>(q_rmem, params, tile.work, warp_row);
    return true;
  };
  bool more = meet(0);
#pragma unroll 1
  for (int number = 0; more; ++number) {
    const MlaGatherTile& tile = tile_message_of<C>(shared, number);
    MlaGatherConsumer<C, GROUP> consumer{
        {params, tile, shared, shared_smem, barriers, warp_row, 0, 0}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) consumer.q_rmem[i][j] = q_rmem[i][j];
    }
    ptx::mbarrier_wait_parity(barriers.q_full(), number % 2);
    ptx::fence_proxy_async_shared();  // as in wait_for()
    consumer.run_pairs(phases);
    more = meet(number + 1);
    // The other warpgroup may still read the sums of the tile before.
    consumer.add_sums(number % 2 == 0 ? C::SUM_SMEM : C::NEXT_SUM_SMEM);
    if (params.call.partials.wanted()) {
      consumer.store_partial_rows();
    } else {
      consumer.store_rows();
    }
    release(barriers.tile_empty(number % 2));
  }
}

template <class C>
__device__ __forceinline__ void mla_gather_fwd(const MlaGatherParams& params) {
  extern __shared__ __align__(1024) unsigned char shared[];  // where swizzle patterns start
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const MlaGatherBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  if (threadIdx.x == 0) barriers.initialise();
  __syncthreads();  // the barriers are there before others use them
  if (threadIdx.x >= C::CONSUMER_THREADS) {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    const int warp = uniform(static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32);
    MlaGatherProducer<C>{params, shared, shared_smem, barriers, warp, 0}.run();
  } else {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    if (threadIdx.x < C::WARPGROUP) {
      consume_chosen_rows<C, 0>(params, shared, shared_smem);
    } else {
      consume_chosen_rows<C, 1>(params, shared, shared_smem);
    }
  }
}

}  // namespace archflash::hopper
