// See decoder.h. Phases of a layer, each handed to the pool as a whole (rows of a phase are independent):
//
//   norm → q, k, v → (rotate, write to the cache) → attend → o → + → norm → gate·up → down → +
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tokenmill {
namespace {

constexpr int kMaxQueryTile = 64;

template <class Buffer>
void grow(Buffer& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

// body(first, end, thread) for pieces of whole tiles of rows, each of some thousand numbers; little work stays with the
// caller.
template <class Body>
void for_tiles(Pool& pool, int rows, int numbers_per_row, int tile, const Body& body) {
  const int per_piece = std::max(1, 8192 / std::max(1, numbers_per_row) / tile) * tile;
  const int pieces = (rows + per_piece - 1) / per_piece;
  pool.run(pieces, [&](int piece, int thread) {
    body(piece * per_piece, std::min(rows, (piece + 1) * per_piece), thread);
  });
}
template <class Body>
void for_rows(Pool& pool, int rows, int numbers_per_row, const Body& body) {
  for_tiles(pool, rows, numbers_per_row, 1, [&](int first, int end, int) {
    for (int r = first; r < end; ++r) body(r);
  });
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("the batch is inconsistent: ") + what);
}

// What the inputs of these must be kept as.
Form form_for(std::initializer_list<const Linear*> readers, float fine_above) {
  const auto quantised = std::count_if(readers.begin(), readers.end(), [](const Linear* l) { return is_quantised(l->w.kind); });
  return {quantised > 0, static_cast<size_t>(quantised) < readers.size(), fine_above};
}

int most_segments(const BatchView& batch) {
  const int longest = *std::max_element(batch.context_lens, batch.context_lens + batch.rows);
  return (longest + kSegment - 1) / kSegment;
}

bool wants_all(const BatchView& batch) {
  if (batch.wanted != batch.tokens) return false;
  for (int i = 0; i < batch.wanted; ++i)
    if (batch.logit_rows[i] != i) return false;
  return true;
}

int padded16(int size) { return (size + 15) / 16 * 16; }

}  // namespace

Decoder::Decoder(int hidden, int vocab, float eps, float embedding_scale, float logit_softcap, int threads,
                 float fine_above, const Kernels& kernels)
    : kernels_(&kernels), pool_(threads), runner_(pool_, kernels), hidden_(hidden), vocab_(vocab), eps_(eps),
      embedding_scale_(embedding_scale), logit_softcap_(logit_softcap),
      fine_above_(fine_above), row_scratch_(static_cast<size_t>(threads)),
      attention_scratch_(static_cast<size_t>(threads)) {}

float Decoder::fine_at_end() const { return std::isinf(fine_above_) ? fine_above_ : 0.0f; }

int Decoder::add_rope(RopeTable table) {
  ropes_.push_back(std::move(table));
  return static_cast<int>(ropes_.size()) - 1;
}

void Decoder::add_layer(Layer layer) {
  const AttentionTask& task = layer.attention;
  const int dim = task.cache.head_dim;
  const auto fits = [](const Linear& l, int rows, int cols) { return l.w.rows == rows && l.w.cols == cols; };
  bool good = task.heads > 0 && task.cache.kv_heads > 0 && task.heads % task.cache.kv_heads == 0 && dim > 0 && dim <= 256;
  good = good && fits(layer.q, task.heads * dim, hidden_) && fits(layer.k, task.cache.kv_heads * dim, hidden_) &&
         fits(layer.v, task.cache.kv_heads * dim, hidden_) && fits(layer.o, hidden_, task.heads * dim);
  good = good && layer.rope < static_cast<int>(ropes_.size()) &&
         (layer.rope < 0 || 2 * ropes_[static_cast<size_t>(layer.rope)].half <= dim);
  const auto mlp_fits = [&](const Mlp& m) { return m.gate.w.cols == hidden_ && m.down.w.rows == hidden_; };
  good = good && layer.mlp.has_value() != layer.moe.has_value() && (!layer.mlp || mlp_fits(*layer.mlp));
  if (layer.moe) good = good && std::all_of(layer.moe->experts.begin(), layer.moe->experts.end(), mlp_fits);
  if (!good) throw std::invalid_argument("the parts of a layer do not fit together");
  layer.attention.sinks = nullptr;
  for (auto& scratch : attention_scratch_)
    grow(scratch, kernels_->attention_scratch_bytes(layer.attention.cache.head_dim) + 64);
  layers_.push_back(std::move(layer));
  Layer& kept = layers_.back();
  if (!kept.sinks.empty()) kept.attention.sinks = kept.sinks.data();  // vectors keep their memory when layers move
}

void Decoder::set_cache(int layer, const PagedCache& cache, int num_blocks) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  const PagedCache& own = to.attention.cache;
  if (own.kv_heads != cache.kv_heads || own.head_dim != cache.head_dim)
    throw std::invalid_argument("the cache has other heads than the layer");
  if (cache.block_size % 16 != 0) throw std::invalid_argument("KV blocks must hold a multiple of 16 tokens");
  if (cache.store == Store::I8 && cache.head_dim % 4 != 0)
    throw std::invalid_argument("heads in an int8 KV cache must be a multiple of 4 numbers");
  to.attention.cache = cache;
  to.num_blocks = num_blocks;
}

