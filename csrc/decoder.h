// A whole decoder step in one call: embedding, layers, final norm. A decoder is built once from packed weights and
// parameters; a step reads and writes the paged cache in place. All code that depends on an instruction set is in Kernels.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "adapters.h"
#include "batch.h"
#include "gemm.h"
#include "kernels.h"
#include "pool.h"
#include "window.h"

namespace tokenmill {

using Vector = std::vector<float>;  // empty: absent

struct RopeTable {
  Vector cos, sin;  // [positions][half]
  int positions = 0, half = 0;
};

struct Norm {
  Vector weight, bias;  // empty weight: no norm; a bias only if the decoder's norms are centred

  bool empty() const { return weight.empty(); }
};

struct Mlp {
  Linear gate, up, down;  // an empty gate: down(act(up))
  Activation activation = Activation::Silu;
  std::optional<float> cutoff = {};  // activation sparsity: gates below mean + cutoff * standard deviation become 0
  std::optional<XieluCurve> curve = {};  // instead of the activation; only without a gate

  bool is_gated() const { return gate.w.data != nullptr; }
  // The matrix of the first product: `gate`, whose product with `up` is computed beside it, or `up` alone.
  const Linear& first() const { return is_gated() ? gate : up; }
  const Linear* second() const { return is_gated() ? &up : nullptr; }
};

enum class Score : uint8_t { Softmax, Sigmoid, SqrtSoftplus };

// How a router selects and weights a token's experts.
struct Routing {
  int num_active = 0;
  Score score = Score::Softmax;
  bool renormalize = true;
  float epsilon = 0.0f;  // added to the sum by which weights are divided
  Vector choice_bias;    // added to the scores for the selection only
  int num_groups = 1, kept_groups = 1;
  int judged_by = 2;  // a group's score is the sum of this many of its best
  float scale = 1.0f;
  Vector expert_scales;
  bool weights_input = false;  // weight an expert's input, not its output
  bool is_bias_on_logits = false;       // the choice bias is added to logits, not to scores
  std::optional<float> jitter = {};  // SparseMixer: weights are softmaxes over the experts left that are near a choice
  std::vector<int32_t> table = {};  // [vocab][num_active]: experts by token id; empty: by score
};

struct Moe {
  Linear router;
  std::vector<Mlp> experts;
  Routing routing;
  std::optional<Mlp> shared;
  Vector shared_gate;  // [hidden]: the shared expert is weighted by the sigmoid of its product with the input
  Vector router_norm;  // the router's own norm of the stream; empty: it reads the experts' input
  Linear latent_in, latent_out;  // experts compute in a latent space; empty: on the input itself
  std::vector<std::vector<int>> owners;  // the ranks that have each expert; empty: this rank has all

  size_t layer = 0;  // its number, given by the decoder

  bool is_spread() const { return !owners.empty(); }
};

// Which rank computes which (token, expert) pair of a step, and where the results are: rows of rank 0, of rank 1, …, and
// within a rank sorted by expert.
struct ExpertRows {
  std::vector<int> counts, starts;  // per expert: the number of rows computed here, and the first of them
  std::vector<size_t> first;        // [ranks + 1] the first row of each rank
  std::vector<int> places;          // [T][active] row of an expert's input; -1: another rank computes it
  std::vector<size_t> rows;         // [T][active] row of the result
};

// A layer's part of per-layer embeddings, added through a gate that reads the stream.
struct LayerInput {
  Linear gate, up;
  Norm norm;
  Activation activation = Activation::GeluTanh;
};

// Several residual streams around a layer, see decoder/streams.cpp. AltUp (Gemma 3n): the layer computes on the first stream;
// all streams are predicted before it and corrected after it. A low-rank branch (LAuReL) is added beside attention.
struct AltUp {
  Linear router;            // [streams][hidden], float32
  Vector router_norm;       // [hidden]
  Vector predict, correct;  // [streams * streams][streams], [streams][streams]
  Vector scale;             // [hidden], of the stream that gates the per-layer embedding; empty: 1
  Linear left, right;       // [rank][hidden], [hidden][rank]
  Norm branch_norm;
};

// Hyper-connections (DeepSeek V4): weights of the coefficients by which a mixer or MLP reads the streams and its result is
// added to them; linear in the normed streams.
struct Connection {
  Linear weight;  // [coefficients][streams * hidden], float32
  Vector base;    // [coefficients]
  Vector scale;   // one value per kind of coefficient
};
struct Connections {
  Connection mixer, feed;
};

// The parameters of a decoder with several residual streams.
struct Streams {
  int count = 1;
  std::vector<Linear> in, out;  // AltUp: [hidden][hidden] per stream but the first, from the embedding and at the end
  Connection end;               // hyper-connections: the mixture after the last layer
  int rounds = 0;               // Sinkhorn rounds of normalising rows and columns
  float eps = 0.0f, norm_eps = 0.0f;

