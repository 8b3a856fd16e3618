// The producers of latent attention over listed rows that are packed (common/packed_rows.h). Four
// warps load the e4m3 numbers of their rows to registers, multiply them by their scales, round
// them to bf16 and store them where wgmma reads them; the columns that are bf16 already come by
// cp.async. The next numbers are loaded as soon as others have been stored, so that loads are
// always under way.
#pragma once

#include <cstdint>

#include "common/device/key_lists.cuh"
#include "common/packed_rows.h"
#include "common/ptx/bulk_exchange.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_arrive.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/special_registers.cuh"
#include "hopper/latent/mla_gather_load.cuh"

namespace archflash::hopper {

// Two e4m3 numbers times a scale, rounded to bf16.
__device__ __forceinline__ uint32_t scale_two(uint32_t pair, float scale) {
  const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(pair));
  return ptx::cvt_rn_x2_f32<DType::BF16>(
      ptx::cvt_f32_f16(static_cast<uint16_t>(halves)) * scale,
      ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> 16)) * scale);
}
__device__ __forceinline__ uint4 scale_eight(uint32_t low, uint32_t high, float scale) {
  return {scale_two(low, scale), scale_two(low >> 16, scale), scale_two(high, scale),
          scale_two(high >> 16, scale)};
}

// Tells the consumers of a stage which rows of a warp a query sees, a bit each; with PAIRS those
// that the other CTA sends, too.
template <class C>
__device__ __forceinline__ void note_seen(unsigned char* shared, int stage, int first_row,
                                          uint32_t seen) {
  unsigned char* const bits = shared + C::SEEN_SMEM + 8 * stage;
  if constexpr (C::PAIRS) {
    static_assert(C::WARP_KEYS == 8);
    bits[first_row / 8] = static_cast<unsigned char>(seen);
    bits[(first_row ^ C::BLOCK_K / 2) / 8] = static_cast<unsigned char>(seen >> 8);
  } else {
    reinterpret_cast<uint16_t*>(bits)[first_row / 16] = static_cast<uint16_t>(seen);
  }
}

// Sends the eight rows of a warp in a half of V to the other CTA of the pair, and those of K alone
// WITH_KEYS. The warp has stored them.
template <class C, bool WITH_KEYS>
__device__ __forceinline__ void send_half(uint32_t rows_smem, uint32_t sent, int half) {
  using RowTile = typename C::RowTile;
  if (ptx::elect_sync()) {
    const uint32_t peer = blockIdx.x % 2 ^ 1;
    const uint32_t to = ptx::mapa_shared_cluster(rows_smem, peer);
    const uint32_t barrier = ptx::mapa_shared_cluster(sent, peer);
#pragma unroll
    for (int i = 0; i < C::HALF_SLABS + (WITH_KEYS ? 1 : 0); ++i) {
      const int slab = i == C::HALF_SLABS ? C::V_SLABS : half * C::HALF_SLABS + i;
      ptx::cp_async_bulk_exchange(to + slab * RowTile::SLAB_BYTES,
                                  rows_smem + slab * RowTile::SLAB_BYTES,
                                  C::WARP_KEYS * RowTile::ROW_BYTES, barrier);
    }
  }
  __syncwarp();
}

