// A recurrent mixer (gated DeltaNet, Mamba-2; of Mamba-1 see selective_scan.cpp). Its phases, each of which the pool runs as
// a whole:
//
//   norm → q, k, v, z, b, a → convolution, silu (tokens) → recurrence (rows × heads) → norm, gate (tokens) → o
//
// A row's tokens are computed one after another, from the state before their chunk and the cells of earlier tokens. Cells
// and states are written where the tables have a block; block 0 means that no later token will read them.
#include <algorithm>
#include <cmath>

#include "decoder/phases.h"
#include "decoder/recurrent_row.h"

namespace tokenmill {

Decoder::RecurrentRow Decoder::recurrent_row(const Layer& layer, const BatchView& batch, int row) const {
  const GroupView& cells = batch.groups[static_cast<size_t>(layer.group)];
  const GroupView& states = batch.groups[static_cast<size_t>(layer.recurrent->state_group)];
  const int first = batch.query_starts[row], end = batch.query_starts[row + 1];
  return {first, end, batch.context_lens[row] - (end - first),
          cells.block_tables + static_cast<size_t>(row) * cells.max_blocks,
          states.block_tables + static_cast<size_t>(row) * states.max_blocks};
}

void Decoder::recur(const Layer& layer, const BatchView& batch) {
  const Recurrent& mixer = *layer.recurrent;
  project_recurrent(layer, batch);
  const int rows = batch.rows;
  for_rows(pool_, batch.tokens, 4 * mixer.kernel * mixer.shape.channels(), [&](int t) {
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + rows + 1, t);
    convolve_token(layer, recurrent_row(layer, batch, static_cast<int>(next - batch.query_starts - 1)), t);
  });
  for (int r = 0; r < rows; ++r) keep_conv_tails(layer, recurrent_row(layer, batch, r));
  if (mixer.scan) {
    project_scan(layer, batch.tokens);
    return scan_rows(layer, batch);
  }
  const int heads = mixer.shape.value_heads;
  grow(recurred_, static_cast<size_t>(batch.tokens) * mixer.shape.values());
  pool_.run(rows * heads, [&](int task, int thread) {
    recur_head(layer, recurrent_row(layer, batch, task / heads), task % heads, thread);
  });
}

void Decoder::project_recurrent(const Layer& layer, const BatchView& batch) {
  const Recurrent& mixer = *layer.recurrent;
  project_to(mixer.in, layer, batch.tokens);
  grow(convolved_, static_cast<size_t>(batch.tokens) * mixer.shape.channels());
}

// The convolution's input of the token at a position: from this step, the chunk's cells, or the tail before the chunk.
const float* Decoder::conv_input(const Layer& layer, const RecurrentRow& row, int position) const {
  const Recurrent& mixer = *layer.recurrent;
  const size_t channels = static_cast<size_t>(mixer.shape.channels());
  if (position < 0) return nullptr;
  if (position >= row.start)
    return projected_.data() + static_cast<size_t>(row.first + position - row.start) * projected_width(layer);
  const int begin = row.start / kStateChunk * kStateChunk, size = mixer.block_size;
  if (position >= begin)
    return mixer.conv_inputs + (static_cast<size_t>(row.cells[position / size]) * size + position % size) * channels;
  const size_t slot = static_cast<size_t>(row.states[row.start / kStateChunk - 1]);
  return mixer.tails + (slot * (mixer.kernel - 1) + (mixer.kernel - 1 - (begin - position))) * channels;
}

void Decoder::convolve_token(const Layer& layer, const RecurrentRow& row, int token) {
  const Recurrent& mixer = *layer.recurrent;
  const int channels = mixer.shape.channels(), position = row.start + token - row.first, size = mixer.block_size;
  const float* taps[kMaxConvKernel];
  for (int k = 0; k < mixer.kernel; ++k) taps[k] = conv_input(layer, row, position - mixer.kernel + 1 + k);
  float* out = convolved_.data() + static_cast<size_t>(token) * channels;
  const float* bias = mixer.conv_bias.empty() ? nullptr : mixer.conv_bias.data();
  kernels_->short_conv(taps, mixer.conv.data(), bias, mixer.ones.data(), mixer.kernel, channels, out);
  kernels_->silu(out, channels, out);
  if (const int32_t block = row.cells[position / size]; block != 0) {
    float* cell = mixer.conv_inputs + (static_cast<size_t>(block) * size + position % size) * channels;
    std::copy_n(taps[mixer.kernel - 1], channels, cell);
  }
}

