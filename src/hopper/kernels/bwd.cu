// images: bwd_f16 bwd_bf16
// one text
// The backward kernels for fp16 and bf16 inputs. backward_config.cuh has their tiles.
#include "common/device/backward_rows.cuh"
#include "common/device/backward_shares.cuh"
#include "common/instantiate.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/backward/backward_chains.cuh"
#include "hopper/backward/wide_bwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

using D64Softcap = BackwardD64<true>;
using D128Softcap = BackwardD128<true>;

ARCHFLASH_ENTRY(KERNEL(hopper_backward_rows), (BACKWARD_ROWS_THREADS), prepare<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_shares), (BACKWARD_DQ_THREADS), device::add_shares<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_sinks), (BACKWARD_SINKS_THREADS), device::backward_sinks)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d32), attention_bwd, BackwardD32)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d32), (BACKWARD_DQ_THREADS), write_dq<BackwardD32>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64), attention_bwd, BackwardD64<>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_softcap), attention_bwd, D64Softcap)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d64), (BACKWARD_DQ_THREADS), write_dq<BackwardD64<>>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_exact), attention_bwd, BackwardD64Exact)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_parts), attention_bwd, BackwardD64Parts)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d64_exact), (BACKWARD_DQ_THREADS),
                write_dq<BackwardD64Exact>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d96), attention_bwd, BackwardD96)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d96), (BACKWARD_DQ_THREADS), write_dq<BackwardD96>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128), attention_bwd, BackwardD128<>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_softcap), attention_bwd, D128Softcap)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d128), (BACKWARD_DQ_THREADS), write_dq<BackwardD128<>>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_exact), attention_bwd, BackwardD128Exact)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_parts), attention_bwd, BackwardD128Parts)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d128_exact), (BACKWARD_DQ_THREADS),
                write_dq<BackwardD128Exact>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d192), wide_bwd, BackwardD192)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d192), (BACKWARD_DQ_THREADS), write_dq<BackwardD192>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d256), wide_bwd, BackwardD256)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d256), (BACKWARD_DQ_THREADS), write_dq<BackwardD256>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d32_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD32>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d64_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD64<>>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d64_exact_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD64Exact>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d96_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD96>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d128_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD128<>>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d128_exact_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD128Exact>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d192_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD192>)
ARCHFLASH_ENTRY(KERNEL(hopper_backward_dq, d256_chains), (BACKWARD_DQ_THREADS),
                write_dq_of_chains<BackwardD256>)
