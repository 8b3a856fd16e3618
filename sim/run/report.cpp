#include "sim/run/report.h"

#include <utility>

namespace archflash::sim {

void Findings::add(Finding finding) {
  for (Finding& known : list_) {
    if (known.kind == finding.kind && known.pc == finding.pc &&
        known.other_pc == finding.other_pc && known.severity == finding.severity) {
      known.count += finding.count;
      return;
    }
  }
  size_t& kept = kept_[static_cast<size_t>(finding.severity)];
  if (kept >= LIMIT) {
    dropped_ += finding.count;
    return;
  }
  ++kept;
  list_.push_back(std::move(finding));
}

void Findings::merge(const Findings& other) {
  for (const Finding& finding : other.list_) add(finding);
  dropped_ += other.dropped_;
}

}  // namespace archflash::sim
