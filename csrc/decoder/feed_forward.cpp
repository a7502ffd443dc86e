// The feed-forward part of a layer: a gated MLP, or experts, where every (token, choice) pair is a row of its expert's
// product.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "decoder/phases.h"

namespace tokenmill {

void Decoder::feed_forward(const Layer& layer, int tokens) {
  const bool is_added = layer.mlp_post_norm.empty() && layer.residual_scale == 1.0f;
  if (layer.mlp && !layer.moe && is_added) return mlp_of_stream(layer, tokens, Gemm::Mode::Add, x_.data());
  feed(layer, tokens);
  add_result(layer.mlp_post_norm, layer.residual_scale, tokens);
}

// Computes the MLP, the experts, or both side by side, into `mixed_`.
void Decoder::feed(const Layer& layer, int tokens) {
  if (!layer.moe) return mlp_of_stream(layer, tokens, Gemm::Mode::Store, mixed_.data());
  if (!layer.mlp) return moe_of_stream(layer, layer.mlp_norm, tokens, mixed_.data());
  mlp_of_stream(layer, tokens, Gemm::Mode::Store, mixed_.data());
  norm_in_place(layer.side.mlp_post_norm, mixed_.data(), tokens);
  grow(side_, static_cast<size_t>(tokens) * hidden_);
  moe_of_stream(layer, layer.side.norm, tokens, side_.data());
  norm_in_place(layer.side.post_norm, side_.data(), tokens);
  for_rows(pool_, tokens, hidden_, [&](int t) {
    const size_t at = static_cast<size_t>(t) * hidden_;
    kernels_->add(mixed_.data() + at, side_.data() + at, hidden_);
  });
}

void Decoder::mlp_of_stream(const Layer& layer, int tokens, Gemm::Mode mode, float* out) {
  norm_rows(layer.mlp_norm, x_.data(), tokens, normed_, form_of_input(*layer.mlp, outlier_threshold(layer)));
  mlp(*layer.mlp, normed_.view(), outlier_threshold(layer), mode, out);
}

void Decoder::moe_of_stream(const Layer& layer, const Norm& norm, int tokens, float* out) {
  const Moe& moe = *layer.moe;
  const float threshold = outlier_threshold(layer);
  Form form = form_for({&moe.router}, threshold);
  if (!moe.router_norm.empty()) {
    fill_rows(tokens, hidden_, 2 * hidden_, routed_, form, [&](int t, float* row) {
      kernels_->rms_norm(x_.data() + static_cast<size_t>(t) * hidden_, moe.router_norm.data(), eps_, hidden_, row);
    });
  }
  if (moe.shared) {
    const Form shared = form_of_input(*moe.shared, threshold);
    form.quantised |= shared.quantised;
    form.outlier_threshold = std::min(form.outlier_threshold, shared.outlier_threshold);
  }
  if (moe.latent_in.w.data != nullptr) form.quantised |= moe.latent_in.reads_blocks();
  form.plain = true;  // experts copy their rows
  norm_rows(norm, x_.data(), tokens, normed_, form);
  this->moe(moe, tokens, threshold, out);
}

void Decoder::mlp(const Mlp& mlp, const Rows& in, float outlier_threshold, Gemm::Mode mode, float* out) {
  if (mlp.curve) {
    curve_rows(mlp, in, outlier_threshold);
  } else if (mlp.cutoff) {
    gate_above_cutoff(mlp, in, outlier_threshold);
  } else {
    inner_.prepare(in.quant.rows, mlp.up.rows(), *kernels_, form_for({&mlp.down}, outlier_threshold));
    Gemm gate{&mlp.first(), mlp.second(), in, Gemm::Mode::Gate};
    gate.activation = mlp.activation;
    gate.gated = &inner_;
    run(&gate, 1);
    mark_outliers(inner_);
  }
  const Gemm down{&mlp.down, nullptr, inner_.view(), mode, out, static_cast<size_t>(hidden_)};
  run(&down, 1);
}

// xIELU of the products with `up`, into `inner_`.
void Decoder::curve_rows(const Mlp& mlp, const Rows& in, float outlier_threshold) {
  const int tokens = in.quant.rows, inter = mlp.up.rows();
  grow(cut_gates_, static_cast<size_t>(tokens) * inter);
  const Gemm up{&mlp.up, nullptr, in, Gemm::Mode::Store, cut_gates_.data(), static_cast<size_t>(inter)};
  run(&up, 1);
  fill_rows(tokens, inter, 8 * inter, inner_, form_for({&mlp.down}, outlier_threshold), [&](int t, float* out) {
    kernels_->xielu(cut_gates_.data() + static_cast<size_t>(t) * inter, *mlp.curve, inter, out);
  });
}

// Activation sparsity: act(relu(gate - (mean + cutoff * standard deviation))) * up into `inner_`, over all gates of a token.
void Decoder::gate_above_cutoff(const Mlp& mlp, const Rows& in, float outlier_threshold) {
  const int tokens = in.quant.rows, inter = mlp.up.rows();
  const size_t stride = 2 * static_cast<size_t>(inter);
  grow(cut_gates_, static_cast<size_t>(tokens) * stride);
  const Gemm gemms[] = {{&mlp.gate, nullptr, in, Gemm::Mode::Store, cut_gates_.data(), stride},
                        {&mlp.up, nullptr, in, Gemm::Mode::Store, cut_gates_.data() + inter, stride}};
  run(gemms, 2);
  fill_rows(tokens, inter, 8 * inter, inner_, form_for({&mlp.down}, outlier_threshold), [&](int t, float* out) {
    float* gates = cut_gates_.data() + static_cast<size_t>(t) * stride;
    const float mean = mean_of(inter, [&](int i) { return gates[i]; });
    const float variance = mean_of(inter, [&](int i) { return (gates[i] - mean) * (gates[i] - mean); });
    const float least = mean + std::sqrt(variance) * *mlp.cutoff;
    for (int i = 0; i < inter; ++i) gates[i] = std::max(0.0f, gates[i] - least);
    gate_row(gates, gates + inter, inter, mlp.activation, out);
  });
}

void Decoder::gate_row(const float* gates, const float* ups, int width, Activation activation, float* out) const {
  for (int at = 0; at < width; at += kBlock) {
    float blocks[3][kBlock] = {};
    const int count = std::min(kBlock, width - at);
    std::copy_n(gates + at, count, blocks[0]);
    std::copy_n(ups + at, count, blocks[1]);
    kernels_->gate(blocks[0], blocks[1], activation, blocks[2]);
    std::copy_n(blocks[2], count, out + at);
  }
}

namespace {

// Removes and returns the largest number; of equal ones the first, as in every argmax here.
float take_best(std::vector<float>& numbers, int& place) {
  const auto best = std::max_element(numbers.begin(), numbers.end());
  const float value = *best;
  place = static_cast<int>(best - numbers.begin());
  *best = -std::numeric_limits<float>::infinity();
  return value;
}

void score_all(const float* logits, int experts, Score score, std::vector<float>& scores) {
  scores.assign(logits, logits + experts);
  if (score == Score::Sigmoid) {
    for (float& s : scores) s = 1.0f / (1.0f + std::exp(-s));
  } else if (score == Score::SqrtSoftplus) {
    for (float& s : scores) s = std::sqrt(s > 20.0f ? s : std::log1p(std::exp(s)));
  } else {
    const float top = *std::max_element(scores.begin(), scores.end());
    float total = 0.0f;
    for (float& s : scores) total += s = std::exp(s - top);
    for (float& s : scores) s /= total;
  }
}

// Excludes the experts whose group is not among the best.
void keep_best_groups(const Routing& routing, std::vector<float>& scores) {
  const int size = static_cast<int>(scores.size()) / routing.num_groups;
  std::vector<float> judged(static_cast<size_t>(routing.num_groups));
  for (int g = 0; g < routing.num_groups; ++g) {
    std::vector<float> own(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    int place;
    for (int i = 0; i < std::min(routing.judged_by, size); ++i) judged[static_cast<size_t>(g)] += take_best(own, place);
  }
  std::vector<bool> is_kept(static_cast<size_t>(routing.num_groups), false);
  for (int i = 0; i < routing.kept_groups; ++i) {
    int place;
    take_best(judged, place);
    is_kept[static_cast<size_t>(place)] = true;
  }
  for (size_t e = 0; e < scores.size(); ++e)
    if (!is_kept[e / static_cast<size_t>(size)]) scores[e] = -std::numeric_limits<float>::infinity();
}

// Writes the top-k experts by score to `ids`.
void take_best_experts(const Routing& routing, std::vector<float> scores, int32_t* ids) {
  for (size_t e = 0; e < routing.choice_bias.size(); ++e) scores[e] += routing.choice_bias[e];
  if (routing.num_groups > 1) keep_best_groups(routing, scores);
  for (int k = 0; k < routing.num_active; ++k) take_best(scores, ids[k]);
}

// Writes each choice's softmax over the experts not chosen before it whose logits are near its own.
void share_among_near(const Routing& routing, const float* logits, int experts, const int32_t* ids, float* shares) {
  std::vector<bool> is_left(static_cast<size_t>(experts), true);
  for (int k = 0; k < routing.num_active; ++k) {
    const float best = logits[ids[k]];
    float total = 0.0f;
    for (int e = 0; e < experts; ++e) {
      const bool is_far = (best - logits[e]) / std::max(std::fabs(logits[e]), best) > 2.0f * *routing.jitter;
      if (is_left[static_cast<size_t>(e)] && !is_far) total += std::exp(logits[e] - best);
    }
    shares[k] = 1.0f / total;
    is_left[static_cast<size_t>(ids[k])] = false;
  }
}

// `looked_up`: the token's experts from the table by token id; null: by score.
void choose_experts(const Routing& routing, const float* logits, int experts, const int32_t* looked_up, int32_t* ids,
                    float* shares) {
  std::vector<float> scores;
  score_all(logits, experts, routing.score, scores);
  if (looked_up != nullptr) std::copy_n(looked_up, routing.num_active, ids);
  else if (routing.is_bias_on_logits || routing.jitter) take_best_experts(routing, {logits, logits + experts}, ids);
  else take_best_experts(routing, scores, ids);
  if (routing.jitter) share_among_near(routing, logits, experts, ids, shares);
  else
    for (int k = 0; k < routing.num_active; ++k) shares[k] = scores[static_cast<size_t>(ids[k])];
  float chosen = routing.epsilon;
  for (int k = 0; k < routing.num_active; ++k) chosen += shares[k];
  for (int k = 0; k < routing.num_active; ++k) {
    if (routing.renormalize) shares[k] /= chosen;
    shares[k] *= routing.scale;
    if (!routing.expert_scales.empty()) shares[k] *= routing.expert_scales[static_cast<size_t>(ids[k])];
  }
}

}  // namespace

void Decoder::route(const Moe& moe, int tokens) {
  const int experts = static_cast<int>(moe.experts.size()), active = moe.routing.num_active;
  grow(router_logits_, static_cast<size_t>(tokens) * experts);
  grow(expert_ids_, static_cast<size_t>(tokens) * active);
  grow(expert_shares_, static_cast<size_t>(tokens) * active);
  const Rows in = moe.router_norm.empty() ? normed_.view() : routed_.view();
  const Gemm router{&moe.router, nullptr, in, Gemm::Mode::Store, router_logits_.data(), static_cast<size_t>(experts)};
  run(&router, 1);
  const std::vector<int32_t>& table = moe.routing.table;
  for (int t = 0; t < tokens; ++t)
    choose_experts(moe.routing, router_logits_.data() + static_cast<size_t>(t) * experts, experts,
                   table.empty() ? nullptr : table.data() + row_tokens_[static_cast<size_t>(t)] * active,
                   expert_ids_.data() + static_cast<size_t>(t) * active,
                   expert_shares_.data() + static_cast<size_t>(t) * active);
}

// Assigns each (token, expert) pair to a rank; ranks that share an expert alternate. All ranks know all pairs, so they
// agree without communication.
void Decoder::place_experts(const Moe& moe, int tokens) {
  const size_t experts = moe.experts.size(), pairs = static_cast<size_t>(tokens) * static_cast<size_t>(moe.routing.num_active);
  const int ranks = moe.is_spread() ? window_->size() : 1, own = moe.is_spread() ? window_->rank() : 0;
  std::vector<int> counts(static_cast<size_t>(ranks) * experts, 0), seen(experts, 0), owner(pairs, 0);
  std::vector<uint64_t>& chosen = expert_counts_[moe.layer];
  expert_rows_.places.resize(pairs);
  expert_rows_.rows.resize(pairs);
  for (size_t i = 0; i < pairs; ++i) {
    const size_t e = static_cast<size_t>(expert_ids_[i]);
    ++chosen[e];
    if (moe.is_spread()) {
      const std::vector<int>& having = moe.owners[e];
      owner[i] = having[static_cast<size_t>(seen[e]++) % having.size()];
    }
    expert_rows_.places[i] = counts[static_cast<size_t>(owner[i]) * experts + e]++;
  }
  std::vector<int> starts(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), 0);
  for (size_t i = 0; i < pairs; ++i) {
    const size_t at = static_cast<size_t>(owner[i]) * experts + static_cast<size_t>(expert_ids_[i]);
    expert_rows_.rows[i] = static_cast<size_t>(starts[at] + expert_rows_.places[i]);
    if (owner[i] != own) expert_rows_.places[i] = -1;
  }
  const auto begin = static_cast<std::ptrdiff_t>(static_cast<size_t>(own) * experts), end = begin + static_cast<std::ptrdiff_t>(experts);
  expert_rows_.counts.assign(counts.begin() + begin, counts.begin() + end);
  expert_rows_.starts.assign(starts.begin() + begin, starts.begin() + end);
  expert_rows_.first.clear();
  for (int rank = 0; rank < ranks; ++rank)
    expert_rows_.first.push_back(static_cast<size_t>(starts[static_cast<size_t>(rank) * experts]));
  expert_rows_.first.push_back(pairs);
  if (!moe.is_spread()) return;
  const size_t mine = expert_rows_.first[static_cast<size_t>(own) + 1] - expert_rows_.first[static_cast<size_t>(own)];
  computed_rows_ += mine;
  received_rows_ += pairs - mine;
}

void Decoder::moe(const Moe& moe, int tokens, float outlier_threshold, float* out) {
  const int experts = static_cast<int>(moe.experts.size()), active = moe.routing.num_active;
  const bool is_latent = moe.latent_in.w.data != nullptr;
  const int width = is_latent ? moe.latent_in.rows() : hidden_;  // width of the experts' inputs and outputs
  route(moe, tokens);
  grow(expert_out_, static_cast<size_t>(tokens) * active * width);
  expert_in_.resize(std::max(expert_in_.size(), static_cast<size_t>(experts)));
  expert_inner_.resize(expert_in_.size());
  if (is_latent) {
    latent_.prepare(tokens, width, *kernels_, {false, true, outlier_threshold});
    const Gemm in{&moe.latent_in, nullptr, normed_.view(), Gemm::Mode::Store, latent_.row(0), static_cast<size_t>(width)};
    run(&in, 1);
  }
  Activations& inputs = is_latent ? latent_ : normed_;
  place_experts(moe, tokens);
  const std::vector<int>&counts = expert_rows_.counts, &places = expert_rows_.places;

  if (is_adapted_) {
    expert_slots_.resize(std::max(expert_slots_.size(), static_cast<size_t>(experts)));
    for (size_t e = 0; e < counts.size(); ++e) expert_slots_[e].resize(static_cast<size_t>(counts[e]));
    for (size_t i = 0; i < places.size(); ++i)
      expert_slots_[static_cast<size_t>(expert_ids_[i])][static_cast<size_t>(places[i])] = row_slots_[i / static_cast<size_t>(active)];
  }
  std::vector<Gemm> gates, downs;
  for (int e = 0; e < experts; ++e) {
    const size_t at = static_cast<size_t>(e);
    if (counts[at] == 0) continue;
    const Mlp& expert = moe.experts[at];
    expert_in_[at].prepare(counts[at], width, *kernels_, form_of_input(expert, outlier_threshold));
    expert_inner_[at].prepare(counts[at], expert.up.rows(), *kernels_, form_for({&expert.down}, outlier_threshold));
    Gemm gate{&expert.first(), expert.second(), expert_in_[at].view(), Gemm::Mode::Gate};
    gate.activation = expert.activation;
    gate.gated = &expert_inner_[at];
    gates.push_back(gate);
    downs.push_back({&expert.down, nullptr, expert_inner_[at].view(), Gemm::Mode::Store,
                     expert_out_.data() + static_cast<size_t>(expert_rows_.starts[at]) * width, static_cast<size_t>(width)});
    if (is_adapted_) gates.back().slots = downs.back().slots = expert_slots_[at].data();
  }
  for_rows(pool_, tokens * active, 2 * width, [&](int i) {
    const size_t pair = static_cast<size_t>(i);
    if (places[pair] < 0) return;
    Activations& to = expert_in_[static_cast<size_t>(expert_ids_[pair])];
    const float* row = inputs.row(i / active);
    if (!moe.routing.weights_input) return to.put_row(places[pair], row, *kernels_);
    Vector weighted(row, row + width);
    kernels_->scale(weighted.data(), expert_shares_[pair], width);
    to.put_row(places[pair], weighted.data(), *kernels_);
  });
  const auto mark_used = [&](std::vector<Activations>& rows) {
    for (size_t e = 0; e < counts.size(); ++e)
      if (counts[e] > 0) mark_outliers(rows[e]);
  };
  mark_used(expert_in_);
  run(gates.data(), static_cast<int>(gates.size()));
  mark_used(expert_inner_);
  run(downs.data(), static_cast<int>(downs.size()));
  if (moe.is_spread()) exchange_rows(expert_out_.data(), expert_rows_.first, static_cast<size_t>(width));
  const auto sum_experts = [&](int t, float* to) {
    std::fill_n(to, width, 0.0f);
    for (int k = 0; k < active; ++k) {
      const size_t i = static_cast<size_t>(t) * active + k;
      const float share = moe.routing.weights_input ? 1.0f : expert_shares_[i];
      const float* from = expert_out_.data() + expert_rows_.rows[i] * width;
      for (int d = 0; d < width; ++d) to[d] += share * from[d];
    }
  };
  if (is_latent) {
    fill_rows(tokens, width, active * width, latent_sums_, form_for({&moe.latent_out}, outlier_threshold), sum_experts);
    const Gemm back{&moe.latent_out, nullptr, latent_sums_.view(), Gemm::Mode::Store, out, static_cast<size_t>(hidden_)};
    run(&back, 1);
  } else {
    for_rows(pool_, tokens, active * width, [&](int t) { sum_experts(t, out + static_cast<size_t>(t) * hidden_); });
  }
  if (moe.shared) add_shared_expert(moe, tokens, outlier_threshold, out);
}

void Decoder::add_shared_expert(const Moe& moe, int tokens, float outlier_threshold, float* out) {
  if (moe.shared_gate.empty()) return mlp(*moe.shared, normed_.view(), outlier_threshold, Gemm::Mode::Add, out);
  grow(side_, static_cast<size_t>(tokens) * hidden_);
  mlp(*moe.shared, normed_.view(), outlier_threshold, Gemm::Mode::Store, side_.data());
  for_rows(pool_, tokens, 4 * hidden_, [&](int t) {
    const size_t at = static_cast<size_t>(t) * hidden_;
    const float* row = normed_.row(t);
    float product = 0.0f;
    for (int d = 0; d < hidden_; ++d) product += row[d] * moe.shared_gate[static_cast<size_t>(d)];
    kernels_->scale(side_.data() + at, 1.0f / (1.0f + std::exp(-product)), hidden_);
    kernels_->add(out + at, side_.data() + at, hidden_);
  });
}

}  // namespace tokenmill
