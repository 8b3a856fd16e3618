// targets: 75:75,ptx 80:80,90,100,120
// What every GPU has: matrices from shared memory, and functions of one number.
#include "common/ptx/ex2.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/lg2.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

template <bool TRANS>
__device__ __forceinline__ void load_matrices(const Params& params) {
  __shared__ __align__(16) uint16_t matrices[4 * 64];
  const int lane = threadIdx.x;
  for (int i = lane; i < 4 * 64; i += 32) matrices[i] = static_cast<uint16_t>(i * 257 + 3);
  __syncwarp();
  uint32_t r[4];
  const uint32_t row_smem = shared_address(matrices + lane * 8);
  if constexpr (TRANS) {
    ptx::ldmatrix_x4_trans(r, row_smem);
  } else {
    ptx::ldmatrix_x4(r, row_smem);
  }
  for (int i = 0; i < 4; ++i) params.out[lane * 4 + i] = r[i];
}
__device__ __forceinline__ void ldmatrix(const Params& params) { load_matrices<false>(params); }
__device__ __forceinline__ void ldmatrix_trans(const Params& params) {
  load_matrices<true>(params);
}

// Powers of two, whose results are exact.
__device__ __forceinline__ void functions(const Params& params) {
  const int lane = threadIdx.x;
  const float power = static_cast<float>(4 * lane - 60);
  params.out[lane] = __float_as_uint(ptx::ex2_approx_ftz(power));
  params.out[32 + lane] = __float_as_uint(ptx::lg2_approx_ftz(exp2f(power)));
  params.out[64 + lane] = __shfl_xor_sync(~0u, static_cast<uint32_t>(number(lane)), 5);
  params.out[96 + lane] = __ballot_sync(~0u, number(lane) > 0);
}

}  // namespace archflash::probes

PROBE(ldmatrix, 32)
PROBE(ldmatrix_trans, 32)
PROBE(functions, 32)
