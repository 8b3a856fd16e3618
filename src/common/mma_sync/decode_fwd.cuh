// Attention of few query rows (decoding), over a KV cache or over K and V as they are given, on
// mma.sync and cp.async. Few rows make little work for each byte that is read, so that the copies
// must never wait: every warp is a pipeline of its own.
//
//   CTA    16 query rows, mostly the heads of one position that share a head of K, packed
//   warp   all 16 rows, and WARP_KEYS keys of each block, which are a group. It copies them into
//          shared memory of its own, which holds STAGES groups, waits for its own copies only, and
//          has its own running bases, sums and outputs
//   end    the warps' results are merged through shared memory
//
// Numbers of 8 bits are converted in registers, between ldmatrix and the product. ldmatrix moves
// units of two bytes, so that a lane gets four neighbouring columns of a key of K, and two columns
// of two keys of V. No byte has to change its lane:
//   K    the sum over columns may have any order: columns 4t, 4t + 2, 4t + 1, 4t + 3 of each 16 are
//        what mma.sync calls 2t, 2t + 1, 2t + 8, 2t + 9 (t = lane % 4), in Q too
//   V    the even columns of each 16 are one product, the odd ones another
//
// Which warp takes a key depends on the key's number in its sequence alone, so that a row has the
// same bits wherever it lies in whichever tile.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/fp8_to_16_bits.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/tile.cuh"
#include "common/mma_sync/unlike_lengths.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"

namespace archflash::mma_sync {

// What a CTA knows besides: which share of its tile's keys it has, out of how many.
struct DecodeContext : CacheContext {
  int share, shares;
};

// The fragments a of the 16 query rows, for each 16 columns.
template <class C>
struct DecodeQuery {
  static constexpr int STEPS = C::HEAD_DIM / 16;
  uint32_t rmem[C::Q_IN_REGISTERS ? STEPS : 1][4];
  const uint4* steps_smem;  // without Q_IN_REGISTERS: those of this lane, 32 from step to step
  // What a score has to be multiplied by, for the two rows of this lane. bf16 has numbers that fp16
  // has not, so that rows of Q are scaled by powers of two before they are multiplied with an FP8
  // cache: the largest number of a row is then at least 2^14.
  float scale[2];

