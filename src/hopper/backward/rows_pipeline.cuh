// How the roles of the backward pass for few query rows hand rows and blocks over to one another:
// the barriers and the hazards that they close, and what a CTA works on.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/ptx/mbarrier.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/rows_config.cuh"
#include "hopper/forward/pipeline.cuh"

namespace archflash::hopper {

// The barriers, as addresses in shared memory. "Bytes": the loader arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed.
//
// clang-format off
//   barrier                arrives               waits      so that
//   work_full of each      loader                consumers  RowsWork is written before it is read
//     stage of rows
//   q_full, dout_full      loader, bytes         consumers  the rows have landed before wgmma reads
//     of each stage                                         them
//   rows_empty of each     each consumer warp    loader     every warp is done with the rows and with
//     stage                                                 RowsWork before the next ones come
//   k_full, v_full         loader, bytes         consumers  the block has landed before wgmma reads it
//     of each stage
//   empty of each stage    each consumer warp    loader     every warp's products have read the block
//                                                           before the next one comes
//   ragged                 loader, bytes         loader     tiles some of whose rows have to do with
//                                                           none of the other side have landed before
//                                                           the loader clears them
// clang-format on
//
// A stage of P and dS needs none. Who writes that of a step has passed the bar.sync of the step
// before, in front of which every warp has waited for the products that read the stage last.
template <class C>
struct RowsBarriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t work_full(int stage) const { return first_smem + 32 * stage; }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return work_full(stage) + 8; }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return work_full(stage) + 16; }
  __device__ __forceinline__ uint32_t rows_empty(int stage) const { return work_full(stage) + 24; }
  __device__ __forceinline__ uint32_t k_full(int stage) const {
    return work_full(C::ROW_STAGES) + 24 * stage;
  }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(stage) + 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return k_full(stage) + 16; }
  __device__ __forceinline__ uint32_t ragged() const { return k_full(C::KEY_STAGES); }

  __device__ __forceinline__ void initialise() const {
    for (int stage = 0; stage < C::ROW_STAGES; ++stage) {
      ptx::mbarrier_init(work_full(stage), 1);
      ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init_for_warps(rows_empty(stage), C::WARPS);
    }
    for (int stage = 0; stage < C::KEY_STAGES; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init(v_full(stage), 1);
      ptx::mbarrier_init_for_warps(empty(stage), C::WARPS);
    }
    ptx::mbarrier_init(ragged(), 1);
    ptx::fence_mbarrier_init();
  }
};

// The named barrier at which the consumers meet when they have stored P and dS.
constexpr int WEIGHTS_BARRIER = 1;

// What a CTA works on: a head of a sequence, and blocks of its keys.
struct RowsWork {
  int batch, head;
  int nq, nk;            // lengths of the sequence
  int q_start, k_start;  // its first rows in packed tensors; 0 without cu_seqlens
  int begin, end;        // blocks
  int share;             // of dQ, among those of all shared heads; negative: it writes dQ
  bool last;             // of the CTA
  // The rows and keys that have to do with any of the other side: the others count as zeros.
  int rows_begin, rows_end, keys_begin, keys_end;
};

template <class C>
__device__ __forceinline__ RowsWork find_rows_work(const BackwardKernelParams& params, int index) {
  const AttentionParams& attention = params.backward.attention;
  const int* const cu_q = C::PACKED ? attention.cu_seqlens_q_gmem : nullptr;
  const int* const cu_k = C::PACKED ? attention.cu_seqlens_k_gmem : nullptr;
  const int first_shared = params.first_shared_head;
  RowsWork work;
  work.share = index - first_shared;
  const int of_shared = max(work.share, 0) / params.shares;
  const int share = max(work.share, 0) - of_shared * params.shares;
  const int head_of_all = min(index, first_shared) + of_shared;
  work.batch = head_of_all / attention.heads_q;
  work.head = head_of_all - work.batch * attention.heads_q;
  work.q_start = device::sequence_start(cu_q, work.batch, attention.nq);
  work.k_start = device::sequence_start(cu_k, work.batch, attention.nk);
  work.nq = attention.nq, work.nk = attention.nk;
  if (cu_q != nullptr) {
    work.nq = max(device::sequence_start(cu_q, work.batch + 1, attention.nq) - work.q_start, 0);
    work.nk = max(device::sequence_start(cu_k, work.batch + 1, attention.nk) - work.k_start, 0);
  }
  const int blocks = (work.nk + C::BLOCK - 1) / C::BLOCK;
  const int of_share = params.share_rows / C::BLOCK;
  work.begin = share * of_share;
  work.end = work.share < 0 ? blocks : min(work.begin + of_share, blocks);
  work.last = index + static_cast<int>(gridDim.x) >= params.tiles;
  return work;
}

// Which keys its rows see.
__device__ __forceinline__ device::VisibleKeys visible_of(const AttentionParams& attention,
                                                          const RowsWork& work) {
  return device::find_visible_keys(
      attention, device::Work{work.batch * attention.heads_q + work.head, 0, work.nq, work.nk});
}

template <class C>
__device__ __forceinline__ RowsWork& rows_work(unsigned char* shared, int stage) {
  return *reinterpret_cast<RowsWork*>(shared + C::WORK_SMEM + stage * C::WORK_BYTES);
}

}  // namespace archflash::hopper
