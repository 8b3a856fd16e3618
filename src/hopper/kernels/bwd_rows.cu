// images: bwd_rows_f16 bwd_rows_bf16
// one text
// The backward kernels for few query rows. rows_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/backward/rows_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_rows), rows_bwd, RowsBackwardD32)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_rows_two), rows_bwd, RowsBackwardD32Two)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_rows_four), rows_bwd, RowsBackwardD32Four)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_rows), rows_bwd, RowsBackwardD64)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_rows_two), rows_bwd, RowsBackwardD64Two)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_rows_three), rows_bwd, RowsBackwardD64Three)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_rows_masked), rows_bwd, RowsBackwardD64Masked)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_rows_two_masked), rows_bwd,
                 RowsBackwardD64TwoMasked)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32_rows_short_masked), rows_bwd,
                 RowsBackwardD32ShortMasked)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_rows_short_masked), rows_bwd,
                 RowsBackwardD64ShortMasked)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d96_rows), rows_bwd, RowsBackwardD96)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_rows), rows_bwd, RowsBackwardD128)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, rows), (BACKWARD_DQ_THREADS), add_dq_shares<DTYPE>)
