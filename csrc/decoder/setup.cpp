// Building a decoder, and the checks of its parts and of batches that precede every use of a pointer. See decoder.h.
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

bool fits(const Linear& l, int64_t rows, int64_t cols) { return l.rows() == rows && l.w.cols == cols; }

// Checks that all block ids of a group's tables are within a cache of `num_blocks` blocks.
void require_tables(const BatchView& batch, const GroupView& group, int num_blocks, int block_size) {
  const int64_t slots = static_cast<int64_t>(num_blocks) * block_size;
  for (int t = 0; t < batch.tokens; ++t) require(group.slots[t] >= 0 && group.slots[t] < slots, "a slot");
  for (int r = 0; r < batch.rows; ++r) {
    const int queries = batch.query_starts[r + 1] - batch.query_starts[r];
    require(queries > 0, "a row without tokens");
    require(batch.context_lens[r] >= queries, "a context is shorter than its queries");
    const int64_t blocks = (int64_t{batch.context_lens[r]} + block_size - 1) / block_size;
    require(blocks <= group.max_blocks, "a block table is too short");
    const int32_t* table = group.block_tables + static_cast<size_t>(r) * group.max_blocks;
    for (int64_t b = 0; b < blocks; ++b) require(table[b] >= 0 && table[b] < num_blocks, "a block id");
  }
}

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
  const int dim = task.cache.head_dim, value_dim = task.cache.value_dim;
  const int64_t width = static_cast<int64_t>(task.heads) * dim, kv_width = static_cast<int64_t>(task.cache.kv_heads) * dim;
  const int64_t v_width = static_cast<int64_t>(task.cache.kv_heads) * value_dim;
  const int64_t own_width = static_cast<int64_t>(task.heads) * value_dim;
  const bool keys_fit = layer.has_own_kv() ? fits(layer.k, kv_width, hidden_) && fits(layer.v, v_width, hidden_)
                                           : layer.v.w.data == nullptr;
  const int64_t out_width = layer.head_borders.empty() ? own_width : layer.head_borders.back();  // of all ranks' heads
  const int64_t gates = layer.output_gate == OutputGate::PerHead ? task.heads : own_width;
  const bool gate_fits = layer.output_gate == OutputGate::None ? layer.gate.w.data == nullptr : fits(layer.gate, gates, hidden_);
  const bool is_joint = layer.head_norm == HeadNorm::Joint, has_norms = layer.head_norm != HeadNorm::None;
  const auto norm_fits = [&](const Vector& norm, int64_t all) {
    return norm.size() == static_cast<size_t>(!has_norms ? 0 : is_joint ? all : dim);
  };
  return task.heads > 0 && task.cache.kv_heads > 0 && task.heads % task.cache.kv_heads == 0 && dim > 0 && dim <= kMaxHeadDim &&
         value_dim > 0 && value_dim <= kMaxHeadDim &&
         fits(layer.q, width, hidden_) && keys_fit && gate_fits && fits(layer.o, hidden_, out_width) &&
         norm_fits(layer.q_norm, width) && (layer.has_own_kv() ? norm_fits(layer.k_norm, kv_width) : layer.k_norm.empty()) &&
         layer.growth.length > 0 && layer.rope < static_cast<int>(ropes_.size()) && block_index_fits(layer) &&
         (layer.rope < 0 || 2 * ropes_[static_cast<size_t>(layer.rope)].half <= dim);
}

bool Decoder::block_index_fits(const Layer& layer) const {
  if (!layer.block_index) return true;
  const BlockIndex& index = *layer.block_index;
  const int dim = index.keys.width, half = layer.rope < 0 ? 0 : ropes_[static_cast<size_t>(layer.rope)].half;
  const auto norm_fits = [&](const Vector& norm) { return static_cast<int>(norm.size()) == dim; };
  return layer.has_own_kv() && layer.attention.window == 0 && index.heads == layer.attention.cache.kv_heads && dim > 0 &&
         dim <= kMaxHeadDim && 2 * half <= dim && fits(index.q, int64_t{index.heads} * dim, hidden_) &&
         fits(index.k, dim, hidden_) && norm_fits(index.q_norm) && norm_fits(index.k_norm) && index.block_size > 0 &&
         index.top_k > 0 && index.num_local >= 0 && index.num_local <= index.top_k;
}

