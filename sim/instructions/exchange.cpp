// Exchanges between the lanes of a warp: shfl, vote, match, redux, elect.
#include <algorithm>
#include <bit>

#include "sim/load/builder.h"
#include "sim/numerics/float.h"
#include "sim/run/cta.h"

namespace archflash::sim {
namespace {

// Calls f for each group of lanes that name the same members: each acts on its own.
template <class F>
void for_each_group(Warp& warp, Ref member_operand, uint32_t mask, F f) {
  const uint32_t* members = warp.lanes<const uint32_t>(member_operand);
  while (mask != 0) {
    const uint32_t named = members[std::countr_zero(mask)];
    uint32_t group = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      if (members[lane] == named) group |= 1u << lane;
    }
    mask &= ~group;
    f(group);
  }
}

enum class Shuffle : uint8_t { Up, Down, Bfly, Idx };

// Operands: d, p, a, b, c, members.
template <Shuffle MODE>
void run_shfl(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* a = warp.lanes<const uint32_t>(instruction.operands[2]);
  const uint32_t* b = warp.lanes<const uint32_t>(instruction.operands[3]);
  const uint32_t* c = warp.lanes<const uint32_t>(instruction.operands[4]);
  uint32_t result[LANES];
  uint32_t valid = 0, absent = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const int segment = static_cast<int>(c[lane] >> 8 & 31), clamp = static_cast<int>(c[lane] & 31);
    const int by = static_cast<int>(b[lane] & 31);
    const int highest = (lane & segment) | (clamp & ~segment & 31);
    int from = MODE == Shuffle::Up     ? lane - by
               : MODE == Shuffle::Down ? lane + by
               : MODE == Shuffle::Bfly ? lane ^ by
                                       : (lane & segment) | (by & ~segment & 31);
    const bool inside = MODE == Shuffle::Up ? from >= highest : from <= highest;
    if (inside)
      valid |= 1u << lane;
    else
      from = lane;
    if (!(mask >> from & 1)) absent |= 1u << lane;
    result[lane] = a[from];
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    d[lane] = absent >> lane & 1 ? 0xFFFFFFFFu : result[lane];
  }
  uint32_t& p = warp.predicate(instruction.operands[1]);
  p = (p & ~mask) | valid;
  if (absent != 0) {
    warp.cta().report(Severity::Lint, warp, std::countr_zero(absent), "shuffle",
                      "reads a lane that does not take part: its value is unspecified");
  }
}
void build_shfl(Builder& b) {
  b.destination_with_predicate({'b', 32});
  b.source({'b', 32});
  b.source({'b', 32});
  b.source({'b', 32});
  b.source({'b', 32});
  b.instruction.converge = Converge::Members;
  b.instruction.converge_operand = 5;
  b.handler(b.has("up")     ? &run_shfl<Shuffle::Up>
            : b.has("down") ? &run_shfl<Shuffle::Down>
            : b.has("bfly") ? &run_shfl<Shuffle::Bfly>
                            : &run_shfl<Shuffle::Idx>,
            Class::Shuffle);
}

constexpr int64_t VOTE_ALL = 0, VOTE_ANY = 1, VOTE_UNI = 2, VOTE_BALLOT = 3;

// Operands: d, predicate, members.
void run_vote(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t votes = warp.predicate(instruction.operands[1]);
  if (instruction.flags & Builder::NEGATED) votes = ~votes;
  for_each_group(warp, instruction.operands[2], mask, [&](uint32_t group) {
    const uint32_t mine = votes & group;
    if (instruction.offset == VOTE_BALLOT) {
      uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
      for (uint32_t rest = group; rest != 0; rest &= rest - 1) d[std::countr_zero(rest)] = mine;
      return;
    }
    const bool result = instruction.offset == VOTE_ALL   ? mine == group
                        : instruction.offset == VOTE_ANY ? mine != 0
                                                         : mine == 0 || mine == group;
    uint32_t& p = warp.predicate(instruction.operands[0]);
    p = result ? p | group : p & ~group;
  });
}
void build_vote(Builder& b) {
  const bool ballot = b.has("ballot");
  if (ballot)
    b.destination({'b', 32});
  else
    b.predicate_destination();
  b.predicate_source();
  b.source({'b', 32});
  b.instruction.offset = ballot         ? VOTE_BALLOT
                         : b.has("all") ? VOTE_ALL
                         : b.has("any") ? VOTE_ANY
                                        : VOTE_UNI;
  b.instruction.converge = Converge::Members;
  b.instruction.converge_operand = 2;
  b.handler(&run_vote, Class::Shuffle);
}

void run_activemask(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) d[std::countr_zero(rest)] = mask;
}
void build_activemask(Builder& b) {
  b.destination({'b', 32});
  b.handler(&run_activemask, Class::Shuffle);
}

