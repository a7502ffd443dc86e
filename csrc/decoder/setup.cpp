// The parts of a decoder, and what must hold of them and of a batch before a pointer is used. See decoder.h.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "decoder.h"

namespace tokenmill {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("the batch is inconsistent: ") + what);
}

bool fits(const Linear& l, int64_t rows, int64_t cols) { return l.w.rows == rows && l.w.cols == cols; }

}  // namespace

Decoder::Decoder(int hidden, int vocab, float eps, float embedding_scale, float logit_softcap, int threads,
                 float outlier_threshold, const Kernels& kernels)
    : kernels_(&kernels), pool_(threads), runner_(pool_, kernels), hidden_(hidden), vocab_(vocab), eps_(eps),
      embedding_scale_(embedding_scale), logit_softcap_(logit_softcap),
      outlier_threshold_(outlier_threshold), row_scratch_(static_cast<size_t>(threads)),
      attention_scratch_(static_cast<size_t>(threads)) {}

float Decoder::threshold_at_end() const { return std::isinf(outlier_threshold_) ? outlier_threshold_ : 0.0f; }

int Decoder::add_rope(RopeTable table) {
  ropes_.push_back(std::move(table));
  return static_cast<int>(ropes_.size()) - 1;
}

bool Decoder::attention_fits(const Layer& layer) const {
  const AttentionTask& task = layer.attention;
  const int dim = task.cache.head_dim;
  const int64_t width = static_cast<int64_t>(task.heads) * dim, kv_width = static_cast<int64_t>(task.cache.kv_heads) * dim;
  return task.heads > 0 && task.cache.kv_heads > 0 && task.heads % task.cache.kv_heads == 0 && dim > 0 && dim <= 256 &&
         fits(layer.q, width, hidden_) && fits(layer.k, kv_width, hidden_) && fits(layer.v, kv_width, hidden_) &&
         fits(layer.o, hidden_, width) && layer.rope < static_cast<int>(ropes_.size()) &&
         (layer.rope < 0 || 2 * ropes_[static_cast<size_t>(layer.rope)].half <= dim);
}

bool Decoder::conv_fits(const Layer& layer) const {
  const ShortConv& conv = *layer.conv;
  const size_t hidden = static_cast<size_t>(hidden_);
  return conv.kernel > 0 && conv.kernel <= kMaxConvKernel && conv.weight.size() == conv.kernel * hidden &&
         (conv.bias.empty() || conv.bias.size() == hidden) && fits(conv.in, 3 * int64_t{hidden_}, hidden_) &&
         fits(layer.o, hidden_, hidden_);
}

void Decoder::add_layer(Layer layer) {
  bool good = layer.conv ? conv_fits(layer) : attention_fits(layer);
  const auto mlp_fits = [&](const Mlp& m) { return m.gate.w.cols == hidden_ && m.down.w.rows == hidden_; };
  good = good && layer.mlp.has_value() != layer.moe.has_value() && (!layer.mlp || mlp_fits(*layer.mlp));
  if (layer.moe)
    good = good && layer.moe->router.w.cols == hidden_ && (!layer.moe->shared || mlp_fits(*layer.moe->shared)) &&
           std::all_of(layer.moe->experts.begin(), layer.moe->experts.end(), mlp_fits);
  if (!good) throw std::invalid_argument("the parts of a layer do not fit together");
  layer.attention.sinks = nullptr;
  for (auto& scratch : attention_scratch_)
    if (!layer.conv) grow(scratch, kernels_->attention_scratch_bytes(layer.attention.cache.head_dim) + 64);
  layers_.push_back(std::move(layer));
  Layer& kept = layers_.back();
  if (!kept.sinks.empty()) kept.attention.sinks = kept.sinks.data();  // vectors keep their memory when layers move
}

void Decoder::set_embedding(Linear embedding) {
  if (!fits(embedding, vocab_, hidden_)) throw std::invalid_argument("the embedding is not [vocab, hidden]");
  embedding_ = std::move(embedding);
}

void Decoder::set_head(Linear head) {
  if (!fits(head, vocab_, hidden_)) throw std::invalid_argument("the head is not [vocab, hidden]");
  head_ = std::move(head);
}

