// A whole decoder step in one call: embedding, layers, final norm. Built once from packed weights and parameters; a
// step reads and writes the paged cache in place. Nothing here knows an instruction set: arithmetic is in Kernels.
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
  Vector weight, bias;  // no weight: there is no norm; a bias only where the decoder's norms are centred

  bool empty() const { return weight.empty(); }
};

struct Mlp {
  Linear gate, up, down;  // an empty gate: down(act(up))
  Activation activation = Activation::Silu;
  std::optional<float> cutoff = {};  // a token's gates count by what they are above their mean and so many deviations

  bool is_gated() const { return gate.w.data != nullptr; }
  // The first product of a gated one is with `gate`, and `up` beside it.
  const Linear& first() const { return is_gated() ? gate : up; }
  const Linear* second() const { return is_gated() ? &up : nullptr; }
};

enum class Score : uint8_t { Softmax, Sigmoid, SqrtSoftplus };

// How a token's experts are chosen and weighted.
struct Routing {
  int num_active = 0;
  Score score = Score::Softmax;
  bool renormalize = true;
  float epsilon = 0.0f;  // added to the sum that weights are divided by
  Vector choice_bias;    // added to scores for the choice alone
  int num_groups = 1, kept_groups = 1;
  int judged_by = 2;  // so many of a group's best, added
  float scale = 1.0f;
  Vector expert_scales;
  bool weights_input = false;  // an expert's input is weighted, not its output
  std::vector<int32_t> table = {};  // [tokens][num_active]: the experts of each; empty: those with the best scores
};

struct Moe {
  Linear router;
  std::vector<Mlp> experts;
  Routing routing;
  std::optional<Mlp> shared;
  Vector shared_gate;  // [hidden]: the shared expert is weighted by the sigmoid of its product with the input
  Vector router_norm;  // the router reads a norm of the stream of its own
  Linear latent_in, latent_out;  // experts work on a projection of their input; empty: on the input itself
  std::vector<std::vector<int>> owners;  // of each expert the ranks that have it; empty: all experts are here

  size_t layer = 0;  // its number, given by the decoder

  bool is_spread() const { return !owners.empty(); }
};

// Who computes the experts of a step's tokens, and where the results lie: rows of rank 0, of rank 1, ..., of each rank
// expert by expert.
struct ExpertRows {
  std::vector<int> counts, starts;  // of each expert: rows that are computed here, and where they begin among all rows
  std::vector<size_t> first;        // [ranks + 1] where the rows of a rank begin
  std::vector<int> places;          // [T][active] the row of an expert's input; -1: another rank computes it
  std::vector<size_t> rows;         // [T][active] the row of the result
};

// The layer's own embeddings of the tokens, which are added through a gate that reads the stream.
struct LayerInput {
  Linear gate, up;
  Norm norm;
  Activation activation = Activation::GeluTanh;
};

// Several residual streams around a layer, see decoder/streams.cpp. AltUp (Gemma 3n): the layer reads the first, the others
// are predicted before it and corrected behind it; a low-rank branch stands beside attention.
struct AltUp {
  Linear router;            // [streams][hidden], float32
  Vector router_norm;       // [hidden]
  Vector predict, correct;  // [streams * streams][streams], [streams][streams]
  Vector scale;             // [hidden], of what gates the layer's own embedding; empty: 1
  Linear left, right;       // [rank][hidden], [hidden][rank]
  Norm branch_norm;
};

// Hyper-connections (DeepSeek V4): coefficients of what a part of a layer reads of the streams and of how its result
// reaches them, linear in the normed streams.
struct Connection {
  Linear weight;  // [coefficients][streams * hidden], float32
  Vector base;    // [coefficients]
  Vector scale;   // one number for each kind of coefficient
};
struct Connections {
  Connection mixer, feed;
};

// What a decoder's layers exchange, where it is more than one stream.
struct Streams {
  int count = 1;
  std::vector<Linear> in, out;  // AltUp: [hidden][hidden] of all but the first, from the embedding and at the end
  Connection end;               // hyper-connections: one more mixture
  int rounds = 0;               // of dividing by sums
  float eps = 0.0f, norm_eps = 0.0f;

  bool are_connected() const { return end.weight.w.data != nullptr; }
};

