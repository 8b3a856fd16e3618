// ARCHFLASH_HOST_DEVICE marks a function that kernels and tests on the host both call.
#pragma once

#ifdef __CUDACC__
#define ARCHFLASH_HOST_DEVICE __host__ __device__
#else
#define ARCHFLASH_HOST_DEVICE
#endif
