// What a Problem and a Device from outside must be, so that planning them neither overflows nor
// divides by zero, and so that tensors of that problem could exist. Plain C++.
#pragma once

#include <cstdint>
#include <string>

#include "common/problem.h"

namespace archflash {

// Integers of a call lie between this and its negative, both excluded: sums of positions, offsets
// and window sides then never overflow.
constexpr int64_t INTEGER_LIMIT = int64_t{1} << 60;

// Throw std::invalid_argument naming the field, with `prefix` before its name, what it is and what
// it must be. Every Problem that build_call() makes passes, and so does every Device of the driver
// and of the table of known ones.
void check_problem(const Problem& problem, const std::string& prefix);
void check_device(const Device& device, const std::string& prefix);

// Whether two elements of a tensor may share an address: each dimension must step over all that
// lies inside it.
bool overlaps_itself(const int64_t* shape, const int64_t* strides, int ndim);

}  // namespace archflash
