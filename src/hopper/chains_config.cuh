// How the kernel that writes dQ of many chains shares out a round: compile-time numbers only, which
// the kernel and plan_backward.cpp (plain C++) read.
#pragma once

namespace archflash::hopper {

// A piece of a round's sums has 8 columns of the 16 rows of a warp, of which each lane has 16
// bytes. A CTA takes so many pieces.
constexpr int DQ_PIECES = 4;

template <class C>
constexpr int DQ_CTAS_OF_ROUND = C::ROUND_SUMS / (DQ_PIECES * 8 * C::WARP_ROWS);

}  // namespace archflash::hopper