// Writes the last inputs of the convolution beside each state that is cached.
void Decoder::keep_conv_tails(const Layer& layer, const RecurrentRow& row) {
  const Recurrent& mixer = *layer.recurrent;
  const int end = row.start + row.end - row.first, number = mixer.kernel - 1;
  const size_t channels = static_cast<size_t>(mixer.shape.channels());
  for (int chunk = row.start / kStateChunk; chunk < end / kStateChunk; ++chunk) {
    const size_t slot = static_cast<size_t>(row.states[chunk]);
    for (int i = 0; slot != 0 && i < number; ++i)
      std::copy_n(conv_input(layer, row, (chunk + 1) * kStateChunk - number + i), channels,
                  mixer.tails + (slot * number + i) * channels);
  }
}

// Computes all tokens of a row in one head.
void Decoder::recur_head(const Layer& layer, const RecurrentRow& row, int head, int thread) {
  const Recurrent& mixer = *layer.recurrent;
  const RecurrentShape& shape = mixer.shape;
  const size_t key_dim = static_cast<size_t>(shape.key_dim), value_dim = static_cast<size_t>(shape.value_dim);
  const size_t state_size = key_dim * value_dim, size = static_cast<size_t>(mixer.block_size);
  const size_t own = static_cast<size_t>(head), key_head = static_cast<size_t>(shape.key_head_of(head));
  Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
  grow(scratch, 2 * state_size + kStateChunk * (2 * key_dim + value_dim) + 3 * key_dim);
  float* next = scratch.data();
  float* fresh_keys = next + 2 * state_size;
  float* fresh_updates = fresh_keys + kStateChunk * key_dim;
  float* query = fresh_updates + kStateChunk * value_dim;
  float* room = query + key_dim;
  float* fresh_decays = room + 2 * key_dim;  // with decays per channel

  ChunkCells cells;
  const auto key_cell = [&](int position) {
    const size_t block = static_cast<size_t>(row.cells[position / mixer.block_size]);
    return mixer.keys + ((block * shape.key_heads + key_head) * size + position % mixer.block_size) * key_dim;
  };
  const auto update_cell = [&](int position) {
    const size_t block = static_cast<size_t>(row.cells[position / mixer.block_size]);
    return mixer.updates + ((block * shape.value_heads + own) * size + position % mixer.block_size) * value_dim;
  };
  const auto decay_cell = [&](int position) {
    const size_t block = static_cast<size_t>(row.cells[position / mixer.block_size]);
    const size_t token = static_cast<size_t>(position % mixer.block_size);
    if (shape.has_channel_decays) return mixer.decays + ((block * shape.value_heads + own) * size + token) * key_dim;
    return mixer.decays + (block * size + token) * shape.value_heads + own;
  };
  for (int position = row.start / kStateChunk * kStateChunk; position < row.start; ++position) {
    const int at = position % kStateChunk;
    cells.keys[at] = key_cell(position);
    cells.updates[at] = update_cell(position);
    cells.decays[at] = *decay_cell(position);
    cells.channel_decays[at] = decay_cell(position);
  }
  const float* state = nullptr;
  if (row.start >= kStateChunk)
    state = mixer.states + (static_cast<size_t>(row.states[row.start / kStateChunk - 1]) * shape.value_heads + own) * state_size;

  const size_t stride = projected_width(layer), channels = static_cast<size_t>(shape.channels());
  for (int t = row.first; t < row.end; ++t) {
    const int position = row.start + t - row.first, at = position % kStateChunk;
    const float* in = convolved_.data() + static_cast<size_t>(t) * channels;
    const float* steps = projected_.data() + static_cast<size_t>(t) * stride + channels + shape.values();
    const float* a = shape.is_delta ? steps + shape.value_heads : steps;
    const auto step = [&](size_t i) {
      const float dt = softplus(a[i] * mixer.step_scale + mixer.step_bias[i]);
      return std::min(std::max(dt, mixer.min_step), mixer.max_step);
    };
    const auto decay = [&](size_t i) {
      if (mixer.lowest_decay == 0.0f) return mixer.rates[own] * step(i);
      return mixer.lowest_decay / (1.0f + std::exp(mixer.rates[own] * (a[i] * mixer.step_scale + mixer.step_bias[i])));
    };
    float* key = fresh_keys + at * key_dim;
    const float* in_key = in + shape.keys() + key_head * key_dim;
    RecurrentToken token{in + key_head * key_dim, in + 2 * static_cast<size_t>(shape.keys()) + own * value_dim, 0.0f, room};
    if (shape.is_delta) {
      kernels_->unit_vector(token.q, 1.0f / std::sqrt(static_cast<float>(shape.key_dim)), shape.key_dim, query);
      kernels_->unit_vector(in_key, 1.0f, shape.key_dim, key);
      token.q = query;
      token.strength = mixer.strength_scale / (1.0f + std::exp(-steps[own]));
    } else {
      std::copy_n(in_key, key_dim, key);
    }
    float* update = fresh_updates + at * value_dim;
    cells.keys[at] = key;
    cells.updates[at] = update;
    if (shape.has_channel_decays) {
      float* decays = fresh_decays + at * key_dim;
      for (size_t c = 0; c < key_dim; ++c)
        decays[c] = (at == 0 ? 0.0f : cells.channel_decays[at - 1][c]) + decay(own * key_dim + c);
      cells.channel_decays[at] = decays;
    } else {
      cells.decays[at] = (at == 0 ? 0.0f : cells.decays[at - 1]) + decay(own);
      if (!shape.is_delta) token.strength = step(own);
    }
    float* out = recurred_.data() + static_cast<size_t>(t) * shape.values() + own * value_dim;
    kernels_->recur_token(shape, cells, at, state, token, update, out);
    for (size_t i = 0; !mixer.skip.empty() && i < value_dim; ++i) out[i] += mixer.skip[own] * token.v[i];
    if (row.cells[position / mixer.block_size] != 0) {
      if (shape.keeps_keys(head)) std::copy_n(key, key_dim, key_cell(position));
      std::copy_n(update, value_dim, update_cell(position));
      if (shape.has_channel_decays) std::copy_n(cells.channel_decays[at], key_dim, decay_cell(position));
      else *decay_cell(position) = cells.decays[at];
    }
    if (at + 1 < kStateChunk) continue;
    kernels_->next_state(shape, cells, state, next);
    state = next;
    next = next == scratch.data() ? scratch.data() + state_size : scratch.data();
    if (const size_t slot = static_cast<size_t>(row.states[position / kStateChunk]); slot != 0)
      std::copy_n(state, state_size, mixer.states + (slot * shape.value_heads + own) * state_size);
  }
}

