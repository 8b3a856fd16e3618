// images: fwd_f16 fwd_bf16
// targets: 89:89,90,ptx
// The kernels for fp16 and bf16 inputs. config.cuh has their tiles. They are made for 8.9
// and checked on 9.0; on newer GPUs other folders come first.
#include "ada/config.cuh"
#include "common/instantiate.cuh"
#include "common/math/combine_splits.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d64_large), D64Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d64), D64<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d64_few_large), D64FewLarge<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d64_few), D64Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d96), D96<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d96_few), D96Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d128_large), D128Large<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d128_tall), D128Tall<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d128), D128<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d192), D192<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d192_few), D192Few<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d256), D256<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ada_attention_fwd, d256_few), D256Few<DTYPE>)
ARCHFLASH_COMBINE_KERNEL(KERNEL(ada_combine), DTYPE)
