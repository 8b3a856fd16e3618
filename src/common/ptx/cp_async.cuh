// 16-byte copies from global to shared memory, asynchronous where the target supports it.
#pragma once

#include <cstdint>

namespace archflash::ptx {

#if __CUDA_ARCH__ >= 800
// cp.async.cg: PTX ISA, "Data Movement and Conversion Instructions: cp.async" (sm_80 and up; L2
// only, past L1). Copies the first `source_bytes` (0 to 16) of 16 and fills the rest with zeros.
// volatile and "memory": it writes shared memory behind the compiler's back.
__device__ __forceinline__ void cp_async_cg_16(uint32_t dst_smem, const void* src_gmem,
                                               uint32_t source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst_smem),
               "l"(__cvta_generic_to_global(src_gmem)), "r"(source_bytes)
               : "memory");
}

// cp.async.cg without a source size: copies all 16 bytes.
__device__ __forceinline__ void cp_async_cg_16(uint32_t dst_smem, const void* src_gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst_smem),
               "l"(__cvta_generic_to_global(src_gmem))
               : "memory");
}

// cp.async.ca: as above for 8 bytes, of which the first `source_bytes` (0 to 8) are copied.
__device__ __forceinline__ void cp_async_ca_8(uint32_t dst_smem, const void* src_gmem,
                                              uint32_t source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst_smem),
               "l"(__cvta_generic_to_global(src_gmem)), "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group makes a group of this thread's copies since the last one; it may be empty.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: at most the PENDING newest groups of this thread are incomplete. The copies
// of the others are visible to this thread.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// cp.async.wait_all: every earlier cp.async of this thread is complete and visible to this thread.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#endif

// Copies 16 bytes if `valid`, else writes 16 zero bytes (src_gmem must be a legal address even
// then). It is asynchronous if the target has cp.async (sm_80 and up) and synchronous otherwise.
// Either way the copy is complete after copies_wait_all().
__device__ __forceinline__ void copy_16_bytes_async(void* dst_smem, const void* src_gmem,
                                                    bool valid) {
#if __CUDA_ARCH__ >= 800
  cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(dst_smem)), src_gmem,
                 valid ? 16 : 0);
#else
  uint4 data = make_uint4(0, 0, 0, 0);
  if (valid) data = __ldg(static_cast<const uint4*>(src_gmem));
  *static_cast<uint4*>(dst_smem) = data;
#endif
}

// Waits for this thread's own copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void copies_wait_all() {
#if __CUDA_ARCH__ >= 800
  cp_async_wait_all();
#endif
}

}  // namespace archflash::ptx