  bool are_connected() const { return end.weight.w.data != nullptr; }
};

// The parts of a layer other than its mixer.
struct LayerFrame {
  Norm attn_norm, mlp_norm, attn_post_norm, mlp_post_norm;  // empty where the model has none
  std::optional<Mlp> mlp;
  std::optional<Moe> moe;  // instead of an MLP, or beside it, with the `side` norms
  struct Side {
    Norm norm, post_norm, mlp_post_norm;
  } side;
  bool is_parallel = false;  // mixer and MLP read the same stream
  float residual_scale = 1.0f;  // of results before they are added to the stream
  std::optional<LayerInput> input;
  float stream_scale = 1.0f;  // of the stream at the end of the layer
  bool is_held = false;  // a second mixer: its result is held until that of the next layer, which reads the same stream
  std::optional<AltUp> altup = {};
  std::optional<Connections> connections = {};
};

enum class HeadNorm : uint8_t { None, Before, After, Joint };  // QK norm before RoPE, after it, or over all heads together

struct QueryGrowth {
  float beta = 0.0f;  // 0: queries are not scaled by their positions
  int length = 1, first = 0;
};

enum class OutputGate : uint8_t { None, PerHead, PerElement };

// A gated short convolution: out(c * conv(b * x)). Every token's input b * x is cached for the next kernel - 1 tokens of its
// sequence.
struct ShortConv {
  Linear in;  // rows of b, then c, then x
  Vector weight;  // [kernel][hidden], the oldest tap first
  Vector bias;    // [hidden]
  int kernel = 0;
  float* inputs = nullptr;  // the cache: [block][token][hidden]
  int block_size = 0;
};

inline constexpr int kMaxConvKernel = 16;

// The inner projections of Mamba-1: `inner` has rows of a, then k, then q; `step` projects a to a step of each channel.
struct ScanInputs {
  Linear inner, step;
  Vector step_norm, key_norm, query_norm;  // of a, k and q; empty: they are not normed
  float eps = 0.0f;
};

// Gated DeltaNet, Kimi's delta rule, Mamba-2 or Mamba-1, see decoder/recurrent.cpp.
struct Recurrent {
  std::vector<Linear> in;  // rows of q, k, v, z, (b,) a: one matrix each; of Mamba-1 v and z
  std::optional<ScanInputs> scan;  // of Mamba-1
  RecurrentShape shape;
  Vector conv, conv_bias;  // [kernel][channels], the oldest tap first; [channels]
  Vector ones;             // [channels]
  int kernel = 0;
  Vector rates, step_bias, skip;  // [value heads], step_bias [decays]; of Mamba-1 rates [key dim][values], skip [values]
  float min_step = 0.0f, max_step = 0.0f, step_scale = 1.0f, gate_scale = 1.0f, out_scale = 1.0f;
  float strength_scale = 1.0f;
  float lowest_decay = 0.0f;  // of one token, below zero; 0: there is no limit
  Vector norm;  // [value dim] or [values]; 0 groups: no norm
  int norm_groups = 0;
  bool is_norm_shared = false, gates_first = false, gates_by_sigmoid = false;
  float eps = 0.0f;

