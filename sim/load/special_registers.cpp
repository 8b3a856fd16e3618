#include "sim/load/special_registers.h"

namespace archflash::sim {
namespace {

constexpr SpecialRegister SPECIALS[] = {
    {"%tid.x", Special::TidX, 32},
    {"%tid.y", Special::TidY, 32},
    {"%tid.z", Special::TidZ, 32},
    {"%ntid.x", Special::NtidX, 32},
    {"%ntid.y", Special::NtidY, 32},
    {"%ntid.z", Special::NtidZ, 32},
    {"%ctaid.x", Special::CtaidX, 32},
    {"%ctaid.y", Special::CtaidY, 32},
    {"%ctaid.z", Special::CtaidZ, 32},
    {"%nctaid.x", Special::NctaidX, 32},
    {"%nctaid.y", Special::NctaidY, 32},
    {"%nctaid.z", Special::NctaidZ, 32},
    {"%laneid", Special::LaneId, 32},
    {"%warpid", Special::WarpId, 32},
    {"%nwarpid", Special::NwarpId, 32},
    {"%smid", Special::SmId, 32},
    {"%nsmid", Special::NsmId, 32},
    {"%gridid", Special::GridId, 64},
    {"%lanemask_eq", Special::LanemaskEq, 32},
    {"%lanemask_le", Special::LanemaskLe, 32},
    {"%lanemask_lt", Special::LanemaskLt, 32},
    {"%lanemask_ge", Special::LanemaskGe, 32},
    {"%lanemask_gt", Special::LanemaskGt, 32},
    {"%dynamic_smem_size", Special::DynamicSmemSize, 32},
    {"%total_smem_size", Special::TotalSmemSize, 32},
    {"%cluster_ctaid.x", Special::ClusterCtaidX, 32},
    {"%cluster_ctaid.y", Special::ClusterCtaidY, 32},
    {"%cluster_ctaid.z", Special::ClusterCtaidZ, 32},
    {"%cluster_nctaid.x", Special::ClusterNctaidX, 32},
    {"%cluster_nctaid.y", Special::ClusterNctaidY, 32},
    {"%cluster_nctaid.z", Special::ClusterNctaidZ, 32},
    {"%cluster_ctarank", Special::ClusterCtarank, 32},
    {"%cluster_nctarank", Special::ClusterNctarank, 32},
    {"%clusterid.x", Special::ClusteridX, 32},
    {"%clusterid.y", Special::ClusteridY, 32},
    {"%clusterid.z", Special::ClusteridZ, 32},
    {"%nclusterid.x", Special::NclusteridX, 32},
    {"%nclusterid.y", Special::NclusteridY, 32},
    {"%nclusterid.z", Special::NclusteridZ, 32},
};

}  // namespace

const SpecialRegister* find_special_register(std::string_view name) {
  for (const SpecialRegister& row : SPECIALS) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

}  // namespace archflash::sim
