// targets: 90:90
// The backward kernels on tensor cores for fp32 inputs. tensor_config.cuh has their tiles.
#include "common/kernel_entry.cuh"
#include "simt/tensor_bwd.cuh"
#include "simt/tensor_config.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_tensor, tensor::attention_bwd, TensorBackwardD64)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_tensor, tensor::attention_bwd, TensorBackwardD128)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d256_tensor, tensor::attention_bwd, TensorBackwardD256)