  // The cache; `Layer::group` is the group of the cells.
  float* conv_inputs = nullptr;  // [block][token][channels]
  float* keys = nullptr;         // [block][key head][token][key dim]
  float* updates = nullptr;      // [block][value head][token][value dim]
  float* decays = nullptr;       // [block][token][value head], or per channel [block][value head][token][key dim]; of
                                 // Mamba-1 the steps [block][token][channel]
  float* states = nullptr;       // [slot][value head][key dim][value dim]
  float* tails = nullptr;        // [slot][kernel - 1][channels]
  int block_size = 0, state_group = 0, num_states = 0;
};

// The keys among which an indexer selects: one per `rate` tokens.
struct IndexView {
  const Linear* q;
  const EntryCache* keys;
  int heads, top_k, group, rate;
  float scale;
};

// Selects the `top_k` context entries that latent attention reads, see decoder/indexer.cpp. Its queries are projected from
// the latent of attention's queries; its keys and the weights of its heads from the layer's input.
struct EntryIndexer {
  Linear q, k, weights;
  Vector norm, norm_bias;  // of keys
  int heads = 0, top_k = 0;
  float scale = 1.0f, eps = 0.0f;
  EntryCache keys;  // one per token, of `keys.width` values
  int group = 0, num_blocks = 0;

  IndexView view() const { return {&q, &keys, heads, top_k, group, 1, scale}; }
};

// Selects the blocks of keys that attention reads, see decoder/block_attention.cpp; one head per KV head.
struct BlockIndex {
  Linear q, k;
  Vector q_norm, k_norm;
  int heads = 0, block_size = 0, top_k = 0, num_local = 0;
  EntryCache keys;  // one per token
  int group = 0, num_blocks = 0;
};

inline constexpr int kSeesAll = -1;  // instead of a number of selected entries: all are

// Multi-head latent attention (MLA): all heads attend to one entry per token, [rank | rope_dim]. `q` projects to queries, or
// to a latent that `q_up` expands to queries; each head has a matrix from queries to the latent space, and one from there to
// its values.
struct LatentAttention {
  Linear q, kv_down;
  std::optional<Linear> q_up;
  Vector q_norm, kv_norm;
  std::vector<Linear> absorb, expand;  // per head, not quantised: [rank][nope_dim] and [value_dim][rank]
  std::optional<Linear> gate;          // of the output: a row per head, or per value of a head
  int heads = 0, nope_dim = 0, rope_dim = 0, value_dim = 0;
  float scale = 1.0f, eps = 0.0f;
  EntryCache cache;
  std::optional<EntryIndexer> index;  // selects the entries to attend to; none: all
  bool shares_index = false;          // this layer uses the selection of the last indexer before it

  bool is_sparse() const { return index.has_value() || shares_index; }
};

// Entries that compress several tokens each. Their inputs, the tokens' values and gates, are cached until an entry is complete.
struct CompressedEntries {
  Vector bias, norm;       // [rate][series * dim], added to the gates; [dim]
  float* inputs = nullptr;  // [block][token][2 * series * dim]
  EntryCache entries;       // `block_size` counts entries
  int inputs_group = 0, num_inputs = 0, group = 0, num_blocks = 0;
};

// Attention over a sliding window and earlier compressed entries, see decoder/compressed_attention.cpp.
struct CompressedAttention {
  std::vector<Linear> in;  // query latent, key; values and gates of entries, and of the index; weights of the index heads
  Linear q_up;
  Vector q_norm, kv_norm, sinks;
  std::vector<Linear> out;  // one per group of heads
  int heads = 0, window = 0;
  float scale = 1.0f, eps = 0.0f;
  EntryCache keys;  // one per token, which is also the value
  int rate = 0;     // tokens per entry; 0: no compressed entries
  bool overlaps = false;
  CompressedEntries compressed;
  struct Index {
    Linear q;
    int heads = 0, top_k = 0;
    float scale = 1.0f;
    CompressedEntries keys;

    IndexView view(int rate) const { return {&q, &keys.entries, heads, top_k, keys.group, rate, scale}; }
  };
  std::optional<Index> index;

  int head_dim() const { return keys.width; }
  int series() const { return overlaps ? 2 : 1; }
  bool has_cache() const {
    const auto is_bound = [](const CompressedEntries& e) { return e.inputs != nullptr && e.entries.entries != nullptr; };
    return keys.entries != nullptr && (rate == 0 || is_bound(compressed)) && (!index || is_bound(index->keys));
  }
};

struct Layer : LayerFrame {
  explicit Layer(LayerFrame frame) : LayerFrame(std::move(frame)) {}