// What of a layer does not depend on its mixer.
struct LayerFrame {
  Norm attn_norm, mlp_norm, attn_post_norm, mlp_post_norm;  // empty where the model has none
  std::optional<Mlp> mlp;
  std::optional<Moe> moe;  // beside the MLP where there is one, then with the norms of `side`
  struct Side {
    Norm norm, post_norm, mlp_post_norm;
  } side;
  bool is_parallel = false;  // the MLP reads the stream that the mixer read
  float residual_scale = 1.0f;  // multiplies what is added to the stream
  std::optional<LayerInput> input;
  float stream_scale = 1.0f;  // multiplies the stream at the end
  bool is_held = false;  // what the mixer adds waits for the next layer's, which reads the same stream; nothing is fed
  std::optional<AltUp> altup = {};
  std::optional<Connections> connections = {};
};

enum class HeadNorm : uint8_t { None, Before, After, Joint };  // of queries and keys: the rotation, or all heads at once

struct QueryGrowth {
  float beta = 0.0f;  // 0: queries don't grow with their positions
  int length = 1, first = 0;
};

enum class OutputGate : uint8_t { None, PerHead, PerElement };

// A gated short convolution: out(c * conv(b * x)). Every token's input b * x is kept in the paged cache, where the next
// kernel - 1 tokens of its sequence read it.
struct ShortConv {
  Linear in;  // rows of b, then c, then x
  Vector weight;  // [kernel][hidden], the oldest token's first
  Vector bias;    // [hidden]
  int kernel = 0;
  float* inputs = nullptr;  // the cache: [block][token][hidden]
  int block_size = 0;
};

inline constexpr int kMaxConvKernel = 16;

// Gated DeltaNet, Kimi's delta rule or Mamba-2, see decoder/recurrent.cpp.
struct Recurrent {
  std::vector<Linear> in;  // rows of q, k, v, z, (b,) a: one matrix each
  RecurrentShape shape;
  Vector conv, conv_bias;  // [kernel][channels], the oldest token's first; [channels]
  Vector ones;             // [channels]
  int kernel = 0;
  Vector rates, step_bias, skip;  // [value heads], step_bias [decays]; `skip` of Mamba-2 only
  float min_step = 0.0f, max_step = 0.0f, step_scale = 1.0f, gate_scale = 1.0f, out_scale = 1.0f;
  Vector norm;  // [value dim] or [values]; no groups: no norm
  int norm_groups = 0;
  bool is_norm_shared = false, gates_first = false, gates_by_sigmoid = false;
  float eps = 0.0f;

  // the cache; `Layer::group` is that of the cells
  float* conv_inputs = nullptr;  // [block][token][channels]
  float* keys = nullptr;         // [block][key head][token][key dim]
  float* updates = nullptr;      // [block][value head][token][value dim]
  float* decays = nullptr;       // [block][token][value head], or of channels [block][value head][token][key dim]
  float* states = nullptr;       // [slot][value head][key dim][value dim]
  float* tails = nullptr;        // [slot][kernel - 1][channels]
  int block_size = 0, state_group = 0, num_states = 0;
};

// What an indexer chooses among: keys, one for each `rate` tokens.
struct IndexView {
  const Linear* q;
  const EntryCache* keys;
  int heads, top_k, group, rate;
  float scale;
};

// Chooses the `top_k` entries of a context that latent attention looks at, see decoder/indexer.cpp. Queries are made of the
// latent that attention's own are made of, keys and the weights of heads of the layer's input.
struct EntryIndexer {
  Linear q, k, weights;
  Vector norm, norm_bias;  // of keys
  int heads = 0, top_k = 0;
  float scale = 1.0f, eps = 0.0f;
  EntryCache keys;  // one a token, of `keys.width` numbers
  int group = 0, num_blocks = 0;

  IndexView view() const { return {&q, &keys, heads, top_k, group, 1, scale}; }
};

inline constexpr int kSeesAll = -1;  // in the place of a number of chosen entries

// Latent attention: all heads attend to one entry a token, [rank | rope_dim]. `q` gives queries, or the latent that `q_up`
// makes them of; each head has a matrix from queries to the space of latents, and one from there to its values.
struct LatentAttention {
  Linear q, kv_down;
  std::optional<Linear> q_up;
  Vector q_norm, kv_norm;
  std::vector<Linear> absorb, expand;  // a head's: [rank][nope_dim] and [value_dim][rank], plain numbers
  int heads = 0, nope_dim = 0, rope_dim = 0, value_dim = 0;
  float scale = 1.0f, eps = 0.0f;
  EntryCache cache;
  std::optional<EntryIndexer> index;  // chooses the entries that are looked at; none: all are
  bool shares_index = false;          // what the indexer before this layer has chosen holds here too

  bool is_sparse() const { return index.has_value() || shares_index; }
};

