// What a caller may ask for in place of the exact formula (the option `approximate`). Never chosen
// by itself. A new one is a row here, its name among a folder's features, and its kernels.
#pragma once

#include <cstdint>

namespace archflash {

enum class Approximate : int64_t {
  Nothing = 0,
  Int8Qk = 1,
  Int8 = 2,
  Fp16Accumulate = 3,
  Nvfp4 = 4,
  Int8Pv = 5
};

struct Approximation {
  const char* name;   // as the option has it; among a folder's features where the folder offers it
  const char* what;   // what a kernel computes otherwise
  const char* error;  // what is to be expected of the output
};

// In the order of Approximate, from its second value on.
inline constexpr Approximation APPROXIMATIONS[] = {
    {"int8_qk", "q k^T in int8, one scale for each 64 rows of q and k",
     "root mean square error about 1.4% of the output's, 13% with outlier channels in k"},
    {"int8", "q k^T in int8 after a rotation, p v in fp16 with fp16 sums of 64 keys",
     "root mean square error about 1.5% of the output's, at most 2% with outlier channels in k"},
    {"fp16_accumulate", "p v in fp16 with fp16 sums of 64 keys",
     "root mean square error about 0.1% of the output's"},
    {"nvfp4", "q k^T and p v in four bits, a scale for each 16 numbers",
     "root mean square error 14 to 28% of the output's, cosine 0.99 to 0.96; 37%, cosine 0.93 with "
     "outlier channels in k"},
    {"int8_pv", "q k^T in int8 after a rotation, p v in int8 with scales for rows and columns of v",
     "root mean square error about 1.5% of the output's, 3% with outlier rows in v"},
};
constexpr int64_t APPROXIMATION_COUNT = sizeof(APPROXIMATIONS) / sizeof(APPROXIMATIONS[0]);

// The row of a Problem's `approximate`, which is not 0.
constexpr const Approximation& approximation(int64_t approximate) {
  return APPROXIMATIONS[approximate - 1];
}

}  // namespace archflash
