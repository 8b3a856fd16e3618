// What planning returns: a LaunchPlan is everything that a launch needs except the addresses of the
// tensors. It is data: printed, compared in a test, sent through JSON, given to the driver
// (src/runtime/execute.cpp) or to the simulator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/merge_parts.h"
#include "common/problem.h"
#include "common/swizzle.h"

namespace archflash {

// Which tensor an address in a parameter block belongs to.
enum class Operand : int32_t {
#define ARCHFLASH_OPERAND(operand, name) operand,
#include "common/operands.inc"
};
constexpr const char* OPERAND_NAMES[] = {
#define ARCHFLASH_OPERAND(operand, name) #name,
#include "common/operands.inc"
};
constexpr int OPERAND_COUNT = static_cast<int>(std::size(OPERAND_NAMES));
constexpr const char* operand_name(Operand operand) {
  return OPERAND_NAMES[static_cast<int>(operand)];
}

constexpr Operand part_out(int i) {
  return static_cast<Operand>(static_cast<int>(Operand::Part0) + i);
}
constexpr Operand part_lse(int i) {
  return static_cast<Operand>(static_cast<int>(Operand::PartLse0) + i);
}
static_assert(part_out(MERGE_PARTS) == Operand::PartLse0);

// bind() writes `address of operand + addend` (8 bytes) at `offset` of the parameter block.
struct PointerSlot {
  Operand operand;
  int32_t offset;
  int64_t addend;
};

// Numbers for the dimensions of a tensor map, at most five of them.
template <class T>
class Extents {
 public:
  static constexpr size_t MOST = 5;

  Extents() = default;
  Extents(std::initializer_list<T> values) {
    for (const T value : values) push_back(value);
  }

  void push_back(T value) { values_.at(size_++) = value; }
  size_t size() const { return size_; }
  T operator[](size_t i) const { return values_[i]; }
  const T* begin() const { return values_.data(); }
  const T* end() const { return begin() + size_; }

