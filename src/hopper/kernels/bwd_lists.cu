// images: bwd_lists_f16 bwd_lists_bf16
// one text
// The backward kernels for lists of keys in fp16 and bf16. list_bwd_config.cuh has their tiles.
#include "common/device/kept_keys.cuh"
#include "common/device/list_backward.cuh"
#include "common/instantiate.cuh"
#include "hopper/lists/list_bwd.cuh"
#include "hopper/lists/list_bwd_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_ENTRY(KERNEL(hopper_backward_order, lists), (LIST_SORT_THREADS), device::sort_list)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_rows, lists), (BACKWARD_ROWS_THREADS),
                device::list_rows<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_keys, lists), (LIST_SUMS_THREADS),
                device::list_gradients<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_kept, lists), (KEPT_SUMS_THREADS),
                device::add_kept_rows<DTYPE, 32>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_lists), list_bwd, D64Lists)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_lists), list_bwd, D128Lists)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d192_lists), list_bwd, D192Lists)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_kept_lists), list_bwd, D64KeptLists)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_kept_lists), list_bwd, D128KeptLists)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d192_kept_lists), list_bwd, D192KeptLists)