bool Decoder::latent_fits(const Layer& layer) const {
  const LatentAttention& latent = *layer.latent;
  const int rank = latent.cache.rank, width = latent.cache.width, heads = latent.heads;
  const int64_t q_size = int64_t{heads} * (latent.nope_dim + latent.rope_dim);
  const auto all = [&](const std::vector<Linear>& matrices, int64_t rows, int64_t cols) {
    return static_cast<int>(matrices.size()) == heads &&
           std::all_of(matrices.begin(), matrices.end(), [&](const Linear& l) {
             return fits(l, rows, cols) && !is_quantised(l.w.kind);
           });
  };
  const bool queries_fit =
      latent.q_up ? fits(*latent.q_up, q_size, latent.q.rows()) &&
                        static_cast<int64_t>(latent.q_norm.size()) == latent.q.rows()
                  : latent.q.rows() == q_size;
  const bool gate_fits = !latent.gate || fits(*latent.gate, heads, hidden_) ||
                         fits(*latent.gate, int64_t{heads} * latent.value_dim, hidden_);
  return heads > 0 && rank > 0 && width == rank + latent.rope_dim && queries_fit && gate_fits && index_fits(latent) && latent.q.w.cols == hidden_ &&
         fits(latent.kv_down, width, hidden_) && static_cast<int>(latent.kv_norm.size()) == rank &&
         all(latent.absorb, rank, latent.nope_dim) && all(latent.expand, latent.value_dim, rank) &&
         fits(layer.o, hidden_, int64_t{heads} * latent.value_dim) && layer.rope < static_cast<int>(ropes_.size()) &&
         (layer.rope < 0 || 2 * ropes_[static_cast<size_t>(layer.rope)].half <= latent.rope_dim);
}

bool Decoder::compressed_fits(const Layer& layer) const {
  const CompressedAttention& mixer = *layer.compressed;
  const int dim = mixer.head_dim(), rate = mixer.rate, series = mixer.series();
  if (mixer.in.size() < 2 || mixer.heads <= 0 || dim <= 0 || mixer.window <= 0 || mixer.out.empty()) return false;
  const int q_rank = mixer.in[0].rows(), groups = static_cast<int>(mixer.out.size());
  std::vector<int> rows{q_rank, dim};
  const auto entries_fit = [&](const CompressedEntries& of) {
    const int width = of.entries.width;
    rows.insert(rows.end(), 2, series * width);
    return width > 0 && static_cast<int>(of.norm.size()) == width && static_cast<int>(of.bias.size()) == rate * series * width;
  };
  if (rate < 0 || (rate > 0 && (mixer.compressed.entries.width != dim || !entries_fit(mixer.compressed)))) return false;
  if (mixer.index) {
    const CompressedAttention::Index& index = *mixer.index;
    if (rate == 0 || !entries_fit(index.keys) || index.heads <= 0 || index.top_k <= 0 ||
        !fits(index.q, int64_t{index.heads} * index.keys.entries.width, q_rank))
      return false;
    rows.push_back(index.heads);
  }
  bool good = mixer.in.size() == rows.size();
  for (size_t i = 0; good && i < rows.size(); ++i) good = fits(mixer.in[i], rows[i], hidden_);
  int64_t out_rows = 0;
  for (const Linear& out : mixer.out) {
    good = good && mixer.heads % groups == 0 && out.w.cols == mixer.heads / groups * dim;
    out_rows += out.rows();
  }
  const int least = mixer.index ? std::min(dim, mixer.index->keys.entries.width) : dim;  // the smallest width that is rotated
  return good && fits(mixer.q_up, int64_t{mixer.heads} * dim, q_rank) && static_cast<int>(mixer.q_norm.size()) == q_rank &&
         static_cast<int>(mixer.kv_norm.size()) == dim && static_cast<int>(mixer.sinks.size()) == mixer.heads &&
         fits(layer.o, hidden_, out_rows) && layer.rope >= 0 && layer.rope < static_cast<int>(ropes_.size()) &&
         2 * ropes_[static_cast<size_t>(layer.rope)].half <= least;
}

