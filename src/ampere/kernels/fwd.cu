// images: fwd_f16 fwd_bf16
// The kernels for fp16 and bf16 inputs. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/math/combine_splits.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_large), D64Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_medium), D64Medium<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_short), D64Short<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_groups), D64Groups<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_few), D64Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d96_large), D96Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d96_medium), D96Medium<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d96_few), D96Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d128_large), D128Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d128_medium), D128Medium<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d128_small), D128Small<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d128_few), D128Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d192_large), D192Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d192_medium), D192Medium<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d192_few), D192Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d256_large), D256Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d256_medium), D256Medium<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d256_small), D256Small<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d256_few), D256Few<DTYPE>)
ARCHFLASH_COMBINE_KERNEL(KERNEL(ampere_combine), DTYPE)