// Computes norm(o) * silu(z) (or * sigmoid(z)), or norm(o * silu(z)), of `tokens` rows of `projected_` and `recurred_`.
void Decoder::recurrent_outputs(const Layer& layer, int tokens) {
  const Recurrent& mixer = *layer.recurrent;
  const RecurrentShape& shape = mixer.shape;
  const int values = shape.values(), groups = mixer.norm_groups, size = groups == 0 ? 0 : values / groups;
  const size_t stride = projected_width(layer);
  fill_rows(tokens, values, 6 * values, heads_, form_for({&layer.o}, outlier_threshold(layer)), [&](int t, float* out) {
    float* x = recurred_.data() + static_cast<size_t>(t) * values;
    float* gate = projected_.data() + static_cast<size_t>(t) * stride + shape.channels();
    if (mixer.gate_scale != 1.0f) kernels_->scale(gate, mixer.gate_scale, values);
    if (mixer.gates_by_sigmoid) kernels_->sigmoid(gate, values, gate);
    else kernels_->silu(gate, values, gate);
    if (groups == 0 || mixer.gates_first) kernels_->multiply(x, gate, values, x);
    if (groups == 0) std::copy_n(x, values, out);
    for (int g = 0; g < groups; ++g) {
      const float* weight = mixer.norm.data() + (mixer.is_norm_shared ? 0 : g * size);
      kernels_->rms_norm(x + g * size, weight, mixer.eps, size, out + g * size);
    }
    if (groups != 0 && !mixer.gates_first) kernels_->multiply(out, gate, values, out);
    if (mixer.out_scale != 1.0f) kernels_->scale(out, mixer.out_scale, values);
  });
}

}  // namespace tokenmill
