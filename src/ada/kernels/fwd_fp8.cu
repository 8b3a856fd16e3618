// images: fwd_e4m3 fwd_e5m2
// targets: 89:89,ptx 90:90,100,120
// The kernels for e4m3 and e5m2 inputs. config.cuh has their tiles. The second PTX text is
// for GPUs whose sums keep more bits than those of 8.9.
#include "ada/attention_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d64), attention_fwd, Fp8D64<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d128), attention_fwd, Fp8D128<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d192), attention_fwd, Fp8D192<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d256), attention_fwd, Fp8D256<DTYPE>)
