// Exact fp32 attention forward on CUDA cores: no tensor cores, any GPU from compute capability 7.5 on.
// Inputs in fp32, fp16 or bf16; every product, sum and exponential in fp32 (16-bit inputs become fp32 in shared memory).
// Work: one CTA per (BLOCK_Q query rows, head, batch). It visits the visible key blocks from the last (ragged) one back
// to the first with an online softmax. A warp owns WARP_ROWS rows: scores, row maxima and outputs stay in its registers,
// P passes from score layout to output layout through its own shared memory.
// Two barriers per key block; the load of V hides behind Q K^T, the load of the next K behind P V:
//   wait K | barrier | start V | S = Q K^T, softmax | wait V | barrier | start next K | O = O * correction + P V
// Tiles: config.cuh. Choice of tile: plan.cpp. Measured numbers: NOTES.md.
#pragma once

#include <cstdint>

#include "common/math/bfloat16.cuh"
#include "common/math/varlen_tiles.cuh"
#include "common/math/visible_keys.cuh"
#include "common/problem.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "simt/config.cuh"
#include "simt/params.h"

namespace archflash::simt {

constexpr unsigned FULL_WARP = 0xFFFFFFFFu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

template <DType DTYPE>
struct ElementOf { using Type = uint16_t; };  // fp16 and bf16 travel as bits
template <>
struct ElementOf<DType::F32> { using Type = float; };

template <DType DTYPE>
__device__ __forceinline__ float half_to_float(uint16_t bits) {
  if constexpr (DTYPE == DType::F16) return ptx::cvt_f32_f16(bits);
  return __uint_as_float(math::float_bits_of_bfloat16(bits));
}

template <DType DTYPE>
__device__ __forceinline__ uint16_t float_to_half(float x) {
  if constexpr (DTYPE == DType::F16) return ptx::cvt_rn_f16_f32(x);
  return math::bfloat16_of_float_bits(__float_as_uint(x));
}

// Lane = {col bits 3.., row bit 1} above {col bit 0} above {row bit 0}. Note: a 16-byte shared load of a warp takes two
// passes instead of four when lane pairs t, t^1 (here: K and V) or t, t^2 (here: Q and P) read the same address.
// Made anew wherever it is used: its addresses must not live in registers across the products.
template <class C>
struct Lane {
  int warp_row;  // first row of the warp in the CTA's tile
  int row;       // [0, LANE_ROWS)
  int col;       // [0, LANE_COLS)

  __device__ __forceinline__ Lane() {
    const int thread = ptx::mov_tid_x_volatile();
    warp_row = thread / 32 * C::WARP_ROWS;
    row = (thread & 1) | (C::LANE_ROWS == 4 ? (thread & 16) >> 3 : 0);
    col = thread >> 1 & (C::LANE_COLS - 1);
  }

