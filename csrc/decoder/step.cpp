// A step of the decoder. The phases of a layer, each of which the pool runs as a whole (a phase's rows are independent):
//
//   norm → q, k, v → (rotate, write to the cache) → attend → o → + → norm → gate·up → down → +
//   norm → b, c, x → (b * x, write to the cache) → convolve · c → o → + → ...
#include <algorithm>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::forward(const BatchView& batch, const float* entering, float* hidden) {
  check(batch, entering != nullptr);
  take_adapters(batch.adapters, batch.tokens);
  if (batch.tokens == 0) return;
  is_owned_ = batch.owners != nullptr;
  if (is_owned_) owned_.take(batch, window_->rank(), window_->size());
  has_held_ = false;
  if (entering == nullptr) embed(batch);
  else enter(entering, batch.tokens);
  const size_t whole_layers = layers_.size() - (is_last_stage_ ? 1 : 0);
  for (size_t i = 0; i < whole_layers; ++i) {
    begin_layer(layers_[i], batch.tokens);
    mixer(layers_[i], batch);
    output_and_mlp(layers_[i], batch.tokens);
    end_layer(layers_[i], static_cast<int>(i), batch.tokens, nullptr);
  }
  if (!is_last_stage_) {
    std::copy_n(x_.data(), static_cast<size_t>(batch.tokens) * hidden_, hidden);
    return;
  }
  last_layer(layers_.back(), batch);
  if (streams_.count > 1) finish_streams(batch.outputs);
  for_rows(pool_, batch.outputs, hidden_, [&](int i) {
    const size_t at = static_cast<size_t>(i) * hidden_;
    norm_row(final_norm_, x_.data() + at, hidden + at);
  });
}

void Decoder::begin_layer(const Layer& layer, int tokens) {
  threshold_now_ = outlier_threshold(layer);
  if (layer.altup) predict_streams(*layer.altup, tokens);
  if (layer.connections) read_streams(layer.connections->mixer, tokens);
}

void Decoder::mixer(const Layer& layer, const BatchView& batch) {
  if (layer.compressed) return attend_compressed(layer, batch);
  if (layer.conv) return convolve(layer, batch);
  if (layer.latent) return attend_latent(layer, batch);
  if (!layer.recurrent) return attention(layer, batch);
  recur(layer, batch);
  recurrent_outputs(layer, batch.tokens);
}

size_t Decoder::projected_width(const Layer& layer) const {
  if (layer.conv) return 3 * static_cast<size_t>(hidden_);
  if (layer.recurrent || layer.compressed) {
    size_t width = 0;
    for (const Linear& linear : layer.recurrent ? layer.recurrent->in : layer.compressed->in)
      width += static_cast<size_t>(linear.rows());
    return width;
  }
  if (layer.latent) {
    int width = layer.latent->q.rows() + layer.latent->kv_down.rows();
    if (const auto& index = layer.latent->index) width += index->k.rows() + index->weights.rows();
    if (layer.latent->gate) width += layer.latent->gate->rows();
    return static_cast<size_t>(width);
  }
  const PagedCache& cache = layer.attention.cache;
  const int kv_width = layer.has_own_kv() ? cache.kv_heads * (cache.head_dim + cache.value_dim) : 0;
  return static_cast<size_t>(layer.attention.heads * cache.head_dim + kv_width) +
         static_cast<size_t>(layer.gate.rows() + layer.index_width());
}

// Multiplies the normed stream by several matrices, whose results are concatenated in `projected_`.
void Decoder::project_to(const std::vector<Linear>& matrices, const Layer& layer, int tokens) {
  norm_rows(layer.attn_norm, x_.data(), tokens, normed_, form_for_all(matrices, outlier_threshold(layer)));
  const size_t stride = projected_width(layer);
  grow(projected_, static_cast<size_t>(tokens) * stride);
  std::vector<Gemm> gemms;
  size_t at = 0;
  for (const Linear& matrix : matrices) {
    gemms.push_back({&matrix, nullptr, normed_.view(), Gemm::Mode::Store, projected_.data() + at, stride});
    at += static_cast<size_t>(matrix.rows());
  }
  run(gemms.data(), static_cast<int>(gemms.size()));
}