  // Reads the rows from global memory; zeros for rows and columns that do not exist. Each warp does
  // it for itself; what goes to shared memory is complete after the next barrier of the CTA.
  __device__ __forceinline__ DecodeQuery(const AttentionParams& params, const CacheContext& cta,
                                         unsigned char* shared) {
    const int lane = threadIdx.x % 32;
    uint32_t all[STEPS][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::FewRow row(params, cta.packed_heads, cta.work, lane / 4 + 8 * r);
      const uint16_t* q_gmem = static_cast<const uint16_t*>(params.q_gmem) +
                               row.batch * params.q_batch + row.head * params.q_head +
                               row.packed * params.q_row;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load_step(all[step], r, q_gmem, step, row, params.d);
      scale[r] = 1.0f;
      if constexpr (C::FP8_CACHE && C::DTYPE == DType::BF16) scale_row(all, r);
    }
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rmem[step][i] = all[step][i];
      }
    } else {
      uint4* steps = reinterpret_cast<uint4*>(shared + C::Q_SMEM) + lane;
      steps_smem = steps;
      const int warp = threadIdx.x / 32;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint32_t (&q)[4] = all[step];
        if (step % C::WARPS == warp) steps[32 * step] = make_uint4(q[0], q[1], q[2], q[3]);
      }
    }
  }

  __device__ __forceinline__ void get(uint32_t (&q_rmem)[4], int step) const {
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q_rmem[i] = rmem[step][i];
    } else {
      const uint4 q = steps_smem[32 * step];
      q_rmem[0] = q.x, q_rmem[1] = q.y, q_rmem[2] = q.z, q_rmem[3] = q.w;
    }
  }

 private:
  // Row number r of this lane, 16 columns from 16 * step on.
  __device__ __forceinline__ static void load_step(uint32_t (&q)[4], int r, const uint16_t* q_gmem,
                                                   int step, const device::FewRow& row,
                                                   int columns) {
    const int lane = threadIdx.x % 32;
    if constexpr (C::FP8_CACHE) {
      const int column = 16 * step + 4 * (lane % 4);
      uint2 four = {0, 0};
      if (row.wanted && column < columns) four = *reinterpret_cast<const uint2*>(q_gmem + column);
      q[r] = __byte_perm(four.x, four.y, 0x5410);
      q[2 + r] = __byte_perm(four.x, four.y, 0x7632);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 16 * step + 8 * i + 2 * (lane % 4);
        q[2 * i + r] = 0;
        if (row.wanted && column < columns)
          q[2 * i + r] = *reinterpret_cast<const uint32_t*>(q_gmem + column);
      }
    }
  }

  // Makes fp16 of row number r of this lane, which is bf16.
  __device__ __forceinline__ void scale_row(uint32_t (&all)[STEPS][4], int r) {
    float largest = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = r; i < 4; i += 2) {
        largest = fmaxf(largest, fabsf(__uint_as_float(all[step][i] << 16)));
        largest = fmaxf(largest, fabsf(__uint_as_float(all[step][i] & 0xFFFF0000u)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(device::FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(device::FULL_WARP, largest, 2));
    // Exponents with their bias of 127. Infinity and NaN stay what they are without a factor.
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    const int up = exponent == 255 ? 127 : min(127 + 14 - (exponent - 127), 253);
    const float factor = __uint_as_float(static_cast<uint32_t>(up) << 23);
    scale[r] = __uint_as_float(static_cast<uint32_t>(254 - up) << 23);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = r; i < 4; i += 2) {
        uint32_t& pair = all[step][i];
        pair = ptx::cvt_rn_x2_f32<DType::F16>(__uint_as_float(pair << 16) * factor,
                                              __uint_as_float(pair & 0xFFFF0000u) * factor);
      }
    }
  }
};

// The copies of one warp: groups of WARP_KEYS keys, BLOCK_K keys apart.
template <class C>
struct DecodeCopies {
  static constexpr int UNIT = 16;  // keys whose copies have the same addresses but for a start
  static_assert(C::WARP_KEYS == UNIT || C::WARP_KEYS == 2 * UNIT);

  const AttentionParams& params;
  const char *k_gmem, *v_gmem;
  const int32_t* pages_gmem;
  int begin, end;                 // what lies outside becomes zeros
  int first, blocks, block_rows;  // of CacheContext
  int page_shift;                 // the rows of a page are 2^page_shift; -1 if they are not
  bool whole_pages;               // each unit lies in one page, or there are none
  bool same_strides;              // of K and V
  int entry = 0;                  // of the page table, for the group that is copied next

  __device__ __forceinline__ DecodeCopies(const AttentionParams& params, const CacheContext& cta)
      : params(params),
        k_gmem(reinterpret_cast<const char*>(cta.k_gmem)),
        v_gmem(reinterpret_cast<const char*>(cta.v_gmem)),
        pages_gmem(cta.pages_gmem),
        begin(visible_keys<C>(cta).begin()),
        end(cta.visible.nk),
        first(cta.first),
        blocks(cta.blocks),
        block_rows(cta.block_rows) {
    page_shift = (block_rows & (block_rows - 1)) == 0 ? __ffs(block_rows) - 1 : -1;
    same_strides = params.k_batch == params.v_batch && params.k_row == params.v_row;
    whole_pages = pages_gmem == nullptr || (block_rows % UNIT == 0 && first % UNIT == 0);
  }

