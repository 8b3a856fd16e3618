// Order of bulk copies to global memory, of what other CTAs do there, and of their buffers. PTX
// ISA, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group" and "Parallel
// Synchronization and Communication Instructions: fence.proxy".
#pragma once

namespace archflash::ptx {

// Waits until all bulk groups of this thread are complete: what they wrote is there for this
// thread, and for those that it tells.
__device__ __forceinline__ void cp_async_bulk_wait_group_0() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Waits until all bulk groups of this thread but the last one have read their shared memory, which
// may then be overwritten.
__device__ __forceinline__ void cp_async_bulk_wait_group_read_1() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

// Orders this thread's earlier accesses of global memory before those of copies that it starts
// later.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace archflash::ptx
