// Dropout: the random bits of an element (batch, head, query, key) of P depend on these four
// numbers, the seed and the offset only. So every implementation, every tiling and the backward
// pass drop the same elements. python/archflash/_dropout.py computes the same bits.
//
// Philox 4x32 with 7 rounds gives 8 elements their 16 bits each. They are those of the queries
// 16a + b + {0, 8} and of the keys 32c + e + {0, 8, 16, 24}, with b, e < 8: those that a lane has
// of a product on mma.sync, whether its rows are queries or keys.
#pragma once

#include <cstdint>

#include "common/dropout_params.h"

namespace archflash::device {

// The random bits of 8 elements.
struct DropoutBits {
  uint32_t words[4];

  // The random bits of one query and key of the group.
  __device__ __forceinline__ uint32_t of(int query, int key) const {
    const uint32_t low = key & 16 ? words[1] : words[0], high = key & 16 ? words[3] : words[2];
    return (query & 8 ? high : low) >> (key & 8 ? 16 : 0) & 0xFFFF;
  }
};

struct Dropout {
  uint32_t key[2];
  uint32_t offset;
  uint32_t batch_head;
  uint32_t threshold;

  // batch_head: batch * heads_q + head, where a packed sequence is a batch.
  __device__ __forceinline__ Dropout(const DropoutParams& params, int batch_head)
      : batch_head(batch_head), threshold(params.threshold) {
    const uint64_t seed = params.state_gmem[0], offset_of_call = params.state_gmem[1];
    offset = static_cast<uint32_t>(offset_of_call);
    key[0] = static_cast<uint32_t>(seed);
    key[1] = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset_of_call >> 32);
  }

  // The bits of the group that an element belongs to.
  __device__ __forceinline__ DropoutBits bits(int query, int key_number) const {
    uint32_t counter[4] = {static_cast<uint32_t>(query >> 4 << 3 | (query & 7)),
                           static_cast<uint32_t>(key_number >> 5 << 3 | (key_number & 7)),
                           batch_head, offset};
    uint32_t round_key[2] = {key[0], key[1]};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * counter[0];
      const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * counter[2];
      const uint32_t next[4] = {
          static_cast<uint32_t>(b >> 32) ^ counter[1] ^ round_key[0], static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ counter[3] ^ round_key[1], static_cast<uint32_t>(a)};
#pragma unroll
      for (int i = 0; i < 4; ++i) counter[i] = next[i];
      round_key[0] += 0x9E3779B9u;
      round_key[1] += 0xBB67AE85u;
    }
    return {{counter[0], counter[1], counter[2], counter[3]}};
  }
  __device__ __forceinline__ bool keeps(uint32_t bits_of_element) const {
    return bits_of_element >= threshold;
  }
};

// Sets the dropped weights of a warp's P to 0: packed to 16 bits as the first operand of P V, of
// key tiles of 16 keys. queries, batch_heads: those of the lane's two rows; key: its first one.
template <int KEYS>
__device__ __forceinline__ void drop_weights(uint32_t (&p_rmem)[KEYS / 16][4],
                                             const DropoutParams& params, const int (&queries)[2],
                                             const int (&batch_heads)[2], int key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Dropout dropout(params, batch_heads[r]);
#pragma unroll
    for (int first = 0; first < KEYS; first += 32) {
      const DropoutBits even = dropout.bits(queries[r], key + first);
      const DropoutBits odd = dropout.bits(queries[r], key + first + 1);
#pragma unroll
      for (int n = 0; n < (KEYS < 32 ? KEYS / 8 : 4); ++n) {
        const int of_pair = key + first + 8 * n;
        uint32_t kept = 0;
        if (dropout.keeps(even.of(queries[r], of_pair))) kept |= 0xFFFF;
        if (dropout.keeps(odd.of(queries[r], of_pair))) kept |= 0xFFFF0000;
        p_rmem[first / 16 + n / 2][n % 2 * 2 + r] &= kept;
      }
    }
  }
}

}  // namespace archflash::device
