#include "runtime/serialize.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <set>
#include <tuple>

#include "runtime/bind.h"
#include "runtime/tensors.h"
#include "runtime/text.h"

namespace archflash {
namespace nb = nanobind;
namespace {

// Each struct's fields are listed once; Writer and Reader walk the same list.
template <class F>
void fields(Strides& s, F&& f) {
  f("batch", s.batch), f("head", s.head), f("row", s.row);
}
template <class F>
void fields(Problem& p, F&& f) {
  f("dtype", p.dtype), f("out_dtype", p.out_dtype);
  f("batch", p.batch), f("heads_q", p.heads_q), f("heads_kv", p.heads_kv), f("nq", p.nq),
      f("nk", p.nk);
  f("d", p.d), f("dv", p.dv), f("max_seqlen_q", p.max_seqlen_q), f("max_seqlen_k", p.max_seqlen_k);
  f("q", p.q), f("k", p.k), f("v", p.v), f("out", p.out);
  f("q_descale", p.q_descale), f("k_descale", p.k_descale), f("v_descale", p.v_descale);
  f("q_offset", p.q_offset), f("window_left", p.window_left), f("window_right", p.window_right);
  f("scale", p.scale), f("softcap", p.softcap), f("approximate", p.approximate),
      f("num_splits", p.num_splits);
  f("q_align", p.q_align), f("k_align", p.k_align), f("v_align", p.v_align),
      f("out_align", p.out_align);
  f("q_unit", p.q_unit), f("k_unit", p.k_unit), f("v_unit", p.v_unit), f("out_unit", p.out_unit);
  f("causal", p.causal), f("varlen", p.varlen), f("q_offset_tensor", p.q_offset_tensor);
  f("q_offset_default", p.q_offset_default), f("sinks", p.sinks), f("mask", p.mask),
      f("descale", p.descale);
  f("want_lse", p.want_lse), f("needs_grad", p.needs_grad), f("on_cuda", p.on_cuda);
}
template <class F>
void fields(Device& d, F&& f) {
  f("name", d.name), f("major", d.major), f("minor", d.minor), f("sm_count", d.sm_count);
  f("shared_per_block", d.shared_per_block), f("shared_per_sm", d.shared_per_sm),
      f("l2_bytes", d.l2_bytes);
  f("registers_per_sm", d.registers_per_sm), f("threads_per_sm", d.threads_per_sm);
}
template <class F>
void fields(PointerSlot& s, F&& f) {
  f("operand", s.operand), f("offset", s.offset), f("addend", s.addend);
}
template <class F>
void fields(TensorMapSpec& s, F&& f) {
  f("operand", s.operand), f("offset", s.offset), f("addend", s.addend), f("dtype", s.dtype),
      f("swizzle", s.swizzle);
  f("nan_fill", s.nan_fill), f("dims", s.dims), f("strides", s.strides), f("box", s.box);
}
template <class F>
void fields(Launch& l, F&& f) {
  f("kernel", l.kernel), f("image", l.image), f("grid", l.grid), f("cluster", l.cluster),
      f("block", l.block);
  f("shared_bytes", l.shared_bytes), f("params", l.params), f("pointers", l.pointers),
      f("tensor_maps", l.tensor_maps);
}
template <class F>
void fields(LaunchPlan& p, F&& f) {
  f("implementation", p.implementation), f("problem", p.problem), f("device", p.device),
      f("launches", p.launches);
  f("workspace_bytes", p.workspace_bytes), f("code", p.code);
}

template <class T>
concept Struct = requires(T& value) { fields(value, [](const char*, auto&) {}); };

// Enumerations travel by name; bytes as hexadecimal digits; 64-bit "unbounded" as None.
template <class Enum, class Name>
Enum enum_by_name(const std::string& text, int count, Name name, const char* what) {
  for (int i = 0; i < count; ++i) {
    if (text == name(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw nb::value_error(join(what, " '", text, "' is not known").c_str());
}

template <Struct T>
nb::dict write(const T& value);
inline nb::object write(const std::string& value) { return nb::cast(value); }
inline nb::object write(double value) { return nb::cast(value); }
inline nb::object write(bool value) { return nb::cast(value); }
inline nb::object write(int32_t value) { return nb::cast(value); }
inline nb::object write(int64_t value) { return value == UNBOUNDED ? nb::none() : nb::cast(value); }
inline nb::object write(DType value) { return nb::cast(dtype_name(value)); }
inline nb::object write(Operand value) { return nb::cast(operand_name(value)); }
inline nb::object write(Swizzle value) { return nb::cast(static_cast<int>(value)); }
inline nb::object write(const std::vector<uint8_t>& bytes) {
  constexpr char DIGITS[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : bytes) text += {DIGITS[byte >> 4], DIGITS[byte & 15]};
  return nb::cast(text);
}
template <class T>
nb::object write_all(const T& values) {
  nb::list list;
  for (const auto& value : values) list.append(write(value));
  return list;
}
template <class T>
nb::object write(const std::vector<T>& values) {
  return write_all(values);
}
template <class T, size_t N>
nb::object write(const std::array<T, N>& values) {
  return write_all(values);
}
template <Struct T>
nb::dict write(const T& value) {
  nb::dict dict;
  fields(const_cast<T&>(value), [&](const char* name, auto& field) { dict[name] = write(field); });
  return dict;
}

template <Struct T>
void read(nb::handle object, T& value);
template <class T>
  requires std::is_arithmetic_v<T> || std::is_same_v<T, std::string>
void read(nb::handle object, T& value) {
  if constexpr (std::is_same_v<T, int64_t>) {
    if (object.is_none()) {
      value = UNBOUNDED;
      return;
    }
  }
  value = nb::cast<T>(object);
}
inline void read(nb::handle object, DType& value) {
  value = enum_by_name<DType>(nb::cast<std::string>(object), DTYPE_COUNT, dtype_name, "dtype");
}
inline void read(nb::handle object, Operand& value) {
  value =
      enum_by_name<Operand>(nb::cast<std::string>(object), OPERAND_COUNT, operand_name, "operand");
}
inline void read(nb::handle object, Swizzle& value) {
  const int number = nb::cast<int>(object);
  if (number < 0 || number > 3)
    throw nb::value_error(join("swizzle ", number, " is not known: 0 to 3 are").c_str());
  value = static_cast<Swizzle>(number);
}
inline void read(nb::handle object, std::vector<uint8_t>& bytes) {
  const std::string text = nb::cast<std::string>(object);
  if (text.size() % 2 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw nb::value_error("params must be an even number of lower-case hexadecimal digits");
  }
  bytes.clear();
  for (size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
}
template <class T>
void read(nb::handle object, std::vector<T>& values) {
  values.clear();
  for (nb::handle item : object) read(item, values.emplace_back());
}
template <class T, size_t N>
void read(nb::handle object, std::array<T, N>& values) {
  if (nb::len(object) != N) throw nb::cast_error();  // reported with the name of the field
  for (size_t i = 0; i < N; ++i) read(object[i], values[i]);
}
template <Struct T>
void read(nb::handle object, T& value) {
  if (!nb::isinstance<nb::dict>(object))
    throw nb::value_error("expected an object with named fields");
  const nb::dict dict = nb::borrow<nb::dict>(object);
  std::set<std::string> known;
  fields(value, [&](const char* name, auto& field) {
    known.insert(name);
    if (!dict.contains(name)) throw nb::value_error(join("field '", name, "' is missing").c_str());
    try {
      read(dict[name], field);
    } catch (const nb::cast_error&) {
      throw nb::value_error(
          join("field '", name, "' is ", given(dict[name]), ": the wrong kind").c_str());
    } catch (const nb::python_error&) {
      throw nb::value_error(
          join("field '", name, "' is ", given(dict[name]), ": the wrong kind").c_str());
    }
  });
  for (const std::pair<nb::handle, nb::handle> item : dict) {
    const std::string name = nb::cast<std::string>(nb::str(item.first));
    if (!known.contains(name))
      throw nb::value_error(join("field '", name, "' is not known").c_str());
  }
}

template <class T>
T from_dict(const nb::dict& dict) {
  T value{};
  read(nb::handle(dict), value);
  return value;
}

// A problem from outside must not make plan() divide by zero or overflow.
void check_problem(const Problem& p) {
  constexpr int64_t LIMIT = int64_t{1} << 60;  // of positions, as a call has it
  const std::tuple<const char*, int64_t, bool> positions[] = {
      {"q_offset", p.q_offset, p.q_offset > -LIMIT && p.q_offset < LIMIT},
      {"window_left", p.window_left,
       p.window_left == UNBOUNDED || (p.window_left >= 0 && p.window_left < LIMIT)},
      {"window_right", p.window_right,
       p.window_right == UNBOUNDED || (p.window_right >= 0 && p.window_right < LIMIT)}};
  for (const auto& [name, position, allowed] : positions) {
    if (!allowed)
      throw nb::value_error(join("field '", name, "' is ", position,
                                 ": an offset must lie between -2^60 and 2^60, the side of a "
                                 "window between 0 and 2^60 or be null")
                                .c_str());
  }
  const std::pair<const char*, int64_t> sizes[] = {
      {"batch", p.batch}, {"heads_q", p.heads_q}, {"heads_kv", p.heads_kv},
      {"nq", p.nq},       {"nk", p.nk},           {"d", p.d},
      {"dv", p.dv}};
  for (const auto& [name, size] : sizes) {
    if (size < 0 || size == UNBOUNDED)
      throw nb::value_error(join("field '", name, "' is ", size, ": it must be a size").c_str());
  }
  const std::pair<const char*, std::pair<int64_t, int64_t>> codes[] = {
      {"sinks", {p.sinks, DTYPE_COUNT}},
      {"mask", {p.mask, 2}},
      {"descale", {p.descale, 15}},
      {"approximate", {p.approximate, 1}},
      {"num_splits", {p.num_splits, int64_t{1} << 60}}};
  for (const auto& [name, code] : codes) {
    if (code.first < 0 || code.first > code.second)
      throw nb::value_error(
          join("field '", name, "' is ", code.first, ": 0 to ", code.second).c_str());
  }
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    throw nb::value_error(
        join("field 'heads_kv' is ", p.heads_kv, ": it must divide heads_q = ", p.heads_q).c_str());
  }
}

// A plan from outside must not make bind() write past the block or read what is not there.
void check_plan(const LaunchPlan& plan) {
  check_problem(plan.problem);
  for (const Launch& launch : plan.launches) {
    if (launch.params.size() > MAX_PARAMETER_BYTES) {
      throw nb::value_error(
          join("field 'params' has ", launch.params.size(), " bytes: at most ", MAX_PARAMETER_BYTES)
              .c_str());
    }
    auto fits = [&](int64_t offset, int64_t bytes) {
      return offset >= 0 && offset + bytes <= static_cast<int64_t>(launch.params.size());
    };
    for (const PointerSlot& slot : launch.pointers) {
      if (!fits(slot.offset, 8))
        throw nb::value_error(
            join("pointer slot at ", slot.offset, " lies outside the parameters").c_str());
    }
    for (const TensorMapSpec& spec : launch.tensor_maps) {
      if (!fits(spec.offset, 128) || spec.offset % 64) {
        throw nb::value_error(join("tensor map at ", spec.offset,
                                   " is not 128 bytes inside the parameters, 64-byte aligned")
                                  .c_str());
      }
    }
  }
}

}  // namespace

nb::dict to_dict(const Problem& problem) { return write(problem); }
nb::dict to_dict(const Device& device) { return write(device); }
nb::dict to_dict(const LaunchPlan& plan) { return write(plan); }

Problem problem_from_dict(const nb::dict& dict) {
  Problem problem;
  std::memset(static_cast<void*>(&problem), 0, sizeof(problem));
  read(nb::handle(dict), problem);
  check_problem(problem);
  return problem;
}
Device device_from_dict(const nb::dict& dict) { return from_dict<Device>(dict); }
LaunchPlan plan_from_dict(const nb::dict& dict) {
  LaunchPlan plan = from_dict<LaunchPlan>(dict);
  check_plan(plan);
  return plan;
}

}  // namespace archflash
