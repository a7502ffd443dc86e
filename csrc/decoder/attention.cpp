// Attention of a step: how queries and parts of their contexts are distributed over threads. The arithmetic is in
// kernels/attention.h.
#include <algorithm>
#include <array>
#include <cmath>

#include "decoder/phases.h"

namespace tokenmill {
namespace {

constexpr int kMaxQueryTile = 32;

constexpr std::array<float, kMaxHeadDim> make_ones() {
  std::array<float, kMaxHeadDim> ones{};
  for (float& one : ones) one = 1.0f;
  return ones;
}
constexpr std::array<float, kMaxHeadDim> kOneEach = make_ones();
constexpr const float* kOnes = kOneEach.data();

int most_segments(const BatchView& batch) {
  const int longest = *std::max_element(batch.context_lens, batch.context_lens + batch.rows);
  return (longest + kSegment - 1) / kSegment;
}

// The position of the first key that a query at this position sees.
int oldest(const AttentionTask& task, int position) {
  if (task.window <= 0) return 0;
  return task.is_chunked ? position / task.window * task.window : std::max(0, position - task.window + 1);
}

int padded16(int size) { return (size + 15) / 16 * 16; }

// Copies of the queries of a tile, normed and rotated in place: query i is head i % per_kv of token i / per_kv of the row.
struct QueryTile {
  float copies[kMaxQueryTile * kMaxHeadDim];
  float* q[kMaxQueryTile];
  int first[kMaxQueryTile], limit[kMaxQueryTile], token[kMaxQueryTile], head[kMaxQueryTile];
  float slope[kMaxQueryTile];
  bool has_slopes;

