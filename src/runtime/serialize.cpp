#include "runtime/serialize.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "runtime/bind.h"
#include "runtime/checks.h"
#include "runtime/registry.h"
#include "runtime/wrong.h"

namespace archflash {
namespace nb = nanobind;
namespace {

// Each struct's fields are listed once; write() and read() walk the same list.
template <class F>
void fields(Strides& s, F&& f) {
  f("batch", s.batch), f("head", s.head), f("row", s.row);
}
template <class T, class F>
void fields(T& value, F&& f)
  requires requires { for_each_field(value, f); }
{
  for_each_field(value, f);
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
  f("shared_bytes", l.shared_bytes), f("uses_pdl", l.uses_pdl), f("of_batch", l.of_batch);
  f("params", l.params), f("pointers", l.pointers), f("tensor_maps", l.tensor_maps);
}
template <class F>
void fields(LaunchPlan& p, F&& f) {
  std::string version = ARCHFLASH_VERSION;  // of what wrote it
  f("version", version), f("implementation", p.implementation), f("problem", p.problem),
      f("device", p.device), f("tile", p.tile), f("launches", p.launches);
  f("workspace_bytes", p.workspace_bytes), f("zeroed_bytes", p.zeroed_bytes);
  f("counter_bytes", p.counter_bytes), f("code", p.code);
}

template <class T>
concept Struct = requires(T& value) { fields(value, [](const char*, auto&) {}); };

// Enumerations travel by name; bytes as hexadecimal digits; 64-bit "unbounded" as None.
template <Struct T>
nb::dict write(const T& value);
inline nb::object write(const std::string& value) { return nb::cast(value); }
inline nb::object write(double value) { return nb::cast(value); }
inline nb::object write(bool value) { return nb::cast(value); }
inline nb::object write(int32_t value) { return nb::cast(value); }
inline nb::object write(Flag value) { return nb::cast(value.value); }
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
template <class T>
nb::object write(const Extents<T>& values) {
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

// --- reading: takes only the types that write() gives; errors name the field by its `path` ---

// What was given, on one line and not long, whatever it is.
std::string shown(nb::handle object) {
  constexpr size_t LONGEST = 80;
  const nb::object text = nb::steal(PyObject_ASCII(object.ptr()));
  if (!text.is_valid()) {  // integers of thousands of digits, lists thousands deep
    PyErr_Clear();
    return join("a huge ", nb::cast<std::string>(object.type().attr("__name__")));
  }
  const std::string whole = nb::cast<std::string>(text);
  return whole.size() <= LONGEST ? whole : whole.substr(0, LONGEST) + "...";
}

template <class... Parts>
[[noreturn]] void refuse(const std::string& path, nb::handle given, const Parts&... must) {
  wrong_value("field '", path, "' is ", shown(given), ": it must be ", must...);
}

std::string field_of(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}
std::string item_of(const std::string& path, size_t index) { return join(path, '[', index, ']'); }

bool is_list(nb::handle object) {
  return PyList_CheckExact(object.ptr()) || PyTuple_CheckExact(object.ptr());
}

template <Struct T>
void read(nb::handle object, T& value, const std::string& path);
void read(nb::handle object, std::string& value, const std::string& path) {
  if (!PyUnicode_CheckExact(object.ptr()) || !nb::try_cast(object, value))
    refuse(path, object, "a text");
}
void read(nb::handle object, bool& value, const std::string& path) {
  if (!PyBool_Check(object.ptr())) refuse(path, object, "true or false");
  value = object.is(Py_True);
}
void read(nb::handle object, double& value, const std::string& path) {
  const bool takes = PyFloat_CheckExact(object.ptr()) || PyLong_CheckExact(object.ptr());
  value = takes ? PyFloat_AsDouble(object.ptr()) : 0;
  if (PyErr_Occurred()) PyErr_Clear(), value = std::numeric_limits<double>::infinity();
  if (!takes || !std::isfinite(value)) refuse(path, object, "a finite number");
}
template <class T>
  requires std::is_integral_v<T>
void read(nb::handle object, T& value, const std::string& path) {
  constexpr bool LONG = sizeof(T) == sizeof(int64_t);
  if (LONG && object.is_none()) {
    value = static_cast<T>(UNBOUNDED);
    return;
  }
  int overflow = 0;
  const bool takes = PyLong_CheckExact(object.ptr());
  const long long given = takes ? PyLong_AsLongLongAndOverflow(object.ptr(), &overflow) : 0;
  if (!takes || overflow != 0 || !std::in_range<T>(given))
    refuse(path, object, "an integer that fits ", 8 * sizeof(T), " bits");
  value = static_cast<T>(given);
}
void read(nb::handle object, Flag& flag, const std::string& path) {
  int32_t number = 0;
  read(object, number, path);
  flag.value = number;
}
// One of `count` named values.
template <class Enum, class Name>
void read_name(nb::handle object, Enum& value, int count, Name name, const std::string& path) {
  std::string text, all;
  read(object, text, path);
  for (int i = 0; i < count; ++i) {
    value = static_cast<Enum>(i);
    if (text == name(value)) return;
    all += join(i == 0 ? "" : ", ", name(value));
  }
  refuse(path, object, "one of ", all);
}
void read(nb::handle object, DType& value, const std::string& path) {
  read_name(object, value, DTYPE_COUNT, dtype_name, path);
}
void read(nb::handle object, Operand& value, const std::string& path) {
  read_name(object, value, OPERAND_COUNT, operand_name, path);
}
void read(nb::handle object, Swizzle& value, const std::string& path) {
  int32_t number = 0;
  read(object, number, path);
  if (number < 0 || number > 3) refuse(path, object, "0 to 3");
  value = static_cast<Swizzle>(number);
}
void read(nb::handle object, std::vector<uint8_t>& bytes, const std::string& path) {
  std::string text;
  read(object, text, path);
  if (text.size() % 2 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    refuse(path, object, "an even number of lower-case hexadecimal digits");
  bytes.clear();
  for (size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
}
template <class T>
void read(nb::handle object, std::vector<T>& values, const std::string& path) {
  if (!is_list(object)) refuse(path, object, "a list");
  values.clear();
  for (nb::handle item : object) {
    const std::string place = item_of(path, values.size());
    read(item, values.emplace_back(), place);
  }
}
template <class T>
void read(nb::handle object, Extents<T>& values, const std::string& path) {
  std::vector<T> all;
  read(object, all, path);
  if (all.size() > Extents<T>::MOST)
    refuse(path, object, "a list of at most ", Extents<T>::MOST, ", as a tensor map has dims");
  values = {};
  for (const T value : all) values.push_back(value);
}
template <class T, size_t N>
void read(nb::handle object, std::array<T, N>& values, const std::string& path) {
  if (!is_list(object) || nb::len(object) != N) refuse(path, object, "a list of ", N);
  for (size_t i = 0; i < N; ++i) read(object[i], values[i], item_of(path, i));
}

nb::dict as_dict(nb::handle object, const std::string& path) {
  if (PyDict_Check(object.ptr())) return nb::borrow<nb::dict>(object);
  if (!path.empty()) refuse(path, object, "an object with named fields");
  wrong_value(shown(object), " is no object with named fields");
}
template <class T>
void read_field(const nb::dict& dict, const char* name, T& value, const std::string& path) {
  const std::string place = field_of(path, name);
  if (!dict.contains(name)) wrong_value("field '", place, "' is missing");
  read(dict[name], value, place);
}
template <Struct T>
void read(nb::handle object, T& value, const std::string& path) {
  const nb::dict dict = as_dict(object, path);
  std::set<std::string> known;
  fields(value, [&](const char* name, auto& field) {
    known.insert(name);
    read_field(dict, name, field, path);
  });
  for (const std::pair<nb::handle, nb::handle> item : dict) {
    std::string name;
    if (!PyUnicode_CheckExact(item.first.ptr()) || !nb::try_cast(item.first, name) ||
        !known.contains(name)) {
      const std::string text = name.empty() ? shown(item.first) : name;
      wrong_value("field '", field_of(path, text), "' is not known");
    }
  }
}

// Plain bytes to compare, so every one is set.
Problem empty_problem() {
  Problem problem;
  std::memset(static_cast<void*>(&problem), 0, sizeof problem);
  return problem;
}

// --- comparing what a file says with what this version plans ---

// Collects the differences between a value from outside and what write() gives, one line each.
class Comparison {
 public:
  void compare(nb::handle given, nb::handle planned, const std::string& path) {
    if (nb::isinstance<nb::dict>(planned)) {
      compare_fields(given, nb::borrow<nb::dict>(planned), path);
    } else if (holds_structs(planned) && is_list(given)) {
      const size_t has = nb::len(given), wants = nb::len(planned);
      for (size_t i = 0; i < std::min(has, wants); ++i)
        compare(given[i], planned[i], item_of(path, i));
      if (has != wants) add(path, join("has ", has, " items; planned: ", wants));
    } else if (!same(given, planned)) {
      add(path, difference(given, planned));
    }
  }

  // Empty where there are none.
  std::string text() const {
    constexpr size_t MOST = 12;
    std::string all;
    for (size_t i = 0; i < std::min(lines_.size(), MOST); ++i) all += "\n  " + lines_[i];
    if (lines_.size() > MOST) all += join("\n  and ", lines_.size() - MOST, " more");
    return all;
  }

 private:
  void add(const std::string& path, const std::string& what) {
    lines_.push_back(join("'", path, "' ", what));
  }

  void compare_fields(nb::handle given, const nb::dict& planned, const std::string& path) {
    if (!PyDict_Check(given.ptr())) return add(path, difference(given, planned));
    for (const std::pair<nb::handle, nb::handle> item : planned) {
      const std::string place = field_of(path, nb::cast<std::string>(item.first));
      if (nb::borrow<nb::dict>(given).contains(item.first)) {
        compare(given[item.first], item.second, place);
      } else {
        add(place, "is missing; planned: " + shown(item.second));
      }
    }
    for (const std::pair<nb::handle, nb::handle> item : nb::borrow<nb::dict>(given)) {
      std::string name;
      if (planned.contains(item.first)) continue;
      if (!nb::try_cast(item.first, name)) name = shown(item.first);
      add(field_of(path, name), "is not known; given: " + shown(item.second));
    }
  }

  static bool holds_structs(nb::handle planned) {
    return PyList_CheckExact(planned.ptr()) && nb::len(planned) > 0 &&
           nb::isinstance<nb::dict>(planned[0]);
  }

  // Whether two values have one type and are equal. Lists of numbers are compared item by item, and
  // JSON may spell a float as a whole number.
  static bool same(nb::handle given, nb::handle planned) {
    if (PyList_CheckExact(planned.ptr())) {
      if (!is_list(given) || nb::len(given) != nb::len(planned)) return false;
      for (size_t i = 0; i < nb::len(planned); ++i) {
        if (!same(given[i], planned[i])) return false;
      }
      return true;
    }
    const bool whole = PyFloat_CheckExact(planned.ptr()) && PyLong_CheckExact(given.ptr());
    return (whole || given.type().is(planned.type())) && given.equal(planned);
  }

  static std::string difference(nb::handle given, nb::handle planned) {
    std::string one, other;
    const bool texts = PyUnicode_CheckExact(given.ptr()) && nb::try_cast(given, one) &&
                       PyUnicode_CheckExact(planned.ptr()) && nb::try_cast(planned, other);
    constexpr size_t LONG = 64;  // of long texts, parameters, the place where they part
    if (!texts || std::min(one.size(), other.size()) < LONG)
      return join("is ", shown(given), "; planned: ", shown(planned));
    const size_t begin =
        std::mismatch(one.begin(), one.end(), other.begin(), other.end()).first - one.begin();
    const auto from = [&](const std::string& text) {
      return shown(nb::cast(begin < text.size() ? text.substr(begin, LONG / 2) : "")) +
             join(" of ", text.size());
    };
    return join("is from character ", begin, " on ", from(one), "; planned: ", from(other));
  }

  std::vector<std::string> lines_;
};

// The tile of a hand-made plan must at least not make notes and the model of the walk divide by
// zero or count for ever.
void check_tile(const LaunchPlan& plan) {
  constexpr int64_t MOST = INT32_MAX;
  const TileChoice& tile = plan.tile;
  if (tile.name.empty()) return;  // nothing is computed by tiles
  // What is divided by, or shared out; the other numbers may be 0.
  static const std::set<std::string> AT_LEAST_ONE{"block_q",      "block_k",     "cluster",
                                                  "packed_heads", "ctas_per_sm", "ctas",
                                                  "tiles",        "splits",      "v_slices"};
  for_each_field(const_cast<TileChoice&>(tile), [&](const std::string& field, const auto& value) {
    using Value = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
      const int least = AT_LEAST_ONE.contains(field) ? 1 : 0;
      if (value >= least && value <= MOST) return;
      wrong_value("field 'tile.", field, "' is ", value, ": it must be an integer from ", least,
                  " to ", MOST);
    }
  });
  constexpr int64_t MOST_PARTS = 16;
  if (tile.part_rows > 0 && tile.part_rows * MOST_PARTS < tile.block_q) {
    wrong_value("field 'tile.part_rows' is ", tile.part_rows, ": tiles of ", tile.block_q,
                " rows are cut into up to ", MOST_PARTS, " parts");
  }
  const int64_t heads_per_kv = plan.problem.heads_q / std::max<int64_t>(plan.problem.heads_kv, 1);
  if (heads_per_kv < tile.packed_heads || heads_per_kv % tile.packed_heads != 0) {
    wrong_value("field 'tile.packed_heads' is ", tile.packed_heads, ": ", heads_per_kv,
                " heads share a head of k, and it must divide them");
  }
  if (tile.heads_per_group % tile.packed_heads != 0) {
    wrong_value("field 'tile.heads_per_group' is ", tile.heads_per_group,
                ": it must be a multiple of packed_heads, ", tile.packed_heads);
  }
}

// A hand-made plan must at least not make bind() write past the block or read what is not there,
// nor execute() write past the workspace.
void check_launches(const LaunchPlan& plan) {
  for (const auto& [name, bytes] : {std::pair{"zeroed_bytes", plan.zeroed_bytes},
                                    std::pair{"counter_bytes", plan.counter_bytes}}) {
    if (bytes >= 0 && bytes <= plan.workspace_bytes) continue;
    wrong_value("field '", name, "' is ", bytes, ": it must be between 0 and workspace_bytes, ",
                plan.workspace_bytes);
  }
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    const Launch& launch = plan.launches[i];
    const std::string path = item_of("launches", i);
    if (launch.params.size() > MAX_PARAMETER_BYTES) {
      wrong_value("field '", path, ".params' has ", launch.params.size(), " bytes: at most ",
                  MAX_PARAMETER_BYTES);
    }
    if (launch.of_batch && plan.counter_bytes == 0) {
      wrong_value("field 'counter_bytes' is 0: '", path,
                  "' is of_batch, and layers that share it have counters of their "
                  "own, which counter_bytes counts");
    }
    auto fits = [&](int64_t offset, int64_t bytes) {
      return offset >= 0 && offset + bytes <= static_cast<int64_t>(launch.params.size());
    };
    for (const PointerSlot& slot : launch.pointers) {
      if (!fits(slot.offset, 8))
        wrong_value(path, ": pointer slot at ", slot.offset, " lies outside the parameters");
    }
    for (const TensorMapSpec& spec : launch.tensor_maps) {
      if (!fits(spec.offset, 128) || spec.offset % 64) {
        wrong_value(path, ": tensor map at ", spec.offset,
                    " is not 128 bytes inside the parameters, 64-byte aligned");
      }
    }
  }
}

}  // namespace

nb::dict to_dict(const Problem& problem) { return write(problem); }
nb::dict to_dict(const Device& device) { return write(device); }
nb::dict to_dict(const LaunchPlan& plan) { return write(plan); }

Problem problem_from_dict(nb::handle dict) {
  Problem problem = empty_problem();
  read(dict, problem, "");
  check_problem(problem, "");
  return problem;
}

Device device_from_dict(nb::handle dict) {
  Device device;
  read(dict, device, "");
  check_device(device, "");
  return device;
}

LaunchPlan plan_from_dict(nb::handle object) {
  const nb::dict given = as_dict(object, "");
  std::string version, implementation;
  read_field(given, "version", version, "");
  if (version != ARCHFLASH_VERSION) {
    wrong_value("field 'version' is ", shown(given["version"]),
                ": this is archflash " ARCHFLASH_VERSION
                ", which plans for itself; make the plan again");
  }
  read_field(given, "implementation", implementation, "");
  const std::vector<std::string>& names = folder_names();
  if (std::find(names.begin(), names.end(), implementation) == names.end())
    refuse("implementation", given["implementation"], "the name of a folder of kernels");
  Problem problem = empty_problem();
  read_field(given, "problem", problem, "");
  check_problem(problem, "problem.");
  Device device;
  read_field(given, "device", device, "");
  check_device(device, "device.");

  PlanResult planned = plan(implementation, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&planned)) {
    std::string all;
    for (const std::string& reason : *reasons) all += "\n  " + reason;
    wrong_value("field 'implementation' is ", shown(given["implementation"]),
                ", which cannot serve this problem on this device:", all);
  }
  LaunchPlan& made = std::get<LaunchPlan>(planned);
  Comparison comparison;
  comparison.compare(given, to_dict(made), "");
  if (const std::string differences = comparison.text(); !differences.empty()) {
    wrong_value("this is not what ", implementation,
                " plans for this problem and device:", differences);
  }
  return std::move(made);
}

LaunchPlan unchecked_plan_from_dict(nb::handle dict) {
  LaunchPlan plan;
  plan.problem = empty_problem();
  read(dict, plan, "");
  check_problem(plan.problem, "problem.");
  check_device(plan.device, "device.");
  check_tile(plan);
  check_launches(plan);
  return plan;
}

}  // namespace archflash
