// The way of an eager call: read, look up, allocate, bind, launch. Which implementation serves a
// problem is decided by the order of orders.h, or in Python (python/archflash/_dispatch), once for
// each new Problem.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "runtime/call.h"

namespace archflash {

// An eager call of archflash.attention or attention_with_kvcache. None when `torch` is to serve it;
// NotImplemented for torch's dispatcher, and for lazy tensors.
nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad,
                     nb::handle implementation);
// A PreparedCall of a call of attention_with_kvcache without gradients that was served just now,
// with the options of `batch` (BATCH); None where no kernel serves it.
nb::object prepare_call(nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                        nb::handle batch, nb::handle implementation);
// decide(problem, device_index, forced) -> LaunchPlan, or None for `torch`: who serves new
// problems. order: orders.h.
void set_decide(nb::object function, nb::object order);
// decide(q, k, v, options, forced) -> a function of (q, k, v, rows_first) that serves calls of
// `torch` which are alike, where no `out` is given; or None, where `attention` is to return None.
// rows_first: their layout has rows before heads.
void set_decide_pytorchs(nb::object function);

// What is forced, in a CacheKey.
int64_t forced_index(nb::handle name);
int64_t forced_index(const std::string& name);

// Plans for the simulator depend on ARCHFLASH_SIM_DEVICE: with another value what is cached is
// stale, and forgotten here.
void forget_other_simulated_devices();

// Tensor subclasses, fake tensors among them, have a say of their own in what runs.
bool needs_dispatcher(nb::handle object);
bool needs_dispatcher(const Arguments& arguments);  // whether any of them is one

std::pair<int64_t, int64_t> hits_and_misses();  // of calls of archflash.attention
size_t cached_calls();
void clear_cached_calls();

}  // namespace archflash
