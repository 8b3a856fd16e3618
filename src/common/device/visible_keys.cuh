// Which keys a query row sees. The causal mask, the window, q_offset and the number of keys
// together reduce to two shifts.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"

namespace archflash::device {

// Row i sees the keys max(0, i + first_shift) to min(nk - 1, i + last_shift), both included. The
// functions below take and return row and key numbers counted from the sequence's first.
struct VisibleKeys {
  int first_shift;
  int last_shift;
  int nk;

  ARCHFLASH_HOST_DEVICE int first(int row) const {
    // mutants: no-negative-key, masked-needlessly (tests/sim/tags.py)
    return row + first_shift > 0 ? row + first_shift : 0;
  }
  ARCHFLASH_HOST_DEVICE int last(int row) const {
    // mutants: masked-needlessly
    return row + last_shift < nk - 1 ? row + last_shift : nk - 1;
  }
  ARCHFLASH_HOST_DEVICE bool sees(int row, int key) const {
    return key >= first(row) && key <= last(row);
  }

  // The keys that any of the first `rows` rows sees lie between these. With the rows of a whole
  // sequence nobody sees the others, which may hold anything, NaN too: kernels make zeros of such
  // rows of V before they are multiplied by P.
  ARCHFLASH_HOST_DEVICE int begin() const { return first(0); }
  ARCHFLASH_HOST_DEVICE int end(int rows) const { return last(rows - 1) + 1; }

  // True unless every one of rows [row_first, row_last] sees every one of keys [key_first,
  // key_last].
  ARCHFLASH_HOST_DEVICE bool masks(int row_first, int row_last, int key_first, int key_last) const {
    return key_last > last(row_first) || key_first < first(row_last);
  }
  // True if no row of [row_first, row_last] sees any key of [key_first, key_last].
  ARCHFLASH_HOST_DEVICE bool hides(int row_first, int row_last, int key_first, int key_last) const {
    return key_first > last(row_last) || key_last < first(row_first);
  }
};

// Finds the shifts. They are clamped to the lengths, beyond which nothing changes, so that they fit
// 32 bits for nq, nk < 2^30. window_left, window_right and q_offset must lie within +-2^62; an
// unbounded side of the window is 2^62.
ARCHFLASH_HOST_DEVICE inline VisibleKeys visible_keys(int nq, int nk, int64_t q_offset,
                                                      int64_t window_left, int64_t window_right) {
  const auto clamp = [=](int64_t shift) {
    return static_cast<int>(shift < -nq ? -nq : shift > nk ? nk : shift);
  };
  return {clamp(q_offset - window_left), clamp(q_offset + window_right), nk};
}

}  // namespace archflash::device
