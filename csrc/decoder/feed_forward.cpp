// The feed-forward part of a layer: one gated product, or experts, where every (token, choice) becomes a row of its
// expert's own small product.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::feed_forward(const Layer& layer, int tokens) {
  const bool post = !layer.mlp_post_norm.empty();
  if (layer.mlp) {
    norm_rows(layer.mlp_norm, x_.data(), tokens, normed_,
              form_for({&layer.mlp->gate, &layer.mlp->up}, outlier_threshold(layer)));
    mlp(*layer.mlp, normed_.view(), outlier_threshold(layer), post ? Gemm::Mode::Store : Gemm::Mode::Add,
        post ? mixed_.data() : x_.data());
    if (post) add_normed(layer.mlp_post_norm, tokens);
    return;
  }
  Form form = form_for({&layer.moe->router}, outlier_threshold(layer));
  if (layer.moe->shared) form.quantised |= form_for({&layer.moe->shared->gate, &layer.moe->shared->up}, 0.0f).quantised;
  form.plain = true;  // experts take copies
  norm_rows(layer.mlp_norm, x_.data(), tokens, normed_, form);
  moe(*layer.moe, tokens, outlier_threshold(layer), mixed_.data());
  if (post) return add_normed(layer.mlp_post_norm, tokens);
  for_rows(pool_, tokens, hidden_, [&](int t) {
    const size_t at = static_cast<size_t>(t) * hidden_;
    kernels_->add(x_.data() + at, mixed_.data() + at, hidden_);
  });
}

void Decoder::mlp(const Mlp& mlp, const Rows& in, float outlier_threshold, Gemm::Mode mode, float* out) {
  inner_.prepare(in.quant.rows, mlp.gate.w.rows, *kernels_, form_for({&mlp.down}, outlier_threshold));
  Gemm gate{&mlp.gate, &mlp.up, in, Gemm::Mode::Gate};
  gate.activation = mlp.activation;
  gate.gated = &inner_;
  runner_.run(&gate, 1);
  mark_outliers(inner_);
  const Gemm down{&mlp.down, nullptr, inner_.view(), mode, out, static_cast<size_t>(hidden_)};
  runner_.run(&down, 1);
}

namespace {

void choose_experts(const float* logits, int experts, int active, bool renormalize, int32_t* ids, float* shares) {
  std::vector<float> weights(logits, logits + experts);
  const float top = *std::max_element(weights.begin(), weights.end());
  float total = 0.0f, chosen = 0.0f;
  for (float& w : weights) total += w = std::exp(w - top);
  for (int k = 0; k < active; ++k) {
    const auto best = std::max_element(weights.begin(), weights.end());
    ids[k] = static_cast<int32_t>(best - weights.begin());
    chosen += shares[k] = *best / total;
    *best = -1.0f;
  }
  if (renormalize)
    for (int k = 0; k < active; ++k) shares[k] /= chosen;
}

}  // namespace

void Decoder::moe(const Moe& moe, int tokens, float outlier_threshold, float* out) {
  const int experts = static_cast<int>(moe.experts.size()), active = moe.num_active;
  grow(router_logits_, static_cast<size_t>(tokens) * experts);
  grow(expert_ids_, static_cast<size_t>(tokens) * active);
  grow(expert_shares_, static_cast<size_t>(tokens) * active);
  grow(expert_out_, static_cast<size_t>(tokens) * active * hidden_);
  expert_in_.resize(std::max(expert_in_.size(), static_cast<size_t>(experts)));
  expert_inner_.resize(expert_in_.size());
  const Gemm router{&moe.router, nullptr, normed_.view(), Gemm::Mode::Store, router_logits_.data(),
                    static_cast<size_t>(experts)};
  runner_.run(&router, 1);
  for (int t = 0; t < tokens; ++t)
    choose_experts(router_logits_.data() + static_cast<size_t>(t) * experts, experts, active, moe.renormalize,
                   expert_ids_.data() + static_cast<size_t>(t) * active,
                   expert_shares_.data() + static_cast<size_t>(t) * active);

  std::vector<int> counts(static_cast<size_t>(experts), 0), places(static_cast<size_t>(tokens) * active);
  for (size_t i = 0; i < places.size(); ++i) places[i] = counts[static_cast<size_t>(expert_ids_[i])]++;
  std::vector<int> starts(static_cast<size_t>(experts), 0);
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), 0);

  std::vector<Gemm> gates, downs;
  for (int e = 0; e < experts; ++e) {
    const size_t at = static_cast<size_t>(e);
    if (counts[at] == 0) continue;
    const Mlp& expert = moe.experts[at];
    expert_in_[at].prepare(counts[at], hidden_, *kernels_, form_for({&expert.gate, &expert.up}, outlier_threshold));
    expert_inner_[at].prepare(counts[at], expert.gate.w.rows, *kernels_, form_for({&expert.down}, outlier_threshold));
    Gemm gate{&expert.gate, &expert.up, expert_in_[at].view(), Gemm::Mode::Gate};
    gate.activation = expert.activation;
    gate.gated = &expert_inner_[at];
    gates.push_back(gate);
    downs.push_back({&expert.down, nullptr, expert_inner_[at].view(), Gemm::Mode::Store,
                     expert_out_.data() + static_cast<size_t>(starts[at]) * hidden_, static_cast<size_t>(hidden_)});
  }
  for_rows(pool_, tokens * active, 2 * hidden_, [&](int i) {
    Activations& to = expert_in_[static_cast<size_t>(expert_ids_[static_cast<size_t>(i)])];
    const int place = places[static_cast<size_t>(i)];
    to.put_row(place, normed_.row(i / active), *kernels_);
  });
  const auto mark_used = [&](std::vector<Activations>& rows) {
    for (size_t e = 0; e < counts.size(); ++e)
      if (counts[e] > 0) mark_outliers(rows[e]);
  };
  mark_used(expert_in_);
  runner_.run(gates.data(), static_cast<int>(gates.size()));
  mark_used(expert_inner_);
  runner_.run(downs.data(), static_cast<int>(downs.size()));
  for_rows(pool_, tokens, active * hidden_, [&](int t) {
    float* to = out + static_cast<size_t>(t) * hidden_;
    std::fill_n(to, hidden_, 0.0f);
    for (int k = 0; k < active; ++k) {
      const size_t i = static_cast<size_t>(t) * active + k;
      const size_t row = static_cast<size_t>(starts[static_cast<size_t>(expert_ids_[i])] + places[i]);
      const float share = expert_shares_[i];
      const float* from = expert_out_.data() + row * hidden_;
      for (int d = 0; d < hidden_; ++d) to[d] += share * from[d];
    }
  });
  if (moe.shared) mlp(*moe.shared, normed_.view(), outlier_threshold, Gemm::Mode::Add, out);
}

}  // namespace tokenmill
