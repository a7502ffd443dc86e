// Attention over the blocks of keys that an indexer selects (MiniMax-M3). Each KV head has an index head; its score of a
// block is the largest q . k of the block's tokens up to the query's.
//
//   input → index queries and key → (norm, rotate, key to the cache) → scores of blocks → the best, and the local ones
//   → attention over a table of the selected blocks, in order of their positions
//
// In contexts of up to `top_k` blocks all are selected without scoring. What a token selects, and its result, depend on its
// own context only.
#include <algorithm>
#include <limits>

#include "decoder/phases.h"

namespace tokenmill {
namespace {

constexpr int kMaxQueries = 32;

int padded16(int size) { return (size + 15) / 16 * 16; }

uint8_t* aligned(PageVector<uint8_t>& scratch) {
  return scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
}

}  // namespace

void Decoder::attend_blocks(const Layer& layer, const BatchView& batch) {
  place_all(layer, batch);
  place_block_keys(layer, batch);
  const int kv_heads = layer.attention.cache.kv_heads;
  choosing_.resize(row_scratch_.size());
  block_choices_.resize(row_scratch_.size());
  pool_.run(batch.tokens * kv_heads, [&](int piece, int thread) {
    attend_chosen_blocks(layer, batch, piece / kv_heads, piece % kv_heads, thread);
  });
}

void Decoder::place_block_keys(const Layer& layer, const BatchView& batch) {
  const BlockIndex& index = *layer.block_index;
  const int64_t* slots = batch.groups[static_cast<size_t>(index.group)].slots;
  for_rows(pool_, batch.tokens, 6 * index.keys.width, [&](int t) {
    float* key = projected_.data() + static_cast<size_t>(t + 1) * projected_width(layer) - index.keys.width;
    kernels_->rms_norm(key, index.k_norm.data(), eps_, index.keys.width, key);
    rotate_at(layer, batch.positions[t], key);
    kernels_->write_entry(index.keys, slots[t], key);
  });
}

// Attends with all heads of a token that share a KV head.
void Decoder::attend_chosen_blocks(const Layer& layer, const BatchView& batch, int token, int kv_head, int thread) {
  const AttentionTask& task = layer.attention;
  const int* starts = batch.query_starts;
  const int row = static_cast<int>(std::upper_bound(starts, starts + batch.rows + 1, token) - starts) - 1;
  const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
  const int32_t* table = group.block_tables + static_cast<size_t>(row) * group.max_blocks;
  int seen = batch.context_lens[row] - (starts[row + 1] - token) + 1;
  if (seen > layer.block_index->block_size * layer.block_index->top_k) {
    seen = choose_blocks(layer, batch, token, kv_head, row, seen, thread);
    table = block_choices_[static_cast<size_t>(thread)].table.data();
  }
  const int dim = task.cache.head_dim, per_kv = task.heads / task.cache.kv_heads, wide = padded16(task.cache.value_dim);
  const int most = std::min(kernels_->query_tile, kMaxQueries);
  const float* queries = projected_.data() + static_cast<size_t>(token) * projected_width(layer);
  float copies[kMaxQueries * kMaxHeadDim], sums[kMaxQueries * kMaxHeadDim];
  float* q[kMaxQueries];
  int first[kMaxQueries] = {}, limit[kMaxQueries];
  Partial partial[kMaxQueries];
  for (int head = kv_head * per_kv; head < (kv_head + 1) * per_kv; head += most) {
    const int count = std::min(most, (kv_head + 1) * per_kv - head);
    for (int i = 0; i < count; ++i) {
      q[i] = copies + i * dim;
      std::copy_n(queries + static_cast<size_t>(head + i) * dim, dim, q[i]);
      prepare_query(layer, batch.positions[token], q[i]);
      limit[i] = seen;
    }
    kernels_->attend(task, kv_head, table, q, first, limit, nullptr, count, 0, seen, 0, sums, partial,
                     aligned(attention_scratch_[static_cast<size_t>(thread)]));
    for (int i = 0; i < count; ++i) take_outputs(layer, token, 1, head + i, sums + i * wide, 0, partial + i, 0);
  }
}

// Selects blocks among the first `seen` tokens of a row's context, and lists their KV blocks in the thread's table; returns
// how many tokens the selected blocks have.
int Decoder::choose_blocks(const Layer& layer, const BatchView& batch, int token, int kv_head, int row, int seen,
                           int thread) {
  const BlockIndex& index = *layer.block_index;
  BlockChoice& choice = block_choices_[static_cast<size_t>(thread)];
  score_tokens(layer, batch, token, kv_head, row, seen, thread);
  const int size = index.block_size, own = (seen - 1) / size;
  choice.best.assign(static_cast<size_t>(own) + 1, 0.0f);
  for (int b = 0; b <= own; ++b)
    choice.best[static_cast<size_t>(b)] =
        *std::max_element(choice.scores.begin() + b * size, choice.scores.begin() + std::min(seen, (b + 1) * size));
  for (int b = std::max(0, own - index.num_local + 1); b <= own; ++b)
    choice.best[static_cast<size_t>(b)] = std::numeric_limits<float>::infinity();
  choice.chosen.resize(static_cast<size_t>(index.top_k));
  choose_best(choice.best.data(), own + 1, index.top_k, thread, choice.chosen.data());
  const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
  const int32_t* table = group.block_tables + static_cast<size_t>(row) * group.max_blocks;
  const int each = size / layer.attention.cache.block_size, last = (seen - 1) / layer.attention.cache.block_size;
  choice.table.clear();
  for (const int32_t b : choice.chosen)
    choice.table.insert(choice.table.end(), table + b * each, table + std::min((b + 1) * each, last + 1));
  return index.top_k * size - (choice.chosen.back() == own ? (own + 1) * size - seen : 0);
}

// Scores the first `seen` tokens of a row's context. The kernel sums weights[h] * max(0, q_h . k) over heads; q and -q with
// the weights 1 and -1 give q . k.
void Decoder::score_tokens(const Layer& layer, const BatchView& batch, int token, int kv_head, int row, int seen,
                           int thread) {
  const BlockIndex& index = *layer.block_index;
  const int dim = index.keys.width, wide = padded16(dim);
  const float signs[2] = {1.0f, -1.0f};
  float queries[2 * kMaxHeadDim] = {};
  const float* projected = projected_.data() + static_cast<size_t>(token + 1) * projected_width(layer);
  std::copy_n(projected - index.q.rows() - dim + kv_head * dim, dim, queries);
  kernels_->rms_norm(queries, index.q_norm.data(), eps_, dim, queries);
  rotate_at(layer, batch.positions[token], queries);
  for (int d = 0; d < dim; ++d) queries[wide + d] = -queries[d];
  Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
  grow(scratch, kernels_->index_scratch_floats);
  BlockChoice& choice = block_choices_[static_cast<size_t>(thread)];
  choice.scores.resize(static_cast<size_t>(seen));
  const GroupView& group = batch.groups[static_cast<size_t>(index.group)];
  kernels_->index_scores(index.keys, group.block_tables + static_cast<size_t>(row) * group.max_blocks, queries, signs, 2, 0,
                         seen, choice.scores.data(), scratch.data());
}

}  // namespace tokenmill
