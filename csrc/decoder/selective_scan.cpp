// A recurrent mixer with the rule of Mamba-1. Its phases, each of which the pool runs as a whole:
//
//   norm → v, z → convolution, silu (tokens) → inner product: a, k, q (→ norms) → dt → scan (rows × channels) → gate → o
//
// A task goes through a row's tokens in order with its channels' states in scratch memory: first through the cells since the
// last state, then through the tokens of the step. So every token's state is the result of the same operations, however steps
// cut the sequence.
#include <algorithm>
#include <cmath>

#include "decoder/phases.h"
#include "decoder/recurrent_row.h"

namespace tokenmill {
namespace {

constexpr int kScanTile = 64;  // channels of a row per task; their states and rates fit into the L1 cache

}  // namespace

// Computes dt of every channel before its softplus, in `scan_steps_`, and k and q in `scan_inner_`.
void Decoder::project_scan(const Layer& layer, int tokens) {
  const Recurrent& mixer = *layer.recurrent;
  const ScanInputs& scan = *mixer.scan;
  const int channels = mixer.shape.channels(), size = mixer.shape.key_dim, rank = scan.step.w.cols;
  const size_t width = static_cast<size_t>(scan.inner.rows());
  const float threshold = outlier_threshold(layer);
  fill_rows(tokens, channels, channels, scan_rows_, form_for({&scan.inner}, threshold), [&](int t, float* out) {
    std::copy_n(convolved_.data() + static_cast<size_t>(t) * channels, channels, out);
  });
  grow(scan_inner_, static_cast<size_t>(tokens) * width);
  const Gemm inner{&scan.inner, nullptr, scan_rows_.view(), Gemm::Mode::Store, scan_inner_.data(), width};
  run(&inner, 1);
  fill_rows(tokens, rank, 2 * static_cast<int>(width), scan_latents_, form_for({&scan.step}, threshold), [&](int t, float* out) {
    float* own = scan_inner_.data() + static_cast<size_t>(t) * width;
    if (!scan.step_norm.empty()) {
      kernels_->rms_norm(own, scan.step_norm.data(), scan.eps, rank, own);
      kernels_->rms_norm(own + rank, scan.key_norm.data(), scan.eps, size, own + rank);
      kernels_->rms_norm(own + rank + size, scan.query_norm.data(), scan.eps, size, own + rank + size);
    }
    std::copy_n(own, rank, out);
  });
  grow(scan_steps_, static_cast<size_t>(tokens) * channels);
  const Gemm steps{&scan.step, nullptr, scan_latents_.view(), Gemm::Mode::Store, scan_steps_.data(), static_cast<size_t>(channels)};
  run(&steps, 1);
}

void Decoder::scan_rows(const Layer& layer, const BatchView& batch) {
  const int channels = layer.recurrent->shape.values(), tiles = (channels + kScanTile - 1) / kScanTile;
  grow(recurred_, static_cast<size_t>(batch.tokens) * channels);
  pool_.run(batch.rows * tiles, [&](int task, int thread) {
    const int first = task % tiles * kScanTile;
    scan_channels(layer, recurrent_row(layer, batch, task / tiles), first, std::min(kScanTile, channels - first), thread);
  });
}

// Computes all tokens of a row in the channels [first, first + count).
void Decoder::scan_channels(const Layer& layer, const RecurrentRow& row, int first, int count, int thread) {
  const Recurrent& mixer = *layer.recurrent;
  const size_t size = static_cast<size_t>(mixer.shape.key_dim), width = static_cast<size_t>(mixer.shape.values());
  const size_t tile_size = static_cast<size_t>(count), begin = static_cast<size_t>(first);
  Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
  grow(scratch, (size + 1) * tile_size);
  float *state = scratch.data(), *update = state + size * tile_size;
  const ScanTile tile{mixer.rates.data() + begin, width, mixer.shape.key_dim, count};
  const auto cell = [&](int position) {
    const size_t block = static_cast<size_t>(row.cells[position / mixer.block_size]);
    return block * static_cast<size_t>(mixer.block_size) + static_cast<size_t>(position % mixer.block_size);
  };
  const auto each_state = [&](size_t slot, const auto& copy) {
    float* kept = mixer.states + slot * size * width + begin;
    for (size_t n = 0; n < size; ++n) copy(kept + n * width, state + n * tile_size);
  };
  const int chunk_start = row.start / kStateChunk * kStateChunk;
  if (chunk_start == 0) std::fill_n(state, size * tile_size, 0.0f);
  else each_state(static_cast<size_t>(row.states[chunk_start / kStateChunk - 1]),
                  [&](const float* kept, float* own) { std::copy_n(kept, tile_size, own); });
  for (int position = chunk_start; position < row.start; ++position) {
    const size_t at = cell(position);
    kernels_->scan_token(tile, mixer.decays + at * width + begin, mixer.keys + at * size, mixer.updates + at * width + begin,
                         nullptr, state, nullptr);
  }
  const size_t inner_width = static_cast<size_t>(mixer.scan->inner.rows());
  for (int t = row.first; t < row.end; ++t) {
    const int position = row.start + t - row.first;
    const size_t at = static_cast<size_t>(t) * width + begin;
    const float* key = scan_inner_.data() + static_cast<size_t>(t + 1) * inner_width - 2 * size;
    const float* value = convolved_.data() + at;
    float *step = scan_steps_.data() + at, *out = recurred_.data() + at;
    for (int c = 0; c < count; ++c) {
      step[c] = softplus(step[c] + mixer.step_bias[begin + static_cast<size_t>(c)]);
      update[c] = step[c] * value[c];
    }
    kernels_->scan_token(tile, step, key, update, key + size, state, out);
    for (int c = 0; c < count; ++c) out[c] += mixer.skip[begin + static_cast<size_t>(c)] * value[c];
    if (row.cells[position / mixer.block_size] != 0) {
      const size_t kept = cell(position);
      if (first == 0) std::copy_n(key, size, mixer.keys + kept * size);
      std::copy_n(step, tile_size, mixer.decays + kept * width + begin);
      std::copy_n(update, tile_size, mixer.updates + kept * width + begin);
    }
    if (position % kStateChunk + 1 < kStateChunk) continue;
    if (const size_t slot = static_cast<size_t>(row.states[position / kStateChunk]); slot != 0)
      each_state(slot, [&](float* kept, const float* own) { std::copy_n(own, tile_size, kept); });
  }
}

}  // namespace tokenmill