// Checks the parts of a layer that read and write several streams.
bool Decoder::streams_fit(const Layer& layer) const {
  const int count = streams_.count;
  const size_t number = static_cast<size_t>(count), hidden = static_cast<size_t>(hidden_);
  if (count == 1) return !layer.altup && !layer.connections;
  if (layer.is_held || layer.is_parallel || (layer.altup && layer.stream_scale != 1.0f)) return false;
  if (streams_.are_connected()) {
    const auto connects = [&](const Connection& connection) {
      return fits(connection.weight, (2 + count) * count, int64_t{count} * hidden_) &&
             !is_quantised(connection.weight.w.kind) && connection.base.size() == (2 + number) * number &&
             connection.scale.size() == 3;
    };
    return layer.connections && connects(layer.connections->mixer) && connects(layer.connections->feed) &&
           layer.attn_post_norm.empty() && layer.mlp_post_norm.empty() && layer.residual_scale == 1.0f && !layer.input &&
           layer.stream_scale == 1.0f && (layer.mlp || layer.moe);
  }
  if (!layer.altup || layer.attn_norm.empty()) return false;
  const AltUp& altup = *layer.altup;
  return fits(altup.router, count, hidden_) && !is_quantised(altup.router.w.kind) && altup.router_norm.size() == hidden &&
         altup.predict.size() == number * number * number && altup.correct.size() == number * number &&
         (altup.scale.empty() || altup.scale.size() == hidden) && altup.left.w.cols == hidden_ &&
         fits(altup.right, hidden_, altup.left.rows()) && altup.branch_norm.weight.size() == hidden;
}

void Decoder::set_streams(Streams streams) {
  const int count = streams.count;
  const size_t others = static_cast<size_t>(std::max(0, count - 1)), number = static_cast<size_t>(std::max(0, count));
  const auto all_fit = [&](const std::vector<Linear>& matrices) {
    return matrices.size() == others &&
           std::all_of(matrices.begin(), matrices.end(), [&](const Linear& l) { return fits(l, hidden_, hidden_); });
  };
  const bool ends_fit = streams.are_connected()
                            ? fits(streams.end.weight, count, int64_t{count} * hidden_) && streams.end.base.size() == number &&
                                  streams.end.scale.size() == 1 && !is_quantised(streams.end.weight.w.kind) && streams.rounds > 0
                            : all_fit(streams.in) && all_fit(streams.out);
  if (count < 2 || !ends_fit || !layers_.empty() || !is_last_stage_)
    throw std::invalid_argument("the ends of several streams do not fit together");
  streams_ = std::move(streams);
  ones_.assign(std::max(ones_.size(), number * static_cast<size_t>(hidden_)), 1.0f);
}

bool Decoder::index_fits(const LatentAttention& latent) const {
  if (latent.shares_index) {
    const auto chooses = [](const Layer& layer) { return layer.latent && layer.latent->index; };
    return !latent.index && std::any_of(layers_.begin(), layers_.end(), chooses);
  }
  if (!latent.index) return true;
  const EntryIndexer& index = *latent.index;
  const int dim = index.keys.width;
  return latent.q_up && index.heads > 0 && index.top_k > 0 && dim >= latent.rope_dim &&
         fits(index.q, int64_t{index.heads} * dim, latent.q.rows()) && fits(index.k, dim, hidden_) &&
         fits(index.weights, index.heads, hidden_) && static_cast<int>(index.norm.size()) == dim &&
         static_cast<int>(index.norm_bias.size()) == dim;
}

bool Decoder::conv_fits(const Layer& layer) const {
  const ShortConv& conv = *layer.conv;
  const size_t hidden = static_cast<size_t>(hidden_);
  return conv.kernel > 0 && conv.kernel <= kMaxConvKernel && conv.weight.size() == conv.kernel * hidden &&
         (conv.bias.empty() || conv.bias.size() == hidden) && fits(conv.in, 3 * int64_t{hidden_}, hidden_) &&
         fits(layer.o, hidden_, hidden_);
}

