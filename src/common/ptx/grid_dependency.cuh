// A kernel that starts while the one before it in its stream still runs (Launch::uses_pdl).
#pragma once

namespace archflash::ptx {

// griddepcontrol: PTX ISA, "Parallel Synchronization and Communication Instructions" (sm_90 and
// up). Older targets have no such launches, and nothing to do here.

// The kernel after this one may start when all CTAs of this one have called it or are done.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one is done. What it has written is then visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace archflash::ptx
