// Builders of integer instructions whose handler is one generic lambda for all types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "sim/instructions/elementwise.h"
#include "sim/load/builder.h"

namespace archflash::sim {

// Calls make<T>() with the C++ type of a PTX integer type.
template <class Make>
Handler by_type(Builder& b, Type t, Make make) {
  const bool is_signed = t.kind == 's';
  switch (t.bits) {
    case 16:
      return is_signed ? make.template operator()<int16_t>() : make.template operator()<uint16_t>();
    case 32:
      return is_signed ? make.template operator()<int32_t>() : make.template operator()<uint32_t>();
    case 64:
      return is_signed ? make.template operator()<int64_t>() : make.template operator()<uint64_t>();
    default:
      b.fail("an integer type of this width");
  }
}

template <class T, size_t>
using Repeated = T;
template <auto OPERATION, class T, size_t... V, size_t... C>
Handler typed_handler(std::index_sequence<V...>, std::index_sequence<C...>) {
  return elementwise<[](Repeated<T, V>... x, Repeated<uint32_t, C>... n) -> T {
    return OPERATION(x..., n...);
  }>();
}

// An operation whose result and first VALUES operands have one integer type, and whose further
// COUNTS operands are .u32. OPERATION is a generic lambda, for every such type T a function that
// returns T.
template <int VALUES, auto OPERATION, int COUNTS = 0>
void build_typed(Builder& b, Type t, Class counted = Class::Integer) {
  b.destination(t);
  for (int i = 0; i < VALUES; ++i) b.source(t);
  for (int i = 0; i < COUNTS; ++i) b.source({'u', 32});
  const auto make = []<class T>() {
    return typed_handler<OPERATION, T>(std::make_index_sequence<VALUES>(),
                                       std::make_index_sequence<COUNTS>());
  };
  b.handler(by_type(b, t, make), counted);
}
// The builder of a form whose type stands in its slot SLOT.
template <size_t SLOT, int VALUES, auto OPERATION, int COUNTS = 0, Class CLASS = Class::Integer>
void build(Builder& b) {
  build_typed<VALUES, OPERATION, COUNTS>(b, b.type(SLOT), CLASS);
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
constexpr int BITS = 8 * sizeof(T);
// A type in which no promotion to int overflows.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

inline void operands(Builder& b, Type t, int sources) {
  b.destination(t);
  for (int i = 0; i < sources; ++i) b.source(t);
}

}  // namespace archflash::sim