size_t Decoder::weight_bytes() const {
  size_t total = head_.w.num_bytes();
  const auto add = [&](const Mlp& m) {
    total += m.gate.w.num_bytes() + m.up.w.num_bytes() + m.down.w.num_bytes();
  };
  for (const Layer& layer : layers_) {
    for (const Linear* l : {&layer.q, &layer.k, &layer.v, &layer.o}) total += l->w.num_bytes();
    if (layer.mlp) add(*layer.mlp);
    if (layer.moe)
      for (const Mlp& expert : layer.moe->experts) add(expert);
  }
  return total;
}

// ── a step ──

void Decoder::check(const BatchView& batch) const {
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.rows] == batch.tokens, "query_starts");
  for (int t = 0; t < batch.tokens; ++t) {
    require(batch.token_ids[t] >= 0 && batch.token_ids[t] < vocab_, "a token id is outside the vocabulary");
    require(batch.positions[t] >= 0, "a position is negative");
    for (const RopeTable& rope : ropes_) require(batch.positions[t] < rope.positions, "a position is past the context");
  }
  for (int i = 0; i < batch.wanted; ++i)
    require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.tokens, "logit_rows");
  std::vector<bool> seen(batch.groups.size(), false);
  for (const Layer& layer : layers_) {
    require(layer.group >= 0 && layer.group < static_cast<int>(batch.groups.size()), "a KV group is missing");
    require(layer.attention.cache.keys != nullptr, "no cache is bound");
    if (seen[static_cast<size_t>(layer.group)]) continue;
    seen[static_cast<size_t>(layer.group)] = true;
    const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
    const int block_size = layer.attention.cache.block_size;
    const int64_t slots = static_cast<int64_t>(layer.num_blocks) * block_size;
    for (int t = 0; t < batch.tokens; ++t) require(group.slots[t] >= 0 && group.slots[t] < slots, "a slot");
    for (int r = 0; r < batch.rows; ++r) {
      const int queries = batch.query_starts[r + 1] - batch.query_starts[r];
      require(queries >= 0 && batch.context_lens[r] >= queries, "a context is shorter than its queries");
      const int blocks = (batch.context_lens[r] + block_size - 1) / block_size;
      require(blocks <= group.max_blocks, "a block table is too short");
      const int32_t* table = group.block_tables + static_cast<size_t>(r) * group.max_blocks;
      for (int b = 0; b < blocks; ++b) require(table[b] >= 0 && table[b] < layer.num_blocks, "a block id");
    }
  }
}

