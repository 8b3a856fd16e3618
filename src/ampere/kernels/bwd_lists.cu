// images: bwd_lists_f16 bwd_lists_bf16
// targets: 80:80,ptx 90:90,100,120
// one text
// The backward kernels for lists of keys in fp16 and bf16. list_bwd_config.cuh has their tiles.
#include "ampere/list_bwd.cuh"
#include "ampere/list_bwd_config.cuh"
#include "common/device/list_backward.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ENTRY(KERNEL(ampere_backward_order, lists), (LIST_SORT_THREADS), device::sort_list)
ARCHFLASH_ENTRY(KERNEL(ampere_backward_rows, lists), (BACKWARD_ROWS_THREADS),
                device::list_rows<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(ampere_backward_keys, lists), (LIST_SUMS_THREADS),
                device::list_gradients<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_lists), list_bwd, D64Lists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_few_lists), list_bwd, D64FewLists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_large_lists), list_bwd, D128LargeLists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_lists), list_bwd, D128Lists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_few_lists), list_bwd, D128FewLists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_large_lists), list_bwd, D192LargeLists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_lists), list_bwd, D192Lists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_few_lists), list_bwd, D192FewLists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_lists), list_bwd, D256Lists)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_few_lists), list_bwd, D256FewLists)
