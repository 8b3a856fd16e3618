#include <cmath>

#include "runtime/reading/reading.h"

namespace archflash::reading {
namespace {

// The numbers of an array (torch, CuPy, JAX) may lie on a GPU: asking for one would wait for it.
bool is_array(nb::handle value) { return is_tensor(value) || nb::hasattr(value, "__dlpack__"); }

bool is_bool(nb::handle value) {
  if (PyBool_Check(value.ptr())) return true;
  const std::string type = nb::cast<std::string>(nb::str(value.type().attr("__name__")));
  return type == "bool" || type == "bool_";  // numpy's
}

// Clears the TypeError or OverflowError of a conversion; passes every other error on.
void clear_refusal() {
  if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_OverflowError))
    PyErr_Clear();
  else
    throw nb::python_error();
}

bool flag(nb::handle value, const char* name) {
  if (!PyBool_Check(value.ptr())) wrong_type(name, " is ", given(value), ": it must be a bool");
  return value.is(Py_True);
}

}  // namespace

double number(nb::handle value, const char* name) {
  const bool is_plain = PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr());
  const bool takes = is_plain || !(is_bool(value) || is_array(value));
  const double result = takes ? PyFloat_AsDouble(value.ptr()) : -1.0;
  const bool refused = result == -1.0 && PyErr_Occurred();
  if (refused) clear_refusal();
  if (!takes || refused) wrong_type(name, " is ", given(value), ": it must be a number or None");
  if (!std::isfinite(result)) wrong_value(name, " is ", result, ": it must be finite");
  return result;
}

int64_t integer(nb::handle value, const char* name, const char* allowed) {
  nb::object index;
  if (PyLong_CheckExact(value.ptr())) {
    index = nb::borrow(value);
  } else if (PyIndex_Check(value.ptr()) && !is_bool(value) && !is_array(value)) {
    index = nb::steal(PyNumber_Index(value.ptr()));
    if (!index.is_valid()) clear_refusal();
  }
  if (!index.is_valid()) wrong_type(name, " is ", given(value), ": it must be ", allowed);
  int overflow = 0;
  const int64_t result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || result >= INTEGER_LIMIT || result <= -INTEGER_LIMIT)
    wrong_value(name, " is ", given(index), ": it must lie between -2^60 and 2^60");
  return result;
}

int64_t longest(nb::handle value, const char* name) {
  if (value.is_none()) return UNKNOWN;
  const int64_t result = integer(value, name);
  if (result < 0) wrong_value(name, " is ", result, ": it must be >= 0, or None");
  return result;
}

void read_flags(const Arguments& a, Problem& p) {
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const Option& option = OPTIONS[i];
    if (option.flag != nullptr) p.*option.flag = flag(a.*ARGUMENTS[i], option.name);
  }
}

void read_window(nb::handle window, Problem& p) {
  if (window.is_none()) return;
  if (!(nb::isinstance<nb::tuple>(window) || nb::isinstance<nb::list>(window)) ||
      nb::len(window) != 2) {
    wrong_type("window is ", given(window),
               ": it must be a pair (left, right) of ints, None or -1 for an unbounded side");
  }
  for (int side = 0; side < 2; ++side) {
    nb::object value = window[side];
    if (value.is_none()) continue;
    const char* name = side == 0 ? "window left" : "window right";
    const int64_t limit = integer(value, name);
    if (limit < 0) continue;  // unbounded, as in flash-attn
    (side == 0 ? p.window_left : p.window_right) = limit;
  }
}

void read_softcap(const Arguments& a, Problem& p) {
  if (a.softcap.is_none()) return;
  p.softcap = number(a.softcap, "softcap");
  if (p.softcap < 0) wrong_value("softcap is ", p.softcap, ": it must be > 0, or None for no cap");
}

void read_approximate(const Arguments& a, Problem& p) {
  if (a.approximate.is_none()) return;
  std::string text =
      nb::isinstance<nb::str>(a.approximate) ? nb::cast<std::string>(a.approximate) : std::string();
  // What archflash.approximate() asks for: "int8 if served".
  constexpr std::string_view IF_SERVED = " if served";
  if (text.ends_with(IF_SERVED)) {
    text.resize(text.size() - IF_SERVED.size());
    p.approximate_if_served = true;
  }
  std::string names;
  for (int64_t i = 0; i < APPROXIMATION_COUNT; ++i) {
    if (text == APPROXIMATIONS[i].name) p.approximate = i + 1;
    names += std::string("'") + APPROXIMATIONS[i].name + "', ";
  }
  if (p.approximate == 0)
    wrong_value("approximate is ", given(a.approximate), ": it must be ", names, "or None");
}

void read_num_splits(const Arguments& a, Problem& p) {
  if (a.num_splits.is_none()) return;
  if (p.batch_invariant) {
    wrong_value(
        "num_splits is given with batch_invariant=True, which splits keys by their "
        "position: leave num_splits at None");
  }
  p.num_splits = integer(a.num_splits, "num_splits");
  if (p.num_splits < 1) {
    wrong_value("num_splits is ", p.num_splits,
                ": it must be at least 1, or None for the plan to choose");
  }
}

void read_attention_chunk(const Arguments& a, Problem& p) {
  if (a.attention_chunk.is_none()) return;
  p.attention_chunk = integer(a.attention_chunk, "attention_chunk");
  if (p.attention_chunk < 1) {
    wrong_value("attention_chunk is ", p.attention_chunk,
                ": it must be at least 1, or None for no chunks");
  }
}

}  // namespace archflash::reading