bool Decoder::recurrent_fits(const Layer& layer) const {
  const Recurrent& mixer = *layer.recurrent;
  const RecurrentShape& shape = mixer.shape;
  const size_t heads = static_cast<size_t>(shape.value_heads), channels = static_cast<size_t>(shape.channels());
  if (shape.key_heads <= 0 || shape.value_heads <= 0 || shape.value_heads % shape.key_heads != 0 || shape.key_dim <= 0 ||
      (shape.key_dim % 16 != 0 && !shape.is_scan) || shape.value_dim <= 0 || shape.value_dim % 16 != 0 || mixer.kernel < 2 ||
      mixer.kernel > kMaxConvKernel || shape.kernel != mixer.kernel ||
      (shape.has_channel_decays && !shape.is_delta) || (mixer.gates_by_sigmoid && mixer.gates_first) ||
      shape.is_scan != mixer.scan.has_value() || (shape.is_scan && !scan_fits(mixer)))
    return false;
  std::vector<int> rows{shape.values(), shape.values()};
  if (!shape.is_scan) {
    rows.insert(rows.begin(), {shape.keys(), shape.keys()});
    if (shape.is_delta) rows.push_back(shape.value_heads);
    rows.push_back(shape.decays());
  }
  bool good = mixer.in.size() == rows.size();
  for (size_t i = 0; good && i < rows.size(); ++i) good = fits(mixer.in[i], rows[i], hidden_);
  const size_t norm = mixer.norm_groups == 0      ? 0
                      : mixer.is_norm_shared      ? static_cast<size_t>(shape.values() / mixer.norm_groups)
                                                  : static_cast<size_t>(shape.values());
  return good && mixer.conv.size() == channels * static_cast<size_t>(mixer.kernel) && mixer.ones.size() == channels &&
         (mixer.conv_bias.empty() || mixer.conv_bias.size() == channels) &&
         (shape.is_scan || mixer.rates.size() == heads) &&
         mixer.step_bias.size() == static_cast<size_t>(shape.decays()) &&
         (shape.is_scan || mixer.skip.empty() || mixer.skip.size() == heads) &&
         mixer.norm_groups >= 0 && (mixer.norm_groups == 0 || shape.values() % mixer.norm_groups == 0) &&
         mixer.norm.size() == norm && fits(layer.o, hidden_, shape.values());
}

bool Decoder::scan_fits(const Recurrent& mixer) const {
  const RecurrentShape& shape = mixer.shape;
  const ScanInputs& scan = *mixer.scan;
  const size_t size = static_cast<size_t>(shape.key_dim), width = static_cast<size_t>(shape.values());
  const int64_t rank = scan.step.w.cols;
  const bool has_norms = !scan.step_norm.empty();
  return !shape.is_delta && shape.key_heads == 1 && shape.value_heads == 1 && rank > 0 &&
         fits(scan.inner, rank + 2 * int64_t{shape.key_dim}, shape.values()) && fits(scan.step, shape.values(), rank) &&
         mixer.rates.size() == size * width && mixer.skip.size() == width &&
         (!has_norms || scan.step_norm.size() == static_cast<size_t>(rank)) &&
         scan.key_norm.size() == (has_norms ? size : 0) && scan.query_norm.size() == (has_norms ? size : 0);
}

RecurrentShape Decoder::recurrent_shape(int layer) const {
  const Layer& of = layers_.at(static_cast<size_t>(layer));
  if (!of.recurrent) throw std::invalid_argument("the layer is not recurrent");
  return of.recurrent->shape;
}

void Decoder::set_recurrent_cache(int layer, int group, const Recurrent& cache, int num_cells) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  if (!to.recurrent) throw std::invalid_argument("the layer is not recurrent");
  if (group < 0 || cache.state_group < 0) throw std::invalid_argument("cache groups are counted from 0");
  if (cache.block_size <= 0 || kStateChunk % cache.block_size != 0)
    throw std::invalid_argument("blocks of cells must divide a chunk of 64 tokens");
  Recurrent& own = *to.recurrent;
  own.conv_inputs = cache.conv_inputs;
  own.keys = cache.keys;
  own.updates = cache.updates;
  own.decays = cache.decays;
  own.states = cache.states;
  own.tails = cache.tails;
  own.block_size = cache.block_size;
  own.state_group = cache.state_group;
  own.num_states = cache.num_states;
  to.group = group;
  to.num_blocks = num_cells;
}

// Checks that the cells and states that a step reads exist; those it writes may be block 0, that is none.
void Decoder::check_recurrent(const Layer& layer, const BatchView& batch) const {
  const Recurrent& mixer = *layer.recurrent;
  require(mixer.state_group < static_cast<int>(batch.groups.size()), "a group of states is missing");
  const GroupView& cells = batch.groups[static_cast<size_t>(layer.group)];
  const GroupView& states = batch.groups[static_cast<size_t>(mixer.state_group)];
  for (int r = 0; r < batch.rows; ++r) {
    const int queries = batch.query_starts[r + 1] - batch.query_starts[r], end = batch.context_lens[r];
    require(queries > 0 && end >= queries, "a context is shorter than its queries");
    const int start = end - queries, begin = start / kStateChunk * kStateChunk, size = mixer.block_size;
    require((end - 1) / size < cells.max_blocks && end / kStateChunk <= states.max_blocks, "a block table is too short");
    const int32_t* own_cells = cells.block_tables + static_cast<size_t>(r) * cells.max_blocks;
    const int32_t* own_states = states.block_tables + static_cast<size_t>(r) * states.max_blocks;
    for (int b = begin / size; b <= (end - 1) / size; ++b) {
      require(own_cells[b] >= 0 && own_cells[b] < layer.num_blocks, "a block of cells");
      require(b * size >= start || own_cells[b] != 0, "a block of cells that is read is missing");
    }
    for (int e = std::max(0, start / kStateChunk - 1); e < end / kStateChunk; ++e)
      require(own_states[e] >= 0 && own_states[e] < mixer.num_states, "a slot of a state");
    require(start < kStateChunk || own_states[start / kStateChunk - 1] != 0, "a state that is read is missing");
  }
}