  QueryTile(const Layer& layer, const BatchView& batch, const float* qkv, size_t stride, int row, int kv_head, int start,
            int count) {
    const AttentionTask& task = layer.attention;
    const int dim = task.cache.head_dim, per_kv = task.heads / task.cache.kv_heads;
    const int begin = batch.query_starts[row], queries = batch.query_starts[row + 1] - begin;
    has_slopes = task.slopes != nullptr;
    for (int i = 0; i < count; ++i) {
      const int index = (start + i) / per_kv;
      token[i] = begin + index;
      head[i] = kv_head * per_kv + (start + i) % per_kv;
      q[i] = copies + i * dim;
      std::copy_n(qkv + static_cast<size_t>(token[i]) * stride + static_cast<size_t>(head[i]) * dim, dim, q[i]);
      limit[i] = batch.context_lens[row] - queries + index + 1;
      first[i] = oldest(task, limit[i] - 1);
      if (has_slopes) slope[i] = task.slopes[head[i]];
    }
  }
  const float* slopes() const { return has_slopes ? slope : nullptr; }
};

const int32_t* table_of(const Layer& layer, const BatchView& batch, int row) {
  const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
  return group.block_tables + static_cast<size_t>(row) * group.max_blocks;
}

uint8_t* aligned(PageVector<uint8_t>& scratch) {
  return scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
}

// The number of queries per tile of a chunk. A short chunk would have only one or two large tiles per KV head and load the
// threads unevenly; it is cut into smaller tiles, whose number is a multiple of the threads.
int tile_size(int queries, int kv_heads, int largest, int threads) {
  int tiles = (queries + largest - 1) / largest;
  if (tiles * kv_heads < 4 * threads)
    while (tiles * kv_heads % threads != 0 && tiles < queries) ++tiles;
  return (queries + tiles - 1) / tiles;
}

}  // namespace

void Decoder::attention(const Layer& layer, const BatchView& batch) {
  project(layer, batch);
  if (!is_owned_) {
    prepare_heads(layer, batch.tokens);
    attend_all(layer, batch);
    return finish_heads(layer, batch.tokens);
  }
  keep_own(projected_, projected_width(layer));
  prepare_heads(layer, owned_.view.tokens);
  if (owned_.view.tokens > 0) attend_all(layer, owned_.view);
  share_heads(layer, static_cast<size_t>(layer.attention.heads) * layer.attention.cache.value_dim);
}

void Decoder::project(const Layer& layer, const BatchView& batch) {
  const int q_size = layer.attention.heads * layer.attention.cache.head_dim;
  const PagedCache& cache = layer.attention.cache;
  const size_t stride = projected_width(layer);
  Form form = layer.has_own_kv() ? form_for({&layer.q, &layer.k, &layer.v}, outlier_threshold(layer))
                                 : form_for({&layer.q}, outlier_threshold(layer));
  if (layer.output_gate != OutputGate::None) {
    const Form gate = form_for({&layer.gate}, outlier_threshold(layer));
    form.quantised |= gate.quantised;
    form.plain |= gate.plain;
  }
  if (layer.block_index) {
    const Form index = form_for({&layer.block_index->q, &layer.block_index->k}, outlier_threshold(layer));
    form.quantised |= index.quantised;
    form.plain |= index.plain;
  }
  norm_rows(layer.attn_norm, x_.data(), batch.tokens, normed_, form);
  grow(projected_, static_cast<size_t>(batch.tokens) * stride);
  const Rows in = normed_.view();
  Gemm gemms[6];
  int count = 0, at = 0;
  const auto add = [&](const Linear& linear, int size) {
    gemms[count++] = {&linear, nullptr, in, Gemm::Mode::Store, projected_.data() + at, stride};
    at += size;
  };
  add(layer.q, q_size);
  if (layer.has_own_kv()) add(layer.k, cache.kv_heads * cache.head_dim), add(layer.v, cache.kv_heads * cache.value_dim);
  if (layer.output_gate != OutputGate::None) add(layer.gate, layer.gate.rows());
  if (layer.block_index)
    for (const Linear* linear : {&layer.block_index->q, &layer.block_index->k}) add(*linear, linear->rows());
  run(gemms, count);
  if (layer.clip > 0.0f) clip_projected(layer, batch.tokens);
  if (layer.head_norm == HeadNorm::Joint) norm_joint_heads(layer, batch.tokens);
}

// Limits queries, keys and values to ± `clip`.
void Decoder::clip_projected(const Layer& layer, int tokens) {
  const int width = static_cast<int>(projected_width(layer)) - layer.gate.rows() - layer.index_width();
  for_rows(pool_, tokens, width, [&](int t) {
    float* row = projected_.data() + static_cast<size_t>(t) * projected_width(layer);
    for (int i = 0; i < width; ++i) row[i] = std::clamp(row[i], -layer.clip, layer.clip);
  });
}

// Norms all heads of a token's queries together, and all heads of its keys.
void Decoder::norm_joint_heads(const Layer& layer, int tokens) {
  const int q_size = static_cast<int>(layer.q_norm.size()), kv_size = static_cast<int>(layer.k_norm.size());
  for_rows(pool_, tokens, 2 * (q_size + kv_size), [&](int t) {
    float* row = projected_.data() + static_cast<size_t>(t) * projected_width(layer);
    kernels_->rms_norm(row, layer.q_norm.data(), eps_, q_size, row);
    if (kv_size > 0) kernels_->rms_norm(row + q_size, layer.k_norm.data(), eps_, kv_size, row + q_size);
  });
}

void Decoder::prepare_heads(const Layer& layer, int tokens) {
  const int dim = layer.attention.cache.value_dim;
  Form form = form_for({&layer.o}, outlier_threshold(layer));
  form.plain |= dim % kBlock != 0;
  const bool are_parts = !layer.head_borders.empty() || is_owned_;
  if (are_parts) form = {false, true, form.outlier_threshold};  // quantised after all ranks' heads or rows are gathered
  heads_.prepare(tokens, layer.attention.heads * dim, *kernels_, form);
}

// Quantises the outputs of heads whose size is not a multiple of a block, which can't be quantised head by head.
void Decoder::finish_heads(const Layer& layer, int tokens) {
  if (!layer.head_borders.empty()) return gather_heads(layer, tokens);
  if (heads_.is_quantised() && layer.attention.cache.value_dim % kBlock != 0)
    for_rows(pool_, tokens, 2 * heads_.cols(), [&](int t) { heads_.quantise_rows(t, 1, heads_.row(t), *kernels_); });
  mark_outliers(heads_);
}

// Norms and rotates a query or a key in place.
void Decoder::norm_rope_head(const Layer& layer, const Vector& norm, int64_t position, float* head) const {
  const int dim = layer.attention.cache.head_dim;
  if (layer.head_norm == HeadNorm::Before) kernels_->rms_norm(head, norm.data(), eps_, dim, head);
  if (layer.rope >= 0) {
    const RopeTable& rope = ropes_[static_cast<size_t>(layer.rope)];
    const size_t at = static_cast<size_t>(position) * rope.half;
    kernels_->rotate(head, rope.cos.data() + at, rope.sin.data() + at, rope.half);
  }
  if (layer.head_norm == HeadNorm::After) kernels_->rms_norm(head, norm.data(), eps_, dim, head);
}

void Decoder::prepare_query(const Layer& layer, int64_t position, float* head) const {
  norm_rope_head(layer, layer.q_norm, position, head);
  const QueryGrowth& growth = layer.growth;
  if (growth.beta == 0.0f) return;
  const float stretches = std::floor(static_cast<float>(position + growth.first) / static_cast<float>(growth.length));
  kernels_->scale(head, 1.0f + growth.beta * std::log1p(stretches), layer.attention.cache.head_dim);
}

// Norms and rotates a token's key and writes key and value to the cache. (Queries are normed and rotated by the piece that
// attends with them.)
void Decoder::place_token(const Layer& layer, const BatchView& batch, int token, int kv_head) {
  const AttentionTask& task = layer.attention;
  const int dim = task.cache.head_dim, value_dim = task.cache.value_dim;
  float* row = projected_.data() + static_cast<size_t>(token) * projected_width(layer);
  float* key = row + static_cast<size_t>(task.heads + kv_head) * dim;
  float* value = row + static_cast<size_t>(task.heads + task.cache.kv_heads) * dim + static_cast<size_t>(kv_head) * value_dim;
  norm_rope_head(layer, layer.k_norm, batch.positions[token], key);
  if (layer.has_value_norm) kernels_->rms_norm(value, kOnes, eps_, value_dim, value);
  if (layer.value_scale != 1.0f) kernels_->scale(value, layer.value_scale, value_dim);
  kernels_->write_kv(task.cache, batch.groups[static_cast<size_t>(layer.group)].slots[token], kv_head, key, value);
}

// Writes all keys and values, in pieces of 16 tokens, whose keys share cache lines.
void Decoder::place_all(const Layer& layer, const BatchView& batch) {
  const int kv_heads = layer.attention.cache.kv_heads;
  for_tiles(pool_, batch.tokens, 4 * kv_heads * layer.attention.cache.widest(), 16, [&](int first, int end, int) {
    for (int h = 0; h < kv_heads; ++h)
      for (int t = first; t < end; ++t) place_token(layer, batch, t, h);
  });
}

bool Decoder::is_decode(const Layer& layer, const BatchView& batch) const {
  return batch.tokens == batch.rows && layer.attention.heads / layer.attention.cache.kv_heads <= kernels_->query_tile;
}

// Whether to split contexts into segments: for few decoding rows with long contexts, where rows alone give too few pieces.
bool Decoder::pays_to_split(const Layer& layer, const BatchView& batch) const {
  return is_decode(layer, batch) && most_segments(batch) > 2 &&
         batch.rows * layer.attention.cache.kv_heads < 8 * pool_.threads();
}

void Decoder::attend_all(const Layer& layer, const BatchView& batch) {
  if (layer.block_index) return attend_blocks(layer, batch);
  if (is_decode(layer, batch) && !pays_to_split(layer, batch)) return attend_singles(layer, batch, most_segments(batch));
  if (layer.has_own_kv()) place_all(layer, batch);
  attend_placed(layer, batch);
}

void Decoder::attend_placed(const Layer& layer, const BatchView& batch) {
  if (pays_to_split(layer, batch)) attend_split(layer, batch, most_segments(batch));
  else attend_chunks(layer, batch);
}

// One token per row: a piece writes the token's key and value and attends; no other piece reads what it writes.
void Decoder::attend_singles(const Layer& layer, const BatchView& batch, int segments) {
  const AttentionTask& task = layer.attention;
  const int kv_heads = task.cache.kv_heads, per_kv = task.heads / kv_heads, all = batch.rows * kv_heads;
  const double seconds = 4.0 * segments * kSegment * per_kv * task.cache.head_dim / 20e9 + 3e-7;
  const int most = std::max(1, all / (2 * pool_.threads()));
  const int per_piece = std::clamp(static_cast<int>(4e-6 / seconds), 1, most);
  pool_.run((all + per_piece - 1) / per_piece, [&](int piece, int thread) {
    for (int i = piece * per_piece; i < std::min(all, (piece + 1) * per_piece); ++i) {
      if (layer.has_own_kv()) place_token(layer, batch, i / kv_heads, i % kv_heads);
      attend_tile(layer, batch, i / kv_heads, i % kv_heads, 0, per_kv, 0, thread);
    }
  });
}

// Few rows with long contexts: every segment is a piece.
void Decoder::attend_split(const Layer& layer, const BatchView& batch, int segments) {
  const AttentionTask& task = layer.attention;
  const int kv_heads = task.cache.kv_heads;
  const size_t parts = static_cast<size_t>(batch.rows) * task.heads * segments;
  grow(split_partials_, parts);
  grow(split_sums_, parts * padded16(task.cache.value_dim));
  pool_.run(batch.rows * kv_heads * segments, [&](int piece, int thread) {
    split_decode(layer, batch, piece / segments / kv_heads, piece / segments % kv_heads, piece % segments, thread);
  });
  for (int r = 0; r < batch.rows; ++r)
    for (int h = 0; h < kv_heads; ++h) merge_splits(layer, batch, r, h);
}

// Any mix of chunks: tiles of queries, ordered by row and head so that a thread reuses the same keys, and within a head by
// descending context length so that no long tile is left for the end.
void Decoder::attend_chunks(const Layer& layer, const BatchView& batch) {
  struct Tile {
    int row, head, first, count;
  };
  const int kv_heads = layer.attention.cache.kv_heads, per_kv = layer.attention.heads / kv_heads;
  std::vector<Tile> tiles;
  for (int r = 0; r < batch.rows; ++r) {
    const int queries = (batch.query_starts[r + 1] - batch.query_starts[r]) * per_kv;
    const int most = kernels_->query_tile;
    const int size = queries > per_kv ? tile_size(queries, kv_heads, most, pool_.threads()) : most;
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

// Multiplies a head's output by the sigmoid or softplus of its gate.
void Decoder::gate_outputs(const Layer& layer, int token, int head, float* out) const {
  const int dim = layer.attention.cache.value_dim;
  const bool is_per_head = layer.output_gate == OutputGate::PerHead;
  const float* row = projected_.data() + static_cast<size_t>(token) * projected_width(layer);
  const size_t first = projected_width(layer) - static_cast<size_t>(layer.gate.rows() + layer.index_width());
  const float* gate = row + first + static_cast<size_t>(head) * (is_per_head ? 1 : dim);
  float weights[kMaxHeadDim];
  const int count = is_per_head ? 1 : dim;
  if (layer.is_softplus_gate) {
    for (int d = 0; d < count; ++d) weights[d] = gate[d] > 20.0f ? gate[d] : std::log1p(std::exp(gate[d]));
  } else {
    kernels_->sigmoid(gate, count, weights);
  }
  if (is_per_head) kernels_->scale(out, weights[0], dim);
  else kernels_->multiply(out, weights, dim, out);
}

// Turns the sums of one head of some tokens, `stride` apart, into that head's outputs.
void Decoder::take_outputs(const Layer& layer, int token, int tokens, int head, float* sums, size_t stride,
                           const Partial* partial, int partial_stride) {
  const int dim = layer.attention.cache.value_dim;
  const float* sink = layer.attention.sinks != nullptr ? layer.attention.sinks + head : nullptr;
  for (int t = 0; t < tokens; ++t) {
    float* out = sums + t * stride;
    kernels_->finish(out, partial[t * partial_stride], sink, dim, out);
    if (layer.output_gate != OutputGate::None) gate_outputs(layer, token + t, head, out);
    if (heads_.is_plain()) std::copy_n(out, dim, heads_.row(token + t) + static_cast<size_t>(head) * dim);
  }
  const int blocks = dim / kBlock;
  if (heads_.is_quantised() && dim % kBlock == 0)
    kernels_->quantise(sums, stride, tokens, blocks, heads_.quant(), token, head * blocks);
}

void Decoder::attend_tile(const Layer& layer, const BatchView& batch, int row, int kv_head, int first, int count,
                          uint64_t keys_id, int thread) {
  QueryTile tile(layer, batch, projected_.data(), projected_width(layer), row, kv_head, first, count);
  for (int i = 0; i < count; ++i) prepare_query(layer, batch.positions[tile.token[i]], tile.q[i]);
  const int wide = padded16(layer.attention.cache.value_dim);
  float sums[kMaxQueryTile * kMaxHeadDim];
  Partial partial[kMaxQueryTile];
  kernels_->attend(layer.attention, kv_head, table_of(layer, batch, row), tile.q, tile.first, tile.limit,
                   tile.slopes(), count, 0, batch.context_lens[row], keys_id, sums, partial,
                   aligned(attention_scratch_[static_cast<size_t>(thread)]));
  const int per_kv = layer.attention.heads / layer.attention.cache.kv_heads;
  for (int i = 0; i < std::min(per_kv, count); ++i) {  // queries i, i + per_kv, … are one head of consecutive tokens
    const int tokens = (count - i + per_kv - 1) / per_kv;
    take_outputs(layer, tile.token[i], tokens, tile.head[i], sums + i * wide, static_cast<size_t>(per_kv) * wide,
                 partial + i, per_kv);
  }
}

// Attends to one segment of a row's context; merge_splits joins the segments in order, with the same result as `attend`.
void Decoder::split_decode(const Layer& layer, const BatchView& batch, int row, int kv_head, int segment, int thread) {
  const int per_kv = layer.attention.heads / layer.attention.cache.kv_heads;
  const int segments = most_segments(batch);
  QueryTile tile(layer, batch, projected_.data(), projected_width(layer), row, kv_head, 0, per_kv);
  for (int i = 0; i < per_kv; ++i) prepare_query(layer, batch.positions[tile.token[i]], tile.q[i]);
  const size_t at = ((static_cast<size_t>(row) * layer.attention.cache.kv_heads + kv_head) * segments + segment) * per_kv;
  kernels_->attend(layer.attention, kv_head, table_of(layer, batch, row), tile.q, tile.first, tile.limit,
                   tile.slopes(), per_kv, segment * kSegment, (segment + 1) * kSegment, 0,
                   split_sums_.data() + at * padded16(layer.attention.cache.value_dim), split_partials_.data() + at,
                   aligned(attention_scratch_[static_cast<size_t>(thread)]));
}

void Decoder::merge_splits(const Layer& layer, const BatchView& batch, int row, int kv_head) {
  const int per_kv = layer.attention.heads / layer.attention.cache.kv_heads;
  const int wide = padded16(layer.attention.cache.value_dim);
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

}  // namespace tokenmill