 private:
  std::array<T, MOST> values_{};
  size_t size_ = 0;
};

// A TMA tensor map to be encoded at bind time into 128 bytes at `offset` of the parameter block.
// Dimension 0 is contiguous; strides are those of dimensions 1 and up. Dimensions of size 1 or
// stride 0 are left out.
struct TensorMapSpec {
  Operand operand;
  int32_t offset;
  int64_t addend;  // bytes from the operand's address to the map's base
  DType dtype;
  Swizzle swizzle;
  bool nan_fill;             // out-of-bounds elements read as NaN instead of zero
  Extents<int64_t> dims;     // elements
  Extents<int64_t> strides;  // bytes, one fewer than dims
  Extents<int32_t> box;      // elements
};

struct Launch {
  std::string kernel;  // entry name in the PTX
  std::string image;   // which fatbin holds it: "<folder>/<file stem>"
  std::array<int64_t, 3> grid{1, 1, 1};
  std::array<int32_t, 3> cluster{1, 1, 1};
  std::array<int32_t, 3> block{1, 1, 1};
  int32_t shared_bytes = 0;  // dynamic
  // It may start while the launch before it in the stream still runs, be it of this plan or not.
  // The kernel itself waits for the end of that launch (ptx/grid_dependency.cuh), if its image has
  // PTX for 9.0. On older GPUs, and where the driver compiles the PTX, the registry resets this.
  bool uses_pdl = false;
  // It depends on lengths alone, which the layers of a batch have in common: one layer's launch
  // serves them all (runtime/prepared_call.h).
  bool of_batch = false;
  std::vector<uint8_t> params;  // the kernel's one parameter, addresses not yet filled in
  std::vector<PointerSlot> pointers;
  std::vector<TensorMapSpec> tensor_maps;
};
inline void add_pointer(Launch& launch, Operand operand, size_t offset, int64_t addend = 0) {
  launch.pointers.push_back({operand, static_cast<int32_t>(offset), addend});
}
inline void add_pointers(Launch& launch, const std::vector<PointerSlot>& more) {
  launch.pointers.insert(launch.pointers.end(), more.begin(), more.end());
}

// The tile that a plan took, and how it is used: what notes, explain and tests read.
struct TileChoice {
  std::string name;             // the last word of the kernel's name: "d128_large"
  std::string reason;           // why the folder has it
  int32_t head_dim = 0;         // it takes d up to this,
  int32_t head_dim_v = 0;       // and dv up to this
  int32_t block_q = 0;          // query rows of the tile, of each packed head
  int32_t block_k = 0;          // keys at a time
  int32_t warps = 0;            // of a CTA that compute rows: no producers or other roles
  int32_t rows_per_warp = 0;    // 0: warps share the rows
  int32_t k_stages = 0;         // buffers for blocks of K; 0: the tile has no stages
  int32_t v_stages = 0;         // and for V; 0: K and V share those of K
  int32_t cluster = 0;          // CTAs that compute one tile together
  int32_t packed_heads = 0;     // heads that share a head of K and lie in one tile; 1: none do
  int32_t ctas_per_sm = 0;      // that an SM of the device has room for
  int64_t ctas = 0;             // of the launch
  int64_t tiles = 0;            // row tiles of all heads
  int64_t splits = 0;           // shares into which the keys of each tile are split; 1: none
  int64_t share_keys = 0;       // share s has the keys from s * share_keys on; 0: equal shares
  int64_t v_slices = 0;         // shares of the columns of V, of CTAs that all compute the scores
  int64_t heads_per_group = 0;  // heads whose tiles follow one another; 0: no groups
  int64_t turned_begin = 0;     // tiles of a head that come in the opposite direction (TileOrder)
  int64_t turned_end = 0;
  // The tiles of a sequence end with it, as far as whole steps of so many rows take them there
  // (device::row_tile_from_end); 0: they begin with it.
  int64_t row_step = 0;
  // The row tiles from whole_tiles on are cut into parts of part_rows rows, which CTAs take one by
  // one; part_rows = 0: none is.
  int64_t whole_tiles = 0, part_rows = 0;
  bool one_tile_each = false;     // no packed sequence has more, and each has that of its number
  bool counts_tiles = false;      // CTAs take their tiles by a counter
  bool summarizes_masks = false;  // a launch before summarizes the masks as data for its kernel
};
template <class F>
void for_each_field(TileChoice& t, F&& f) {
  f("name", t.name), f("reason", t.reason);
  f("head_dim", t.head_dim), f("head_dim_v", t.head_dim_v);
  f("block_q", t.block_q), f("block_k", t.block_k);
  f("warps", t.warps), f("rows_per_warp", t.rows_per_warp);
  f("k_stages", t.k_stages), f("v_stages", t.v_stages), f("cluster", t.cluster);
  f("packed_heads", t.packed_heads), f("ctas_per_sm", t.ctas_per_sm);
  f("ctas", t.ctas), f("tiles", t.tiles), f("splits", t.splits), f("share_keys", t.share_keys);
  f("v_slices", t.v_slices);
  f("heads_per_group", t.heads_per_group);
  f("turned_begin", t.turned_begin), f("turned_end", t.turned_end), f("row_step", t.row_step);
  f("whole_tiles", t.whole_tiles), f("part_rows", t.part_rows);
  f("one_tile_each", t.one_tile_each);
  f("counts_tiles", t.counts_tiles), f("summarizes_masks", t.summarizes_masks);
}

struct LaunchPlan {
  std::string implementation;  // folder name
  Problem problem;
  Device device;
  TileChoice tile;               // its name is empty where nothing is computed by tiles
  std::vector<Launch> launches;  // in stream order; empty when there is nothing to compute
  int64_t workspace_bytes = 0;
  // So many bytes at the start of the workspace are zero when the first launch starts, such as a
  // counter by which CTAs take their tiles. A kernel cannot leave them zero for the next call: a
  // CUDA graph may be replayed while another call runs.
  int64_t zeroed_bytes = 0;
  // Where a launch is of_batch: so many bytes at the start of the workspace must be zero when the
  // launches behind it start, and it leaves them so. A layer without it has others in their place.
  int64_t counter_bytes = 0;
  bool accumulates = false;  // the gradients that it writes are added to what is there
  // Bytes of the workspace that keep the gradient of each score, which a launch adds up to that of
  // attn_mask in a fixed order; 0: where heads or sequences share a mask, it is in any order. Above
  // the limit only calls that must be deterministic keep them.
  int64_t kept_bytes = 0;
  static constexpr int64_t MOST_KEPT_BYTES = int64_t{1} << 30;
  bool writes_dmask = false;  // that gradient is not added to what is there
  std::string code;  // what the device will run: "sm_90" (native) or "compute_75 PTX, compiled by
                     // the driver"
};

// Lines about a plan for people: (name, value), such as tile, warps, stages.
using Notes = std::vector<std::pair<std::string, std::string>>;
using Reasons = std::vector<std::string>;  // why an implementation cannot serve a problem; never
                                           // empty when returned
using PlanResult = std::variant<LaunchPlan, Reasons>;

// The facts about an implementation, stated once, beside its plan(). Capabilities are
// 10 * major + minor.
struct Description {
  std::string name;
  std::string summary;
  std::string home_device;  // the known device that it plans for on the simulator
  std::vector<DType> dtypes;
  std::string head_dims;           // in words: "multiples of 8 up to 256"
  int64_t largest_head_dim = 256;  // of 16-bit and fp32 inputs; 256 for 8-bit ones and 8-bit caches
  std::vector<std::string> features;

  // What dispatch goes by where nothing was measured. Kernels whose instructions are newer are
  // asked first.
  int needs_capability = 0;  // the first one that has the instructions its kernels are built on
  bool uses_tensor_cores = true;  // if not, 16-bit inputs go to PyTorch's fused kernels before it
  // The capability that its tiles for 16-bit inputs are made for: on others the other folders are
  // asked before it for such inputs. 0: every capability.
  int sixteen_bits_made_for = 0;
  // Major versions for which it is built only so that it can be run there: it serves calls that
  // force it, and kinds of problems for which it was measured there.
  std::vector<int> only_forced_on_majors;
  // What was measured of calls that the table of measured kinds (python/archflash/_measured.py)
  // lacks. The capability on which it reads a dense attn_mask faster than PyTorch's fused kernels;
  // 0: none.
  int masks_faster_on = 0;
  // The capability on which it is faster with dropout: from so many query rows than kernels for any
  // GPU, and from such a head dim than PyTorch's fused ones. 0: none.
  int dropout_faster_on = 0;
  int64_t dropout_rows = 0, dropout_head_dim = 0;
  // Whether a run on one GPU whose results were right stands for all that it has code for: it has
  // no instruction that only few of them have.
  bool proved_by_any_gpu = false;
  std::vector<int> fp8_sums_of_13_bits_on;  // capabilities whose tensor cores keep 13 bits of a sum
                                            // of 8-bit products, where its kernels take them
};

}  // namespace archflash
