// PyTorch's attention operators while archflash stands in front of them, without Python: a call
// like one before is served, or handed to PyTorch's own kernel, here. Every other call goes to the
// function in Python that stands behind (python/archflash/_overrides.py), whose decision is kept.
//
// Versions of PyTorch without the functions of torch_functions.h have the functions in Python
// alone.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/execute.h"

namespace archflash {

namespace nb = nanobind;

// Counts of calls by name, which threads without Python's lock add to.
class Counts {
 public:
  using Counter = std::atomic<int64_t>;
  Counter& of(const std::string& name);  // the reference stays valid
  // Returns the counts that are above 0. `reset`: all counts start at 0 again.
  std::map<std::string, int64_t> read(bool reset);

 private:
  std::mutex lock_;
  std::map<std::string, Counter> counts_;
};
Counts& served();    // calls of PyTorch's operators, by implementation
Counts& declined();  // those handed to PyTorch's own kernels without Python, by reason
// Calls of all kinds that a kernel served approximately, by what was asked for.
Counts& approximated();

// What the function in Python decided for the operator's call that this thread is serving.
struct OperatorAnswer {
  bool keep = true;                    // whether a call like this one is to be treated the same
  std::shared_ptr<PreparedPlan> plan;  // null where PyTorch's own kernel serves
  std::string declined;                // why it does; empty where it does not
};
OperatorAnswer& operator_answer();

void forget_operator_calls();  // drops all decisions: each call asks the function in Python again
void bind_operators(nb::module_& m);

}  // namespace archflash