  __device__ __forceinline__ int page_of(int row) const {
    return page_shift >= 0 ? row >> page_shift : row / block_rows;
  }
  // Looks up the pages of the group that is copied next, long before they are needed: lane i that
  // of key i, or of the first key of its unit. Lanes beyond the group repeat those of its keys.
  __device__ __forceinline__ void look_up(int key) {
    if (pages_gmem == nullptr) return;
    const int lane = threadIdx.x % C::WARP_KEYS;
    const int own = whole_pages ? lane & -UNIT : lane;
    entry = pages_gmem[page_of(min(key + own, end - 1) + first)];
  }

  // Starts the copy of the keys from `key` on into a stage, after look_up() of the same key.
  __device__ __forceinline__ void start(uint32_t stage_smem, int key) const {
#pragma unroll
    for (int unit = 0; unit < C::WARP_KEYS; unit += UNIT) {
      int page = entry;
      if constexpr (C::WARP_KEYS > UNIT)
        page = __shfl_sync(device::FULL_WARP, entry, unit + threadIdx.x % UNIT);
      // A page outside the cache is clamped into it.
      page = min(max(page, 0), blocks - 1);
      const uint32_t k_smem = stage_smem + unit * C::Tile::ROW_BYTES;
      start_unit(k_smem, k_smem + C::K_BYTES, key + unit, page);
    }
  }

 private:
  // Which 16-byte chunk of a unit's rows a lane copies in each step, in K and in V.
  struct Lane {
    using Tile = typename C::Tile;
    static constexpr int ROWS = 32 / Tile::CHUNKS;  // of a step
    static constexpr int STEPS = UNIT / ROWS;
    static_assert(32 % Tile::CHUNKS == 0 && UNIT % ROWS == 0);
    int row, chunk;
    uint32_t offset;  // of the chunk of step 0 in the tile
    bool in_k, in_v;  // whether the chunk is among the columns that there are

    __device__ __forceinline__ explicit Lane(const AttentionParams& params) {
      const int lane = threadIdx.x % 32;
      row = lane / Tile::CHUNKS;
      chunk = lane % Tile::CHUNKS;
      offset = Tile::offset(row, chunk);
      const int column = chunk * (16 / C::ELEMENT_BYTES);
      in_k = column < params.d;
      in_v = column < params.dv;
    }
    // Where the chunk of a step goes. ROWS is a power of two and `row` is below it, so that the
    // swizzle of row + step * ROWS is that of both joined by XOR.
    __device__ __forceinline__ uint32_t target(uint32_t tile_smem, int step) const {
      return ((tile_smem + offset) ^ (Tile::swizzle(step * ROWS) * 16)) +
             step * ROWS * Tile::ROW_BYTES;
    }
  };

