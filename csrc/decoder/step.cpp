// A step, and what surrounds its products. Phases of a layer, each handed to the pool as a whole (rows of a phase are
// independent):
//
//   norm → q, k, v → (rotate, write to the cache) → attend → o → + → norm → gate·up → down → +
//   norm → b, c, x → (b * x, write to the cache) → convolve · c → o → + → ...
#include <algorithm>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::forward(const BatchView& batch, float* hidden) {
  check(batch);
  if (batch.tokens == 0) return;
  embed(batch);
  for (size_t i = 0; i + 1 < layers_.size(); ++i) {
    mixer(layers_[i], batch);
    output_and_mlp(layers_[i], batch.tokens);
  }
  last_layer(layers_.back(), batch);
  for_rows(pool_, batch.wanted, hidden_, [&](int i) {
    const size_t at = static_cast<size_t>(i) * hidden_;
    kernels_->rms_norm(x_.data() + at, final_norm_.data(), eps_, hidden_, hidden + at);
  });
}

void Decoder::mixer(const Layer& layer, const BatchView& batch) {
  if (layer.conv) convolve(layer, batch);
  else attention(layer, batch);
}

size_t Decoder::projected_width(const Layer& layer) const {
  if (layer.conv) return 3 * static_cast<size_t>(hidden_);
  return static_cast<size_t>(layer.attention.heads + 2 * layer.attention.cache.kv_heads) * layer.attention.cache.head_dim;
}

// Of the last layer every token's key and value (or input of the convolution) is kept, but only the wanted tokens go on
// from there: each of them is then a row of its own whose context ends with it.
void Decoder::last_layer(const Layer& layer, const BatchView& batch) {
  if (batch.wants_all()) {
    mixer(layer, batch);
    return output_and_mlp(layer, batch.tokens);
  }
  if (layer.conv) {
    project_conv(layer, batch);
    write_conv_inputs(layer, batch);
  } else {
    project(layer, batch);
    place_all(layer, batch);
  }
  keep_wanted(batch, projected_width(layer), projected_);
  keep_wanted(batch, static_cast<size_t>(hidden_), x_);
  if (batch.wanted == 0) return;
  narrowed_.take(batch, layer.group);
  if (layer.conv) {
    conv_outputs(layer, narrowed_.view, false);
    return output_and_mlp(layer, batch.wanted);
  }
  prepare_heads(layer, batch.wanted);
  attend_placed(layer, narrowed_.view);
  finish_heads(layer, batch.wanted);
  output_and_mlp(layer, batch.wanted);
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

// What follows the mixer: its output product, then the feed-forward part.
void Decoder::output_and_mlp(const Layer& layer, int tokens) {
  const bool post = !layer.attn_post_norm.empty();
  const Gemm o{&layer.o, nullptr, heads_.view(), post ? Gemm::Mode::Store : Gemm::Mode::Add,
               post ? mixed_.data() : x_.data(), static_cast<size_t>(hidden_)};
  runner_.run(&o, 1);
  if (post) add_normed(layer.attn_post_norm, tokens);
  feed_forward(layer, tokens);
}

void Decoder::norm_rows(const Vector& weight, const float* x, int tokens, Activations& to, const Form& form) {
  fill_rows(tokens, hidden_, 2 * hidden_, to, form, [&](int t, float* out) {
    kernels_->rms_norm(x + static_cast<size_t>(t) * hidden_, weight.data(), eps_, hidden_, out);
  });
}

void Decoder::mark_outliers(Activations& rows) {
  if (!rows.marks_outliers()) return;
  for_rows(pool_, rows.quant().tiles(), rows.quant().tile * rows.quant().blocks,
           [&](int t) { rows.mark_outliers(t, *kernels_); });
}

void Decoder::add_normed(const Vector& weight, int tokens) {
  for_rows(pool_, tokens, 2 * hidden_, [&](int t) {
    float* mixed = mixed_.data() + static_cast<size_t>(t) * hidden_;
    kernels_->rms_norm(mixed, weight.data(), eps_, hidden_, mixed);
    kernels_->add(x_.data() + static_cast<size_t>(t) * hidden_, mixed, hidden_);
  });
}

}  // namespace tokenmill
