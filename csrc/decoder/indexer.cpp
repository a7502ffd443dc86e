// An indexer: selects the context entries that a token attends to (DeepSeek's sparse attention, latent or compressed).
//
//   input → key → (norm, rotate, write to the cache)       latent of queries → queries, rotated       input → a weight per head
//   score of an entry = sum over heads of weight * max(0, query . key);  selected: the top k, of equal scores the earliest
//
// In contexts of up to `top_k` tokens all entries are selected without scoring. The selection is kept for later layers
// without an indexer. It depends on the token's own context only. The keys of compressed entries are computed like the
// entries (decoder/compressed_attention.cpp); only complete entries are candidates.
#include <algorithm>
#include <limits>
#include <numeric>

#include "decoder/phases.h"

namespace tokenmill {
namespace {

constexpr int kPiece = 4 * kSegment;                // entries scored per piece
constexpr size_t kMostScores = size_t{1} << 22;     // scores in memory at a time; more take several rounds
constexpr float kLeast = -std::numeric_limits<float>::infinity();

size_t padded16(int size) { return static_cast<size_t>((size + 15) / 16 * 16); }

// How far from the end of a token's projections the weights of the index heads begin: only gates follow them.
int weights_from_end(const IndexView& index, const Layer& layer) {
  return index.heads + (layer.latent && layer.latent->gate ? layer.latent->gate->rows() : 0);
}

}  // namespace

void Decoder::place_index_keys(const Layer& layer, const BatchView& batch) {
  const EntryIndexer& index = *layer.latent->index;
  const int dim = index.keys.width, at = static_cast<int>(layer.latent->q.rows() + layer.latent->kv_down.rows());
  const int64_t* slots = batch.groups[static_cast<size_t>(index.group)].slots;
  for_rows(pool_, batch.tokens, 6 * dim, [&](int t) {
    float* key = projected_.data() + static_cast<size_t>(t) * projected_width(layer) + at;
    kernels_->layer_norm(key, index.norm.data(), index.norm_bias.data(), index.eps, dim, key);
    rotate_at(layer, batch.positions[t], key);
    kernels_->write_entry(index.keys, slots[t], key);
  });
}

// Computes the indexer's queries [T][heads][padded dim] from the latents of attention's queries.
void Decoder::prepare_index_queries(const IndexView& index, const Layer& layer, const BatchView& batch) {
  const int dim = index.keys->width, tokens = batch.tokens;
  const size_t width = static_cast<size_t>(index.heads) * dim, wide = padded16(dim);
  grow(index_rows_, static_cast<size_t>(tokens) * width);
  grow(index_queries_, static_cast<size_t>(tokens) * index.heads * wide);
  const Gemm product{index.q, nullptr, query_latents_.view(), Gemm::Mode::Store, index_rows_.data(), width};
  run(&product, 1);
  for_rows(pool_, tokens, 4 * static_cast<int>(width), [&](int t) {
    for (int h = 0; h < index.heads; ++h) {
      float* to = index_queries_.data() + (static_cast<size_t>(t) * index.heads + h) * wide;
      std::copy_n(index_rows_.data() + static_cast<size_t>(t) * width + static_cast<size_t>(h) * dim, dim, to);
      if (layer.compressed) turn(layer, batch.positions[t], 1.0f, to, dim);
      else rotate_at(layer, batch.positions[t], to);
      std::fill(to + dim, to + wide, 0.0f);
    }
    const size_t end = static_cast<size_t>(t + 1) * projected_width(layer);
    float* weights = projected_.data() + end - weights_from_end(index, layer);
    kernels_->scale(weights, index.scale, index.heads);
  });
}

void Decoder::choose_entries(const IndexView& index, const Layer& layer, const BatchView& batch) {
  const int tokens = batch.tokens;
  num_chosen_.assign(static_cast<size_t>(tokens), kSeesAll);
  const int longest = *std::max_element(batch.context_lens, batch.context_lens + batch.rows) / index.rate;
  if (longest <= index.top_k) return;
  prepare_index_queries(index, layer, batch);
  chosen_stride_ = index.top_k;
  choosing_.resize(row_scratch_.size());
  grow(chosen_, static_cast<size_t>(tokens) * index.top_k);
  const GroupView& group = batch.groups[static_cast<size_t>(index.group)];
  const auto row_of = [&](int t) {
    return static_cast<size_t>(std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, t) -
                               batch.query_starts - 1);
  };
  const auto context_of = [&](int t) {
    const size_t row = row_of(t);
    return (batch.context_lens[row] - (batch.query_starts[row + 1] - t) + 1) / index.rate;
  };
  const size_t stride = static_cast<size_t>(longest), wide = padded16(index.keys->width);
  const int turn = static_cast<int>(std::clamp<size_t>(kMostScores / stride, 1, static_cast<size_t>(tokens)));
  const int pieces = (longest + kPiece - 1) / kPiece;
  grow(index_scores_, static_cast<size_t>(turn) * stride);
  for (int first = 0; first < tokens; first += turn) {
    const int count = std::min(turn, tokens - first);
    pool_.run(count * pieces, [&](int piece, int thread) {
      const int t = first + piece / pieces, lo = piece % pieces * kPiece, context = context_of(t);
      if (context <= index.top_k || lo >= context) return;
      Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
      grow(scratch, kernels_->index_scratch_floats);
      const size_t end = static_cast<size_t>(t + 1) * projected_width(layer);
      kernels_->index_scores(*index.keys, group.block_tables + row_of(t) * group.max_blocks,
                             index_queries_.data() + static_cast<size_t>(t) * index.heads * wide,
                             projected_.data() + end - weights_from_end(index, layer), index.heads, lo,
                             std::min(context, lo + kPiece),
                             index_scores_.data() + static_cast<size_t>(t - first) * stride + lo, scratch.data());
    });
    pool_.run(count, [&](int i, int thread) {
      const int t = first + i, context = context_of(t);
      if (context <= index.top_k) return;
      choose_best(index_scores_.data() + static_cast<size_t>(i) * stride, context, index.top_k, thread,
                  chosen_.data() + static_cast<size_t>(t) * index.top_k);
      num_chosen_[static_cast<size_t>(t)] = index.top_k;
    });
  }
}