// Entries of several tokens each. What they are made of, values and gates, is kept of every token until it is used.
struct CompressedEntries {
  Vector bias, norm;       // [rate][series * dim], added to gates; [dim]
  float* inputs = nullptr;  // [block][token][2 * series * dim]
  EntryCache entries;       // `block_size` counts entries
  int inputs_group = 0, num_inputs = 0, group = 0, num_blocks = 0;
};

// Attention over a window and compressed entries behind it, see decoder/compressed_attention.cpp.
struct CompressedAttention {
  std::vector<Linear> in;  // the latent of queries, the key; values and gates of entries, of the index; weights of its heads
  Linear q_up;
  Vector q_norm, kv_norm, sinks;
  std::vector<Linear> out;  // of each group of heads
  int heads = 0, window = 0;
  float scale = 1.0f, eps = 0.0f;
  EntryCache keys;  // one a token, which is the value too
  int rate = 0;     // tokens of an entry; 0: there are none
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

  Vector q_norm, k_norm, sinks;
  HeadNorm head_norm = HeadNorm::None;
  bool has_value_norm = false;
  QueryGrowth growth;
  Linear q, k, v, o;  // without k and v the layer reads another one's cache
  Linear gate;        // of what attention puts out
  std::vector<int> head_borders;  // where ranks have heads each: the columns of o's input that rank r has begin at [r]
  OutputGate output_gate = OutputGate::None;
  bool is_softplus_gate = false;
  AttentionTask attention;
  int rope = -1;
  int group = 0;
  int num_blocks = 0;
  std::optional<ShortConv> conv;  // in the place of attention: then `o` projects its output, and q, k and v are empty
  std::optional<Recurrent> recurrent;  // likewise

  std::optional<LatentAttention> latent;  // likewise
  std::optional<CompressedAttention> compressed;  // likewise