  Vector q_norm, k_norm, sinks, slopes;
  HeadNorm head_norm = HeadNorm::None;
  float clip = 0.0f;  // projected queries, keys and values are limited to ± this value; 0: they are not
  bool has_value_norm = false;
  float value_scale = 1.0f;
  QueryGrowth growth;
  Linear q, k, v, o;  // empty k and v: the layer reads another layer's cache
  Linear gate;        // of the attention output
  std::vector<int> head_borders;  // if heads are cut over ranks: rank r has the columns of o's input from [r] on
  OutputGate output_gate = OutputGate::None;
  bool is_softplus_gate = false;
  AttentionTask attention;
  std::optional<BlockIndex> block_index;  // none: attention reads the whole context
  int rope = -1;
  int group = 0;
  int num_blocks = 0;
  std::optional<ShortConv> conv;  // instead of attention: then `o` projects its output, and q, k and v are empty
  std::optional<Recurrent> recurrent;  // likewise

  std::optional<LatentAttention> latent;  // likewise
  std::optional<CompressedAttention> compressed;  // likewise

  bool has_own_kv() const { return k.w.data != nullptr; }
  // Columns of the projections after those of the gate.
  int index_width() const { return block_index ? block_index->q.rows() + block_index->k.rows() : 0; }
  bool has_cache() const {
    if (compressed) return compressed->has_cache();
    if (recurrent) return recurrent->states != nullptr;
    if (latent) return latent->cache.entries != nullptr && (!latent->index || latent->index->keys.entries != nullptr);
    const bool has_index_keys = !block_index || block_index->keys.entries != nullptr;
    return conv ? conv->inputs != nullptr : attention.cache.keys != nullptr && has_index_keys;
  }
  int block_size() const {
    if (compressed) return compressed->keys.block_size;
    if (recurrent) return recurrent->block_size;
    if (latent) return latent->cache.block_size;
    return conv ? conv->block_size : attention.cache.block_size;
  }
};

class Decoder {
 public:
  // `outlier_threshold`: see Form. Unless it is infinite, all blocks of the last layer and the head have 16 bits.
  Decoder(int hidden, int vocab, float eps, float embedding_scale, float logit_softcap, int threads,
          float outlier_threshold, const Kernels& kernels);
  void set_norms(bool are_centred) { are_norms_centred_ = are_centred; }
  void set_logit_scale(float scale) { logit_scale_ = scale; }
  // The layers are some of a model's: those of one stage of a pipeline.
  void set_stage(bool is_last) { is_last_stage_ = is_last; }
  bool is_last_stage() const { return is_last_stage_; }
  // The other ranks, where several compute the model together: they run the same steps at the same time.
  void set_window(std::shared_ptr<Window> window) { window_ = std::move(window); }
  // Before any layer is added.
  void set_streams(Streams streams);
  // Embeddings that each layer has for itself: [vocab or fewer][layers * width], [layers * width][hidden], [width].
  void set_layer_inputs(Linear table, Linear project, Vector norm);

  int add_rope(RopeTable table);
  void add_layer(Layer layer);
  void set_embedding(Linear embedding);
  void set_embedding_ends(std::optional<Linear> positions, Norm norm);
  void set_head(Linear head);
  void set_final_norm(Norm norm) { final_norm_ = std::move(norm); }
  // The cache of a layer of attention, or of a convolution; `group` says which of a batch's block tables is its own.
  void set_cache(int layer, int group, const PagedCache& cache, int num_blocks);
  void set_conv_cache(int layer, int group, float* inputs, int num_blocks, int block_size);
  // The pointers, sizes and group of states in `cache`; `group` is that of the cells.
  void set_recurrent_cache(int layer, int group, const Recurrent& cache, int num_cells);
  void set_entry_cache(int layer, int group, const EntryCache& cache, int num_blocks);
  void set_index_cache(int layer, int group, const EntryCache& cache, int num_blocks);
  // What attention over a window compresses, or the keys of its index.
  void set_compressed_cache(int layer, bool of_index, const CompressedEntries& cache);

  // Sets the matrices that adapters may change, and the number of adapter slots.
  void set_adapter_sites(int slots, std::vector<AdapterSlots::Site> sites) { adapters_.declare(slots, std::move(sites)); }
  void set_adapter(int slot, AdapterSlots::Parts parts) { adapters_.put(slot, std::move(parts)); }