// As gather_latent_rows(), for rows of 656 bytes, or of 584 if not BYTES_656. With PAIRS a warp
// sends the rows that it has stored to the other CTA, eight at a time, as they lie side by side in
// each slab; and the columns that are bf16 pass through registers, so that they are there too.
template <class C, bool BYTES_656>
__device__ __forceinline__ void convert_latent_rows(const MlaPackedParams& params,
                                                    const MlaListTile& found,
                                                    const MlaListTile& tile, unsigned char* shared,
                                                    uint32_t shared_smem, int warp, int entry) {
  using RowTile = typename C::RowTile;
  constexpr int LANES = 8;  // that convert a row, 16 numbers at a time
  constexpr int ROWS = 32 / LANES, STEPS = C::WARP_KEYS / ROWS;
  constexpr int AHEAD = 2;  // steps whose numbers are under way: for more there are no registers
  constexpr int HALF_CHUNKS = C::HEAD_DIM_V / 32;           // of 16 numbers, in half of a row
  constexpr int CHUNKS = BYTES_656 ? 2 * HALF_CHUNKS : 28;  // of e4m3 in a row
  // The columns that are bf16: which half of the numbers they come with, their slab and place.
  constexpr int REST_HALF = BYTES_656 ? 0 : 1;
  constexpr int REST_SLAB = BYTES_656 ? C::V_SLABS : C::V_SLABS - 1;
  constexpr int REST_BYTE = BYTES_656 ? 528 : 448;
  const AttentionParams& attention = params.call.attention;
  const KvCache& cache = params.call.cache;
  const MlaBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  // Found anew where it is used, so that nothing of it takes a register between two blocks.
  const auto lane = [] { return static_cast<int>(ptx::mov_tid_x_volatile()) % 32; };
  const int first = uniform(found.blocks.first);
  constexpr int OTHER_ROWS = C::BLOCK_K / 2;  // with PAIRS, of the other CTA
  const auto first_row = [] {                 // of this warp, in a block
    const int row = (ptx::mov_tid_x_volatile() - C::CONSUMER_THREADS) / 32 * C::WARP_KEYS;
    return C::PAIRS ? row + static_cast<int>(blockIdx.x) % 2 * OTHER_ROWS : row;
  };
  const auto entry_of = [&](const device::KeyList& list, int block) {
    return list.entry(block + place_of_lane<C>());
  };
  const auto store = [&](int offset, const uint4& x) {
    *reinterpret_cast<uint4*>(shared + offset) = x;
  };
  if (!BYTES_656) {  // columns of K alone, which the format lacks
    constexpr int WARP_ROWS = C::BLOCK_K / C::PRODUCER_WARPS;
#pragma unroll
    for (int i = 0; i < C::STAGES * WARP_ROWS / ROWS; ++i) {
      const int row = warp * WARP_ROWS + ROWS * i % WARP_ROWS + lane() / LANES;
      store(C::ROWS_SMEM + ROWS * i / WARP_ROWS * RowTile::BYTES +
                C::V_SLABS * RowTile::SLAB_BYTES + RowTile::offset(row, lane() % LANES),
            uint4{});
    }
  }
  int key = uniform(found.blocks.last);

  // The row of this lane: the byte where it begins, and how far behind it its scales lie.
  int64_t own_row = 0;
  int to_scales = 512;
  uint32_t seen = 0;  // which rows of the warp a query sees
  const auto look_up = [&](const device::KeyList& list, int entry) {
    const device::KeyPlace place = find_place(params, list, entry);
    own_row = place.block * attention.v_batch + place.row * attention.v_row;
    if (!BYTES_656) to_scales = cache.block_rows * 576 + place.row * (8 - 576);
    seen = __ballot_sync(device::FULL_WARP, place.position != device::NO_KEY);
  };
  const auto row_of = [&](int row_of_warp) {
    return static_cast<const unsigned char*>(attention.v_gmem) +
           __shfl_sync(device::FULL_WARP, own_row, row_of_warp);
  };
  uint4 numbers[AHEAD][2], rest[AHEAD];
  float scales[AHEAD][2];
  // Loads the numbers of rows ROWS * step and on; those that no query sees are zeros.
  const auto load = [&](int step, int half) {
    const int row_of_warp = ROWS * step + lane() / LANES, chunk = lane() % LANES;
    const unsigned char* const row_gmem = row_of(row_of_warp);
    const unsigned char* const scales_gmem =
        row_gmem + (BYTES_656 ? 512 : __shfl_sync(device::FULL_WARP, to_scales, row_of_warp));
    const bool exists = seen >> row_of_warp & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = half * HALF_CHUNKS + i * LANES + chunk;
      uint4& x = numbers[step % AHEAD][i];
      float& scale = scales[step % AHEAD][i];
      x = uint4{};
      scale = 0.0f;
      if (!exists || number >= CHUNKS) continue;
      x = *reinterpret_cast<const uint4*>(row_gmem + 16 * number);
      scale = BYTES_656 ? reinterpret_cast<const float*>(scales_gmem)[2 * half + i]
                        : __uint_as_float(uint32_t{scales_gmem[number / 4]} << 23);
    }
    if (C::PAIRS && half == REST_HALF) {
      uint4& x = rest[step % AHEAD];
      x = uint4{};
      if (exists) x = *reinterpret_cast<const uint4*>(row_gmem + REST_BYTE + 16 * chunk);
    }
  };
  // Stores them, as bf16, from `rows` on, where the warp's rows of the stage lie. Four lanes write
  // the columns of a slab, and the next four those of the next one, which lie in the same banks: so
  // these begin with the other half of their columns.
  const auto convert = [&](int rows, int step, int half) {
    const int row = lane() / LANES, chunk = lane() % LANES;
    const bool high_first = (chunk & 4) != 0;
    const int first_of_row = rows + RowTile::offset(row, 2 * chunk + (high_first ? 1 : 0));
    constexpr int ODD_ROWS = 4 * 16;  // what the swizzle changes four rows further on
    const int offset = (step % 2 == 0 ? first_of_row : first_of_row ^ ODD_ROWS) +
                       ROWS * step * RowTile::ROW_BYTES + half * C::HALF_BYTES;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (half * HALF_CHUNKS + i * LANES + chunk >= CHUNKS) continue;
      const uint4& x = numbers[step % AHEAD][i];
      const float scale = scales[step % AHEAD][i];
      const int at = offset + i * 2 * RowTile::SLAB_BYTES;
      store(at, scale_eight(high_first ? x.z : x.x, high_first ? x.w : x.y, scale));
      store(at ^ 16, scale_eight(high_first ? x.x : x.z, high_first ? x.y : x.w, scale));
    }
    if (C::PAIRS && half == REST_HALF) {
      store(rows + REST_SLAB * RowTile::SLAB_BYTES + RowTile::offset(ROWS * step + row, chunk),
            rest[step % AHEAD]);
    }
  };
  static_assert(ROWS == 4 && RowTile::GROUP == 8 && HALF_CHUNKS == 2 * LANES);

  look_up(found.list, entry);
  entry = key - C::BLOCK_K >= first ? entry_of(found.list, key - C::BLOCK_K) : 0;