  // page: that of the unit's first key, or of the lane's own key, which is lane % UNIT.
  __device__ __forceinline__ void start_unit(uint32_t k_smem, uint32_t v_smem, int key,
                                             int page) const {
    const Lane at(params);
    if (whole_pages && key >= begin && key + UNIT <= end) {
      int64_t k_row = key, v_row = key;  // of the first key, in elements
      if (pages_gmem == nullptr) {
        k_row *= params.k_row;
        v_row *= params.v_row;
      } else {
        const int row = key + first, row_of_page = row - page_of(row) * block_rows;
        k_row = page * params.k_batch + row_of_page * params.k_row;
        v_row = page * params.v_batch + row_of_page * params.v_row;
      }
      const char* k = k_gmem + (k_row + at.row * params.k_row) * C::ELEMENT_BYTES + at.chunk * 16;
      const char* v = v_gmem + (v_row + at.row * params.v_row) * C::ELEMENT_BYTES + at.chunk * 16;
#pragma unroll
      for (int step = 0; step < Lane::STEPS; ++step) {
        if (at.in_k) ptx::cp_async_cg_16(at.target(k_smem, step), k);
        k += Lane::ROWS * params.k_row * C::ELEMENT_BYTES;
      }
#pragma unroll
      for (int step = 0; step < Lane::STEPS; ++step) {
        if (at.in_v) ptx::cp_async_cg_16(at.target(v_smem, step), v);
        v += Lane::ROWS * params.v_row * C::ELEMENT_BYTES;
      }
      return;
    }
    // Lanes 0 to 15 find where a row of K lies, the others where one of V does, in elements. The
    // lanes that copy a row ask them. Rows that no row of the sequence sees become zeros.
    const int lane = threadIdx.x % 32;
    const bool of_k = lane < UNIT;
    const int64_t row_stride = of_k ? params.k_row : params.v_row;
    const int own_key = min(key + lane % UNIT, end - 1);
    int64_t own = own_key * row_stride;
    if (pages_gmem != nullptr) {
      const int row = own_key + first, row_of_page = row - page_of(row) * block_rows;
      own = page * (of_k ? params.k_batch : params.v_batch) + row_of_page * row_stride;
    }
#pragma unroll
    for (int step = 0; step < Lane::STEPS; ++step) {
      const int row = step * Lane::ROWS + at.row;
      const uint32_t bytes = key + row >= begin && key + row < end ? 16 : 0;
      const int64_t k_row = __shfl_sync(device::FULL_WARP, own, row);
      int64_t v_row = k_row;
      if (!same_strides) v_row = __shfl_sync(device::FULL_WARP, own, UNIT + row);
      const int of_row = at.chunk * 16;
      if (at.in_k) {
        ptx::cp_async_cg_16(at.target(k_smem, step), k_gmem + k_row * C::ELEMENT_BYTES + of_row,
                            bytes);
      }
      if (at.in_v) {
        ptx::cp_async_cg_16(at.target(v_smem, step), v_gmem + v_row * C::ELEMENT_BYTES + of_row,
                            bytes);
      }
    }
  }
};

// S = Q K^T of a warp's keys.
template <class C, DType FORMAT>
__device__ __forceinline__ void multiply_decode_qk(device::Scores<typename C::Warp>& s_rmem,
                                                   const DecodeQuery<C>& query, uint32_t k_smem) {
  using Tile = typename C::Tile;
  auto& s = s_rmem[0];
#pragma unroll
  for (int n = 0; n < C::WARP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
  }
#pragma unroll
  for (int chunk = 0; chunk < Tile::CHUNKS; chunk += 2) {
    constexpr int STEPS = C::FP8_CACHE ? 2 : 1;  // of 16 columns in two chunks
    uint32_t q_rmem[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) query.get(q_rmem[step], chunk * STEPS / 2 + step);
#pragma unroll
    for (int n = 0; n < C::WARP_KEYS / 8; n += 2) {
      // Keys 0 to 7 and 8 to 15 of the first chunk, then of the second.
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem, Tile::advance(k_smem, chunk) + n * 8 * Tile::ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (C::FP8_CACHE) {
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            const device::Fp8Pairs<FORMAT> k(k_rmem[2 * step + i]);
            ptx::mma_m16n8k16<C::PRODUCT>(s[n + i], q_rmem[step], k.even, k.odd);
          }
        } else {
          ptx::mma_m16n8k16<C::PRODUCT>(s[n + i], q_rmem[0], k_rmem[i], k_rmem[2 + i]);
        }
      }
    }
  }
}

