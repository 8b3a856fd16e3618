// targets: 120f:120f
// approximate="nvfp4": K and V to four bits, and attention; the same of inputs that have four bits
// as they come. Tiles: nvfp4_config.cuh.
#include "blackwell_consumer/nvfp4_attention_fwd.cuh"
#include "blackwell_consumer/nvfp4_prepare.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_ENTRY(blackwell_consumer_nvfp4_means_d64, (NVFP4_PREPARE_THREADS), nvfp4_means<Nvfp4D64>)
ARCHFLASH_ENTRY(blackwell_consumer_nvfp4_means_d128, (NVFP4_PREPARE_THREADS),
                nvfp4_means<Nvfp4D128>)
ARCHFLASH_ENTRY(blackwell_consumer_nvfp4_chunks_d64, (NVFP4_PREPARE_THREADS),
                nvfp4_chunks<Nvfp4D64>)
ARCHFLASH_ENTRY(blackwell_consumer_nvfp4_chunks_d128, (NVFP4_PREPARE_THREADS),
                nvfp4_chunks<Nvfp4D128>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_nvfp4_d64, nvfp4_attention_fwd, Nvfp4D64)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_nvfp4_d128, nvfp4_attention_fwd, Nvfp4D128)
ARCHFLASH_ENTRY(blackwell_consumer_nvfp4_copies_d64, (NVFP4_PREPARE_THREADS),
                nvfp4_chunks<Nvfp4StoredD64>)
ARCHFLASH_ENTRY(blackwell_consumer_nvfp4_copies_d128, (NVFP4_PREPARE_THREADS),
                nvfp4_chunks<Nvfp4StoredD128>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_nvfp4_stored_d64, nvfp4_attention_fwd,
                 Nvfp4StoredD64)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_nvfp4_stored_d128, nvfp4_attention_fwd,
                 Nvfp4StoredD128)