  bool has_own_kv() const { return k.w.data != nullptr; }
  bool has_cache() const {
    if (compressed) return compressed->has_cache();
    if (recurrent) return recurrent->states != nullptr;
    if (latent) return latent->cache.entries != nullptr && (!latent->index || latent->index->keys.entries != nullptr);
    return conv ? conv->inputs != nullptr : attention.cache.keys != nullptr;
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
  // `outlier_threshold`: see Form. Where some blocks have 16 bits, all of the last layer's and the head's do.
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

  // The matrices that adapters may change, and how many adapters there is room for.
  void set_adapter_sites(int slots, std::vector<AdapterSlots::Site> sites) { adapters_.declare(slots, std::move(sites)); }
  void set_adapter(int slot, AdapterSlots::Parts parts) { adapters_.put(slot, std::move(parts)); }

  // `entering` [tokens][hidden]: the stream as the stage before has left it; null: this is the first stage. `hidden`:
  // [wanted][hidden], normed; of a stage that is not the last one the stream, [tokens][hidden].
  void forward(const BatchView& batch, const float* entering, float* hidden);
  // The slots of the adapters of the rows that `forward` has put out; null where none has one.
  const int32_t* wanted_slots() const { return is_adapted_ ? row_slots_.data() : nullptr; }
  // `slots` [rows] of the rows' adapters, null: none has one
  void logits(const float* hidden, int rows, const int32_t* slots, float* out);  // [rows][vocab]
  // The highest logit of each row and its place, the first of equals; NaN where any of the row's is.
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
  // Tokens that have chosen each expert so far, by layer; empty for layers without experts.
  const std::vector<std::vector<uint64_t>>& expert_counts() const { return expert_counts_; }
  Pool& pool() { return pool_; }
  size_t weight_bytes() const;

 private:
  bool attention_fits(const Layer& layer) const;
  bool conv_fits(const Layer& layer) const;
  bool recurrent_fits(const Layer& layer) const;
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
  bool latent_fits(const Layer& layer) const;
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
  struct Gathered {  // [rows][stride], of which this rank has computed the columns from borders[rank] on
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
  struct Shrinking {  // products with a's: where in `shrunk_` their results begin, and how many numbers these are
    std::vector<Gemm> gemms;
    std::vector<size_t> at;
    size_t size = 0;
  };
  bool adapt(const Linear& w, const Gemm& gemm, AdaptedRows& rows, Shrinking& shrinking);
  // What the inputs of these must be kept as: plain too where adapters read them.
  Form form_for(std::initializer_list<const Linear*> readers, float outlier_threshold) const;
  Form form_for_all(const std::vector<Linear>& readers, float outlier_threshold) const;
  Form form_of_input(const Mlp& mlp, float outlier_threshold) const;
  void embed(const BatchView& batch);
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
  void norm_joint_heads(const Layer& layer, int tokens);
  void gate_outputs(const Layer& layer, int token, int head, float* out) const;
  void place_token(const Layer& layer, const BatchView& batch, int token, int kv_head);
  void attend_all(const Layer& layer, const BatchView& batch);
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
  // body(t, out) gives the `cols` numbers of row t, which are kept in the form that is asked for.
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
  Norm final_norm_;
  bool are_norms_centred_ = false;
  float logit_scale_ = 1.0f;
  bool is_last_stage_ = true;
  Linear input_table_, input_project_;
  Vector input_norm_;
  Streams streams_;

  AdapterSlots adapters_;
  std::shared_ptr<Window> window_;  // null: this is the only rank

  // ── buffers of a step, grown when needed ──
  bool is_adapted_ = false;         // some rows have adapters
  std::vector<int32_t> row_slots_;  // their slots, of the rows that are computed now
  std::vector<AdaptedRows> adapted_rows_;
  PageVector<float> shrunk_;  // products with a's
  std::vector<std::vector<int32_t>> expert_slots_;  // [experts][rows]
  PageVector<float> x_;       // [T][hidden] the residual stream, or what a part of a layer reads of several
  PageVector<float> all_streams_, coefficients_;  // [T][streams][hidden], [T][coefficients]
  Activations stream_rows_, branch_rows_;
  Vector ones_;  // the weights of a norm that has none
  std::vector<int64_t> row_tokens_;  // of the rows that are computed now, where experts are looked up
  std::vector<Activations> group_rows_;  // of each group of heads
  PageVector<float> cut_gates_;          // [T][2][inter]
  PageVector<float> projected_;  // [T][q + 2 kv], or [T][3 hidden] of a convolution
  PageVector<float> convolved_, recurred_;  // of a recurrent mixer: [T][channels], [T][values]
  PageVector<float> queries_, absorbed_, mixtures_, latent_values_;  // of latent attention: [T][heads] of each
  Activations query_latents_;
  // ── of an indexer ──
  PageVector<float> index_rows_, index_queries_, index_scores_;  // [T][heads][dim] as projected, and padded; [T][context]
  std::vector<int32_t> chosen_, num_chosen_;  // [T][top_k], ascending; [T], kSeesAll where nothing is left out
  int chosen_stride_ = 0;                     // top_k of the indexer that has chosen
  std::vector<std::vector<int32_t>> choosing_;  // one per thread
  PageVector<float> kept_rows_;  // of the wanted tokens, swapped with the buffer they come from
  NarrowedBatch narrowed_;
  OwnedBatch owned_;
  bool is_owned_ = false;  // each rank keeps the contexts of some of the step's rows, and attends for them
  PageVector<float> mixed_;   // [T][hidden] output of a part before its post norm, or of the experts
  PageVector<float> held_;    // [T][hidden] of the layer before, where its result is still to be added
  bool has_held_ = false;
  PageVector<float> side_;    // [T][hidden] of experts beside an MLP, or of the shared expert
  PageVector<float> layer_inputs_, input_gates_;  // [T][layers][width], [T][width]
  std::vector<Activations> ordered_rows_;  // inputs of matrices whose columns stand in an order of their own
  float threshold_now_ = 0.0f;             // see Form, of the part of the model that is computed now
  std::vector<Activations> cut_rows_;  // what a gated product's ranks have computed each, before it is rounded
  PageVector<float> gathered_heads_, embedded_;
  Activations whole_heads_;
  Activations normed_, heads_, inner_, routed_, latent_, latent_sums_, input_rows_;
  std::vector<Vector> row_scratch_;                      // one per thread: the rows of a tile
  std::vector<PageVector<uint8_t>> attention_scratch_;   // one per thread
  uint64_t num_attended_ = 0;  // phases of chunks so far
  PageVector<float> split_sums_;
  std::vector<Partial> split_partials_;
  std::vector<int32_t> expert_ids_;  // [T][active]
  ExpertRows expert_rows_;
  size_t computed_rows_ = 0, received_rows_ = 0;  // of experts that ranks share out, so far
  std::vector<std::vector<uint64_t>> expert_counts_;
  PageVector<float> expert_shares_, router_logits_, expert_out_;
  std::vector<Activations> expert_in_, expert_inner_;
  std::vector<Best> best_;  // [threads][rows]
};

}  // namespace tokenmill