// O += P V of a warp's keys. For an FP8 cache o_rmem[0][2j] has the even columns of the 16 from 16j
// on, o_rmem[0][2j + 1] the odd ones.
template <class C, DType FORMAT>
__device__ __forceinline__ void multiply_decode_pv(
    device::Outputs<typename C::Warp>& o_rmem,
    const device::Probabilities<typename C::Warp>& p_rmem, uint32_t v_smem) {
  using Tile = typename C::Tile;
#pragma unroll
  for (int chunk = 0; chunk < Tile::CHUNKS; chunk += 2) {
#pragma unroll
    for (int k = 0; k < C::WARP_KEYS / 16; ++k) {
      const uint32_t (&p)[4] = p_rmem[0][k];
      // Keys 0 to 7 and 8 to 15 of the first chunk, then of the second.
      uint32_t v_rmem[4];
      ptx::ldmatrix_x4_trans(v_rmem, Tile::advance(v_smem, chunk) + k * 16 * Tile::ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (C::FP8_CACHE) {
          float (*o)[4] = &o_rmem[0][2 * (chunk + i)];
          const device::Fp8Pairs<FORMAT> low(v_rmem[2 * i]), high(v_rmem[2 * i + 1]);
          ptx::mma_m16n8k16<C::PRODUCT>(o[0], p, low.even, high.even);
          ptx::mma_m16n8k16<C::PRODUCT>(o[1], p, low.odd, high.odd);
        } else {
          ptx::mma_m16n8k16<C::PRODUCT>(o_rmem[0][chunk + i], p, v_rmem[2 * i], v_rmem[2 * i + 1]);
        }
      }
    }
  }
}

// Writes a warp's outputs, and base and sum of its rows, for merge_warps().
template <class C>
__device__ __forceinline__ void store_warp(unsigned char* shared,
                                           const device::Outputs<typename C::Warp>& o_rmem,
                                           const device::RowState<typename C::Warp>& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* rows = reinterpret_cast<float*>(shared + warp * C::WARP_BYTES);
  PartialEnd* ends = reinterpret_cast<PartialEnd*>(shared + C::ENDS_SMEM) + warp * C::BLOCK_Q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float sum = state.sum[0][r];
    sum += __shfl_xor_sync(device::FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(device::FULL_WARP, sum, 2);
    if (lane % 4 == 0) ends[row] = {state.base[0][r], sum};
    float* own = rows + row * C::OUT_STRIDE;
    if constexpr (C::FP8_CACHE) {
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
        const float *even = &o_rmem[0][n][2 * r], *odd = &o_rmem[0][n + 1][2 * r];
        *reinterpret_cast<float4*>(own + 8 * n + 4 * (lane % 4)) = {even[0], odd[0], even[1],
                                                                    odd[1]};
      }
    } else {
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        *reinterpret_cast<float2*>(own + 8 * n + 2 * (lane % 4)) = {o_rmem[0][n][2 * r],
                                                                    o_rmem[0][n][2 * r + 1]};
      }
    }
  }
}