// Checks the parts of a layer other than its mixer.
bool Decoder::frame_fits(const Layer& layer) const {
  const auto mlp_fits = [](const Mlp& m, int width) {
    return m.up.w.cols == width && fits(m.down, width, m.up.rows()) && (!m.is_gated() || fits(m.gate, m.up.rows(), width)) &&
           (!m.cutoff || m.is_gated());
  };
  if (!layer.mlp && !layer.moe && layer.is_parallel) return false;
  if (layer.is_held && (layer.mlp || layer.moe || layer.input || !layer.attn_post_norm.empty())) return false;
  if (layer.mlp && !mlp_fits(*layer.mlp, hidden_)) return false;
  if (layer.input && (!fits(layer.input->gate, static_cast<int64_t>(input_norm_.size()), hidden_) ||
                      !fits(layer.input->up, hidden_, static_cast<int64_t>(input_norm_.size()))))
    return false;
  if (!layer.moe) return true;
  const Moe& moe = *layer.moe;
  const Routing& routing = moe.routing;
  const int experts = static_cast<int>(moe.experts.size());
  const bool is_latent = moe.latent_in.w.data != nullptr;
  const int width = is_latent ? moe.latent_in.rows() : hidden_;
  const auto of_experts = [&](const Vector& v) { return v.empty() || v.size() == moe.experts.size(); };
  const size_t looked_up = routing.table.size();
  if (looked_up != 0 && looked_up != static_cast<size_t>(vocab_) * static_cast<size_t>(routing.num_active)) return false;
  if (std::any_of(routing.table.begin(), routing.table.end(), [&](int32_t e) { return e < 0 || e >= experts; })) return false;
  return fits(moe.router, experts, hidden_) && routing.num_active >= 1 && routing.num_active <= experts &&
         routing.num_groups >= 1 && experts % routing.num_groups == 0 && routing.kept_groups >= 1 &&
         routing.kept_groups <= routing.num_groups &&
         experts / routing.num_groups * routing.kept_groups >= routing.num_active && of_experts(routing.choice_bias) &&
         of_experts(routing.expert_scales) &&
         (!is_latent || (moe.latent_in.w.cols == hidden_ && fits(moe.latent_out, hidden_, width))) &&
         (!moe.shared || mlp_fits(*moe.shared, hidden_)) &&
         experts_fit(moe, width);
}

void Decoder::add_layer(Layer layer) {
  const bool mixer_fits = layer.conv ? conv_fits(layer) : layer.recurrent ? recurrent_fits(layer)
                          : layer.latent ? latent_fits(layer) : layer.compressed ? compressed_fits(layer)
                                                                                 : attention_fits(layer);
  const bool good = mixer_fits && frame_fits(layer) && streams_fit(layer);
  if (!good) throw std::invalid_argument("the parts of a layer do not fit together");
  layer.attention.sinks = layer.attention.slopes = nullptr;
  for (auto& scratch : attention_scratch_)
    if (!layer.conv && !layer.recurrent && !layer.latent && !layer.compressed)
      grow(scratch, kernels_->attention_scratch_bytes(layer.attention.cache.widest()) + 64);
  if (layer.moe) layer.moe->layer = layers_.size();
  if (layer.compressed) ones_.assign(std::max(ones_.size(), static_cast<size_t>(layer.compressed->head_dim())), 1.0f);
  expert_counts_.emplace_back(layer.moe ? layer.moe->experts.size() : 0, 0);
  layers_.push_back(std::move(layer));
  Layer& kept = layers_.back();
  if (!kept.sinks.empty()) kept.attention.sinks = kept.sinks.data();  // vectors keep their memory when layers move
  if (!kept.slopes.empty()) kept.attention.slopes = kept.slopes.data();
}