// Of the last layer every token's key and value (or input of the convolution) is kept, but only the output tokens go on
// from there: each of them is then a row of its own whose context ends with it.
void Decoder::last_layer(const Layer& layer, const BatchView& batch) {
  const int number = num_layers() - 1;
  begin_layer(layer, batch.tokens);
  if (batch.outputs_all() || is_owned_) {
    mixer(layer, batch);
    output_and_mlp(layer, batch.tokens);
    end_layer(layer, number, batch.tokens, nullptr);
    if (batch.outputs_all()) return;
    keep_wanted(batch, static_cast<size_t>(hidden_), x_);
    if (streams_.count > 1) keep_wanted(batch, static_cast<size_t>(streams_.count) * hidden_, all_streams_);
    return keep_wanted_adapters(batch);
  }
  if (layer.recurrent) {
    recur(layer, batch);
    keep_wanted(batch, static_cast<size_t>(layer.recurrent->shape.values()), recurred_);
  } else if (layer.conv) {
    project_conv(layer, batch);
    write_conv_inputs(layer, batch);
  } else if (layer.latent) {
    project_latent(layer, batch);
    place_entries(layer, batch);
  } else if (layer.compressed) {
    project_compressed(layer, batch);
    place_compressed(layer, batch);
  } else {
    project(layer, batch);
    if (layer.has_own_kv()) place_all(layer, batch);
  }
  keep_wanted(batch, projected_width(layer), projected_);
  keep_wanted(batch, static_cast<size_t>(hidden_), x_);
  if (has_held_) keep_wanted(batch, static_cast<size_t>(hidden_), held_);
  if (streams_.count > 1) keep_wanted(batch, static_cast<size_t>(streams_.count) * hidden_, all_streams_);
  if (layer.connections) keep_wanted(batch, static_cast<size_t>(layer.connections->mixer.weight.rows()), coefficients_);
  if (!row_tokens_.empty())
    for (int i = 0; i < batch.outputs; ++i) row_tokens_[static_cast<size_t>(i)] = batch.token_ids[batch.logit_rows[i]];
  keep_wanted_adapters(batch);
  if (layer.latent && layer.latent->shares_index) keep_wanted_choices(batch);
  if (batch.outputs == 0) return;
  narrowed_.take(batch, layer.group);
  if (layer.latent && layer.latent->index) narrowed_.take_tables(batch, layer.latent->index->group);
  if (layer.compressed && layer.compressed->rate) narrowed_.take_tables(batch, layer.compressed->compressed.group);
  if (layer.compressed && layer.compressed->index) narrowed_.take_tables(batch, layer.compressed->index->keys.group);
  if (layer.recurrent) {
    recurrent_outputs(layer, batch.outputs);
  } else if (layer.conv) {
    conv_outputs(layer, narrowed_.view, false);
  } else if (layer.latent) {
    latent_outputs(layer, narrowed_.view);
  } else if (layer.compressed) {
    compressed_outputs(layer, narrowed_.view);
  } else {
    prepare_heads(layer, batch.outputs);
    attend_placed(layer, narrowed_.view);
    finish_heads(layer, batch.outputs);
  }
  output_and_mlp(layer, batch.outputs);
  end_layer(layer, number, batch.outputs, batch.logit_rows);
}

void Decoder::keep_wanted(const BatchView& batch, size_t width, PageVector<float>& rows) {
  grow(kept_rows_, rows.size());
  for (int i = 0; i < batch.outputs; ++i)
    std::copy_n(rows.data() + static_cast<size_t>(batch.logit_rows[i]) * width, width, kept_rows_.data() + i * width);
  std::swap(rows, kept_rows_);
}

// Takes over the residual stream of the previous pipeline stage.
void Decoder::enter(const float* stream, int tokens) {
  const size_t size = static_cast<size_t>(tokens) * hidden_;
  grow(x_, size);
  grow(mixed_, size);
  std::copy_n(stream, size, x_.data());
}

void Decoder::embed(const BatchView& batch) {
  const size_t size = static_cast<size_t>(batch.tokens) * hidden_;
  threshold_now_ = outlier_threshold_;
  grow(x_, size);
  grow(mixed_, size);
  embed_rows(embedding_, batch.token_ids, batch.tokens, embedding_scale_, x_.data());
  embed_adapters(batch);
  if (positions_.w.data != nullptr) add_positions(batch);
  if (!embed_norm_.empty()) norm_in_place(embed_norm_, x_.data(), batch.tokens);
  if (!input_norm_.empty()) layer_inputs(batch);
  if (streams_.count > 1) begin_streams(batch.tokens);
  const bool looks_up = std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
    return layer.moe && !layer.moe->routing.table.empty();
  });
  if (looks_up) row_tokens_.assign(batch.token_ids, batch.token_ids + batch.tokens);
}

void Decoder::add_positions(const BatchView& batch) {
  embed_rows(positions_, batch.positions, batch.tokens, 1.0f, mixed_.data());
  for_rows(pool_, batch.tokens, hidden_, [&](int t) {
    const size_t at = static_cast<size_t>(t) * hidden_;
    kernels_->add(x_.data() + at, mixed_.data() + at, hidden_);
  });
}