// Adds up what the warps of a CTA have found, and writes it: to the workspace if the keys are
// split, else to the output. Neighbouring threads have a row. v_factor: of the numbers of V.
template <class C>
__device__ __forceinline__ void merge_warps(const unsigned char* shared, const DecodeParams& params,
                                            const DecodeContext& cta, float v_factor) {
  constexpr int THREADS_OF_ROW = C::THREADS / C::BLOCK_Q, COLUMNS = 4;
  const AttentionParams& attention = params.attention;
  const int row_of_tile = threadIdx.x / THREADS_OF_ROW;
  const int thread_of_row = threadIdx.x % THREADS_OF_ROW;
  const device::FewRow row(attention, cta.packed_heads, cta.work, row_of_tile);
  if (!row.wanted) return;
  PartialEnd ends[C::WARPS];
  float base = device::LOWEST;
#pragma unroll
  for (int warp = 0; warp < C::WARPS; ++warp) {
    ends[warp] =
        reinterpret_cast<const PartialEnd*>(shared + C::ENDS_SMEM)[warp * C::BLOCK_Q + row_of_tile];
    if (ends[warp].sum != 0.0f) base = fmaxf(base, ends[warp].base);
  }
  float sum = 0.0f, weight[C::WARPS];
#pragma unroll
  for (int warp = 0; warp < C::WARPS; ++warp) {
    weight[warp] = ends[warp].sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz(ends[warp].base - base);
    sum = fmaf(ends[warp].sum, weight[warp], sum);
  }

  const Partials& partials = params.partials;
  float* partial_gmem = nullptr;
  uint16_t* row_gmem = nullptr;
  float factor = v_factor;
  const bool by_length = params.share_ctas > 0;
  int64_t row_of_all = 0;
  if (partials.wanted()) {
    row_of_all =
        params.few_rows == 0
            ? row.lse_index(attention)
            : (static_cast<int64_t>(row.batch) * attention.heads_q + row.head) * params.few_rows +
                  row.row;
    if (by_length && cta.share == 0 && thread_of_row == 0)
      params.shares_gmem[row_of_all] = cta.shares;
  }
  if (partials.wanted() && !(by_length && cta.shares == 1)) {
    const int64_t index = partials.index(cta.share, row_of_all);
    if (thread_of_row == 0) partials.ends_gmem[index] = {base, sum};
    if (sum == 0.0f) return;  // the combining kernel does not read the outputs
    partial_gmem = partials.rows_gmem + index * attention.dv;
  } else {
    const device::RowEnd end =
        device::finish_row(sum == 0.0f ? device::MINUS_INFINITY : base * device::LN_2, sum,
                           device::load_sink(attention, row.head));
    if (attention.lse_gmem != nullptr && thread_of_row == 0)
      attention.lse_gmem[row.lse_index(attention)] = end.lse;
    factor *= end.factor;
    row_gmem = static_cast<uint16_t*>(attention.out_gmem) + row.batch * attention.out_batch +
               row.head * attention.out_head + row.packed * attention.out_row;
  }
#pragma unroll
  for (int first = 0; first < C::HEAD_DIM_V; first += COLUMNS * THREADS_OF_ROW) {
    const int column = first + COLUMNS * thread_of_row;
    if (column >= attention.dv) break;
    float4 o = {};
#pragma unroll
    for (int warp = 0; warp < C::WARPS; ++warp) {
      const float4 x = reinterpret_cast<const float4*>(
          shared + warp * C::WARP_BYTES)[(row_of_tile * C::OUT_STRIDE + column) / 4];
      o = {fmaf(x.x, weight[warp], o.x), fmaf(x.y, weight[warp], o.y), fmaf(x.z, weight[warp], o.z),
           fmaf(x.w, weight[warp], o.w)};
    }
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    if (partial_gmem != nullptr) {
      *reinterpret_cast<float4*>(partial_gmem + column) = o;
    } else {
      ptx::st_global_v2_b32(row_gmem + column, ptx::cvt_rn_x2_f32<C::DTYPE>(o.x, o.y),
                            ptx::cvt_rn_x2_f32<C::DTYPE>(o.z, o.w));
    }
  }
}

// The tile of a CTA of a launch for the packed sequences of at most few_rows rows, which are one
// tile each.
__device__ __forceinline__ device::Work work_of_short_sequence(const AttentionParams& params,
                                                               int index, int few_rows,
                                                               int packed_heads) {
  const int tiles = params.heads_q / packed_heads;  // of a sequence
  const int sequence = index / tiles;
  const int* cu_q = params.cu_seqlens_q_gmem;
  device::Work work{};
  work.batch_head = sequence * params.heads_q + index % tiles * packed_heads;
  work.nq = device::sequence_start(cu_q, sequence + 1, params.nq) -
            device::sequence_start(cu_q, sequence, params.nq);
  work.first_row = work.nq > 0 && work.nq <= few_rows ? 0 : -1;
  return work;
}

