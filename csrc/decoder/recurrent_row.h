// What the recurrent mixers' files share: a row's tokens and tables, and the softplus of steps.
#pragma once
#include <cmath>

#include "decoder.h"

namespace tokenmill {

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The tokens of one row in a step, and its tables.
struct Decoder::RecurrentRow {
  int first, end;  // the row's tokens [first, end) of the step
  int start;       // position of the first one
  const int32_t* cells;
  const int32_t* states;
};

}  // namespace tokenmill
