// Multi-head latent attention (MLA) in absorbed form: each head's query is mapped to the latent space, attends to the one
// entry per token directly, and the result is mapped to the head's values.
//
//   norm → q, entry → (norm, rotate, write to the cache) → queries · absorb → attend → · expand → o
//
// If there is an indexer (decoder/indexer.cpp), it selects the entries that a token's heads attend to. Attention over
// entries is in kernels/latent_attention.h; absorb and expand are ordinary products.
#include <algorithm>

#include "decoder/phases.h"

namespace tokenmill {
namespace {

constexpr int kHeadTile = 16;  // heads of a token per piece

size_t padded16(int size) { return static_cast<size_t>((size + 15) / 16 * 16); }

// Some columns of rows, `stride` apart, as the input of products with unquantised matrices.
Rows columns_of(const float* values, size_t stride, int rows, const Kernels& kernels) {
  Rows in{values, stride, {}};
  in.quant.rows = rows;
  in.quant.tile = kernels.tile_for(rows);
  return in;
}

}  // namespace

void Decoder::attend_latent(const Layer& layer, const BatchView& batch) {
  project_latent(layer, batch);
  if (!is_owned_) {
    place_entries(layer, batch);
    return latent_outputs(layer, batch);
  }
  const LatentAttention& latent = *layer.latent;
  if (latent.q_up) {  // for all rows, since its matrix is cut over the ranks
    grow_queries(layer, batch.tokens);
    keep_own(queries_, static_cast<size_t>(latent.q_up->rows()));
  }
  keep_own(projected_, projected_width(layer));
  if (owned_.view.tokens > 0) {
    place_entries(layer, owned_.view);
    latent_outputs(layer, owned_.view);
  }
  share_heads(layer, static_cast<size_t>(latent.heads) * latent.value_dim);
}

void Decoder::project_latent(const Layer& layer, const BatchView& batch) {
  const LatentAttention& latent = *layer.latent;
  const size_t stride = projected_width(layer);
  const float threshold = outlier_threshold(layer);
  Form form = latent.index ? form_for({&latent.q, &latent.kv_down, &latent.index->k, &latent.index->weights}, threshold)
                           : form_for({&latent.q, &latent.kv_down}, threshold);
  if (latent.gate) {
    const Form gate = form_for({&*latent.gate}, threshold);
    form.quantised |= gate.quantised;
    form.plain |= gate.plain;
  }
  norm_rows(layer.attn_norm, x_.data(), batch.tokens, normed_, form);
  grow(projected_, static_cast<size_t>(batch.tokens) * stride);
  Gemm gemms[5];
  int count = 0, at = 0;
  const auto add = [&](const Linear& linear) {
    gemms[count++] = {&linear, nullptr, normed_.view(), Gemm::Mode::Store, projected_.data() + at, stride};
    at += linear.rows();
  };
  add(latent.q);
  add(latent.kv_down);
  if (latent.index) add(latent.index->k), add(latent.index->weights);
  if (latent.gate) add(*latent.gate);
  run(gemms, count);
}

void Decoder::rotate_at(const Layer& layer, int64_t position, float* values) const {
  if (layer.rope < 0) return;
  const RopeTable& rope = ropes_[static_cast<size_t>(layer.rope)];
  const size_t at = static_cast<size_t>(position) * rope.half;
  kernels_->rotate(values, rope.cos.data() + at, rope.sin.data() + at, rope.half);
}

// Norms every token's latent, rotates its key, and writes both to the cache.
void Decoder::place_entries(const Layer& layer, const BatchView& batch) {
  const LatentAttention& latent = *layer.latent;
  const int64_t* slots = batch.groups[static_cast<size_t>(layer.group)].slots;
  for_rows(pool_, batch.tokens, 4 * latent.cache.width, [&](int t) {
    float* entry = projected_.data() + static_cast<size_t>(t) * projected_width(layer) + latent.q.rows();
    kernels_->rms_norm(entry, latent.kv_norm.data(), latent.eps, latent.cache.rank, entry);
    rotate_at(layer, batch.positions[t], entry + latent.cache.rank);
    kernels_->write_entry(latent.cache, slots[t], entry);
  });
  if (latent.index) place_index_keys(layer, batch);
}

void Decoder::latent_outputs(const Layer& layer, const BatchView& batch) {
  const LatentAttention& latent = *layer.latent;
  const int tokens = batch.tokens, value_width = latent.heads * latent.value_dim;
  absorb_queries(layer, batch);
  if (latent.index) choose_entries(latent.index->view(), layer, batch);
  attend_tokens(layer, batch);
  grow(latent_values_, static_cast<size_t>(tokens) * value_width);
  const size_t wide = padded16(latent.cache.rank), stride = latent.heads * wide;
  std::vector<Gemm> gemms;
  for (int h = 0; h < latent.heads; ++h)
    gemms.push_back({&latent.expand[static_cast<size_t>(h)], nullptr,
                     columns_of(mixtures_.data() + h * wide, stride, tokens, *kernels_), Gemm::Mode::Store,
                     latent_values_.data() + static_cast<size_t>(h) * latent.value_dim, static_cast<size_t>(value_width)});
  run(gemms.data(), latent.heads);
  Form form = form_for({&layer.o}, outlier_threshold(layer));
  if (is_owned_) form = {false, true, form.outlier_threshold};  // quantised after all rows are gathered
  fill_rows(tokens, value_width, 2 * value_width, heads_, form, [&](int t, float* out) {
    std::copy_n(latent_values_.data() + static_cast<size_t>(t) * value_width, value_width, out);
    if (latent.gate) gate_latent(layer, t, out);
  });
}

// Multiplies a token's output by the sigmoid of its gates, one per head or per value; the gates are overwritten.
void Decoder::gate_latent(const Layer& layer, int token, float* out) {
  const LatentAttention& latent = *layer.latent;
  const int count = latent.gate->rows();
  float* gates = projected_.data() + static_cast<size_t>(token + 1) * projected_width(layer) - count;
  kernels_->sigmoid(gates, count, gates);
  if (count > latent.heads) return kernels_->multiply(out, gates, count, out);
  for (int h = 0; h < count; ++h) kernels_->scale(out + static_cast<size_t>(h) * latent.value_dim, gates[h], latent.value_dim);
}

// Computes the queries of all heads from their latents: [T][heads][nope and rope dims].
void Decoder::grow_queries(const Layer& layer, int tokens) {
  const LatentAttention& latent = *layer.latent;
  const size_t stride = projected_width(layer);
  const int q_rank = static_cast<int>(latent.q.rows());
  const Form form = latent.index ? form_for({&*latent.q_up, &latent.index->q}, outlier_threshold(layer))
                                 : form_for({&*latent.q_up}, outlier_threshold(layer));
  fill_rows(tokens, q_rank, 2 * q_rank, query_latents_, form, [&](int t, float* out) {
    kernels_->rms_norm(projected_.data() + static_cast<size_t>(t) * stride, latent.q_norm.data(), latent.eps, q_rank, out);
  });
  const size_t width = static_cast<size_t>(latent.q_up->rows());
  grow(queries_, static_cast<size_t>(tokens) * width);
  const Gemm up{&*latent.q_up, nullptr, query_latents_.view(), Gemm::Mode::Store, queries_.data(), width};
  run(&up, 1);
}

// Computes queries over entries, [T][heads][padded width]: the unrotated part mapped to the latent space, and the rotated
// part.
void Decoder::absorb_queries(const Layer& layer, const BatchView& batch) {
  const LatentAttention& latent = *layer.latent;
  const int tokens = batch.tokens, head_dim = latent.nope_dim + latent.rope_dim, rank = latent.cache.rank;
  const float* queries = projected_.data();
  size_t stride = projected_width(layer);
  if (latent.q_up) {
    if (!is_owned_) grow_queries(layer, tokens);
    queries = queries_.data();
    stride = static_cast<size_t>(latent.heads) * head_dim;
  }
  const size_t wide = padded16(latent.cache.width), all = latent.heads * wide;
  grow(absorbed_, static_cast<size_t>(tokens) * all);
  std::vector<Gemm> gemms;
  for (int h = 0; h < latent.heads; ++h)
    gemms.push_back({&latent.absorb[static_cast<size_t>(h)], nullptr,
                     columns_of(queries + static_cast<size_t>(h) * head_dim, stride, tokens, *kernels_),
                     Gemm::Mode::Store, absorbed_.data() + h * wide, all});
  run(gemms.data(), latent.heads);
  for_rows(pool_, tokens, 4 * latent.heads * latent.rope_dim, [&](int t) {
    for (int h = 0; h < latent.heads; ++h) {
      float* to = absorbed_.data() + static_cast<size_t>(t) * all + h * wide + rank;
      std::copy_n(queries + static_cast<size_t>(t) * stride + static_cast<size_t>(h) * head_dim + latent.nope_dim,
                  latent.rope_dim, to);
      rotate_at(layer, batch.positions[t], to);
      std::fill(to + latent.rope_dim, to + wide - rank, 0.0f);
    }
  });
}

// Attends with each token's heads over its context: [T][heads][padded rank].
void Decoder::attend_tokens(const Layer& layer, const BatchView& batch) {
  const LatentAttention& latent = *layer.latent;
  const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
  const size_t wide = padded16(latent.cache.width), wide_sums = padded16(latent.cache.rank);
  const int tiles = (latent.heads + kHeadTile - 1) / kHeadTile;
  grow(mixtures_, static_cast<size_t>(batch.tokens) * latent.heads * wide_sums);
  pool_.run(batch.tokens * tiles, [&](int piece, int thread) {
    const int t = piece / tiles, first = piece % tiles * kHeadTile, count = std::min(kHeadTile, latent.heads - first);
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, t);
    const size_t row = static_cast<size_t>(next - batch.query_starts - 1);
    int limit = batch.context_lens[row] - (*next - t) + 1;
    const int32_t* chosen = nullptr;
    if (latent.is_sparse() && num_chosen_[static_cast<size_t>(t)] != kSeesAll) {
      chosen = chosen_.data() + static_cast<size_t>(t) * chosen_stride_;
      limit = num_chosen_[static_cast<size_t>(t)];
    }
    Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
    grow(scratch, kernels_->entry_scratch_floats(latent.cache.rank));
    const size_t at = static_cast<size_t>(t) * latent.heads + first;
    float* sums = mixtures_.data() + at * wide_sums;
    Partial partial[kHeadTile];
    kernels_->attend_entries(latent.cache, group.block_tables + row * group.max_blocks, chosen, absorbed_.data() + at * wide,
                             count, limit, latent.scale, sums, partial, scratch.data());
    for (int i = 0; i < count; ++i)
      kernels_->finish(sums + i * wide_sums, partial[i], nullptr, static_cast<int>(wide_sums), sums + i * wide_sums);
  });
}

}  // namespace tokenmill