  // Reduces over the lanes that share this lane's rows.
  template <class Combine>
  static __device__ __forceinline__ float reduce_cols(float x, Combine combine) {
#pragma unroll
    for (int mask = 2; mask <= C::LANE_COLS; mask *= 2) x = combine(x, __shfl_xor_sync(FULL_WARP, x, mask));
    return x;
  }
};

// What this CTA computes. Rows and keys are counted from the sequence's first.
struct Work {
  int batch_head;        // batch * heads_q + head: one register for both
  int first_row;         // of the sequence; negative: nothing to do
  int nq, nk;            // of the sequence
};

// Rows before a sequence in a packed tensor of `rows` rows; 0 without cu_seqlens. Offsets outside the tensor are the
// caller's error: clamping keeps every access inside it.
__device__ __forceinline__ int sequence_start(const int* cu_seqlens_gmem, int sequence, int rows) {
  return cu_seqlens_gmem == nullptr ? 0 : min(max(cu_seqlens_gmem[sequence], 0), rows);
}

// CTA index -> (row tile, head, batch). Row tiles go from the last to the first: under a causal mask the last is the
// longest. From snake_from on the order is reversed: where two CTAs share each SM, a long one then meets a short one.
template <class C>
__device__ __forceinline__ Work find_work(const Params& params) {
  int index = blockIdx.x;
  if (index >= params.snake_from) index = params.snake_from + static_cast<int>(gridDim.x) - 1 - index;
  Work work{};
  int tile_from_last;
  if (params.cu_seqlens_q_gmem == nullptr) {
    const int heads = params.batch * params.heads_q;
    tile_from_last = index / heads;
    work.batch_head = index % heads;
    work.nq = params.nq;
    work.nk = params.nk;
  } else {
    const int* cu_q = params.cu_seqlens_q_gmem;
    const int* cu_k = params.cu_seqlens_k_gmem;
    const int tile = index / params.heads_q;
    const int batch = math::find_varlen_sequence(cu_q, params.batch, C::BLOCK_Q, tile);
    work.first_row = -1;
    if (batch < 0) return work;
    tile_from_last = tile - math::varlen_tile_start(cu_q, batch, C::BLOCK_Q);
    work.batch_head = batch * params.heads_q + index % params.heads_q;
    work.nq = max(sequence_start(cu_q, batch + 1, params.nq) - sequence_start(cu_q, batch, params.nq), 0);
    work.nk = max(sequence_start(cu_k, batch + 1, params.nk) - sequence_start(cu_k, batch, params.nk), 0);
  }
  const int tiles = (work.nq + C::BLOCK_Q - 1) / C::BLOCK_Q;
  work.first_row = (tiles - 1 - tile_from_last) * C::BLOCK_Q;  // negative for a surplus tile of a short sequence
  return work;
}

// Starts the copy of rows [0, ROWS) of `rows_gmem` to shared memory as fp32; rows from `valid_rows` on and columns from
// `columns` on become zeros, so that what lies beyond a sequence's end in memory never matters.
// fp32: asynchronous (copies_wait_all, then a barrier). 16-bit: loaded, converted and stored before it returns.
template <class C, int ROWS, int PITCH>
__device__ __forceinline__ void start_load(float* tile_smem /* (ROWS, PITCH) */,
                                           const typename ElementOf<C::DTYPE>::Type* rows_gmem, int64_t row_stride,
                                           int valid_rows, int columns) {
  using Element = typename ElementOf<C::DTYPE>::Type;
  constexpr int CHUNK = 16 / sizeof(Element);
  constexpr int CHUNKS_PER_ROW = C::HEAD_DIM / CHUNK;
  constexpr int ROWS_PER_STEP = C::THREADS / CHUNKS_PER_ROW;
  constexpr int STEPS = ROWS / ROWS_PER_STEP;
  static_assert(STEPS * ROWS_PER_STEP == ROWS && ROWS_PER_STEP * CHUNKS_PER_ROW == C::THREADS, "threads must tile the rows");

  const int thread = ptx::mov_tid_x_volatile();  // addresses made here must not live in registers across the products
  const int row = thread / CHUNKS_PER_ROW;
  const int column = thread % CHUNKS_PER_ROW * CHUNK;
  const int rows_left = column < columns ? valid_rows - row : 0;  // of this thread's column
  const Element* source = rows_gmem + row * row_stride + column;
  float* target = tile_smem + row * PITCH + column;

  if constexpr (C::DTYPE == DType::F32) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const bool valid = step * ROWS_PER_STEP < rows_left;
      ptx::copy_16_bytes_async(target + step * ROWS_PER_STEP * PITCH, valid ? source : rows_gmem, valid);
      source += ROWS_PER_STEP * row_stride;
    }
  } else {
    uint4 raw_rmem[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const bool valid = step * ROWS_PER_STEP < rows_left;
      raw_rmem[step] = valid ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
      source += ROWS_PER_STEP * row_stride;
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint32_t words[4] = {raw_rmem[step].x, raw_rmem[step].y, raw_rmem[step].z, raw_rmem[step].w};
      float x[CHUNK];
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        x[i] = half_to_float<C::DTYPE>(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
      }
      float4* store = reinterpret_cast<float4*>(target + step * ROWS_PER_STEP * PITCH);
      store[0] = make_float4(x[0], x[1], x[2], x[3]);
      store[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
}

__device__ __forceinline__ void load_4(float (&x)[4], const float* x_smem) {
  const float4 vector = *reinterpret_cast<const float4*>(x_smem);
  x[0] = vector.x, x[1] = vector.y, x[2] = vector.z, x[3] = vector.w;
}

// S = Q K^T over the first d columns. Thread (row i, key j) holds row i * LANE_ROWS + lane.row, key j * LANE_COLS + lane.col.
// Summed in chunks of CHUNK_D columns: one long chain of additions would round twice as coarsely (NOTES.md).
template <class C>
__device__ __forceinline__ void multiply_qk(float (&s_rmem)[C::THREAD_ROWS][C::THREAD_KEYS],
                                            const float* q_smem /* this lane's first row */,
                                            const float* k_smem /* this lane's first key */, int d) {
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) s_rmem[i][j] = 0.0f;
  }
  int column = 0;
#pragma unroll 1
  while (column < d) {
    float chunk_rmem[C::THREAD_ROWS][C::THREAD_KEYS] = {};
    const int chunk_end = min(column + C::CHUNK_D, d);
#pragma unroll 1
    for (; column < chunk_end; column += C::D_STEP) {
#pragma unroll
      for (int step = 0; step < C::D_STEP; step += 4) {
        float q[C::THREAD_ROWS][4];
#pragma unroll
        for (int i = 0; i < C::THREAD_ROWS; ++i) load_4(q[i], q_smem + i * C::LANE_ROWS * C::QK_PITCH + step);
#pragma unroll
        for (int j = 0; j < C::THREAD_KEYS; ++j) {
          float k[4];
          load_4(k, k_smem + j * C::LANE_COLS * C::QK_PITCH + step);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int i = 0; i < C::THREAD_ROWS; ++i) chunk_rmem[i][j] = fmaf(q[i][e], k[e], chunk_rmem[i][j]);
          }
        }
      }
      q_smem += C::D_STEP;
      k_smem += C::D_STEP;
    }
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < C::THREAD_KEYS; ++j) s_rmem[i][j] += chunk_rmem[i][j];
    }
  }
}

