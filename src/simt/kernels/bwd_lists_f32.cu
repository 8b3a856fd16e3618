// The backward kernels for fp32 inputs with lists of keys. backward_config.cuh has their tiles.
#include "common/device/list_backward.cuh"
#include "common/kernel_entry.cuh"
#include "simt/backward_config.cuh"
#include "simt/list_bwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_ENTRY(simt_backward_order_f32_lists, (LIST_SORT_THREADS), device::sort_list)
ARCHFLASH_ENTRY(simt_backward_rows_f32_lists, (BACKWARD_ROWS_THREADS),
                device::list_rows<DType::F32>)
ARCHFLASH_ENTRY(simt_backward_keys_f32_lists, (LIST_SUMS_THREADS),
                device::list_gradients<DType::F32>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_lists, list_bwd, D64Lists)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_lists, list_bwd, D128Lists)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d256_lists, list_bwd, D256Lists)
