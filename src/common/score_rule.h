// What becomes of the product of a query and a key before masks and the softmax.
#pragma once

#include <math.h>

#include "common/device/host_device.h"

namespace archflash {

// The score of q.k: softcap * tanh(q.k * tanh_scale), or q.k * tanh_scale without a softcap.
struct ScoreRule {
  float tanh_scale;
  float softcap;  // 0: none

  ARCHFLASH_HOST_DEVICE ScoreRule scaled(float factor) const {
    return {tanh_scale * factor, softcap};
  }
  // It uses tanhf, whose error is relative to its result: the error of tanh.approx is relative to
  // 1, and softcap would multiply it.
  ARCHFLASH_HOST_DEVICE float score(float qk) const {
    const float x = qk * tanh_scale;
    return softcap == 0.0f ? x : softcap * tanhf(x);
  }
};

}  // namespace archflash
