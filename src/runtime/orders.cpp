#include "runtime/orders.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <utility>
#include <vector>

#include "runtime/call_path.h"
#include "runtime/kept_object.h"
#include "runtime/kinds.h"
#include "runtime/plan_cache.h"

namespace archflash {
namespace {

using Kernels = std::vector<std::pair<std::string, bool>>;
struct Order {
  Device device;
  Kernels before, behind;
};
using KeptOrder = std::optional<Order>;  // nothing: Python decides each problem

static_assert(sizeof(Kind) == sizeof(Problem) + 8 * sizeof(int64_t));

PlanCache<Kind, KeptOrder>& orders() {
  static auto& instance = *new PlanCache<Kind, KeptOrder>;
  return instance;
}

std::map<std::pair<int, int64_t>, KeptOrder>& orders_of_gradients() {
  static auto& instance = *new std::map<std::pair<int, int64_t>, KeptOrder>;
  return instance;
}

constexpr auto order_function = kept_object<[] {}>;

constexpr auto gradients_function = kept_object<[] {}>;

// What Python has told: a tuple of the members, the last of which may be missing.
KeptOrder read(const nb::object& told) {
  if (told.is_none()) return std::nullopt;
  const bool has_behind = nb::len(told) > 2;
  return Order{nb::cast<Device>(told[0]), nb::cast<Kernels>(told[1]),
               has_behind ? nb::cast<Kernels>(told[2]) : Kernels()};
}

std::shared_ptr<LaunchPlan> first(const Kernels& kernels, const Device& device,
                                  const PlanBy& plan_by) {
  for (const auto& [name, summarizing] : kernels) {
    PlanResult result = plan_by(name, device);
    auto* plan = std::get_if<LaunchPlan>(&result);
    if (plan == nullptr || (summarizing && !plan->tile.summarizes_masks)) continue;
    return std::make_shared<LaunchPlan>(std::move(*plan));
  }
  return nullptr;
}

}  // namespace

void set_order(nb::object function) { order_function() = std::move(function); }

void set_order_of_gradients(nb::object function) { gradients_function() = std::move(function); }

std::optional<std::shared_ptr<LaunchPlan>> plan_in_order(const Problem& problem, int device_index,
                                                         nb::handle implementation,
                                                         const PlanBy& plan_by) {
  if (!order_function().is_valid() || order_function().is_none()) return std::nullopt;
  const CacheKey<Kind> key{kind_of(problem), device_index, forced_index(implementation)};
  const KeptOrder* order = orders().find(key);
  if (order == nullptr)
    order = orders().insert(key, read(order_function()(problem, device_index, implementation)));
  if (!*order) return std::nullopt;
  const auto& [device, before, behind] = **order;
  if (auto plan = first(before, device, plan_by)) return plan;
  if (first(behind, device, plan_by)) return nullptr;
  return std::nullopt;
}

std::shared_ptr<LaunchPlan> plan_gradients_in_order(int device_index, nb::handle implementation,
                                                    const PlanBy& plan_by) {
  if (!gradients_function().is_valid() || gradients_function().is_none()) return nullptr;
  const std::pair key(device_index, forced_index(implementation));
  auto found = orders_of_gradients().find(key);
  if (found == orders_of_gradients().end()) {
    KeptOrder order = read(gradients_function()(device_index, implementation));
    found = orders_of_gradients().insert_or_assign(key, std::move(order)).first;
  }
  return found->second ? first(found->second->before, found->second->device, plan_by) : nullptr;
}

void clear_orders() {
  orders().clear();
  orders_of_gradients().clear();
}

}  // namespace archflash
