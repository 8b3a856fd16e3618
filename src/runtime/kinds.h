// The kind of a problem: what can matter to the order in which kernels are asked to serve it. A
// length matters by the powers of two between which it lies, and by little more.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace archflash {

// Plain bytes without padding, compared as such.
struct Kind {
  Problem problem;      // without addresses, strides and positions; sizes as octave() has them
  int64_t rows;         // query rows of all heads and sequences
  int64_t least_rows;   // query rows of a sequence, rounded down,
  int64_t most_rows;    // and up: packed ones differ
  int64_t elements;     // of the largest of q, k and v, with a head of k and v for each of q
  int64_t dq_elements;  // of dq in whole tiles
  int64_t scores;       // of a head
  int64_t keys_left;    // nk modulo 128 where it is a multiple of 64, else 1
  int64_t square;       // whether there are as many query rows as keys
};

// Between which powers of two a size lies: the same for sizes that compare alike with each power.
int64_t octave(double size);

// tests/unit/test_kinds.py: problems of one kind have the same order (_dispatch/order.py).
Kind kind_of(const Problem& problem);

}  // namespace archflash