void Decoder::set_layer_inputs(Linear table, Linear project, Vector norm) {
  if (norm.empty() || table.rows() < 1 || table.rows() > vocab_ || table.w.cols != project.rows() || table.w.is_ordered || project.w.cols != hidden_ ||
      project.rows() % static_cast<int>(norm.size()) != 0)
    throw std::invalid_argument("the per-layer embeddings do not fit together");
  input_table_ = std::move(table);
  input_project_ = std::move(project);
  input_norm_ = std::move(norm);
}

bool Decoder::experts_fit(const Moe& moe, int width) const {
  if (moe.is_spread() && (moe.owners.size() != moe.experts.size() || !window_)) return false;
  for (size_t e = 0; e < moe.experts.size(); ++e) {
    bool is_here = !moe.is_spread();
    if (moe.is_spread()) {
      if (moe.owners[e].empty()) return false;
      for (const int rank : moe.owners[e]) {
        if (rank < 0 || rank >= window_->size()) return false;
        is_here = is_here || rank == window_->rank();
      }
    }
    const Mlp& m = moe.experts[e];
    if (is_here && !(fits(m.down, width, m.up.rows()) && m.up.w.cols == width &&
                     (!m.is_gated() || fits(m.gate, m.up.rows(), width))))
      return false;
  }
  return true;
}

void Decoder::set_embedding(Linear embedding) {
  if (!fits(embedding, vocab_, hidden_) || embedding.w.is_ordered) throw std::invalid_argument("the embedding is not [vocab, hidden]");
  embedding_ = std::move(embedding);
}

// What follows the tokens' embeddings: an embedding of positions, and a norm.
void Decoder::set_embedding_ends(std::optional<Linear> positions, Norm norm) {
  if (positions && (positions->w.cols != hidden_ || positions->rows() < 1 || positions->is_cut() || positions->w.is_ordered))
    throw std::invalid_argument("the embedding of positions is not [positions, hidden]");
  if (!norm.empty() && norm.weight.size() != static_cast<size_t>(hidden_)) throw std::invalid_argument("a norm is not [hidden]");
  positions_ = positions.value_or(Linear());
  embed_norm_ = std::move(norm);
}

void Decoder::set_head(Linear head) {
  if (!fits(head, vocab_, hidden_)) throw std::invalid_argument("the head is not [vocab, hidden]");
  head_ = std::move(head);
}

// For latent attention, and attention over a window.
void Decoder::set_entry_cache(int layer, int group, const EntryCache& cache, int num_blocks) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  if (!to.latent && !to.compressed) throw std::invalid_argument("the layer has no cache of entries");
  if (group < 0) throw std::invalid_argument("cache groups are counted from 0");
  EntryCache& own = to.latent ? to.latent->cache : to.compressed->keys;
  const bool has_whole_entries = to.latent || to.compressed->rate == 0 || cache.block_size % to.compressed->rate == 0;
  if (cache.width != own.width || cache.block_size <= 0 || cache.store == Store::I8 || !has_whole_entries)
    throw std::invalid_argument("the cache does not fit the layer's entries");
  const int rank = own.rank;
  own = cache;
  own.rank = rank;
  to.group = group;
  to.num_blocks = num_blocks;
}

void Decoder::set_index_cache(int layer, int group, const EntryCache& cache, int num_blocks) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  if (!to.block_index && (!to.latent || !to.latent->index)) throw std::invalid_argument("the layer has no indexer");
  if (group < 0) throw std::invalid_argument("cache groups are counted from 0");
  const auto set = [&](auto& index) {
    if (cache.width != index.keys.width || cache.block_size <= 0 || cache.store == Store::I8)
      throw std::invalid_argument("the cache does not fit the indexer's keys");
    index.keys = cache;
    index.group = group;
    index.num_blocks = num_blocks;
  };
  if (to.block_index) set(*to.block_index);
  else set(*to.latent->index);
}

const CompressedAttention& Decoder::compressed_at(int layer) const {
  const Layer& of = layers_.at(static_cast<size_t>(layer));
  if (!of.compressed) throw std::invalid_argument("the layer has no compressed entries");
  return *of.compressed;
}

