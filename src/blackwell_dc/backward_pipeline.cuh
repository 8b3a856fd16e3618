// The barriers of the backward kernel, and who waits for which.
#pragma once

#include <cstdint>

#include "common/ptx/mbarrier.cuh"

namespace archflash::blackwell_dc::backward {

// The barriers, as addresses in shared memory. "Bytes": the loader arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed. "Commit": tcgen05.commit arrives once
// all products that were started before are done.
//
// clang-format off
//   barrier                  arrives                waits        so that
//   k_full, v_full           load, bytes            mma          the CTA's keys have landed
//   q_full of each stage     load, bytes; terms     mma, score   Q has landed, its terms are there
//   q_empty of each stage    mma, commit;           load, terms  S and dK have read Q, and all score
//                            score, each warp                    warps the terms, before the next
//   dout_full of each stage  load, bytes            mma          dO has landed
//   dout_empty               mma, commit            load         dP and dV have read dO
//   s_ready                  mma, commit            score        S is complete
//   p_ready                  score, each warp       mma          S is read, and P written
//   dp_ready                 mma, commit            score        dP is complete
//   ds_ready                 score, each warp       mma          dP is read, and dS written to both
//                                                                memories
//   ds_empty                 mma, commit            score        dQ has read dS in shared memory
//                                                                before the next one; with
//                                                                DQ_OVER_DS dp_ready says so
//   dq_ready                 mma, commit            dq           dQ is complete
//   dq_empty                 dq, each warp          mma          dQ is read before its columns are
//                                                                overwritten
//   sums_ready               mma, commit            score        dK and dV are complete
//   drained                  mma, commit            mma          without TRUST_ISSUE_ORDER: all
//                                                                products so far are done
//   ragged                   load, bytes            load         a tile some of whose rows have to
//                                                                do with none of the other side has
//                                                                landed before the loader clears
//                                                                them
// clang-format on
template <class C>
struct BackwardBarriers {
  uint32_t smem;  // address of the first barrier

  __device__ __forceinline__ uint32_t k_full() const { return at(0); }
  __device__ __forceinline__ uint32_t v_full() const { return at(1); }
  __device__ __forceinline__ uint32_t ragged() const { return at(2); }
  __device__ __forceinline__ uint32_t s_ready() const { return at(3); }
  __device__ __forceinline__ uint32_t p_ready() const { return at(4); }
  __device__ __forceinline__ uint32_t dp_ready() const { return at(5); }
  __device__ __forceinline__ uint32_t ds_ready() const { return at(6); }
  __device__ __forceinline__ uint32_t ds_empty() const { return at(7); }
  __device__ __forceinline__ uint32_t dq_ready() const { return at(8); }
  __device__ __forceinline__ uint32_t dq_empty() const { return at(9); }
  __device__ __forceinline__ uint32_t sums_ready() const { return at(10); }
  __device__ __forceinline__ uint32_t drained() const { return at(11); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return at(RINGS + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return at(RINGS + C::Q_STAGES + stage);
  }
  __device__ __forceinline__ uint32_t dout_full(int stage) const {
    return at(RINGS + 2 * C::Q_STAGES + stage);
  }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const {
    return at(RINGS + 2 * C::Q_STAGES + C::DOUT_STAGES + stage);
  }

  // Called by one thread, before any warp uses the barriers.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < RINGS; ++i) {
      const uint32_t barrier = at(i);
      const bool of_scores = barrier == p_ready() || barrier == ds_ready();
      ptx::mbarrier_init(barrier, of_scores               ? C::SCORE_WARPS
                                  : barrier == dq_empty() ? C::DQ_WARPS
                                                          : 1);
    }
    for (int stage = 0; stage < C::Q_STAGES; ++stage) {
      ptx::mbarrier_init(q_full(stage), 2);
      ptx::mbarrier_init(q_empty(stage), 1 + C::SCORE_WARPS);
    }
    for (int stage = 0; stage < C::DOUT_STAGES; ++stage) {
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init(dout_empty(stage), 1);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int RINGS = 12;
  static_assert(RINGS + 2 * C::Q_STAGES + 2 * C::DOUT_STAGES == C::BARRIERS);

  __device__ __forceinline__ uint32_t at(int index) const { return smem + 8 * index; }
};

}  // namespace archflash::blackwell_dc::backward