  // `entering` [tokens][hidden]: the previous stage's residual stream; null on the first stage. `hidden`: the normed states
  // [outputs][hidden] on the last stage, else the stream [tokens][hidden].
  void forward(const BatchView& batch, const float* entering, float* hidden);
  // The adapter slots of the rows that `forward` returned; null if no row has an adapter.
  const int32_t* output_slots() const { return is_adapted_ ? row_slots_.data() : nullptr; }
  // `slots` [rows]: adapter slots; null: no row has an adapter.
  void logits(const float* hidden, int rows, const int32_t* slots, float* out);  // [rows][vocab]
  // The highest logit of each row and its index, of equal ones the first; NaN if any logit of the row is.
  void best_logits(const float* hidden, int rows, const int32_t* slots, int64_t* places, float* values);

  int hidden() const { return hidden_; }
  int vocab() const { return vocab_; }
  RecurrentShape recurrent_shape(int layer) const;
  int entry_series(int layer) const { return compressed_at(layer).series(); }
  int entry_rate(int layer) const { return compressed_at(layer).rate; }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  const Kernels& kernels() const { return *kernels_; }
  size_t computed_rows() const { return computed_rows_; }
  size_t received_rows() const { return received_rows_; }
  // Tokens routed to each expert so far, by layer; empty for layers without experts.
  const std::vector<std::vector<uint64_t>>& expert_counts() const { return expert_counts_; }
  Pool& pool() { return pool_; }
  size_t weight_bytes() const;

