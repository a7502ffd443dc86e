// The recurrence of one head, token by token. Sums over earlier tokens are added in the order of their positions, those
// over the state in the order of its rows, so that a token's numbers are the same however steps cut its sequence.
#pragma once
#include <cmath>

#include "recurrent.h"

namespace tokenmill::TM_ISA {

// x over its length, times `scale`; sizes are multiples of 16 here and below
inline void unit_vector(const float* x, float scale, int size, float* out) {
  Floats squares = zeros();
  for (int i = 0; i < size; i += 16) {
    const Floats a = load(x + i);
    squares = fma(a, a, squares);
  }
  const Floats factor = splat(scale / std::sqrt(sum_lanes(squares) + 1e-6f));
  for (int i = 0; i < size; i += 16) store(out + i, mul(load(x + i), factor));
}

inline float dot_product(const float* x, const float* y, int size) {
  Floats sum = zeros();
  for (int i = 0; i < size; i += 16) sum = fma(load(x + i), load(y + i), sum);
  return sum_lanes(sum);
}

// Weights e^{G_t - G_j} (x · k_j) of the cells before `count`, G_t being `decay`
inline void cell_weights(const ChunkCells& cells, const float* x, float decay, int count, int key_dim, float* weights) {
  float powers[kStateChunk + 16];
  for (int j = 0; j < count; ++j) powers[j] = decay - cells.decays[j];
  for (int j = count; j % 16 != 0; ++j) powers[j] = 0.0f;
  for (int j = 0; j < count; j += 16) store(powers + j, exp(load(powers + j)));
  for (int j = 0; j < count; ++j) weights[j] = powers[j] * dot_product(x, cells.keys[j], key_dim);
}

// What is left of the state for a vector: factor * (x S), added to by the weighted updates of `count` cells
inline void recall(const float* state, const float* x, float factor, const ChunkCells& cells, const float* weights,
                   int count, int key_dim, int value_dim, float* out) {
  for (int i = 0; i < value_dim; i += 16) {
    Floats sum = zeros();
    if (state != nullptr) {
      for (int d = 0; d < key_dim; ++d) sum = fma(splat(x[d]), load(state + static_cast<size_t>(d) * value_dim + i), sum);
      sum = mul(sum, splat(factor));
    }
    for (int j = 0; j < count; ++j) sum = fma(splat(weights[j]), load(cells.updates[j] + i), sum);
    store(out + i, sum);
  }
}

// The update and the output of token `at` of a chunk, whose key and decay are the cells' own; `state` null: zeros.
inline void recur_token(const RecurrentShape& shape, const ChunkCells& cells, int at, const float* state,
                        const RecurrentToken& token, float* update, float* out) {
  float weights[kStateChunk];
  const float decay = cells.decays[at], kept = exp_one(decay);
  const int key_dim = shape.key_dim, value_dim = shape.value_dim;
  const Floats strength = splat(token.strength);
  if (shape.is_delta) {
    const float* key = cells.keys[at];
    cell_weights(cells, key, decay, at, key_dim, weights);
    recall(state, key, kept, cells, weights, at, key_dim, value_dim, update);
    for (int i = 0; i < value_dim; i += 16)
      store(update + i, mul(sub(load(token.v + i), load(update + i)), strength));
  } else {
    for (int i = 0; i < value_dim; i += 16) store(update + i, mul(load(token.v + i), strength));
  }
  cell_weights(cells, token.q, decay, at + 1, key_dim, weights);
  recall(state, token.q, kept, cells, weights, at + 1, key_dim, value_dim, out);
}

// The state behind a whole chunk; `state` null: zeros before it.
inline void next_state(const RecurrentShape& shape, const ChunkCells& cells, const float* state, float* next) {
  float powers[kStateChunk];
  const float last = cells.decays[kStateChunk - 1], kept = exp_one(last);
  for (int j = 0; j < kStateChunk; ++j) powers[j] = last - cells.decays[j];
  for (int j = 0; j < kStateChunk; j += 16) store(powers + j, exp(load(powers + j)));
  for (int d = 0; d < shape.key_dim; ++d) {
    float weights[kStateChunk];
    for (int j = 0; j < kStateChunk; ++j) weights[j] = powers[j] * cells.keys[j][d];
    const size_t row = static_cast<size_t>(d) * shape.value_dim;
    for (int i = 0; i < shape.value_dim; i += 16) {
      Floats sum = state == nullptr ? zeros() : mul(load(state + row + i), splat(kept));
      for (int j = 0; j < kStateChunk; ++j) sum = fma(splat(weights[j]), load(cells.updates[j] + i), sum);
      store(next + row + i, sum);
    }
  }
}

}  // namespace tokenmill::TM_ISA