// Writes the indices of the `top_k` highest of `count` scores, ascending; NaN counts as the lowest score.
void Decoder::choose_best(const float* scores, int count, int top_k, int thread, int32_t* chosen) {
  std::vector<int32_t>& places = choosing_[static_cast<size_t>(thread)];
  places.resize(static_cast<size_t>(count));
  std::iota(places.begin(), places.end(), 0);
  const auto score_of = [&](int32_t place) { return scores[place] == scores[place] ? scores[place] : kLeast; };
  const auto is_before = [&](int32_t a, int32_t b) {
    const float first = score_of(a), second = score_of(b);
    return first > second || (first == second && a < b);
  };
  std::nth_element(places.begin(), places.begin() + top_k - 1, places.end(), is_before);
  std::copy_n(places.begin(), top_k, chosen);
  std::sort(chosen, chosen + top_k);
}

// In the last layer: keeps the selections of the output tokens only.
void Decoder::keep_wanted_choices(const BatchView& batch) {
  std::vector<int32_t> numbers, chosen;
  for (int i = 0; i < batch.outputs; ++i) {
    const size_t token = static_cast<size_t>(batch.logit_rows[i]);
    numbers.push_back(num_chosen_[token]);
    if (chosen_stride_ == 0) continue;
    const auto begin = chosen_.begin() + static_cast<ptrdiff_t>(token) * chosen_stride_;
    chosen.insert(chosen.end(), begin, begin + chosen_stride_);
  }
  num_chosen_ = std::move(numbers);
  chosen_ = std::move(chosen);
}

}  // namespace tokenmill