// `cache` has the pointers, groups and numbers of blocks; its `entries.width` and `entries.block_size` are those of tokens.
void Decoder::set_compressed_cache(int layer, bool of_index, const CompressedEntries& cache) {
  Layer& to = layers_.at(static_cast<size_t>(layer));
  const bool has_entries = to.compressed && to.compressed->rate != 0;
  if (!has_entries || (of_index && !to.compressed->index)) throw std::invalid_argument("the layer has no compressed entries");
  CompressedAttention& mixer = *to.compressed;
  CompressedEntries& own = of_index ? mixer.index->keys : mixer.compressed;
  if (cache.inputs_group < 0 || cache.group < 0) throw std::invalid_argument("cache groups are counted from 0");
  if (cache.entries.width * mixer.rate != own.entries.width || cache.entries.store == Store::I8 ||
      cache.entries.block_size <= 0 || cache.entries.block_size % mixer.rate != 0)
    throw std::invalid_argument("the cache does not fit the layer's entries");
  const int width = own.entries.width;
  own.inputs = cache.inputs;
  own.entries = cache.entries;
  own.entries.width = own.entries.rank = width;
  own.entries.block_size = cache.entries.block_size / mixer.rate;
  own.inputs_group = cache.inputs_group;
  own.num_inputs = cache.num_inputs;
  own.group = cache.group;
  own.num_blocks = cache.num_blocks;
}

void Decoder::check_compressed(const Layer& layer, const BatchView& batch) const {
  const CompressedAttention& mixer = *layer.compressed;
  const auto check_tables = [&](int group, int num_blocks, int block_size) {
    require(group < static_cast<int>(batch.groups.size()), "a KV group is missing");
    require_tables(batch, batch.groups[static_cast<size_t>(group)], num_blocks, block_size);
  };
  const auto check_entries = [&](const CompressedEntries& of) {
    check_tables(of.inputs_group, of.num_inputs, of.entries.block_size * mixer.rate);
    check_tables(of.group, of.num_blocks, of.entries.block_size * mixer.rate);
  };
  if (mixer.rate != 0) check_entries(mixer.compressed);
  if (mixer.index) check_entries(mixer.index->keys);
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
  if (to.conv || to.latent || to.compressed) throw std::invalid_argument("the layer has no keys and values");
  if (group < 0) throw std::invalid_argument("cache groups are counted from 0");
  const PagedCache& own = to.attention.cache;
  if (own.kv_heads != cache.kv_heads || own.head_dim != cache.head_dim || own.value_dim != cache.value_dim)
    throw std::invalid_argument("the cache has other heads than the layer");
  if (cache.block_size <= 0 || cache.block_size % 16 != 0)
    throw std::invalid_argument("KV blocks must hold a multiple of 16 tokens");
  if (cache.store == Store::I8 && (cache.head_dim % 4 != 0 || cache.value_dim % 4 != 0))
    throw std::invalid_argument("heads in an int8 KV cache must be a multiple of 4 numbers");
  if (to.block_index && to.block_index->block_size % cache.block_size != 0)
    throw std::invalid_argument("KV blocks do not divide the blocks that an indexer selects");
  to.attention.cache = cache;
  to.group = group;
  to.num_blocks = num_blocks;
}

