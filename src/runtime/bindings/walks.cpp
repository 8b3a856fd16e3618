#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>

#include "common/planning/core_set.h"
#include "common/planning/makespan.h"
#include "common/planning/order.h"
#include "runtime/bindings/bindings.h"
#include "runtime/text.h"

namespace archflash {
namespace {

using Lengths = std::vector<int64_t>;

// Throws std::invalid_argument unless the walk of this plan can be modelled, with these lengths of
// its packed sequences.
void check_walk(const LaunchPlan& plan, const Lengths& q, const Lengths& k) {
  constexpr int64_t MOST_TILES = 1 << 26;  // gigabytes, and seconds
  const Problem& problem = plan.problem;
  if (plan.tile.name.empty())
    throw std::invalid_argument("this plan computes nothing by tiles: it has no walk");
  const int64_t shares = plan.tile.splits * plan.tile.v_slices;
  const int64_t parts =
      plan.tile.part_rows > 0 ? core::ceil_div(plan.tile.block_q, plan.tile.part_rows) : 1;
  if (plan.tile.tiles > MOST_TILES / shares / parts) {
    throw std::invalid_argument(join("a walk over ", plan.tile.tiles, " tiles in ", shares,
                                     " shares: the model takes up to ", MOST_TILES, " of them"));
  }
  const size_t sequences = problem.varlen ? static_cast<size_t>(problem.batch) : 0;
  const auto check = [&](const char* name, const Lengths& lengths, int64_t rows) {
    if (lengths.size() != sequences) {
      throw std::invalid_argument(join(name, " has ", lengths.size(), " lengths: this plan has ",
                                       sequences,
                                       " packed sequences, and each of them one length"));
    }
    for (const int64_t length : lengths) {
      if (length < 0 || length > rows) {
        throw std::invalid_argument(join(name, " has the length ", length,
                                         ": all sequences together have up to ", rows, " rows"));
      }
      rows -= length;
    }
  };
  check("q_lengths", q, problem.nq);
  check("k_lengths", k, problem.nk);
}

}  // namespace

void bind_walks(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<core::Makespan>(m, "Makespan",
                             "How evenly a walk over row tiles fills a GPU: a model.")
      .def_ro("workers", &core::Makespan::workers, "CTAs, or pairs of them, that run at a time.")
      .def_ro("time", &core::Makespan::time, "Until the last one is done, in keys.")
      .def_ro("ideal", &core::Makespan::ideal,
              "If the work were shared out evenly; at least the longest tile.")
      .def_prop_ro("share", &core::Makespan::share, "ideal / time.");
  m.def(
      "makespan",
      [](const LaunchPlan& plan, const Lengths& q, const Lengths& k) {
        check_walk(plan, q, k);
        return core::makespan(plan, {q, k});
      },
      "plan"_a, "q_lengths"_a = Lengths(), "k_lengths"_a = Lengths(),
      "The model of a plan's first launch; with cu_seqlens for sequences of these lengths.");
  m.def(
      "makespan_of",
      [](const std::vector<double>& times, int64_t workers, bool rounds) {
        constexpr int64_t MOST_WORKERS = int64_t{1} << 32;
        if (workers < 1 || workers > MOST_WORKERS) {
          throw std::invalid_argument(
              join(workers, " workers: a walk has from 1 to ", MOST_WORKERS));
        }
        for (const double time : times) {
          if (!std::isfinite(time) || time < 0)
            throw std::invalid_argument(
                join("a tile that takes ", time, ": times are finite and not negative"));
        }
        return core::makespan(times, workers, rounds ? core::Walk::Rounds : core::Walk::Queue);
      },
      "times"_a, "workers"_a, "rounds"_a,
      "The model of tiles in this order. 'rounds': workers take one tile each, every second time "
      "in reverse order; otherwise whoever is free first takes the next tile.");
  m.def(
      "tile_times",
      [](const LaunchPlan& plan, const Lengths& q, const Lengths& k) {
        check_walk(plan, q, k);
        std::vector<std::pair<int64_t, double>> tiles;
        for (const core::TileTime& tile : core::tile_times(plan, {q, k}))
          tiles.emplace_back(tile.kv_head, tile.time);
        return tiles;
      },
      "plan"_a, "q_lengths"_a = Lengths(), "k_lengths"_a = Lengths(),
      "The tiles of a plan's first launch in their order: (head of k, time in keys).");
  m.attr("TILE_KEYS") = core::TILE_KEYS;
  m.def(
      "reads_of_keys",
      [](const LaunchPlan& plan) {
        if (plan.problem.varlen)
          throw std::invalid_argument("packed sequences: there is no model of what they read");
        check_walk(plan, {}, {});
        return core::reads_of_keys(plan);
      },
      "plan"_a, "How often K and V come from memory, on average: a model.");
}

}  // namespace archflash