// Operands: d, p, a, members.
template <class T>
void run_match(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const T* a = warp.lanes<const T>(instruction.operands[2]);
  const bool all = instruction.offset != 0;
  for_each_group(warp, instruction.operands[3], mask, [&](uint32_t group) {
    const T first = a[std::countr_zero(group)];
    bool same = true;
    uint32_t equal[LANES];
    for (uint32_t rest = group; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      same = same && a[lane] == first;
      equal[lane] = 0;
      for (uint32_t others = group; others != 0; others &= others - 1) {
        const int other = std::countr_zero(others);
        if (a[other] == a[lane]) equal[lane] |= 1u << other;
      }
    }
    for (uint32_t rest = group; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      d[lane] = !all ? equal[lane] : same ? group : 0;
    }
    if (all) {
      uint32_t& p = warp.predicate(instruction.operands[1]);
      p = same ? p | group : p & ~group;
    }
  });
}
void build_match(Builder& b) {
  const Type t = b.type(2);
  if (b.has("all")) {
    b.destination_with_predicate({'b', 32});
    b.instruction.offset = 1;
  } else {
    b.destination({'b', 32});
    b.add_scratch(1);
  }
  b.source(t);
  b.source({'b', 32});
  b.instruction.converge = Converge::Members;
  b.instruction.converge_operand = 3;
  b.handler(t.bits == 64 ? &run_match<uint64_t> : &run_match<uint32_t>, Class::Shuffle);
}

struct Reduction {
  std::string_view name;
  std::string_view kinds;  // of types
  uint32_t (*combine)(uint32_t x, uint32_t y, MinMaxMode mode);
};
using U = uint32_t;
using M = MinMaxMode;
constexpr Reduction REDUCTIONS[] = {
    {"add", "us", [](U x, U y, M) -> U { return x + y; }},
    {"and", "b", [](U x, U y, M) -> U { return x & y; }},
    {"or", "b", [](U x, U y, M) -> U { return x | y; }},
    {"xor", "b", [](U x, U y, M) -> U { return x ^ y; }},
    {"min", "u", [](U x, U y, M) -> U { return std::min(x, y); }},
    {"max", "u", [](U x, U y, M) -> U { return std::max(x, y); }},
    {"min", "s", [](U x, U y, M) -> U { return std::min<int32_t>(x, y); }},
    {"max", "s", [](U x, U y, M) -> U { return std::max<int32_t>(x, y); }},
    {"min", "f",
     [](U x, U y, M mode) -> U { return bits_of(min_f32(f32_of(x), f32_of(y), mode)); }},
    {"max", "f",
     [](U x, U y, M mode) -> U { return bits_of(max_f32(f32_of(x), f32_of(y), mode)); }},
};
constexpr uint32_t REDUX_ABS = 1, REDUX_NAN = 2;

// Operands: d, a, members.
void run_redux(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& reduction = *static_cast<const Reduction*>(instruction.extra);
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* a = warp.lanes<const uint32_t>(instruction.operands[1]);
  for_each_group(warp, instruction.operands[2], mask, [&](uint32_t group) {
    const auto value = [&](int lane) {
      return instruction.flags & REDUX_ABS ? a[lane] & 0x7FFFFFFFu : a[lane];
    };
    const MinMaxMode mode{false, (instruction.flags & REDUX_NAN) != 0, false};
    uint32_t result = value(std::countr_zero(group));
    for (uint32_t rest = group & (group - 1); rest != 0; rest &= rest - 1)
      result = reduction.combine(result, value(std::countr_zero(rest)), mode);
    for (uint32_t rest = group; rest != 0; rest &= rest - 1) d[std::countr_zero(rest)] = result;
  });
}
void build_redux(Builder& b) {
  const Type t = b.type(4);
  for (const Reduction& row : REDUCTIONS) {
    if (b.slot(1) == row.name && row.kinds.find(t.kind) != row.kinds.npos)
      b.instruction.extra = &row;
  }
  if (b.instruction.extra == nullptr) b.fail("no such reduction of this type");
  if (t.kind != 'f' && (b.has("abs") || b.has("NaN"))) b.fail(".abs and .NaN are for .f32");
  b.destination(t);
  b.source(t);
  b.source({'b', 32});
  b.instruction.flags |= (b.has("abs") ? REDUX_ABS : 0) | (b.has("NaN") ? REDUX_NAN : 0);
  b.instruction.converge = Converge::Members;
  b.instruction.converge_operand = 2;
  b.handler(&run_redux, Class::Shuffle);
}

// Operands: d, p, members. The leader is the lowest member that takes part.
void run_elect(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  uint32_t& p = warp.predicate(instruction.operands[1]);
  for_each_group(warp, instruction.operands[2], mask, [&](uint32_t group) {
    const int leader = std::countr_zero(group);
    for (uint32_t rest = group; rest != 0; rest &= rest - 1) {
      d[std::countr_zero(rest)] = static_cast<uint32_t>(leader);
    }
    p = (p & ~group) | 1u << leader;
  });
}
void build_elect(Builder& b) {
  b.destination_with_predicate({'b', 32});
  b.source({'b', 32});
  b.instruction.converge = Converge::Members;
  b.instruction.converge_operand = 2;
  b.handler(&run_elect, Class::Shuffle);
}

constexpr Form FORMS[] = {
    {"shfl", "sync up|down|bfly|idx b32", build_shfl},
    {"vote", "sync all|any|uni pred", build_vote},
    {"vote", "sync ballot b32", build_vote},
    {"activemask", "b32", build_activemask},
    {"elect", "sync", build_elect},
    {"match", "any|all sync b32|b64", build_match},
    {"redux", "sync add|min|max|and|or|xor ?abs ?NaN u32|s32|b32|f32", build_redux},
};

}  // namespace

std::span<const Form> exchange_forms() { return FORMS; }

}  // namespace archflash::sim