// Subtracts what ALiBi does from the scores of a warp's keys, from `key` on. What it needs is found
// anew for each group, so that other calls keep no register for it.
template <class C>
__device__ __forceinline__ void add_alibi(device::Scores<typename C::Warp>& s_rmem,
                                          const CacheParams& params, const CacheContext& cta,
                                          int key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(params.attention, cta.packed_heads, cta.work, lane / 4 + 8 * r);
    const AlibiSlopes& slopes = params.slopes;
    const float slope = slopes.gmem[row.batch * slopes.batch + row.head * slopes.head];
    const float distance =
        static_cast<float>(row.row + cta.work.nk - cta.work.nq - key - lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < C::WARP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& s = s_rmem[0][n][2 * r + i];
        s = fmaf(-slope, fabsf(distance - static_cast<float>(8 * n + i)), s);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void decode_fwd(const DecodeParams& params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  using Warp = typename C::Warp;
  static_assert(sizeof(DecodeContext) <= C::CONTEXT_BYTES);
  const AttentionParams& attention = params.attention;
  const device::PackedHeads& packed = params.packed_heads;
  const Partials& partials = params.partials;
  DecodeContext& cta = *reinterpret_cast<DecodeContext*>(shared + C::CONTEXT_SMEM);
  // This kernel starts early (Launch::uses_pdl): what it reads is written now, and what it
  // writes was read.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the combining kernel waits for the last share
  {
    const bool all_rows = params.few_rows == 0;  // of all sequences
    for (int head = 0; all_rows && !partials.wanted() && head < packed.count; ++head) {
      device::write_rows_of_no_sequence(attention, blockIdx.x, threadIdx.x, C::THREADS,
                                        packed.rows(), packed.count, head);
    }
    SharedWork own;
    if (params.share_ctas > 0) {
      own = find_shared_work<C::BLOCK_K>(params);
    } else {
      const int index = static_cast<int>(blockIdx.x) / partials.splits;
      own.work = all_rows ? device::find_work(attention, index, packed.rows(), packed.count)
                          : work_of_short_sequence(attention, index, params.few_rows, packed.count);
      own.share = blockIdx.x % partials.splits;
      own.shares = partials.splits;
    }
    if (own.work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const device::CacheRows rows = find_rows(params, own.work);
      own.work.nk = rows.count;
      cta = {make_cache_context<C>(params, own.work, rows), own.share, own.shares};
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  // Two ranges of keys: `first` to `last`, which any row of the tile sees, cut to the part of this
  // CTA where the keys are split; and all_first to all_last, which every row sees, so that scores
  // there need no mask.
  const device::ChunkedKeys visible = visible_keys<C>(cta);
  const int first_row = cta.work.first_row;
  const int last_row = min(first_row + packed.rows(), cta.work.nq) - 1;
  const int all_first = visible.first(last_row), all_last = visible.last(first_row);
  int first = visible.first(first_row), last = visible.last(last_row);
  Partials of_tile = partials;
  of_tile.splits = cta.shares;
  const device::Blocks share = device::blocks_of_share<C::BLOCK_K>(
      {first & -C::BLOCK_K, last & -C::BLOCK_K}, of_tile, cta.share);
  first = max(first & -C::WARP_KEYS, share.first);
  last = min(last, share.last + C::BLOCK_K - 1);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int key = (first & -C::BLOCK_K) + warp * C::WARP_KEYS;
  if (key < first) key += C::BLOCK_K;

  unsigned char* own = shared + warp * C::WARP_BYTES;
  const uint32_t own_smem = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  if (attention.d < C::HEAD_DIM || attention.dv < C::HEAD_DIM_V) {
    // Columns that no copy writes, over which the products run too.
    for (int i = lane; i < C::WARP_BYTES / 16; i += 32)
      reinterpret_cast<uint4*>(own)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();  // before other lanes' copies write the other columns
  }
  DecodeCopies<C> copies(attention, cta);
  int copied = key;  // the next group to copy
  if (copied <= last) copies.look_up(copied);
  uint32_t filled = 0;  // offset of the stage that it goes to
  const auto start_next = [&] {
    if (copied <= last) {
      copies.start(own_smem + filled, copied);
      copied += C::BLOCK_K;
      if (copied <= last) copies.look_up(copied);
    }
    ptx::cp_async_commit_group();
    filled = filled == (C::STAGES - 1) * C::STAGE_BYTES ? 0 : filled + C::STAGE_BYTES;
  };
#pragma unroll
  for (int stage = 0; stage < C::STAGES - 1; ++stage) start_next();

  const DecodeQuery<C> query(attention, cta, shared);
  if (!C::Q_IN_REGISTERS) __syncthreads();  // all warps have stored their part of Q
  device::Outputs<Warp> o_rmem = {};
  device::RowState<Warp> state;
  state.large = false;
  device::clear(state);
  const uint32_t k_lane = own_smem + rows_first_offset<typename C::Tile>(lane);
  const uint32_t v_lane = own_smem + C::K_BYTES + rows_first_offset<typename C::Tile>(lane);
  const bool e4m3 = params.cache_dtype == DType::E4M3;
  // What the numbers of K and V have to be multiplied by.
  float v_factor = cta.v_descale, k_factor[2];
  if (C::FP8_CACHE) {
    const float of_format = e4m3 ? device::Fp8Pairs<DType::E4M3>::FACTOR : 1.0f;
    v_factor *= of_format;
    for (int r = 0; r < 2; ++r)
      k_factor[r] = query.scale[r] * of_format * (attention.rule.tanh_scale * cta.k_descale);
  }
  uint32_t read = 0;  // offset of the stage that is read
#pragma unroll 1
  for (; key <= last; key += C::BLOCK_K) {
    // This lane's copies of the group are complete, and after the barrier those of the other lanes.
    // No lane still reads the group before, whose stage is filled next.
    ptx::cp_async_wait_group<C::STAGES - 2>();
    __syncwarp();
    start_next();

    const device::RaiseLimits<Warp> limits(state);
    device::Scores<Warp> s_rmem;
    if (C::FP8_CACHE && !e4m3) {
      multiply_decode_qk<C, DType::E5M2>(s_rmem, query, k_lane + read);
    } else {
      multiply_decode_qk<C, DType::E4M3>(s_rmem, query, k_lane + read);
    }
    if constexpr (C::FP8_CACHE) {
#pragma unroll
      for (int n = 0; n < C::WARP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s_rmem[0][n][i] *= k_factor[i / 2];
      }
      if (attention.rule.softcap != 0.0f)
        device::transform_scores<Warp>(s_rmem, ScoreRule{1.0f, attention.rule.softcap});
    } else if (attention.transform_scores) {
      device::transform_scores<Warp>(s_rmem, attention.rule);
    }
    if (params.slopes.gmem != nullptr) add_alibi<C>(s_rmem, params, cta, key);
    if (key < all_first || key + C::WARP_KEYS - 1 > all_last) {
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + packed.row(lane / 4 + 8 * r);
        device::mask_row<Warp>(s_rmem, visible.of_row(row), 0, r, 0, key + lane % 4 * 2);
      }
    }
    const float exp2_scale =
        device::update_row_max<Warp>(s_rmem, state, o_rmem, attention.exp2_scale, &limits);
    device::Probabilities<Warp> p_rmem;
    device::exponentiate_all_scores<Warp>(s_rmem, p_rmem, state, exp2_scale);
    if (C::FP8_CACHE && !e4m3) {
      multiply_decode_pv<C, DType::E5M2>(o_rmem, p_rmem, v_lane + read);
    } else {
      multiply_decode_pv<C, DType::E4M3>(o_rmem, p_rmem, v_lane + read);
    }
    read = read == (C::STAGES - 1) * C::STAGE_BYTES ? 0 : read + C::STAGE_BYTES;
  }
  __syncwarp();  // every lane has read its stages, before outputs overwrite them
  store_warp<C>(shared, o_rmem, state);
  __syncthreads();  // all warps have stored theirs, before they are merged
  merge_warps<C>(shared, params, cta, v_factor);
}

}  // namespace archflash::mma_sync