// PV += P V over P_KEYS keys. Thread (row i, group n) holds row i * LANE_ROWS + lane.row, columns 4 * (n * LANE_COLS + lane.col).
template <class C>
__device__ __forceinline__ void multiply_pv(float (&pv_rmem)[C::THREAD_ROWS][4 * C::OUT_GROUPS],
                                            const float* p_smem /* this lane's first row */,
                                            const float* v_smem /* this lane's first column */) {
#pragma unroll 1
  for (int key = 0; key < C::P_KEYS; key += C::KEY_STEP) {
#pragma unroll
    for (int step = 0; step < C::KEY_STEP; step += 4) {
      float p[C::THREAD_ROWS][4];
#pragma unroll
      for (int i = 0; i < C::THREAD_ROWS; ++i) load_4(p[i], p_smem + i * C::LANE_ROWS * C::P_PITCH + step);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int n = 0; n < C::OUT_GROUPS; ++n) {
          float v[4];
          load_4(v, v_smem + (step + e) * C::V_PITCH + 4 * n * C::LANE_COLS);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int i = 0; i < C::THREAD_ROWS; ++i) {
              pv_rmem[i][4 * n + c] = fmaf(p[i][e], v[c], pv_rmem[i][4 * n + c]);
            }
          }
        }
      }
    }
    p_smem += C::KEY_STEP;
    v_smem += C::KEY_STEP * C::V_PITCH;
  }
}

