// images: bwd_f16 bwd_bf16
// one text
// The backward kernels for fp16 and bf16 inputs. backward_config.cuh has their tiles.
#include "blackwell_dc/attention_bwd.cuh"
#include "common/device/backward_rows.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_ENTRY(KERNEL(blackwell_dc_backward_rows), (BACKWARD_ROWS_THREADS),
                backward::prepare<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(blackwell_dc_backward_sinks), (BACKWARD_SINKS_THREADS),
                device::backward_sinks)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_bwd, d64), backward::attention_bwd, BackwardD64)
ARCHFLASH_ENTRY(KERNEL(blackwell_dc_backward_dq, d64), (BACKWARD_DQ_THREADS),
                backward::write_dq<BackwardD64>)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_bwd, d128), backward::attention_bwd, BackwardD128)
ARCHFLASH_ENTRY(KERNEL(blackwell_dc_backward_dq, d128), (BACKWARD_DQ_THREADS),
                backward::write_dq<BackwardD128>)
