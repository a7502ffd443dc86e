// A step, and what surrounds its products. Phases of a layer, each handed to the pool as a whole (rows of a phase are
// independent):
//
//   norm → q, k, v → (rotate, write to the cache) → attend → o → + → norm → gate·up → down → +
#include <algorithm>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::forward(const BatchView& batch, float* hidden) {
  check(batch);
  if (batch.tokens == 0) return;
  embed(batch);
  for (size_t i = 0; i + 1 < layers_.size(); ++i) {
    attention(layers_[i], batch);
    mix(layers_[i], batch.tokens);
  }
  last_layer(layers_.back(), batch);
  for_rows(pool_, batch.wanted, hidden_, [&](int i) {
    const size_t at = static_cast<size_t>(i) * hidden_;
    kernels_->rms_norm(x_.data() + at, final_norm_.data(), eps_, hidden_, hidden + at);
  });
}

// Of the last layer every token's key and value is kept, but only the wanted tokens go on from there: each of them is
// then a row of its own whose context ends with it.
void Decoder::last_layer(const Layer& layer, const BatchView& batch) {
  if (batch.wants_all()) {
    attention(layer, batch);
    return mix(layer, batch.tokens);
  }
  project(layer, batch);
  place_all(layer, batch);
  keep_wanted(batch, qkv_width(layer), qkv_);
  keep_wanted(batch, static_cast<size_t>(hidden_), x_);
  if (batch.wanted == 0) return;
  narrowed_.take(batch, layer.group);
  prepare_heads(layer, batch.wanted);
  attend_placed(layer, narrowed_.view);
  settle_heads(layer, batch.wanted);
  mix(layer, batch.wanted);
}

void Decoder::keep_wanted(const BatchView& batch, size_t width, PageVector<float>& rows) {
  grow(kept_rows_, rows.size());
  for (int i = 0; i < batch.wanted; ++i)
    std::copy_n(rows.data() + static_cast<size_t>(batch.logit_rows[i]) * width, width, kept_rows_.data() + i * width);
  std::swap(rows, kept_rows_);
}

void Decoder::embed(const BatchView& batch) {
  const size_t size = static_cast<size_t>(batch.tokens) * hidden_;
  grow(x_, size);
  grow(mixed_, size);
  for_rows(pool_, batch.tokens, 8 * hidden_, [&](int t) {
    kernels_->embed(embedding_.w, static_cast<int>(batch.token_ids[t]), embedding_scale_,
                    x_.data() + static_cast<size_t>(t) * hidden_);
  });
}

// What follows attention: its output product, then the feed-forward part.
void Decoder::mix(const Layer& layer, int tokens) {
  const bool post = !layer.attn_post_norm.empty();
  const Gemm o{&layer.o, nullptr, heads_.view(), post ? Gemm::Mode::Store : Gemm::Mode::Add,
               post ? mixed_.data() : x_.data(), static_cast<size_t>(hidden_)};
  runner_.run(&o, 1);
  if (post) add_normed(layer.attn_post_norm, tokens);
  feed_forward(layer, tokens);
}

void Decoder::norm_rows(const Vector& weight, const float* x, int tokens, Activations& to, const Form& form) {
  to.prepare(tokens, hidden_, *kernels_, form);
  const bool in_tiles = tokens > kernels_->small_rows;  // of few rows each is a piece
  const int tile = in_tiles ? to.quant().tile : 1;
  for_tiles(pool_, tokens, 2 * hidden_, tile, [&](int first, int end, int thread) {
    Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
    grow(scratch, static_cast<size_t>(tile) * hidden_);
    for (int t = first; t < end; t += tile) {
      const int rows = std::min(tile, end - t);
      float* normed = form.plain ? to.row(t) : scratch.data();
      for (int r = 0; r < rows; ++r)
        kernels_->rms_norm(x + static_cast<size_t>(t + r) * hidden_, weight.data(), eps_, hidden_, normed + r * hidden_);
      if (form.quantised) to.quantise_rows(t, rows, normed, *kernels_);
      if (in_tiles && to.needs_settling()) to.settle(t / tile, *kernels_);
    }
  });
  if (!in_tiles) settle(to);
}

void Decoder::settle(Activations& rows) {
  if (!rows.needs_settling()) return;
  for_rows(pool_, rows.quant().tiles(), rows.quant().tile * rows.quant().blocks, [&](int t) { rows.settle(t, *kernels_); });
}

void Decoder::add_normed(const Vector& weight, int tokens) {
  for_rows(pool_, tokens, 2 * hidden_, [&](int t) {
    float* mixed = mixed_.data() + static_cast<size_t>(t) * hidden_;
    kernels_->rms_norm(mixed, weight.data(), eps_, hidden_, mixed);
    kernels_->add(x_.data() + static_cast<size_t>(t) * hidden_, mixed, hidden_);
  });
}

}  // namespace tokenmill