void Decoder::forward(const BatchView& batch, float* hidden) {
  check(batch);
  if (batch.tokens == 0) return;
  embed(batch);
  for (size_t i = 0; i + 1 < layers_.size(); ++i) {
    attention(layers_[i], batch);
    mix(layers_[i], batch.tokens);
  }
  last_layer(layers_.back(), batch);
  for_rows(pool_, batch.wanted, hidden_, [&](int i) {
    const size_t at = static_cast<size_t>(i) * hidden_;
    kernels_->rms_norm(x_.data() + at, final_norm_.data(), eps_, hidden_, hidden + at);
  });
}

// Of the last layer every token's key and value is kept, but only the wanted tokens go on from there: each of them is
// then a row of its own whose context ends with it.
void Decoder::last_layer(const Layer& layer, const BatchView& batch) {
  if (wants_all(batch)) {
    attention(layer, batch);
    return mix(layer, batch.tokens);
  }
  project(layer, batch);
  place_all(layer, batch);
  keep_wanted(batch, qkv_width(layer), qkv_);
  keep_wanted(batch, static_cast<size_t>(hidden_), x_);
  if (batch.wanted == 0) return;
  narrowed_.take(batch, layer.group);
  prepare_heads(layer, batch.wanted);
  attend_placed(layer, narrowed_.view);
  settle_heads(layer, batch.wanted);
  mix(layer, batch.wanted);
}

void Decoder::keep_wanted(const BatchView& batch, size_t width, PageVector<float>& rows) {
  grow(kept_rows_, rows.size());
  for (int i = 0; i < batch.wanted; ++i)
    std::copy_n(rows.data() + static_cast<size_t>(batch.logit_rows[i]) * width, width, kept_rows_.data() + i * width);
  std::swap(rows, kept_rows_);
}

void NarrowedBatch::take(const BatchView& batch, int group) {
  const GroupView& from = batch.groups[static_cast<size_t>(group)];
  const size_t blocks = static_cast<size_t>(from.max_blocks);
  const size_t wanted = static_cast<size_t>(batch.wanted);
  starts_.resize(wanted + 1);
  std::iota(starts_.begin(), starts_.end(), 0);
  contexts_.resize(wanted);
  tables_.resize(wanted * blocks);
  for (size_t i = 0; i < wanted; ++i) {
    const int token = static_cast<int>(batch.logit_rows[i]);
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, token);
    const ptrdiff_t row = next - batch.query_starts - 1;
    contexts_[i] = batch.context_lens[row] - (*next - token - 1);
    std::copy_n(from.block_tables + static_cast<size_t>(row) * blocks, blocks, tables_.data() + i * blocks);
  }
  view = {};
  view.tokens = view.rows = view.wanted = batch.wanted;
  view.query_starts = starts_.data();
  view.context_lens = contexts_.data();
  view.groups.assign(batch.groups.size(), {tables_.data(), from.max_blocks, nullptr});
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

// What follows attention: its output product, then the feed-forward part.
void Decoder::mix(const Layer& layer, int tokens) {
  const bool post = !layer.attn_post_norm.empty();
  const Gemm o{&layer.o, nullptr, heads_.view(), post ? Gemm::Mode::Store : Gemm::Mode::Add,
               post ? mixed_.data() : x_.data(), static_cast<size_t>(hidden_)};
  runner_.run(&o, 1);
  if (post) add_normed(layer.attn_post_norm, tokens);
  feed_forward(layer, tokens);
}

