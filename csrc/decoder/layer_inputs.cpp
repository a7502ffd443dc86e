// Per-layer embeddings (Gemma 3n and 4): a row of a second table plus a projection of the token's embedding, computed once
// per step; each layer adds its part through a gate that reads the stream.
//
//   input[t][l] = (norm(project(x_t)[l] / sqrt(hidden)) + table[token][l] * sqrt(width)) / sqrt(2)
//   x += norm(up(act(gate(x)) * input[t][l]))
#include <algorithm>
#include <cmath>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::layer_inputs(const BatchView& batch) {
  const int width = static_cast<int>(input_norm_.size()), all = input_project_.rows();
  grow(layer_inputs_, static_cast<size_t>(batch.tokens) * all);
  fill_rows(batch.tokens, hidden_, hidden_, input_rows_, form_for({&input_project_}, outlier_threshold_),
            [&](int t, float* out) { std::copy_n(x_.data() + static_cast<size_t>(t) * hidden_, hidden_, out); });
  const Gemm project{&input_project_, nullptr, input_rows_.view(), Gemm::Mode::Store, layer_inputs_.data(),
                     static_cast<size_t>(all)};
  run(&project, 1);
  const float narrower = 1.0f / std::sqrt(static_cast<float>(hidden_)), wider = std::sqrt(static_cast<float>(width));
  grow(embedded_, static_cast<size_t>(batch.tokens) * all);
  std::vector<int64_t> known(batch.token_ids, batch.token_ids + batch.tokens);
  for (int64_t& id : known) id = id < input_table_.rows() ? id : 0;
  embed_rows(input_table_, known.data(), batch.tokens, wider, embedded_.data());
  for_rows(pool_, batch.tokens, 4 * all, [&](int t) {
    float* row = layer_inputs_.data() + static_cast<size_t>(t) * all;
    const float* embedded = embedded_.data() + static_cast<size_t>(t) * all;
    kernels_->scale(row, narrower, all);
    for (int at = 0; at < all; at += width) kernels_->rms_norm(row + at, input_norm_.data(), eps_, width, row + at);
    kernels_->add(row, embedded, all);
    kernels_->scale(row, std::sqrt(0.5f), all);
  });
}

// Computes what a layer adds, before its norm, into `mixed_`.
void Decoder::gate_layer_input(const Layer& layer, int number, int tokens, const int64_t* rows) {
  const LayerInput& input = *layer.input;
  const int width = static_cast<int>(input_norm_.size()), all = input_project_.rows();
  const float threshold = outlier_threshold(layer);
  fill_rows(tokens, hidden_, hidden_, input_rows_, form_for({&input.gate}, threshold),
            [&](int t, float* out) { std::copy_n(x_.data() + static_cast<size_t>(t) * hidden_, hidden_, out); });
  grow(input_gates_, static_cast<size_t>(tokens) * width);
  const Gemm gate{&input.gate, nullptr, input_rows_.view(), Gemm::Mode::Store, input_gates_.data(),
                  static_cast<size_t>(width)};
  run(&gate, 1);
  fill_rows(tokens, width, width, inner_, form_for({&input.up}, threshold), [&](int t, float* out) {
    const size_t token = static_cast<size_t>(rows == nullptr ? t : rows[t]);
    const float* own = layer_inputs_.data() + token * all + static_cast<size_t>(number) * width;
    gate_row(input_gates_.data() + static_cast<size_t>(t) * width, own, width, input.activation, out);
  });
  const Gemm up{&input.up, nullptr, inner_.view(), Gemm::Mode::Store, mixed_.data(), static_cast<size_t>(hidden_)};
  run(&up, 1);
}

}  // namespace tokenmill
