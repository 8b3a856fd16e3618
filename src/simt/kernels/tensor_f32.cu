// targets: 90:90
// The kernels on tensor cores for fp32 inputs. tensor_config.cuh has their tiles.
#include "common/kernel_entry.cuh"
#include "simt/tensor_config.cuh"
#include "simt/tensor_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_tensor, tensor::attention_fwd, TensorD64)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_tensor, tensor::attention_fwd, TensorD128)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d256_tensor, tensor::attention_fwd, TensorD256)