void Decoder::norm_rows(const Vector& weight, const float* x, int tokens, Activations& to, const Form& form) {
  to.prepare(tokens, hidden_, *kernels_, form);
  const bool in_tiles = tokens > kernels_->small_rows;  // of few rows each is a piece
  const int tile = in_tiles ? to.quant().tile : 1;
  for_tiles(pool_, tokens, 2 * hidden_, tile, [&](int first, int end, int thread) {
    Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
    grow(scratch, static_cast<size_t>(tile) * hidden_);
    for (int t = first; t < end; t += tile) {
      const int rows = std::min(tile, end - t);
      float* normed = form.plain ? to.row(t) : scratch.data();
      for (int r = 0; r < rows; ++r)
        kernels_->rms_norm(x + static_cast<size_t>(t + r) * hidden_, weight.data(), eps_, hidden_, normed + r * hidden_);
      if (form.quantised) to.quantise_rows(t, rows, normed, *kernels_);
      if (in_tiles && to.needs_settling()) to.settle(t / tile);
    }
  });
  if (!in_tiles) settle(to);
}

void Decoder::settle(Activations& rows) {
  if (!rows.needs_settling()) return;
  for_rows(pool_, rows.quant().tiles(), rows.quant().tile * rows.quant().blocks, [&](int t) { rows.settle(t); });
}

void Decoder::add_normed(const Vector& weight, int tokens) {
  for_rows(pool_, tokens, 2 * hidden_, [&](int t) {
    float* mixed = mixed_.data() + static_cast<size_t>(t) * hidden_;
    kernels_->rms_norm(mixed, weight.data(), eps_, hidden_, mixed);
    kernels_->add(x_.data() + static_cast<size_t>(t) * hidden_, mixed, hidden_);
  });
}

// ── attention ──

size_t Decoder::qkv_width(const Layer& layer) {
  return static_cast<size_t>(layer.attention.heads + 2 * layer.attention.cache.kv_heads) * layer.attention.cache.head_dim;
}

void Decoder::attention(const Layer& layer, const BatchView& batch) {
  project(layer, batch);
  prepare_heads(layer, batch.tokens);
  attend_all(layer, batch);
  settle_heads(layer, batch.tokens);
}

void Decoder::project(const Layer& layer, const BatchView& batch) {
  const int q_size = layer.attention.heads * layer.attention.cache.head_dim;
  const int kv_size = layer.attention.cache.kv_heads * layer.attention.cache.head_dim;
  const size_t stride = qkv_width(layer);
  norm_rows(layer.attn_norm, x_.data(), batch.tokens, normed_,
            form_for({&layer.q, &layer.k, &layer.v}, fine_above(layer)));
  grow(qkv_, static_cast<size_t>(batch.tokens) * stride);
  const Rows in = normed_.view();
  const Gemm gemms[3] = {{&layer.q, nullptr, in, Gemm::Mode::Store, qkv_.data(), stride},
                         {&layer.k, nullptr, in, Gemm::Mode::Store, qkv_.data() + q_size, stride},
                         {&layer.v, nullptr, in, Gemm::Mode::Store, qkv_.data() + q_size + kv_size, stride}};
  runner_.run(gemms, 3);
}

void Decoder::prepare_heads(const Layer& layer, int tokens) {
  const int dim = layer.attention.cache.head_dim;
  Form form = form_for({&layer.o}, fine_above(layer));
  form.plain |= dim % kBlock != 0;
  heads_.prepare(tokens, layer.attention.heads * dim, *kernels_, form);
}

// Heads that are no whole number of blocks can't be rounded one by one.
void Decoder::settle_heads(const Layer& layer, int tokens) {
  if (heads_.is_quantised() && layer.attention.cache.head_dim % kBlock != 0)
    for_rows(pool_, tokens, 2 * heads_.cols(), [&](int t) { heads_.quantise_rows(t, 1, heads_.row(t), *kernels_); });
  settle(heads_);
}

