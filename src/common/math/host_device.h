// Marks a function that a kernel and a host test both call.
#pragma once

#ifdef __CUDACC__
#define ARCHFLASH_HOST_DEVICE __host__ __device__
#else
#define ARCHFLASH_HOST_DEVICE
#endif