// The rest of a layer after its mixer: the output projection, then the feed-forward part. If both read the same stream, the
// MLP's result is kept in `side_` until the mixer's output is added.
void Decoder::output_and_mlp(const Layer& layer, int tokens) {
  if (layer.connections) return output_and_mlp_of_streams(layer, tokens);
  if (layer.is_parallel) {
    feed(layer, tokens);
    grow(side_, static_cast<size_t>(tokens) * hidden_);
    std::swap(side_, mixed_);
  }
  const bool is_added = layer.attn_post_norm.empty() && layer.residual_scale == 1.0f && !layer.is_held;
  const Gemm o{&layer.o, nullptr, heads_.view(), is_added ? Gemm::Mode::Add : Gemm::Mode::Store,
               is_added ? x_.data() : mixed_.data(), static_cast<size_t>(hidden_)};
  run(&o, 1);
  if (layer.is_held) return hold_result(tokens);
  if (!is_added) add_result(layer.attn_post_norm, layer.residual_scale, tokens);
  if (has_held_) add_held(layer.residual_scale, tokens);
  if (layer.altup) add_branch(layer, tokens);
  if (!layer.mlp && !layer.moe) return;
  if (!layer.is_parallel) return feed_forward(layer, tokens);
  std::swap(side_, mixed_);
  add_result(layer.mlp_post_norm, layer.residual_scale, tokens);
}

// Of two mixers that read the same stream, the first one's result is kept in `held_` until the second one's is added.
void Decoder::hold_result(int tokens) {
  grow(held_, static_cast<size_t>(tokens) * hidden_);
  std::swap(held_, mixed_);
  has_held_ = true;
}

void Decoder::add_held(float scale, int tokens) {
  std::swap(held_, mixed_);
  add_result(Norm(), scale, tokens);
  std::swap(held_, mixed_);
  has_held_ = false;
}

// Adds per-layer embeddings and applies the stream's scale, if the layer has them. `rows`: the tokens that are left; null: all.
void Decoder::end_layer(const Layer& layer, int number, int tokens, const int64_t* rows) {
  if (layer.altup) correct_streams(*layer.altup, tokens);
  if (layer.input) gate_layer_input(layer, number, tokens, rows);
  if (layer.input && layer.altup) add_to_streams(layer.input->norm, tokens);
  else if (layer.input) add_result(layer.input->norm, 1.0f, tokens);
  if (layer.stream_scale == 1.0f) return;
  for_rows(pool_, tokens, hidden_, [&](int t) {
    kernels_->scale(x_.data() + static_cast<size_t>(t) * hidden_, layer.stream_scale, hidden_);
  });
}

void Decoder::norm_row(const Norm& norm, const float* x, float* out) const {
  if (norm.empty()) {
    std::copy_n(x, hidden_, out);
  } else if (are_norms_centred_) {
    const float* bias = norm.bias.empty() ? nullptr : norm.bias.data();
    kernels_->layer_norm(x, norm.weight.data(), bias, eps_, hidden_, out);
  } else {
    kernels_->rms_norm(x, norm.weight.data(), eps_, hidden_, out);
  }
}

void Decoder::norm_rows(const Norm& norm, const float* x, int tokens, Activations& to, const Form& form) {
  fill_rows(tokens, hidden_, 2 * hidden_, to, form, [&](int t, float* out) {
    norm_row(norm, x + static_cast<size_t>(t) * hidden_, out);
  });
}

void Decoder::mark_outliers(Activations& rows) {
  if (!rows.marks_outliers()) return;
  for_rows(pool_, rows.quant().tiles(), rows.quant().tile * rows.quant().blocks,
           [&](int t) { rows.mark_outliers(t, *kernels_); });
}

void Decoder::norm_in_place(const Norm& norm, float* rows, int tokens) {
  for_rows(pool_, tokens, 2 * hidden_, [&](int t) {
    float* row = rows + static_cast<size_t>(t) * hidden_;
    norm_row(norm, row, row);
  });
}

// Adds `mixed_`, normed and scaled, to the stream.
void Decoder::add_result(const Norm& norm, float scale, int tokens) {
  for_rows(pool_, tokens, 2 * hidden_, [&](int t) {
    float* mixed = mixed_.data() + static_cast<size_t>(t) * hidden_;
    if (!norm.empty()) norm_row(norm, mixed, mixed);
    if (scale != 1.0f) kernels_->scale(mixed, scale, hidden_);
    kernels_->add(x_.data() + static_cast<size_t>(t) * hidden_, mixed, hidden_);
  });
}

}  // namespace tokenmill