#pragma unroll
  for (int step = 0; step < AHEAD; ++step) load(step, 0);
  wait_for_start<C>();
#pragma unroll 1
  for (int count = 0; key >= first; ++count, key -= C::BLOCK_K) {
    const int stage = count % C::STAGES;
    const uint32_t parity = count / C::STAGES % 2;
    const int rows = C::ROWS_SMEM + stage * RowTile::BYTES + first_row() * RowTile::ROW_BYTES;
    const bool goes_on = key - C::BLOCK_K >= first;
    // Side by side the halves of the other format have too few registers in a CTA alone.
#pragma unroll(BYTES_656 || C::PAIRS ? 2 : 1)
    for (int half = 0; half < 2; ++half) {
      // Every product of the half that the stage held is done.
      ptx::mbarrier_wait_parity(barriers.empty(stage, MLA_LEFT + half), parity ^ 1);
      if (C::PAIRS && warp == 0 && ptx::elect_sync()) {  // what the other CTA sends
        const int slabs = C::HALF_SLABS + (BYTES_656 && half == 0 ? 1 : 0);
        ptx::mbarrier_arrive_expect_tx(barriers.sent(stage, MLA_LEFT + half),
                                       slabs * OTHER_ROWS * RowTile::ROW_BYTES);
      }
      if (half == 0 && lane() == 0) note_seen<C>(shared, stage, first_row(), seen);
      if (!C::PAIRS && half == REST_HALF) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int row_of_warp = ROWS * step + lane() / LANES, chunk = lane() % LANES;
          ptx::cp_async_cg_16(shared_smem + rows + REST_SLAB * RowTile::SLAB_BYTES +
                                  RowTile::offset(row_of_warp, chunk),
                              row_of(row_of_warp) + REST_BYTE + 16 * chunk,
                              seen >> row_of_warp & 1 ? 16 : 0);
        }
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        convert(rows, step, half);
        if (step + AHEAD < STEPS) {
          load(step + AHEAD, half);
        } else if (half == 0) {
          load(step + AHEAD - STEPS, 1);
        } else if (goes_on) {
          if (step + AHEAD == STEPS) {  // from here on rows are those of the next block
            look_up(tile.list, entry);
            if (key - 2 * C::BLOCK_K >= first) entry = entry_of(tile.list, key - 2 * C::BLOCK_K);
          }
          load(step + AHEAD - STEPS, 0);
        }
      }
      const uint32_t full = barriers.full(stage, MLA_LEFT + half);
      if constexpr (C::PAIRS) {
        ptx::fence_proxy_async_shared();  // the stores come before the copies that read them
        release(full);
        const uint32_t sent = barriers.sent(stage, MLA_LEFT + half);
        if (BYTES_656 && half == 0) {
          send_half<C, true>(shared_smem + rows, sent, half);
        } else {
          send_half<C, false>(shared_smem + rows, sent, half);
        }
      } else {
        ptx::cp_async_mbarrier_arrive_noinc(full);
        // Releases what this warp has stored; the arrivals above release the copies alone.
        release(full);
      }
    }
  }
  ptx::cp_async_wait_all();  // a thread may not end before its copies
}

}  // namespace archflash::hopper
