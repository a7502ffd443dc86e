// A gated short convolution as mixer: out(c * conv(b * x)), with b, c and x projected from the norm.
//
//   inputs in the cache     ... | t-2 | t-1 |  t  |         each token's own b * x, in the blocks of its sequence
//   taps of a kernel of 3         w0     w1    w2            y_t = c_t * (w0 * in[t-2] + w1 * in[t-1] + w2 * in[t])
//
// Inputs are found through the block table only, so chunked, forked and resumed sequences compute the same sums.
#include <algorithm>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::convolve(const Layer& layer, const BatchView& batch) {
  project_conv(layer, batch);
  const bool is_decode = batch.tokens == batch.rows;  // then no token reads what another token of this step writes
  if (!is_decode) write_conv_inputs(layer, batch);
  conv_outputs(layer, batch, is_decode);
}

void Decoder::project_conv(const Layer& layer, const BatchView& batch) {
  norm_rows(layer.attn_norm, x_.data(), batch.tokens, normed_, form_for({&layer.conv->in}, outlier_threshold(layer)));
  grow(projected_, static_cast<size_t>(batch.tokens) * projected_width(layer));
  const Gemm in{&layer.conv->in, nullptr, normed_.view(), Gemm::Mode::Store, projected_.data(), projected_width(layer)};
  run(&in, 1);
}

void Decoder::write_conv_inputs(const Layer& layer, const BatchView& batch) {
  for_rows(pool_, batch.tokens, 2 * hidden_, [&](int t) { write_conv_input(layer, batch, t); });
}

void Decoder::write_conv_input(const Layer& layer, const BatchView& batch, int token) {
  const float* b = projected_.data() + static_cast<size_t>(token) * projected_width(layer);
  const int64_t slot = batch.groups[static_cast<size_t>(layer.group)].slots[token];
  kernels_->multiply(b, b + 2 * hidden_, hidden_, layer.conv->inputs + static_cast<size_t>(slot) * hidden_);
}

void Decoder::conv_outputs(const Layer& layer, const BatchView& batch, bool writes_inputs) {
  const ShortConv& conv = *layer.conv;
  const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
  fill_rows(batch.tokens, hidden_, (conv.kernel + 2) * hidden_, heads_, form_for({&layer.o}, outlier_threshold(layer)),
            [&](int t, float* out) {
    if (writes_inputs) write_conv_input(layer, batch, t);
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, t);
    const size_t row = static_cast<size_t>(next - batch.query_starts - 1);
    const int32_t* table = group.block_tables + row * group.max_blocks;
    const int position = batch.context_lens[row] - (*next - t);
    const float* taps[kMaxConvKernel];
    for (int k = 0; k < conv.kernel; ++k) {
      const int at = position - conv.kernel + 1 + k;
      const size_t slot = at < 0 ? 0 : static_cast<size_t>(table[at / conv.block_size]) * conv.block_size + at % conv.block_size;
      taps[k] = at < 0 ? nullptr : conv.inputs + slot * hidden_;
    }
    const float* gate = projected_.data() + static_cast<size_t>(t) * projected_width(layer) + hidden_;
    const float* bias = conv.bias.empty() ? nullptr : conv.bias.data();
    kernels_->short_conv(taps, conv.weight.data(), bias, gate, conv.kernel, hidden_, out);
  });
}

}  // namespace tokenmill