 private:
  bool attention_fits(const Layer& layer) const;
  bool conv_fits(const Layer& layer) const;
  bool recurrent_fits(const Layer& layer) const;
  bool scan_fits(const Recurrent& mixer) const;
  void check_recurrent(const Layer& layer, const BatchView& batch) const;
  struct RecurrentRow;
  RecurrentRow recurrent_row(const Layer& layer, const BatchView& batch, int row) const;
  void recur(const Layer& layer, const BatchView& batch);
  void project_recurrent(const Layer& layer, const BatchView& batch);
  const float* conv_input(const Layer& layer, const RecurrentRow& row, int position) const;
  void convolve_token(const Layer& layer, const RecurrentRow& row, int token);
  void keep_conv_tails(const Layer& layer, const RecurrentRow& row);
  void recur_head(const Layer& layer, const RecurrentRow& row, int head, int thread);
  void recurrent_outputs(const Layer& layer, int tokens);
  void project_scan(const Layer& layer, int tokens);
  void scan_rows(const Layer& layer, const BatchView& batch);
  void scan_channels(const Layer& layer, const RecurrentRow& row, int first, int count, int thread);
  bool latent_fits(const Layer& layer) const;
  void gate_latent(const Layer& layer, int token, float* out);
  const CompressedAttention& compressed_at(int layer) const;
  bool compressed_fits(const Layer& layer) const;
  bool streams_fit(const Layer& layer) const;
  void check_compressed(const Layer& layer, const BatchView& batch) const;
  bool index_fits(const LatentAttention& latent) const;
  void check(const BatchView& batch, bool has_stream) const;
  void take_adapters(const int32_t* slots, int rows);
  void keep_wanted_adapters(const BatchView& batch);
  void embed_adapters(const BatchView& batch);
  void run(const Gemm* gemms, int count);
  void run_own(const Gemm* gemms, int count);
  void run_shrinking(std::vector<Gemm>& with);
  void reorder_inputs(std::vector<Gemm>& gemms);
  void run_cut(const Gemm* gemms, int count);
  struct Gathered {  // [rows][stride], of which rank r computes the columns from borders[r] on
    float* data;
    size_t stride;
    int rows;
    const std::vector<int>* borders;
  };
  void gather(const std::vector<Gathered>& parts);
  void gather_round(const std::vector<Gathered>& parts);
  void gather_heads(const Layer& layer, int tokens);
  void gather_best(std::vector<Best>& best);
  void keep_own(PageVector<float>& rows, size_t width);
  void share_heads(const Layer& layer, size_t width);
  void embed_rows(const Linear& table, const int64_t* ids, int count, float scale, float* out);
  struct Shrinking {  // products with the adapters' `a`: the first of their results in `shrunk_`, and how many there are
    std::vector<Gemm> gemms;
    std::vector<size_t> at;
    size_t size = 0;
  };
  bool adapt(const Linear& w, const Gemm& gemm, AdaptedRows& rows, Shrinking& shrinking);
  // The form in which the inputs of these matrices must be kept; unquantised too if adapters read them.
  Form form_for(std::initializer_list<const Linear*> readers, float outlier_threshold) const;
  Form form_for_all(const std::vector<Linear>& readers, float outlier_threshold) const;
  Form form_of_input(const Mlp& mlp, float outlier_threshold) const;
  void embed(const BatchView& batch);
  void add_positions(const BatchView& batch);
  void enter(const float* stream, int tokens);
  void begin_layer(const Layer& layer, int tokens);
  void begin_streams(int tokens);
  void finish_streams(int tokens);
  void judge_streams(const AltUp& altup, const float* x, size_t stride, int tokens);
  void predict_streams(const AltUp& altup, int tokens);
  void add_branch(const Layer& layer, int tokens);
  void correct_streams(const AltUp& altup, int tokens);
  void add_to_streams(const Norm& norm, int tokens);
  void connect(const Connection& connection, int tokens);
  void read_streams(const Connection& connection, int tokens);
  void write_streams(int tokens);
  void output_and_mlp_of_streams(const Layer& layer, int tokens);
  void attend_compressed(const Layer& layer, const BatchView& batch);
  void project_compressed(const Layer& layer, const BatchView& batch);
  void place_compressed(const Layer& layer, const BatchView& batch);
  void make_entries(const Layer& layer, const BatchView& batch);
  void make_entry(const Layer& layer, const CompressedEntries& of, const BatchView& batch, int row, int number) const;
  void compressed_outputs(const Layer& layer, const BatchView& batch);
  void compressed_queries(const Layer& layer, const BatchView& batch);
  void attend_window(const Layer& layer, const BatchView& batch);
  void turn(const Layer& layer, int64_t position, float direction, float* values, int dim) const;
  void mixer(const Layer& layer, const BatchView& batch);
  void last_layer(const Layer& layer, const BatchView& batch);
  void keep_wanted(const BatchView& batch, size_t width, PageVector<float>& rows);
  void output_and_mlp(const Layer& layer, int tokens);
  void hold_result(int tokens);
  void add_held(float scale, int tokens);
  size_t projected_width(const Layer& layer) const;
  void project_to(const std::vector<Linear>& matrices, const Layer& layer, int tokens);
  void attend_latent(const Layer& layer, const BatchView& batch);
  void project_latent(const Layer& layer, const BatchView& batch);
  void rotate_at(const Layer& layer, int64_t position, float* values) const;
  void place_entries(const Layer& layer, const BatchView& batch);
  void latent_outputs(const Layer& layer, const BatchView& batch);
  void grow_queries(const Layer& layer, int tokens);
  void absorb_queries(const Layer& layer, const BatchView& batch);
  void attend_tokens(const Layer& layer, const BatchView& batch);
  void place_index_keys(const Layer& layer, const BatchView& batch);
  void prepare_index_queries(const IndexView& index, const Layer& layer, const BatchView& batch);
  void choose_entries(const IndexView& index, const Layer& layer, const BatchView& batch);
  void choose_best(const float* scores, int count, int top_k, int thread, int32_t* chosen);
  void keep_wanted_choices(const BatchView& batch);
  void convolve(const Layer& layer, const BatchView& batch);
  void project_conv(const Layer& layer, const BatchView& batch);
  void write_conv_inputs(const Layer& layer, const BatchView& batch);
  void write_conv_input(const Layer& layer, const BatchView& batch, int token);
  void conv_outputs(const Layer& layer, const BatchView& batch, bool writes_inputs);
  void attention(const Layer& layer, const BatchView& batch);
  void project(const Layer& layer, const BatchView& batch);
  void prepare_heads(const Layer& layer, int tokens);
  void finish_heads(const Layer& layer, int tokens);
  void place_all(const Layer& layer, const BatchView& batch);
  bool is_decode(const Layer& layer, const BatchView& batch) const;
  bool pays_to_split(const Layer& layer, const BatchView& batch) const;
  void attend_placed(const Layer& layer, const BatchView& batch);
  void norm_rope_head(const Layer& layer, const Vector& norm, int64_t position, float* head) const;
  void prepare_query(const Layer& layer, int64_t position, float* head) const;
  void clip_projected(const Layer& layer, int tokens);
  void norm_joint_heads(const Layer& layer, int tokens);
  void gate_outputs(const Layer& layer, int token, int head, float* out) const;
  void place_token(const Layer& layer, const BatchView& batch, int token, int kv_head);
  void attend_all(const Layer& layer, const BatchView& batch);
  void attend_blocks(const Layer& layer, const BatchView& batch);
  void place_block_keys(const Layer& layer, const BatchView& batch);
  void attend_chosen_blocks(const Layer& layer, const BatchView& batch, int token, int kv_head, int thread);
  int choose_blocks(const Layer& layer, const BatchView& batch, int token, int kv_head, int row, int seen, int thread);
  void score_tokens(const Layer& layer, const BatchView& batch, int token, int kv_head, int row, int seen, int thread);
  bool block_index_fits(const Layer& layer) const;
  void attend_singles(const Layer& layer, const BatchView& batch, int segments);
  void attend_split(const Layer& layer, const BatchView& batch, int segments);
  void attend_chunks(const Layer& layer, const BatchView& batch);
  void attend_tile(const Layer& layer, const BatchView& batch, int row, int kv_head, int first, int count,
                   uint64_t keys_id, int thread);
  void split_decode(const Layer& layer, const BatchView& batch, int row, int kv_head, int segment, int thread);
  void merge_splits(const Layer& layer, const BatchView& batch, int row, int kv_head);
  void take_outputs(const Layer& layer, int token, int tokens, int head, float* sums, size_t stride,
                    const Partial* partial, int partial_stride);
  void feed_forward(const Layer& layer, int tokens);
  void feed(const Layer& layer, int tokens);
  void mlp_of_stream(const Layer& layer, int tokens, Gemm::Mode mode, float* out);
  void moe_of_stream(const Layer& layer, const Norm& norm, int tokens, float* out);
  void mlp(const Mlp& mlp, const Rows& in, float outlier_threshold, Gemm::Mode mode, float* out);
  void curve_rows(const Mlp& mlp, const Rows& in, float outlier_threshold);
  void gate_above_cutoff(const Mlp& mlp, const Rows& in, float outlier_threshold);
  void gate_row(const float* gates, const float* ups, int width, Activation activation, float* out) const;
  void moe(const Moe& moe, int tokens, float outlier_threshold, float* out);
  void route(const Moe& moe, int tokens);
  void place_experts(const Moe& moe, int tokens);
  void exchange_rows(float* rows, const std::vector<size_t>& first, size_t width);
  void add_shared_expert(const Moe& moe, int tokens, float outlier_threshold, float* out);
  void layer_inputs(const BatchView& batch);
  void gate_layer_input(const Layer& layer, int number, int tokens, const int64_t* rows);
  void end_layer(const Layer& layer, int number, int tokens, const int64_t* rows);
  bool frame_fits(const Layer& layer) const;
  bool experts_fit(const Moe& moe, int width) const;
  // body(t, out) computes the `cols` values of row t, which are stored in the given form.
  template <class Body>
  void fill_rows(int tokens, int cols, int work_per_row, Activations& to, const Form& form, const Body& body);
  void norm_rows(const Norm& norm, const float* x, int tokens, Activations& to, const Form& form);
  void norm_row(const Norm& norm, const float* x, float* out) const;
  void mark_outliers(Activations& rows);
  float outlier_threshold(const Layer& layer) const {
    return is_last_stage_ && &layer == &layers_.back() ? threshold_at_end() : outlier_threshold_;
  }
  float threshold_at_end() const;
  void norm_in_place(const Norm& norm, float* rows, int tokens);
  void add_result(const Norm& norm, float scale, int tokens);
  Rows head_input(const float* hidden, int rows);

