// The recurrence of one head, token by token. Earlier tokens are added in the order of their positions, the state in the
// order of its rows, so that a token's result does not depend on how its sequence is split into steps.
#pragma once
#include <cmath>

#include "recurrent.h"

namespace tokenmill::TM_ISA {

// Normalises x to length `scale`; sizes are multiples of 16 here and below.
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

// Computes the weights e^{G_t - G_j} (x · k_j) of the first `count` cells; G_t is `decay`.
inline void cell_weights(const ChunkCells& cells, const float* x, float decay, int count, int key_dim, float* weights) {
  float powers[kStateChunk + 16];
  for (int j = 0; j < count; ++j) powers[j] = decay - cells.decays[j];
  for (int j = count; j % 16 != 0; ++j) powers[j] = 0.0f;
  for (int j = 0; j < count; j += 16) store(powers + j, exp(load(powers + j)));
  for (int j = 0; j < count; ++j) weights[j] = powers[j] * dot_product(x, cells.keys[j], key_dim);
}

// Multiplies a vector by the state, factor * (x S), and adds the weighted updates of `count` cells.
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

// The weights with decays per channel, Σ_c x_c k_jc e^{G_tc - G_jc}, for token `at`'s key and for its query.
inline void channel_weights(const ChunkCells& cells, const float* query, int at, int key_dim, float* of_key, float* of_query) {
  const float *key = cells.keys[at], *decays = cells.channel_decays[at];
  for (int j = 0; j <= at; ++j) {
    Floats by_key = zeros(), by_query = zeros();
    for (int i = 0; i < key_dim; i += 16) {
      const Floats faded = mul(load(cells.keys[j] + i), exp(sub(load(decays + i), load(cells.channel_decays[j] + i))));
      by_key = fma(load(key + i), faded, by_key);
      by_query = fma(load(query + i), faded, by_query);
    }
    of_key[j] = sum_lanes(by_key);
    of_query[j] = sum_lanes(by_query);
  }
}

inline void recur_by_channels(const RecurrentShape& shape, const ChunkCells& cells, int at, const float* state,
                              const RecurrentToken& token, float* update, float* out) {
  float of_key[kStateChunk], of_query[kStateChunk];
  const int key_dim = shape.key_dim, value_dim = shape.value_dim;
  float *faded_key = token.room, *faded_query = token.room + key_dim;
  for (int i = 0; i < key_dim; i += 16) {
    const Floats kept = exp(load(cells.channel_decays[at] + i));
    store(faded_key + i, mul(load(cells.keys[at] + i), kept));
    store(faded_query + i, mul(load(token.q + i), kept));
  }
  channel_weights(cells, token.q, at, key_dim, of_key, of_query);
  recall(state, faded_key, 1.0f, cells, of_key, at, key_dim, value_dim, update);
  for (int i = 0; i < value_dim; i += 16)
    store(update + i, mul(sub(load(token.v + i), load(update + i)), splat(token.strength)));
  recall(state, faded_query, 1.0f, cells, of_query, at + 1, key_dim, value_dim, out);
}

// Computes the update and the output of token `at` of a chunk, whose key and decay are in the cells; `state` null: zeros.
inline void recur_token(const RecurrentShape& shape, const ChunkCells& cells, int at, const float* state,
                        const RecurrentToken& token, float* update, float* out) {
  if (shape.has_channel_decays) return recur_by_channels(shape, cells, at, state, token, update, out);
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

// One row of the state after a whole chunk: the decayed row before it, plus every cell's update times its weight.
inline void next_row(const ChunkCells& cells, const float* row, float kept, const float* weights, int value_dim, float* next) {
  for (int i = 0; i < value_dim; i += 16) {
    Floats sum = row == nullptr ? zeros() : mul(load(row + i), splat(kept));
    for (int j = 0; j < kStateChunk; ++j) sum = fma(splat(weights[j]), load(cells.updates[j] + i), sum);
    store(next + i, sum);
  }
}

inline void next_state_by_channels(const RecurrentShape& shape, const ChunkCells& cells, const float* state, float* next) {
  const float* last = cells.channel_decays[kStateChunk - 1];
  for (int first = 0; first < shape.key_dim; first += 16) {
    float kept[16], weights[16][kStateChunk];
    store(kept, exp(load(last + first)));
    for (int j = 0; j < kStateChunk; ++j) {
      float lanes[16];
      const Floats faded = exp(sub(load(last + first), load(cells.channel_decays[j] + first)));
      store(lanes, mul(load(cells.keys[j] + first), faded));
      for (int d = 0; d < 16; ++d) weights[d][j] = lanes[d];
    }
    for (int d = 0; d < 16; ++d) {
      const size_t row = static_cast<size_t>(first + d) * shape.value_dim;
      next_row(cells, state == nullptr ? nullptr : state + row, kept[d], weights[d], shape.value_dim, next + row);
    }
  }
}

// The state after a whole chunk; `state` null: zeros before it.
inline void next_state(const RecurrentShape& shape, const ChunkCells& cells, const float* state, float* next) {
  if (shape.has_channel_decays) return next_state_by_channels(shape, cells, state, next);
  float powers[kStateChunk];
  const float last = cells.decays[kStateChunk - 1], kept = exp_one(last);
  for (int j = 0; j < kStateChunk; ++j) powers[j] = last - cells.decays[j];
  for (int j = 0; j < kStateChunk; j += 16) store(powers + j, exp(load(powers + j)));
  for (int d = 0; d < shape.key_dim; ++d) {
    float weights[kStateChunk];
    for (int j = 0; j < kStateChunk; ++j) weights[j] = powers[j] * cells.keys[j][d];
    const size_t row = static_cast<size_t>(d) * shape.value_dim;
    next_row(cells, state == nullptr ? nullptr : state + row, kept, weights, shape.value_dim, next + row);
  }
}

}  // namespace tokenmill::TM_ISA