// Norms and rotates the queries of one kv head and its key, and writes key and value to the cache.
void Decoder::place_token(const Layer& layer, const BatchView& batch, int token, int kv_head) {
  const AttentionTask& task = layer.attention;
  const int dim = task.cache.head_dim, per_kv = task.heads / task.cache.kv_heads;
  float* row = qkv_.data() + static_cast<size_t>(token) * (task.heads + 2 * task.cache.kv_heads) * dim;
  float* key = row + static_cast<size_t>(task.heads + kv_head) * dim;
  const float* value = key + static_cast<size_t>(task.cache.kv_heads) * dim;
  const auto turn = [&](float* head, const Vector& norm) {
    if (!norm.empty()) kernels_->rms_norm(head, norm.data(), eps_, dim, head);
    if (layer.rope < 0) return;
    const RopeTable& rope = ropes_[static_cast<size_t>(layer.rope)];
    const size_t at = static_cast<size_t>(batch.positions[token]) * rope.half;
    kernels_->rotate(head, rope.cos.data() + at, rope.sin.data() + at, rope.half);
  };
  for (int g = 0; g < per_kv; ++g) turn(row + static_cast<size_t>(kv_head * per_kv + g) * dim, layer.q_norm);
  turn(key, layer.k_norm);
  kernels_->write_kv(task.cache, batch.groups[static_cast<size_t>(layer.group)].slots[token], kv_head, key, value);
}

void Decoder::place_all(const Layer& layer, const BatchView& batch) {
  for_rows(pool_, batch.tokens, 2 * static_cast<int>(qkv_width(layer)), [&](int t) {
    for (int h = 0; h < layer.attention.cache.kv_heads; ++h) place_token(layer, batch, t, h);
  });
}

bool Decoder::is_decode(const Layer& layer, const BatchView& batch) const {
  return batch.tokens == batch.rows && layer.attention.heads / layer.attention.cache.kv_heads <= kernels_->query_tile;
}

// Few single tokens behind long contexts: there are more pieces in segments than in rows.
bool Decoder::pays_to_split(const Layer& layer, const BatchView& batch) const {
  return is_decode(layer, batch) && most_segments(batch) > 2 &&
         batch.rows * layer.attention.cache.kv_heads < 8 * pool_.threads();
}

void Decoder::attend_all(const Layer& layer, const BatchView& batch) {
  if (is_decode(layer, batch) && !pays_to_split(layer, batch)) return attend_singles(layer, batch, most_segments(batch));
  place_all(layer, batch);
  attend_placed(layer, batch);
}

void Decoder::attend_placed(const Layer& layer, const BatchView& batch) {
  if (pays_to_split(layer, batch)) attend_split(layer, batch, most_segments(batch));
  else attend_chunks(layer, batch);
}

// One token per row: a piece places the token and attends at once, since no other piece reads what it writes.
void Decoder::attend_singles(const Layer& layer, const BatchView& batch, int segments) {
  const AttentionTask& task = layer.attention;
  const int kv_heads = task.cache.kv_heads, per_kv = task.heads / kv_heads, all = batch.rows * kv_heads;
  const double seconds = 4.0 * segments * kSegment * per_kv * task.cache.head_dim / 20e9 + 3e-7;
  const int most = std::max(1, all / (2 * pool_.threads()));
  const int per_piece = std::clamp(static_cast<int>(4e-6 / seconds), 1, most);
  pool_.run((all + per_piece - 1) / per_piece, [&](int piece, int thread) {
    for (int i = piece * per_piece; i < std::min(all, (piece + 1) * per_piece); ++i) {
      place_token(layer, batch, i / kv_heads, i % kv_heads);
      attend_tile(layer, batch, i / kv_heads, i % kv_heads, 0, per_kv, 0, thread);
    }
  });
}

// Few rows with long contexts: every segment is a piece of its own.
void Decoder::attend_split(const Layer& layer, const BatchView& batch, int segments) {
  const AttentionTask& task = layer.attention;
  const int kv_heads = task.cache.kv_heads;
  const size_t parts = static_cast<size_t>(batch.rows) * task.heads * segments;
  grow(split_partials_, parts);
  grow(split_sums_, parts * padded16(task.cache.head_dim));
  pool_.run(batch.rows * kv_heads * segments, [&](int piece, int thread) {
    split_decode(layer, batch, piece / segments / kv_heads, piece / segments % kv_heads, piece % segments, thread);
  });
  for (int r = 0; r < batch.rows; ++r)
    for (int h = 0; h < kv_heads; ++h) merge_splits(layer, batch, r, h);
}

