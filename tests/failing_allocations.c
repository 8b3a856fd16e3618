// Loaded in front of the C library and the CUDA runtime (LD_PRELOAD): counts what PyTorch allocates
// for tensors, on the CPU (posix_memalign) and on a GPU (cudaMalloc), and refuses one of them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

static int counting = 0, count = 0, refused = -1;

// Starts to count from 0. number: of the allocation that fails; -1 for none.
void failing_begin(int number) {
  count = 0;
  refused = number;
  counting = 1;
}

// Ends it, and returns how many allocations there were.
int failing_end(void) {
  counting = 0;
  return count;
}

static int fails(void) { return counting && count++ == refused; }

int posix_memalign(void** address, size_t alignment, size_t bytes) {
  static int (*next)(void**, size_t, size_t) = NULL;
  if (next == NULL) next = dlsym(RTLD_NEXT, "posix_memalign");
  return fails() ? ENOMEM : next(address, alignment, bytes);
}

int cudaMalloc(void** address, size_t bytes) {
  static int (*next)(void**, size_t) = NULL;
  if (next == NULL) next = dlsym(RTLD_NEXT, "cudaMalloc");
  return fails() ? 2 /* cudaErrorMemoryAllocation */ : next(address, bytes);
}
