#include "sim/units/pipe_order.h"

#include <algorithm>

namespace archflash::sim {

bool PipeOrder::Set::has(Kind kind, Clock clock) const {
  return std::any_of(last_.begin(), last_.end(),
                     [&](const Last& last) { return last.kind == kind && last.clock >= clock; });
}

void PipeOrder::Set::add(Kind kind, Clock clock) {
  for (Last& last : last_) {
    if (last.kind != kind) continue;
    last.clock = std::max(last.clock, clock);
    return;
  }
  last_.push_back({kind, clock});
}

void PipeOrder::Set::add(const Set& other) {
  for (const Last& last : other.last_) add(last.kind, last.clock);
}

void PipeOrder::issue(Kind kind, Clock clock) {
  before_ = {};
  if (kind == COPY) {
    copies_.add(kind, clock);
    return;
  }
  if (kind == SHIFT) {
    before_ = products_;
    shifts_.add(before_);
    shifts_.add(kind, clock);
    return;
  }
  auto chain = std::find_if(chains_.begin(), chains_.end(),
                            [&](const Chain& c) { return c.accumulator == kind; });
  if (chain == chains_.end()) chain = chains_.insert(chain, {kind, {}});
  before_ = chain->products;
  before_.add(copies_);
  before_.add(shifts_);
  chain->products = before_;
  chain->products.add(kind, clock);
  products_.add(chain->products);
}

}  // namespace archflash::sim