// Any mix of chunks: tiles of queries, one head of a row after another so that a thread meets the same keys again, in
// each those with the longest contexts first so that none is left at the end.
void Decoder::attend_chunks(const Layer& layer, const BatchView& batch) {
  struct Tile {
    int row, head, first, count;
  };
  const int kv_heads = layer.attention.cache.kv_heads, per_kv = layer.attention.heads / kv_heads;
  const int size = kernels_->query_tile;
  std::vector<Tile> tiles;
  for (int r = 0; r < batch.rows; ++r) {
    const int queries = (batch.query_starts[r + 1] - batch.query_starts[r]) * per_kv;
    for (int head = 0; head < kv_heads; ++head)
      for (int first = (queries + size - 1) / size * size - size; first >= 0; first -= size)
        tiles.push_back({r, head, first, std::min(size, queries - first)});
  }
  const uint64_t phase = ++num_attended_ << 32;
  pool_.run(static_cast<int>(tiles.size()), [&](int piece, int thread) {
    const Tile& tile = tiles[static_cast<size_t>(piece)];
    attend_tile(layer, batch, tile.row, tile.head, tile.first, tile.count,
                phase + static_cast<uint64_t>(tile.row * kv_heads + tile.head), thread);
  });
}

namespace {

// The queries of a tile: query i is head i % per_kv of token i / per_kv of the row.
struct QueryTile {
  const float* q[kMaxQueryTile];
  int first[kMaxQueryTile], limit[kMaxQueryTile], token[kMaxQueryTile], head[kMaxQueryTile];

  QueryTile(const Layer& layer, const BatchView& batch, const float* qkv, int row, int kv_head, int start, int count) {
    const AttentionTask& task = layer.attention;
    const int dim = task.cache.head_dim, per_kv = task.heads / task.cache.kv_heads;
    const size_t stride = static_cast<size_t>(task.heads + 2 * task.cache.kv_heads) * dim;
    const int begin = batch.query_starts[row], queries = batch.query_starts[row + 1] - begin;
    for (int i = 0; i < count; ++i) {
      const int index = (start + i) / per_kv;
      token[i] = begin + index;
      head[i] = kv_head * per_kv + (start + i) % per_kv;
      q[i] = qkv + static_cast<size_t>(token[i]) * stride + static_cast<size_t>(head[i]) * dim;
      limit[i] = batch.context_lens[row] - queries + index + 1;
      first[i] = task.window > 0 ? std::max(0, limit[i] - task.window) : 0;
    }
  }
};

const int32_t* table_of(const Layer& layer, const BatchView& batch, int row) {
  const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
  return group.block_tables + static_cast<size_t>(row) * group.max_blocks;
}

uint8_t* aligned(PageVector<uint8_t>& scratch) {
  return scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
}

}  // namespace

// Numerators of some tokens' same head, `stride` apart, become that head's output.
void Decoder::take_outputs(const Layer& layer, int token, int tokens, int head, float* sums, size_t stride,
                           const Partial* partial, int partial_stride) {
  const int dim = layer.attention.cache.head_dim;
  const float* sink = layer.attention.sinks != nullptr ? layer.attention.sinks + head : nullptr;
  for (int t = 0; t < tokens; ++t) {
    float* out = sums + t * stride;
    kernels_->finish(out, partial[t * partial_stride], sink, dim, out);
    if (heads_.is_plain()) std::copy_n(out, dim, heads_.row(token + t) + static_cast<size_t>(head) * dim);
  }
  const int blocks = dim / kBlock;
  if (heads_.is_quantised() && dim % kBlock == 0)
    kernels_->quantise(sums, stride, tokens, blocks, heads_.quant(), token, head * blocks);
}