// Softcap, or a scale that cannot be folded into the exponential (zero or negative): rare, one branch per block.
template <class C>
__device__ __forceinline__ void transform_scores(float (&s_rmem)[C::THREAD_ROWS][C::THREAD_KEYS], const Params& params) {
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const float x = s_rmem[i][j] * params.tanh_scale;
      s_rmem[i][j] = params.softcap == 0.0f ? x : params.softcap * tanhf(x);
    }
  }
}

// Only where the block has an edge in it. Masking is a select: what a masked score was does not matter.
template <class C>
__device__ __forceinline__ void mask_scores(float (&s_rmem)[C::THREAD_ROWS][C::THREAD_KEYS],
                                            const math::VisibleKeys& visible, int first_row, int key_first) {
  const Lane<C> lane;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const int row = first_row + lane.warp_row + i * C::LANE_ROWS + lane.row;
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      if (!visible.sees(row, key_first + j * C::LANE_COLS + lane.col)) s_rmem[i][j] = MINUS_INFINITY;
    }
  }
}

// Running maximum (in units of log2) and this thread's share of the running sum of each of its rows.
template <class C>
struct RowState {
  float max_rmem[C::THREAD_ROWS];
  float sum_rmem[C::THREAD_ROWS];
};

// S becomes P = 2^(S * exp2_scale - max); the sums move to the new maxima; `correction` is what O must be multiplied by.
template <class C>
__device__ __forceinline__ void online_softmax(float (&s_rmem)[C::THREAD_ROWS][C::THREAD_KEYS], RowState<C>& state,
                                               float (&correction)[C::THREAD_ROWS], float exp2_scale) {
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    float block_max = s_rmem[i][0];
#pragma unroll
    for (int j = 1; j < C::THREAD_KEYS; ++j) block_max = fmaxf(block_max, s_rmem[i][j]);
    block_max = Lane<C>::reduce_cols(block_max, [](float x, float y) { return fmaxf(x, y); });
    const float new_max = fmaxf(state.max_rmem[i], block_max * exp2_scale);
    const float base = new_max == MINUS_INFINITY ? 0.0f : new_max;  // a row that has seen no key: avoids inf - inf
    correction[i] = ptx::ex2_approx_ftz(state.max_rmem[i] - base);
    state.max_rmem[i] = new_max;
    float block_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      s_rmem[i][j] = ptx::ex2_approx_ftz(fmaf(s_rmem[i][j], exp2_scale, -base));
      block_sum += s_rmem[i][j];
    }
    state.sum_rmem[i] = fmaf(state.sum_rmem[i], correction[i], block_sum);
  }
}

// The attention sink of a head in units of log2: one more logit in the denominator.
__device__ __forceinline__ float load_sink(const Params& params, int head) {
  if (params.sinks_gmem == nullptr) return MINUS_INFINITY;
  const DType dtype = static_cast<DType>(params.sinks_dtype);
  if (dtype == DType::F32) return static_cast<const float*>(params.sinks_gmem)[head] * LOG2_E;
  const uint16_t bits = static_cast<const uint16_t*>(params.sinks_gmem)[head];
  return (dtype == DType::F16 ? half_to_float<DType::F16>(bits) : half_to_float<DType::BF16>(bits)) * LOG2_E;
}

// Writes four columns of one row.
template <DType DTYPE>
__device__ __forceinline__ void store_4(void* target_gmem, const float (&x)[4]) {
  if constexpr (DTYPE == DType::F32) {
    ptx::st_global_v4_b32(target_gmem, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                          __float_as_uint(x[3]));
  } else {
    const auto pair = [](float low, float high) {
      return float_to_half<DTYPE>(low) | static_cast<uint32_t>(float_to_half<DTYPE>(high)) << 16;
    };
    ptx::st_global_v2_b32(target_gmem, pair(x[0], x[1]), pair(x[2], x[3]));
  }
}

