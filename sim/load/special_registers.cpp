#include "sim/load/special_registers.h"

namespace archflash::sim {
namespace {

using P = const ThreadPosition&;
constexpr int SMS = 4;

uint64_t bit_of_lane(P p) { return uint64_t{1} << p.thread % LANES; }
uint64_t cluster_rank(P p) {
  const Dim3 &cta = p.cta, &size = p.cluster;
  return cta.x % size.x + size.x * (cta.y % size.y + size.y * (cta.z % size.z));
}

constexpr SpecialRegister SPECIALS[] = {
    {"%tid.x", [](P p) -> uint64_t { return p.thread % p.block.x; }},
    {"%tid.y", [](P p) -> uint64_t { return p.thread / p.block.x % p.block.y; }},
    {"%tid.z", [](P p) -> uint64_t { return p.thread / (p.block.x * p.block.y); }},
    {"%ntid.x", [](P p) -> uint64_t { return p.block.x; }},
    {"%ntid.y", [](P p) -> uint64_t { return p.block.y; }},
    {"%ntid.z", [](P p) -> uint64_t { return p.block.z; }},
    {"%ctaid.x", [](P p) -> uint64_t { return p.cta.x; }},
    {"%ctaid.y", [](P p) -> uint64_t { return p.cta.y; }},
    {"%ctaid.z", [](P p) -> uint64_t { return p.cta.z; }},
    {"%nctaid.x", [](P p) -> uint64_t { return p.grid.x; }},
    {"%nctaid.y", [](P p) -> uint64_t { return p.grid.y; }},
    {"%nctaid.z", [](P p) -> uint64_t { return p.grid.z; }},
    {"%laneid", [](P p) -> uint64_t { return p.thread % LANES; }},
    {"%warpid", [](P p) -> uint64_t { return p.thread / LANES; }},
    {"%nwarpid", [](P p) -> uint64_t { return (p.block.count() + LANES - 1) / LANES; }},
    {"%smid", [](P p) -> uint64_t { return p.cta_index % SMS; }},
    {"%nsmid", [](P) -> uint64_t { return SMS; }},
    {"%gridid", [](P) -> uint64_t { return 1; }, 64},
    {"%lanemask_eq", [](P p) -> uint64_t { return bit_of_lane(p); }},
    {"%lanemask_le", [](P p) -> uint64_t { return 2 * bit_of_lane(p) - 1; }},
    {"%lanemask_lt", [](P p) -> uint64_t { return bit_of_lane(p) - 1; }},
    {"%lanemask_ge", [](P p) -> uint64_t { return ~(bit_of_lane(p) - 1); }},
    {"%lanemask_gt", [](P p) -> uint64_t { return ~(2 * bit_of_lane(p) - 1); }},
    {"%dynamic_smem_size", [](P p) -> uint64_t { return p.dynamic_shared; }},
    {"%total_smem_size", [](P p) -> uint64_t { return p.shared_bytes; }},
    {"%cluster_ctaid.x", [](P p) -> uint64_t { return p.cta.x % p.cluster.x; }},
    {"%cluster_ctaid.y", [](P p) -> uint64_t { return p.cta.y % p.cluster.y; }},
    {"%cluster_ctaid.z", [](P p) -> uint64_t { return p.cta.z % p.cluster.z; }},
    {"%cluster_nctaid.x", [](P p) -> uint64_t { return p.cluster.x; }},
    {"%cluster_nctaid.y", [](P p) -> uint64_t { return p.cluster.y; }},
    {"%cluster_nctaid.z", [](P p) -> uint64_t { return p.cluster.z; }},
    {"%cluster_ctarank", [](P p) -> uint64_t { return cluster_rank(p); }},
    {"%cluster_nctarank", [](P p) -> uint64_t { return p.cluster.count(); }},
    {"%clusterid.x", [](P p) -> uint64_t { return p.cta.x / p.cluster.x; }},
    {"%clusterid.y", [](P p) -> uint64_t { return p.cta.y / p.cluster.y; }},
    {"%clusterid.z", [](P p) -> uint64_t { return p.cta.z / p.cluster.z; }},
    {"%nclusterid.x", [](P p) -> uint64_t { return p.grid.x / p.cluster.x; }},
    {"%nclusterid.y", [](P p) -> uint64_t { return p.grid.y / p.cluster.y; }},
    {"%nclusterid.z", [](P p) -> uint64_t { return p.grid.z / p.cluster.z; }},
};

}  // namespace

const SpecialRegister* find_special_register(std::string_view name) {
  for (const SpecialRegister& row : SPECIALS) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

}  // namespace archflash::sim
