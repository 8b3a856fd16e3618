// The one parameter of the kernels of bounded_fwd.cuh.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/host_device.h"
#include "common/partials.h"

namespace archflash::mma_sync {

// How CTAs share out the keys of a head's row tiles: share s has those from s * keys on. The CTAs
// of the first share come first, and of them those of the last tile.
struct KeyShares {
  int32_t keys;   // of a share, whole blocks of the kernel
  int32_t shift;  // row i sees the keys up to i + shift, of which there are nk; not negative
  int32_t nq, nk;
  int32_t first_combined;  // rows of the tiles before have one share each

  // The end of the keys that a tile sees.
  ARCHFLASH_HOST_DEVICE int end(int tile, int block_q) const {
    const int rows = (tile + 1) * block_q < nq ? (tile + 1) * block_q : nq;
    return rows + shift < nk ? rows + shift : nk;
  }
  // The first tile that sees keys of a share.
  ARCHFLASH_HOST_DEVICE int first_tile(int share, int block_q) const {
    const int unseeing = share * keys - shift;  // rows
    return unseeing > 0 ? unseeing / block_q : 0;
  }
  // What CTA `index` of a head computes.
  struct Place {
    int tile, share;
  };
  ARCHFLASH_HOST_DEVICE Place find(int index, int block_q) const {
    const int tiles = (nq + block_q - 1) / block_q;
    for (int share = 0;; ++share) {
      const int ctas = tiles - first_tile(share, block_q);
      if (index < ctas) return {tiles - 1 - index, share};
      index -= ctas;
    }
  }
};

// The parameter block of the kernels of bounded_fwd.cuh. For packed sequences `shares` says of
// `shift` alone: how many keys behind the one at its own place, counted from the last ones on, a
// row sees.
struct BoundedParams {
  AttentionParams attention;
  Partials partials;
  KeyShares shares;
};

}  // namespace archflash::mma_sync
