// Several residual streams, `all_streams_` [T][streams][hidden]: how a layer's input is computed from them, and how its
// result is added to them.
//
// AltUp (Gemma 3n). c(x) = tanh(router(norm(x) / hidden)), one number per stream
//
//   before the layer   h_i += sum_j P(c(h_0))_ij h_j        x = h_0
//   in the layer       x = (x + attention + n + norm(right(left(n)))) / sqrt(2), with n the normed x
//   behind it          h_i += (1 + K(c(x))_i) (x - h_0)     the per-layer embedding is added to all but h_0
//
// Hyper-connections (DeepSeek V4), around the mixer and around the MLP
//
//   a, b, M = functions of the normed streams      x = sum_i a_i h_i      h_i = b_i y + sum_j M_ji h_j
//
// where y is the mixer's or MLP's result for x, and M is made doubly stochastic by dividing rows and columns by their sums
// in turn.
#include <algorithm>
#include <cmath>

#include "decoder/phases.h"

namespace tokenmill {
namespace {

constexpr float kMinSquare = 1e-5f;  // smallest mean square of a stream that is rescaled

// Scales x to the norm of `model`.
void make_as_long(float* x, const float* model, int size) {
  const float target = std::sqrt(mean_of(size, [&](int i) { return model[i] * model[i]; }));
  const float found = std::sqrt(std::max(kMinSquare, mean_of(size, [&](int i) { return x[i] * x[i]; })));
  for (int d = 0; d < size; ++d) x[d] *= target / found;
}

void add_times(float factor, const float* x, int size, float* to) {
  for (int d = 0; d < size; ++d) to[d] += factor * x[d];
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides `count` lines by their sums; a line has `count` numbers that are `step` apart, and lines are `next` apart.
void divide_by_sums(float* matrix, int count, int step, int next, float eps) {
  for (int i = 0; i < count; ++i) {
    float sum = eps;
    for (int j = 0; j < count; ++j) sum += matrix[i * next + j * step];
    for (int j = 0; j < count; ++j) matrix[i * next + j * step] /= sum;
  }
}

void make_doubly_stochastic(float* matrix, int count, int rounds, float eps) {
  for (int i = 0; i < count; ++i) {
    float* row = matrix + i * count;
    const float top = *std::max_element(row, row + count);
    float total = 0.0f;
    for (int j = 0; j < count; ++j) total += row[j] = std::exp(row[j] - top);
    for (int j = 0; j < count; ++j) row[j] = row[j] / total + eps;
  }
  divide_by_sums(matrix, count, count, 1, eps);
  for (int round = 1; round < rounds; ++round) {
    divide_by_sums(matrix, count, 1, count, eps);
    divide_by_sums(matrix, count, count, 1, eps);
  }
}

}  // namespace

void Decoder::begin_streams(int tokens) {
  const size_t all = static_cast<size_t>(streams_.count) * hidden_;
  grow(all_streams_, static_cast<size_t>(tokens) * all);
  if (!streams_.in.empty()) {
    fill_rows(tokens, hidden_, hidden_, stream_rows_, form_for_all(streams_.in, outlier_threshold_),
              [&](int t, float* out) { std::copy_n(x_.data() + static_cast<size_t>(t) * hidden_, hidden_, out); });
    std::vector<Gemm> gemms;
    for (size_t i = 0; i < streams_.in.size(); ++i)
      gemms.push_back({&streams_.in[i], nullptr, stream_rows_.view(), Gemm::Mode::Store,
                       all_streams_.data() + (i + 1) * static_cast<size_t>(hidden_), all});
    run(gemms.data(), static_cast<int>(gemms.size()));
  }
  for_rows(pool_, tokens, 4 * static_cast<int>(all), [&](int t) {
    const float* x = x_.data() + static_cast<size_t>(t) * hidden_;
    float* streams = all_streams_.data() + static_cast<size_t>(t) * all;
    std::copy_n(x, hidden_, streams);
    for (int i = 1; i < streams_.count; ++i) {
      float* stream = streams + static_cast<size_t>(i) * hidden_;
      if (streams_.in.empty()) std::copy_n(x, hidden_, stream);
      else make_as_long(stream, x, hidden_);
    }
  });
}

// Reduces the streams to one, in `x_`: for AltUp the mean of the first stream and the others, projected and scaled to its
// norm; for hyper-connections one more mixture.
void Decoder::finish_streams(int tokens) {
  if (tokens == 0) return;
  if (streams_.are_connected()) return read_streams(streams_.end, tokens);
  const size_t all = static_cast<size_t>(streams_.count) * hidden_;
  for_rows(pool_, tokens, hidden_, [&](int t) {
    std::copy_n(all_streams_.data() + static_cast<size_t>(t) * all, hidden_, x_.data() + static_cast<size_t>(t) * hidden_);
  });
  for (size_t i = 0; i < streams_.out.size(); ++i) {
    fill_rows(tokens, hidden_, hidden_, stream_rows_, form_for({&streams_.out[i]}, threshold_at_end()), [&](int t, float* out) {
      std::copy_n(all_streams_.data() + static_cast<size_t>(t) * all + (i + 1) * static_cast<size_t>(hidden_), hidden_, out);
    });
    const Gemm gemm{&streams_.out[i], nullptr, stream_rows_.view(), Gemm::Mode::Store, mixed_.data(),
                    static_cast<size_t>(hidden_)};
    run(&gemm, 1);
    for_rows(pool_, tokens, 4 * hidden_, [&](int t) {
      float* end = mixed_.data() + static_cast<size_t>(t) * hidden_;
      make_as_long(end, all_streams_.data() + static_cast<size_t>(t) * all, hidden_);
      kernels_->add(x_.data() + static_cast<size_t>(t) * hidden_, end, hidden_);
    });
  }
  for_rows(pool_, tokens, hidden_, [&](int t) {
    kernels_->scale(x_.data() + static_cast<size_t>(t) * hidden_, 1.0f / static_cast<float>(streams_.count), hidden_);
  });
}

// ── AltUp ──

// Computes tanh(router(norm(x) / hidden)) of rows `stride` apart, into `coefficients_` [T][streams].
void Decoder::judge_streams(const AltUp& altup, const float* x, size_t stride, int tokens) {
  const size_t count = static_cast<size_t>(streams_.count);
  fill_rows(tokens, hidden_, 2 * hidden_, stream_rows_, {false, true, outlier_threshold_}, [&](int t, float* out) {
    kernels_->rms_norm(x + static_cast<size_t>(t) * stride, altup.router_norm.data(), eps_, hidden_, out);
    kernels_->scale(out, 1.0f / static_cast<float>(hidden_), hidden_);
  });
  grow(coefficients_, static_cast<size_t>(tokens) * count);
  const Gemm router{&altup.router, nullptr, stream_rows_.view(), Gemm::Mode::Store, coefficients_.data(), count};
  run(&router, 1);
  for (size_t i = 0; i < static_cast<size_t>(tokens) * count; ++i) coefficients_[i] = std::tanh(coefficients_[i]);
}

// Predicts all streams after the layer; the layer itself reads the first one.
void Decoder::predict_streams(const AltUp& altup, int tokens) {
  const int count = streams_.count;
  const size_t all = static_cast<size_t>(count) * hidden_;
  judge_streams(altup, all_streams_.data(), all, tokens);
  for_tiles(pool_, tokens, count * static_cast<int>(all), 1, [&](int first, int end, int thread) {
    Vector& before = row_scratch_[static_cast<size_t>(thread)];
    grow(before, all);
    for (int t = first; t < end; ++t) {
      float* streams = all_streams_.data() + static_cast<size_t>(t) * all;
      const float *judged = coefficients_.data() + static_cast<size_t>(t) * count, *predict = altup.predict.data();
      std::copy_n(streams, all, before.data());
      for (int i = 0; i < count; ++i)
        for (int j = 0; j < count; ++j, predict += count) {
          float share = 0.0f;
          for (int k = 0; k < count; ++k) share += judged[k] * predict[k];
          add_times(share, before.data() + static_cast<size_t>(j) * hidden_, hidden_, streams + static_cast<size_t>(i) * hidden_);
        }
      std::copy_n(streams, hidden_, x_.data() + static_cast<size_t>(t) * hidden_);
    }
  });
}

// Adds the low-rank branch beside attention, whose result is already in `x_`.
void Decoder::add_branch(const Layer& layer, int tokens) {
  const AltUp& altup = *layer.altup;
  const float threshold = outlier_threshold(layer);
  const size_t all = static_cast<size_t>(streams_.count) * hidden_;
  const int rank = altup.left.rows();
  Form form = form_for({&altup.left}, threshold);
  form.plain = true;
  fill_rows(tokens, hidden_, 2 * hidden_, normed_, form, [&](int t, float* out) {
    norm_row(layer.attn_norm, all_streams_.data() + static_cast<size_t>(t) * all, out);
  });
  branch_rows_.prepare(tokens, rank, *kernels_, {false, true, threshold});
  const Gemm left{&altup.left, nullptr, normed_.view(), Gemm::Mode::Store, branch_rows_.row(0), static_cast<size_t>(rank)};
  run(&left, 1);
  fill_rows(tokens, rank, rank, inner_, form_for({&altup.right}, threshold),
            [&](int t, float* out) { std::copy_n(branch_rows_.row(t), rank, out); });
  const Gemm right{&altup.right, nullptr, inner_.view(), Gemm::Mode::Store, mixed_.data(), static_cast<size_t>(hidden_)};
  run(&right, 1);
  add_result(altup.branch_norm, 1.0f, tokens);
  for_rows(pool_, tokens, 2 * hidden_, [&](int t) {
    float* x = x_.data() + static_cast<size_t>(t) * hidden_;
    kernels_->add(x, normed_.row(t), hidden_);
    kernels_->scale(x, std::sqrt(0.5f), hidden_);
  });
}

// Corrects all streams by the layer's result for the first one, in `x_`; `x_` then gates the per-layer embedding.
void Decoder::correct_streams(const AltUp& altup, int tokens) {
  const int count = streams_.count;
  const size_t all = static_cast<size_t>(count) * hidden_;
  judge_streams(altup, x_.data(), static_cast<size_t>(hidden_), tokens);
  for_rows(pool_, tokens, 2 * static_cast<int>(all), [&](int t) {
    float *x = x_.data() + static_cast<size_t>(t) * hidden_, *streams = all_streams_.data() + static_cast<size_t>(t) * all;
    const float *judged = coefficients_.data() + static_cast<size_t>(t) * count, *correct = altup.correct.data();
    for (int d = 0; d < hidden_; ++d) x[d] -= streams[d];
    for (int i = 0; i < count; ++i, correct += count) {
      float share = 1.0f;
      for (int k = 0; k < count; ++k) share += judged[k] * correct[k];
      add_times(share, x, hidden_, streams + static_cast<size_t>(i) * hidden_);
    }
    if (altup.scale.empty()) std::copy_n(streams, hidden_, x);
    else kernels_->multiply(streams, altup.scale.data(), hidden_, x);
  });
}

// Adds `mixed_`, normed, to all streams but the first.
void Decoder::add_to_streams(const Norm& norm, int tokens) {
  const size_t all = static_cast<size_t>(streams_.count) * hidden_;
  for_rows(pool_, tokens, static_cast<int>(all), [&](int t) {
    float *added = mixed_.data() + static_cast<size_t>(t) * hidden_, *streams = all_streams_.data() + static_cast<size_t>(t) * all;
    norm_row(norm, added, added);
    for (int i = 1; i < streams_.count; ++i) kernels_->add(streams + static_cast<size_t>(i) * hidden_, added, hidden_);
  });
}

// ── hyper-connections ──

// Multiplies the normed streams by the connection's weight, into `coefficients_`.
void Decoder::connect(const Connection& connection, int tokens) {
  const int all = streams_.count * hidden_;
  const size_t count = static_cast<size_t>(connection.weight.rows());
  fill_rows(tokens, all, 2 * all, stream_rows_, {false, true, outlier_threshold_}, [&](int t, float* out) {
    kernels_->rms_norm(all_streams_.data() + static_cast<size_t>(t) * all, ones_.data(), streams_.norm_eps, all, out);
  });
  grow(coefficients_, static_cast<size_t>(tokens) * count);
  const Gemm gemm{&connection.weight, nullptr, stream_rows_.view(), Gemm::Mode::Store, coefficients_.data(), count};
  run(&gemm, 1);
}

// Writes a mixture of the streams to `x_`. For a connection of a mixer or MLP, `coefficients_` then holds per token the
// coefficients for reading [streams], for writing [streams], and for mixing the streams [streams][streams].
void Decoder::read_streams(const Connection& connection, int tokens) {
  const int count = streams_.count;
  const size_t all = static_cast<size_t>(count) * hidden_, number = static_cast<size_t>(connection.weight.rows());
  connect(connection, tokens);
  for_rows(pool_, tokens, 2 * static_cast<int>(all), [&](int t) {
    float* own = coefficients_.data() + static_cast<size_t>(t) * number;
    for (size_t i = 0; i < number; ++i) {
      const size_t kind = std::min<size_t>(i / static_cast<size_t>(count), 2);
      own[i] = own[i] * connection.scale[kind] + connection.base[i];
    }
    float* x = x_.data() + static_cast<size_t>(t) * hidden_;
    std::fill_n(x, hidden_, 0.0f);
    for (int i = 0; i < count; ++i) {
      own[i] = sigmoid(own[i]) + streams_.eps;
      add_times(own[i], all_streams_.data() + static_cast<size_t>(t) * all + static_cast<size_t>(i) * hidden_, hidden_, x);
    }
    if (number == static_cast<size_t>(count)) return;
    for (int i = count; i < 2 * count; ++i) own[i] = 2.0f * sigmoid(own[i]);
    make_doubly_stochastic(own + 2 * count, count, streams_.rounds, streams_.eps);
  });
}

// Mixes the streams and adds the mixer's or MLP's result, `mixed_`, to all of them.
void Decoder::write_streams(int tokens) {
  const int count = streams_.count, number = (2 + count) * count;
  const size_t all = static_cast<size_t>(count) * hidden_;
  for_tiles(pool_, tokens, count * static_cast<int>(all), 1, [&](int first, int end, int thread) {
    Vector& before = row_scratch_[static_cast<size_t>(thread)];
    grow(before, all);
    for (int t = first; t < end; ++t) {
      const float *result = mixed_.data() + static_cast<size_t>(t) * hidden_;
      const float *written = coefficients_.data() + static_cast<size_t>(t) * number + count, *mixed = written + count;
      float* streams = all_streams_.data() + static_cast<size_t>(t) * all;
      std::copy_n(streams, all, before.data());
      for (int i = 0; i < count; ++i) {
        float* stream = streams + static_cast<size_t>(i) * hidden_;
        for (int d = 0; d < hidden_; ++d) stream[d] = written[i] * result[d];
        for (int j = 0; j < count; ++j)
          add_times(mixed[j * count + i], before.data() + static_cast<size_t>(j) * hidden_, hidden_, stream);
      }
    }
  });
}

void Decoder::output_and_mlp_of_streams(const Layer& layer, int tokens) {
  const Gemm o{&layer.o, nullptr, heads_.view(), Gemm::Mode::Store, mixed_.data(), static_cast<size_t>(hidden_)};
  run(&o, 1);
  write_streams(tokens);
  read_streams(layer.connections->feed, tokens);
  feed(layer, tokens);
  write_streams(tokens);
}

}  // namespace tokenmill