void Decoder::set_conv_cache(int layer, int group, float* inputs, int num_blocks, int block_size) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  if (!to.conv) throw std::invalid_argument("the layer has no convolution");
  if (group < 0) throw std::invalid_argument("cache groups are counted from 0");
  to.conv->inputs = inputs;
  to.conv->block_size = block_size;
  to.group = group;
  to.num_blocks = num_blocks;
}

void Decoder::set_cache(int layer, int group, const PagedCache& cache, int num_blocks) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  if (to.conv) throw std::invalid_argument("the layer has no attention");
  if (group < 0) throw std::invalid_argument("cache groups are counted from 0");
  const PagedCache& own = to.attention.cache;
  if (own.kv_heads != cache.kv_heads || own.head_dim != cache.head_dim)
    throw std::invalid_argument("the cache has other heads than the layer");
  if (cache.block_size <= 0 || cache.block_size % 16 != 0)
    throw std::invalid_argument("KV blocks must hold a multiple of 16 tokens");
  if (cache.store == Store::I8 && cache.head_dim % 4 != 0)
    throw std::invalid_argument("heads in an int8 KV cache must be a multiple of 4 numbers");
  to.attention.cache = cache;
  to.group = group;
  to.num_blocks = num_blocks;
}

size_t Decoder::weight_bytes() const {
  size_t total = head_.w.num_bytes();
  const auto add = [&](const Mlp& m) {
    total += m.gate.w.num_bytes() + m.up.w.num_bytes() + m.down.w.num_bytes();
  };
  for (const Layer& layer : layers_) {
    for (const Linear* l : {&layer.q, &layer.k, &layer.v, &layer.o}) total += l->w.num_bytes();
    if (layer.conv) total += layer.conv->in.w.num_bytes();
    if (layer.mlp) add(*layer.mlp);
    if (layer.moe)
      for (const Mlp& expert : layer.moe->experts) add(expert);
  }
  return total;
}

void Decoder::check(const BatchView& batch) const {
  if (layers_.empty() || embedding_.w.data == nullptr || final_norm_.empty())
    throw std::invalid_argument("a decoder computes once it has layers, an embedding and a final norm");
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.rows] == batch.tokens, "query_starts");
  for (int t = 0; t < batch.tokens; ++t) {
    require(batch.token_ids[t] >= 0 && batch.token_ids[t] < vocab_, "a token id is outside the vocabulary");
    require(batch.positions[t] >= 0, "a position is negative");
    for (const RopeTable& rope : ropes_) require(batch.positions[t] < rope.positions, "a position is past the context");
  }
  require(batch.wanted <= batch.tokens, "more tokens are wanted than there are");
  for (int i = 0; i < batch.wanted; ++i)
    require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.tokens, "logit_rows");
  std::vector<const Layer*> checked(batch.groups.size(), nullptr);  // the layer whose cache the group was compared with
  for (const Layer& layer : layers_) {
    require(layer.group >= 0 && layer.group < static_cast<int>(batch.groups.size()), "a KV group is missing");
    require(layer.has_cache(), "no cache is bound");
    const int block_size = layer.block_size();
    const Layer*& before = checked[static_cast<size_t>(layer.group)];
    if (before && before->num_blocks == layer.num_blocks && before->block_size() == block_size) continue;
    before = &layer;
    const GroupView& group = batch.groups[static_cast<size_t>(layer.group)];
    const int64_t slots = static_cast<int64_t>(layer.num_blocks) * block_size;
    for (int t = 0; t < batch.tokens; ++t) require(group.slots[t] >= 0 && group.slots[t] < slots, "a slot");
    for (int r = 0; r < batch.rows; ++r) {
      const int queries = batch.query_starts[r + 1] - batch.query_starts[r];
      require(queries > 0, "a row without tokens");
      require(batch.context_lens[r] >= queries, "a context is shorter than its queries");
      const int64_t blocks = (int64_t{batch.context_lens[r]} + block_size - 1) / block_size;
      require(blocks <= group.max_blocks, "a block table is too short");
      const int32_t* table = group.block_tables + static_cast<size_t>(r) * group.max_blocks;
      for (int64_t b = 0; b < blocks; ++b) require(table[b] >= 0 && table[b] < layer.num_blocks, "a block id");
    }
  }
}

}  // namespace tokenmill
