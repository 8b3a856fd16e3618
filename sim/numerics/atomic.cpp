#include "sim/numerics/atomic.h"

namespace archflash::sim {

Atomic atomic_named(std::string_view name) {
  static const struct {
    const char* name;
    Atomic operation;
  } OPERATIONS[] = {{"add", Atomic::Add}, {"min", Atomic::Min}, {"max", Atomic::Max},
                    {"inc", Atomic::Inc}, {"dec", Atomic::Dec}, {"and", Atomic::And},
                    {"or", Atomic::Or},   {"xor", Atomic::Xor}, {"exch", Atomic::Exch}};
  for (const auto& row : OPERATIONS) {
    if (name == row.name) return row.operation;
  }
  return Atomic::Cas;
}

uint64_t apply_atomic(const AtomicUpdate& update, uint64_t old, uint64_t x, uint64_t y) {
  const auto narrow = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const auto pair = [&](auto f) { return uint64_t{packed(f, narrow(old), narrow(x))}; };
  switch (update.operation) {
    case Atomic::Exch:
      return x;
    case Atomic::Cas:
      return old == x ? y : old;
    case Atomic::And:
      return old & x;
    case Atomic::Or:
      return old | x;
    case Atomic::Xor:
      return old ^ x;
    case Atomic::Inc:
      return narrow(old) >= narrow(x) ? 0 : narrow(old) + 1;
    case Atomic::Dec:
      return narrow(old) == 0 || narrow(old) > narrow(x) ? narrow(x) : narrow(old) - 1;
    case Atomic::Add:
      switch (update.type) {
        case NumericType::F32:
          return bits_of(add_f32(f32_of(narrow(old)), f32_of(narrow(x)), {Round::RN, update.ftz}));
        case NumericType::F64:
          return bits_of(add_f64(f64_of(old), f64_of(x)));
        case NumericType::F16:
          return add_f16(static_cast<uint16_t>(old), static_cast<uint16_t>(x));
        case NumericType::BF16:
          return add_bf16(static_cast<uint16_t>(old), static_cast<uint16_t>(x));
        case NumericType::F16X2:
          return pair([](uint16_t p, uint16_t q) { return add_f16(p, q); });
        case NumericType::BF16X2:
          return pair([](uint16_t p, uint16_t q) { return add_bf16(p, q); });
        default:
          return old + x;
      }
    case Atomic::Min:
    case Atomic::Max: {
      const bool maximum = update.operation == Atomic::Max;
      const auto choose = [&](auto p, auto q) { return (maximum ? q > p : q < p) ? q : p; };
      switch (update.type) {
        case NumericType::S32:
          return narrow(
              static_cast<uint64_t>(choose(static_cast<int32_t>(old), static_cast<int32_t>(x))));
        case NumericType::S64:
          return static_cast<uint64_t>(choose(static_cast<int64_t>(old), static_cast<int64_t>(x)));
        case NumericType::U32:
          return choose(narrow(old), narrow(x));
        case NumericType::F16:
          return maximum ? max_f16(static_cast<uint16_t>(old), static_cast<uint16_t>(x))
                         : min_f16(static_cast<uint16_t>(old), static_cast<uint16_t>(x));
        case NumericType::BF16:
          return maximum ? max_bf16(static_cast<uint16_t>(old), static_cast<uint16_t>(x))
                         : min_bf16(static_cast<uint16_t>(old), static_cast<uint16_t>(x));
        case NumericType::F16X2:
          return maximum ? pair([](uint16_t p, uint16_t q) { return max_f16(p, q); })
                         : pair([](uint16_t p, uint16_t q) { return min_f16(p, q); });
        case NumericType::BF16X2:
          return maximum ? pair([](uint16_t p, uint16_t q) { return max_bf16(p, q); })
                         : pair([](uint16_t p, uint16_t q) { return min_bf16(p, q); });
        default:
          return choose(old, x);
      }
    }
  }
  return old;
}

}  // namespace archflash::sim
