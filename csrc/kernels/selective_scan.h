// The recurrence of Mamba-1 for a tile of channels, one token at a time: every channel has a state of `size` values, each with
// its own decay rate. States are added up in the order of their numbers.
#pragma once
#include "recurrent.h"

namespace tokenmill::TM_ISA {

// Advances the states [size][channels] of a tile by one token:
//   state[n][c] = e^{rates[n][c] * step[c]} * state[n][c] + key[n] * update[c]
// `query` not null: out[c] = the sum over n of query[n] * state[n][c]. `channels` is a multiple of 16.
inline void scan_token(const ScanTile& tile, const float* step, const float* key, const float* update, const float* query,
                       float* state, float* out) {
  for (int i = 0; i < tile.channels; i += 16) {
    const Floats dt = load(step + i), u = load(update + i);
    Floats sum = zeros();
    for (int n = 0; n < tile.size; ++n) {
      float* own = state + static_cast<size_t>(n) * tile.channels + i;
      const Floats kept = exp(mul(load(tile.rates + static_cast<size_t>(n) * tile.stride + i), dt));
      const Floats next = fma(kept, load(own), mul(splat(key[n]), u));
      store(own, next);
      if (query != nullptr) sum = fma(splat(query[n]), next, sum);
    }
    if (query != nullptr) store(out + i, sum);
  }
}

}  // namespace tokenmill::TM_ISA