void Decoder::attend_tile(const Layer& layer, const BatchView& batch, int row, int kv_head, int first, int count,
                          uint64_t keys_id, int thread) {
  const QueryTile tile(layer, batch, qkv_.data(), row, kv_head, first, count);
  const int wide = padded16(layer.attention.cache.head_dim);
  float sums[kMaxQueryTile * 256];
  Partial partial[kMaxQueryTile];
  kernels_->attend(layer.attention, kv_head, table_of(layer, batch, row), tile.q, tile.first, tile.limit, count, 0,
                   batch.context_lens[row], keys_id, sums, partial,
                   aligned(attention_scratch_[static_cast<size_t>(thread)]));
  const int per_kv = layer.attention.heads / layer.attention.cache.kv_heads;
  for (int i = 0; i < std::min(per_kv, count); ++i) {  // queries i, i + per_kv ... are the same head of tokens in order
    const int tokens = (count - i + per_kv - 1) / per_kv;
    take_outputs(layer, tile.token[i], tokens, tile.head[i], sums + i * wide, static_cast<size_t>(per_kv) * wide,
                 partial + i, per_kv);
  }
}

// One segment of one row's context; the parts are joined in order by merge_splits, as attend itself would have done.
void Decoder::split_decode(const Layer& layer, const BatchView& batch, int row, int kv_head, int segment, int thread) {
  const int per_kv = layer.attention.heads / layer.attention.cache.kv_heads;
  const int segments = most_segments(batch);
  const QueryTile tile(layer, batch, qkv_.data(), row, kv_head, 0, per_kv);
  const size_t at = ((static_cast<size_t>(row) * layer.attention.cache.kv_heads + kv_head) * segments + segment) * per_kv;
  kernels_->attend(layer.attention, kv_head, table_of(layer, batch, row), tile.q, tile.first, tile.limit, per_kv,
                   segment * kSegment, (segment + 1) * kSegment, 0,
                   split_sums_.data() + at * padded16(layer.attention.cache.head_dim), split_partials_.data() + at,
                   aligned(attention_scratch_[static_cast<size_t>(thread)]));
}

void Decoder::merge_splits(const Layer& layer, const BatchView& batch, int row, int kv_head) {
  const int per_kv = layer.attention.heads / layer.attention.cache.kv_heads;
  const int wide = padded16(layer.attention.cache.head_dim);
  const int segments = most_segments(batch);
  const size_t at = (static_cast<size_t>(row) * layer.attention.cache.kv_heads + kv_head) * segments * per_kv;
  for (int g = 0; g < per_kv; ++g) {
    float* sums = split_sums_.data() + (at + g) * wide;
    Partial& partial = split_partials_[at + g];
    for (int s = 1; s < segments; ++s) {
      const size_t other = at + static_cast<size_t>(s) * per_kv + g;
      kernels_->join(sums, partial, split_sums_.data() + other * wide, split_partials_[other], wide);
    }
    take_outputs(layer, batch.query_starts[row], 1, kv_head * per_kv + g, sums, 0, &partial, 0);
  }
}

// ── feed forward ──

void Decoder::feed_forward(const Layer& layer, int tokens) {
  const bool post = !layer.mlp_post_norm.empty();
  if (layer.mlp) {
    norm_rows(layer.mlp_norm, x_.data(), tokens, normed_,
              form_for({&layer.mlp->gate, &layer.mlp->up}, fine_above(layer)));
    mlp(*layer.mlp, normed_.view(), fine_above(layer), post ? Gemm::Mode::Store : Gemm::Mode::Add,
        post ? mixed_.data() : x_.data());
    if (post) add_normed(layer.mlp_post_norm, tokens);
    return;
  }
  Form form = form_for({&layer.moe->router}, fine_above(layer));
  if (layer.moe->shared) form.quantised |= form_for({&layer.moe->shared->gate, &layer.moe->shared->up}, 0.0f).quantised;
  form.plain = true;  // experts take copies
  norm_rows(layer.mlp_norm, x_.data(), tokens, normed_, form);
  moe(*layer.moe, tokens, fine_above(layer), mixed_.data());
  if (post) return add_normed(layer.mlp_post_norm, tokens);
  for_rows(pool_, tokens, hidden_, [&](int t) {
    const size_t at = static_cast<size_t>(t) * hidden_;
    kernels_->add(x_.data() + at, mixed_.data() + at, hidden_);
  });
}

