// images: bwd_dense_f16 bwd_dense_bf16
// one text
// The main backward kernels for fp16 and bf16 inputs with a dense attn_mask, and the one that reads
// it before them. backward_config.cuh has their tiles; the launches before and behind are those of
// bwd.cu.
#include "common/instantiate.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/backward/mask_sums.cuh"
#include "hopper/backward/wide_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_ENTRY(KERNEL(hopper_prepare_mask), (DENSE_THREADS), prepare_mask<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_dense), attention_bwd, BackwardD64Dense<>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_dense), attention_bwd, BackwardD128Dense<>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_added), attention_bwd, BackwardD64Added)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_dense_bias), attention_bwd,
                 BackwardD64Dense<true>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_dense_bias), attention_bwd,
                 BackwardD128Dense<true>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_added_kept), attention_bwd, BackwardD64AddedKept)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_dense_kept), attention_bwd, BackwardD64DenseKept)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_dense_kept), attention_bwd,
                 BackwardD128DenseKept)
ARCHFLASH_ENTRY(KERNEL(hopper_sum_mask_gradients), (SUMMING_THREADS), sum_mask_gradients<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d256_dense), wide_bwd, BackwardD256Dense<>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d256_dense_bias), wide_bwd, BackwardD256Dense<true>)
