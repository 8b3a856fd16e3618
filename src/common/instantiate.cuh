// For .cu files whose first line names several images. The build compiles such a file once for each
// of them, with the type that the image's name ends in: for fwd_bf16 ARCHFLASH_DTYPE is BF16 and
// ARCHFLASH_DTYPE_WORD is bf16.
#pragma once

#include "common/image_dtype.h"
#include "common/kernel_entry.cuh"

// The name of a kernel for this type: KERNEL(hopper_attention_fwd, d64_large) is
// hopper_attention_fwd_bf16_d64_large, and KERNEL(hopper_combine) is hopper_combine_bf16.
#define KERNEL(BASE, ...) ARCHFLASH_EXPAND(BASE, ARCHFLASH_DTYPE_WORD __VA_OPT__(, ) __VA_ARGS__)
#define ARCHFLASH_EXPAND(BASE, WORD, ...) ARCHFLASH_JOIN(BASE, WORD __VA_OPT__(, ) __VA_ARGS__)
#define ARCHFLASH_JOIN(BASE, WORD, ...) BASE##_##WORD##__VA_OPT__(_##__VA_ARGS__)