void Decoder::mlp(const Mlp& mlp, const Rows& in, float fine_above, Gemm::Mode mode, float* out) {
  inner_.prepare(in.quant.rows, mlp.gate.w.rows, *kernels_, form_for({&mlp.down}, fine_above));
  Gemm gate{&mlp.gate, &mlp.up, in, Gemm::Mode::Gate};
  gate.activation = mlp.activation;
  gate.gated = &inner_;
  runner_.run(&gate, 1);
  settle(inner_);
  const Gemm down{&mlp.down, nullptr, inner_.view(), mode, out, static_cast<size_t>(hidden_)};
  runner_.run(&down, 1);
}

// ── experts: every (token, choice) becomes a row of its expert's own small product ──

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

void Decoder::moe(const Moe& moe, int tokens, float fine_above, float* out) {
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
    expert_in_[at].prepare(counts[at], hidden_, *kernels_, form_for({&expert.gate, &expert.up}, fine_above));
    expert_inner_[at].prepare(counts[at], expert.gate.w.rows, *kernels_, form_for({&expert.down}, fine_above));
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
  const auto settle_used = [&](std::vector<Activations>& rows) {
    for (size_t e = 0; e < counts.size(); ++e)
      if (counts[e] > 0) settle(rows[e]);
  };
  settle_used(expert_in_);
  runner_.run(gates.data(), static_cast<int>(gates.size()));
  settle_used(expert_inner_);
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
  if (moe.shared) mlp(*moe.shared, normed_.view(), fine_above, Gemm::Mode::Add, out);
}

// ── head ──

Rows Decoder::head_input(const float* hidden, int rows) {
  normed_.prepare(rows, hidden_, *kernels_, form_for({&head_}, fine_at_end()));
  for_rows(pool_, rows, hidden_, [&](int r) {
    normed_.put_row(r, hidden + static_cast<size_t>(r) * hidden_, *kernels_);
  });
  settle(normed_);
  return normed_.view();
}

void Decoder::logits(const float* hidden, int rows, float* out) {
  if (rows == 0) return;
  const Gemm head{&head_, nullptr, head_input(hidden, rows), Gemm::Mode::Store, out, static_cast<size_t>(vocab_)};
  runner_.run(&head, 1);
  if (logit_softcap_ > 0.0f)
    for_rows(pool_, rows, vocab_, [&](int r) {
      kernels_->softcap(out + static_cast<size_t>(r) * vocab_, logit_softcap_, vocab_);
    });
}

void Decoder::best_logits(const float* hidden, int rows, int64_t* places, float* values) {
  if (rows == 0) return;
  const size_t threads = static_cast<size_t>(pool_.threads()), count = static_cast<size_t>(rows);
  best_.assign(threads * count, Best{});
  Gemm head{&head_, nullptr, head_input(hidden, rows), Gemm::Mode::Best};
  head.best = best_.data();
  head.softcap = logit_softcap_;
  runner_.run(&head, 1);
  for (size_t r = 0; r < count; ++r) {
    Best best = best_[r];
    for (size_t t = 1; t < threads; ++t) {
      const Best& other = best_[t * count + r];
      const bool has_nan = best.has_nan || other.has_nan;
      if (other.value > best.value || (other.value == best.value && other.place < best.place)) best = other;
      best.has_nan = has_nan;
    }
    places[r] = best.place;
    values[r] = best.has_nan ? std::numeric_limits<float>::quiet_NaN() : best.value;
  }
}

}  // namespace tokenmill