template <class C>
__device__ __forceinline__ void store_out(const float (&o_rmem)[C::THREAD_ROWS][4 * C::OUT_GROUPS],
                                          const RowState<C>& state, const Params& params, const Work& work) {
  using Element = typename ElementOf<C::DTYPE>::Type;
  const Lane<C> lane;
  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int first_row = work.first_row + lane.warp_row + lane.row;
  const int first_column = 4 * lane.col;
  const int64_t packed_row = sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + first_row;
  Element* row_gmem = static_cast<Element*>(params.out_gmem) + batch * params.out_batch +
                      head * params.out_head + packed_row * params.out_row + first_column;
  float* lse_gmem = params.lse_gmem;
  if (lse_gmem != nullptr) lse_gmem += batch * params.lse_batch + head * params.lse_head + packed_row;
  const float sink = load_sink(params, head);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const float keys_sum = Lane<C>::reduce_cols(state.sum_rmem[i], [](float x, float y) { return x + y; });
    const float keys_max = state.max_rmem[i];
    const float max = fmaxf(keys_max, sink);
    const float base = max == MINUS_INFINITY ? 0.0f : max;
    const float correction = ptx::ex2_approx_ftz(keys_max - base);
    const float sum = fmaf(keys_sum, correction, ptx::ex2_approx_ftz(sink - base));
    const float factor = keys_sum != 0.0f ? correction / sum : 0.0f;  // 0: the row saw no key

    if (first_row + i * C::LANE_ROWS < work.nq) {
#pragma unroll
      for (int n = 0; n < C::OUT_GROUPS; ++n) {
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = o_rmem[i][4 * n + c] * factor;
        const int column = 4 * n * C::LANE_COLS;
        if (first_column + column < params.dv) store_4<C::DTYPE>(row_gmem + column, x);
      }
      // -inf where max is -inf: sum is then 0.
      if (lse_gmem != nullptr && lane.col == 0) lse_gmem[i * C::LANE_ROWS] = fmaf(max, LN_2, logf(sum));
    }
    row_gmem += C::LANE_ROWS * params.out_row;
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  using Element = typename ElementOf<C::DTYPE>::Type;
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  float* q_smem = shared + C::Q_SMEM;  // (BLOCK_Q, QK_PITCH)
  float* k_smem = shared + C::K_SMEM;  // (BLOCK_K, QK_PITCH)
  float* v_smem = shared + C::V_SMEM;  // (BLOCK_K, V_PITCH)

  const Work work = find_work<C>(params);
  if (work.first_row < 0) return;

  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int kv_head = head / params.heads_per_kv;
  const int64_t q_row = sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + work.first_row;
  const int64_t k_row = sequence_start(params.cu_seqlens_k_gmem, batch, params.nk);
  const Element* q_gmem = static_cast<const Element*>(params.q_gmem) + batch * params.q_batch +
                          head * params.q_head + q_row * params.q_row;
  const Element* k_gmem = static_cast<const Element*>(params.k_gmem) + batch * params.k_batch +
                          kv_head * params.k_head + k_row * params.k_row;
  const Element* v_gmem = static_cast<const Element*>(params.v_gmem) + batch * params.v_batch +
                          kv_head * params.v_head + k_row * params.v_row;

  int64_t q_offset = params.q_offset;
  if (params.offset_mode == OffsetMode::KeysMinusQueries) q_offset = work.nk - work.nq;
  if (params.offset_mode == OffsetMode::PerBatch) q_offset = params.q_offsets_gmem[batch];
  const math::VisibleKeys visible =
      math::visible_keys(work.nq, work.nk, q_offset, params.window_left, params.window_right);


  float o_rmem[C::THREAD_ROWS][4 * C::OUT_GROUPS] = {};
  RowState<C> state;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) state.max_rmem[i] = MINUS_INFINITY, state.sum_rmem[i] = 0.0f;

  const int cta_last = min(work.first_row + C::BLOCK_Q, work.nq) - 1;
  const int blocks_begin = visible.first(work.first_row) & -C::BLOCK_K;  // first key of the first block with a visible key
  const int blocks_last = visible.last(cta_last) & -C::BLOCK_K;          // of the last one; before the first: none

  const auto start_k = [&](int key) {
    start_load<C, C::BLOCK_K, C::QK_PITCH>(k_smem, k_gmem + key * params.k_row, params.k_row, work.nk - key, params.d);
  };
  const auto start_v = [&](int key) {
    start_load<C, C::BLOCK_K, C::V_PITCH>(v_smem, v_gmem + key * params.v_row, params.v_row, work.nk - key, params.dv);
  };
  if (blocks_begin <= blocks_last) {
    start_load<C, C::BLOCK_Q, C::QK_PITCH>(q_smem, q_gmem, params.q_row, work.nq - work.first_row, params.d);
    start_k(blocks_last);
  }