  const Kernels* kernels_;
  Pool pool_;
  Runner runner_;
  int hidden_, vocab_;
  float eps_, embedding_scale_, logit_softcap_;
  float outlier_threshold_;
  std::vector<RopeTable> ropes_;
  std::vector<Layer> layers_;
  Linear embedding_, head_;
  Linear positions_;  // [positions][hidden], added to the tokens' embeddings; empty: none
  Norm embed_norm_;
  Norm final_norm_;
  bool are_norms_centred_ = false;
  float logit_scale_ = 1.0f;
  bool is_last_stage_ = true;
  Linear input_table_, input_project_;
  Vector input_norm_;
  Streams streams_;

  AdapterSlots adapters_;
  std::shared_ptr<Window> window_;  // null: a single rank

  // ── buffers of a step, grown when needed ──
  bool is_adapted_ = false;         // some rows have adapters
  std::vector<int32_t> row_slots_;  // adapter slots of the rows that are computed now
  std::vector<AdaptedRows> adapted_rows_;
  PageVector<float> shrunk_;  // products with the adapters' `a`
  std::vector<std::vector<int32_t>> expert_slots_;  // [experts][rows]
  PageVector<float> x_;       // [T][hidden] the residual stream, or the mixture of several that a mixer or MLP reads
  PageVector<float> all_streams_, coefficients_;  // [T][streams][hidden], [T][coefficients]
  Activations stream_rows_, branch_rows_;
  Vector ones_;  // weights of a norm without weights
  std::vector<int64_t> row_tokens_;  // token ids of the rows that are computed now, if experts are looked up by them
  std::vector<Activations> group_rows_;  // one per group of heads
  PageVector<float> cut_gates_;          // [T][2][inter]
  PageVector<float> projected_;  // [T][q + 2 kv], or [T][3 hidden] of a convolution
  PageVector<float> convolved_, recurred_;  // of a recurrent mixer: [T][channels], [T][values]
  PageVector<float> scan_inner_, scan_steps_;  // of Mamba-1: [T][rank and two states], [T][channels]
  Activations scan_rows_, scan_latents_;
  PageVector<float> queries_, absorbed_, mixtures_, latent_values_;  // of latent attention: [T][heads][…] each
  Activations query_latents_;
  // ── of an indexer ──
  PageVector<float> index_rows_, index_queries_, index_scores_;  // [T][heads][dim] as projected, and padded; [T][context]
  std::vector<int32_t> chosen_, num_chosen_;  // [T][top_k], ascending; [T], kSeesAll if all entries are selected
  int chosen_stride_ = 0;                     // top_k of the last indexer
  std::vector<std::vector<int32_t>> choosing_;  // one per thread
  struct BlockChoice {
    std::vector<float> scores, best;     // of the tokens of a context, and of its blocks
    std::vector<int32_t> chosen, table;  // blocks, and the KV blocks that they consist of
  };
  std::vector<BlockChoice> block_choices_;  // one per thread
  PageVector<float> kept_rows_;  // of the output tokens, swapped with the buffer that is narrowed
  NarrowedBatch narrowed_;
  OwnedBatch owned_;
  bool is_owned_ = false;  // data-parallel attention: each rank caches the contexts of some rows and attends for them
  PageVector<float> mixed_;   // [T][hidden] output of a mixer or MLP before its post norm, or of the experts
  PageVector<float> held_;    // [T][hidden] result of a second mixer that is not yet added
  bool has_held_ = false;
  PageVector<float> side_;    // [T][hidden] of experts beside an MLP, or of the shared expert
  PageVector<float> layer_inputs_, input_gates_;  // [T][layers][width], [T][width]
  std::vector<Activations> ordered_rows_;  // inputs of matrices with reordered columns
  float threshold_now_ = 0.0f;             // outlier threshold of the part of the model that is computed now
  std::vector<Activations> cut_rows_;  // this rank's part of gated products, before it is gathered and quantised
  PageVector<float> gathered_heads_, embedded_;
  Activations whole_heads_;
  Activations normed_, heads_, inner_, routed_, latent_, latent_sums_, input_rows_;
  std::vector<Vector> row_scratch_;                      // one per thread: the rows of a tile
  std::vector<PageVector<uint8_t>> attention_scratch_;   // one per thread
  uint64_t num_attended_ = 0;  // calls of attend_chunks so far
  PageVector<float> split_sums_;
  std::vector<Partial> split_partials_;
  std::vector<int32_t> expert_ids_;  // [T][active]
  ExpertRows expert_rows_;
  size_t computed_rows_ = 0, received_rows_ = 0;  // expert rows so far, with expert parallelism
  std::vector<std::vector<uint64_t>> expert_counts_;
  PageVector<float> expert_shares_, router_logits_, expert_out_;
  std::vector<Activations> expert_in_, expert_inner_;
  std::vector<Best> best_;  // [threads][rows]
};

}  // namespace tokenmill