size_t Decoder::weight_bytes() const {
  size_t total = head_.w.num_bytes() + input_project_.w.num_bytes();
  const auto add = [&](const Mlp& m) {
    total += m.gate.w.num_bytes() + m.up.w.num_bytes() + m.down.w.num_bytes();
  };
  for (const auto* ends : {&streams_.in, &streams_.out})
    for (const Linear& l : *ends) total += l.w.num_bytes();
  total += streams_.end.weight.w.num_bytes();
  for (const Layer& layer : layers_) {
    for (const Linear* l : {&layer.q, &layer.k, &layer.v, &layer.o}) total += l->w.num_bytes();
    if (layer.block_index) total += layer.block_index->q.w.num_bytes() + layer.block_index->k.w.num_bytes();
    if (layer.conv) total += layer.conv->in.w.num_bytes();
    if (layer.recurrent)
      for (const Linear& linear : layer.recurrent->in) total += linear.w.num_bytes();
    if (layer.recurrent && layer.recurrent->scan)
      total += layer.recurrent->scan->inner.w.num_bytes() + layer.recurrent->scan->step.w.num_bytes();
    if (layer.latent) {
      total += layer.latent->q.w.num_bytes() + layer.latent->kv_down.w.num_bytes();
      if (layer.latent->q_up) total += layer.latent->q_up->w.num_bytes();
      if (layer.latent->gate) total += layer.latent->gate->w.num_bytes();
      if (layer.latent->index)
        for (const Linear* l : {&layer.latent->index->q, &layer.latent->index->k, &layer.latent->index->weights})
          total += l->w.num_bytes();
      for (const auto* heads : {&layer.latent->absorb, &layer.latent->expand})
        for (const Linear& l : *heads) total += l.w.num_bytes();
    }
    if (layer.compressed) {
      total += layer.compressed->q_up.w.num_bytes();
      if (layer.compressed->index) total += layer.compressed->index->q.w.num_bytes();
      for (const auto* matrices : {&layer.compressed->in, &layer.compressed->out})
        for (const Linear& l : *matrices) total += l.w.num_bytes();
    }
    if (layer.altup)
      for (const Linear* l : {&layer.altup->router, &layer.altup->left, &layer.altup->right}) total += l->w.num_bytes();
    if (layer.connections)
      total += layer.connections->mixer.weight.w.num_bytes() + layer.connections->feed.weight.w.num_bytes();
    if (layer.mlp) add(*layer.mlp);
    total += layer.gate.w.num_bytes();
    if (layer.input) total += layer.input->gate.w.num_bytes() + layer.input->up.w.num_bytes();
    if (layer.moe) {
      for (const Mlp& expert : layer.moe->experts) add(expert);
      if (layer.moe->shared) add(*layer.moe->shared);
      total += layer.moe->latent_in.w.num_bytes() + layer.moe->latent_out.w.num_bytes();
    }
  }
  return total;
}

void Decoder::check(const BatchView& batch, bool has_stream) const {
  if (layers_.empty() || (!has_stream && embedding_.w.data == nullptr) || (is_last_stage_ && final_norm_.empty()))
    throw std::invalid_argument("a decoder computes once it has layers, an embedding and a final norm");
  for (const Layer& layer : layers_)
    require(!layer.input || input_project_.rows() == num_layers() * static_cast<int>(input_norm_.size()), "layer inputs");
  for (int r = 0; batch.owners != nullptr && r < batch.rows; ++r)
    require(window_ != nullptr && batch.owners[r] >= 0 && batch.owners[r] < window_->size(), "a row of no rank");
  for (const Layer& layer : layers_)
    require(batch.owners == nullptr || (!layer.recurrent && !layer.conv && !layer.compressed && !layer.block_index &&
                                       !(layer.latent && layer.latent->is_sparse())),
            "data-parallel attention needs attention in all layers");
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.rows] == batch.tokens, "query_starts");
  for (int t = 0; t < batch.tokens; ++t) {
    require(batch.token_ids[t] >= 0 && batch.token_ids[t] < vocab_, "a token id is outside the vocabulary");
    require(batch.positions[t] >= 0, "a position is negative");
    require(positions_.w.data == nullptr || batch.positions[t] < positions_.rows(), "a position without an embedding");
    for (const RopeTable& rope : ropes_) require(batch.positions[t] < rope.positions, "a position is past the context");
  }
  require(batch.outputs <= batch.tokens, "more output rows than tokens");
  for (int i = 0; i < batch.outputs; ++i)
    require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.tokens, "logit_rows");
  std::vector<const Layer*> checked(batch.groups.size(), nullptr);  // the layer whose cache the group was compared with
  for (const Layer& layer : layers_) {
    require(layer.group >= 0 && layer.group < static_cast<int>(batch.groups.size()), "a KV group is missing");
    require(layer.has_cache(), "no cache is bound");
    if (layer.recurrent) {
      check_recurrent(layer, batch);
      continue;
    }
    if (layer.compressed) check_compressed(layer, batch);
    const auto require_index = [&](const auto& index) {
      require(index.group < static_cast<int>(batch.groups.size()), "a group of an index is missing");
      require_tables(batch, batch.groups[static_cast<size_t>(index.group)], index.num_blocks, index.keys.block_size);
    };
    if (layer.latent && layer.latent->index) require_index(*layer.latent->index);
    if (layer.block_index) require_index(*layer.block_index);
    const int block_size = layer.block_size();
    const Layer*& before = checked[static_cast<size_t>(layer.group)];
    if (before && before->num_blocks == layer.num_blocks && before->block_size() == block_size) continue;
    before = &layer;
    require_tables(batch, batch.groups[static_cast<size_t>(layer.group)], layer.num_blocks, block_size);
  }
}

}  // namespace tokenmill