#pragma unroll 1
  for (int key_first = blocks_last; key_first >= blocks_begin; key_first -= C::BLOCK_K) {
    const int key_last = key_first + C::BLOCK_K - 1;
    const int warp_first = work.first_row + Lane<C>().warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, work.nq) - 1;  // below warp_first: the warp has no rows
    const bool computes = warp_last >= warp_first && !visible.hides(warp_first, warp_last, key_first, key_last);
    const bool masked = visible.masks(warp_first, warp_last, key_first, key_last);
    float s_rmem[C::THREAD_ROWS][C::THREAD_KEYS];
    float correction[C::THREAD_ROWS];

    ptx::copies_wait_all();
    __syncthreads();  // K (and at first Q) of all threads have landed; all warps are done with the V of the block before
    start_v(key_first);
    if (computes) {
      const Lane<C> lane;
      multiply_qk<C>(s_rmem, q_smem + (lane.warp_row + lane.row) * C::QK_PITCH, k_smem + lane.col * C::QK_PITCH, params.d);
      if (params.transform_scores) transform_scores<C>(s_rmem, params);
      if (masked) mask_scores<C>(s_rmem, visible, work.first_row, key_first);
      online_softmax<C>(s_rmem, state, correction, params.exp2_scale);
    }

    ptx::copies_wait_all();
    __syncthreads();  // V of all threads has landed; all warps are done with K, so the next one may overwrite it
    if (key_first > blocks_begin) start_k(key_first - C::BLOCK_K);
    if (computes) {
      const Lane<C> lane;
      float* p_smem = shared + C::P_SMEM + (lane.warp_row + lane.row) * C::P_PITCH;  // (THREAD_ROWS * LANE_ROWS, P_PITCH)
      float pv_rmem[C::THREAD_ROWS][4 * C::OUT_GROUPS] = {};
#pragma unroll
      for (int part = 0; part < C::P_PARTS; ++part) {
        constexpr int COLUMNS = C::P_KEYS / C::LANE_COLS;  // of this thread's scores
        if (part > 0) __syncwarp();  // all lanes have read the part before: its place may be overwritten
#pragma unroll
        for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) {
            p_smem[i * C::LANE_ROWS * C::P_PITCH + j * C::LANE_COLS + lane.col] = s_rmem[i][part * COLUMNS + j];
          }
        }
        __syncwarp();  // the warp's part of P is complete before any lane reads it
        multiply_pv<C>(pv_rmem, p_smem, v_smem + part * C::P_KEYS * C::V_PITCH + 4 * lane.col);
      }
#pragma unroll
      for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
        for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) o_rmem[i][c] = fmaf(o_rmem[i][c], correction[i], pv_rmem[i][c]);
      }
    }
  }
  store_out<C>(o_rmem, state, params, work);
}

}  // namespace archflash::simt

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory.
#define ARCHFLASH_SIMT_KERNEL(NAME, CONFIG)                                                              \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM)                     \
      NAME(const __grid_constant__ archflash::simt::Params params) {                                     \
    archflash::simt::attention_fwd<CONFIG>(params);                                                      \
  }
