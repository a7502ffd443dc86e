// The calls by which Python builds a decoder: its parts, layers and caches.
#include <stdexcept>

#include "bindings/held_decoder.h"

namespace tokenmill {
namespace {

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu") return Activation::Gelu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  if (name == "relu") return Activation::Relu;
  if (name == "relu2") return Activation::Relu2;
  if (name == "swiglu_oai") return Activation::SwigluOai;
  if (name == "silu_to_10") return Activation::SiluTo10;
  if (name == "clamped_silu_4") return Activation::ClampedSilu4;
  if (name == "clamped_silu_5") return Activation::ClampedSilu5;
  if (name == "clamped_silu_7") return Activation::ClampedSilu7;
  if (name == "clamped_silu_16") return Activation::ClampedSilu16;
  throw std::invalid_argument("unknown activation " + name);
}

template <class AnyKind>
Store store_of(const AnyKind& array) {
  const nb::dlpack::dtype type = array.dtype();
  if (type == nb::dtype<float>()) return Store::F32;
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) return Store::F16;
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) return Store::BF16;
  if (type == nb::dtype<int8_t>()) return Store::I8;
  throw std::invalid_argument("the KV cache must be float32, float16, bfloat16 or int8");
}

void hold_cache(HeldDecoder& decoder, int layer, HeldCache cache) {
  decoder.caches.resize(static_cast<size_t>(decoder.num_layers()));
  decoder.caches[static_cast<size_t>(layer)] = std::move(cache);
}

EntryCache entry_cache(const AnyArray& entries) {
  if (entries.ndim() != 3) throw std::invalid_argument("entries must be [blocks, block size, width]");
  EntryCache cache;
  cache.entries = entries.data();
  cache.store = store_of(entries);
  cache.block_size = static_cast<int>(entries.shape(1));
  cache.width = static_cast<int>(entries.shape(2));
  return cache;
}

// Binds the keys of a layer's indexer; called after `bind_entry_cache`.
void bind_index_cache(HeldDecoder& decoder, int layer, int group, AnyArray keys) {
  const DecoderLock lock(decoder);
  decoder.set_index_cache(layer, group, entry_cache(keys), static_cast<int>(keys.shape(0)));
  decoder.caches.at(static_cast<size_t>(layer)).index_keys = std::move(keys);
}

void bind_entry_cache(HeldDecoder& decoder, int layer, int group, AnyArray entries) {
  const DecoderLock lock(decoder);
  decoder.set_entry_cache(layer, group, entry_cache(entries), static_cast<int>(entries.shape(0)));
  HeldCache held;
  held.entries = std::move(entries);
  hold_cache(decoder, layer, std::move(held));
}

// Binds the inputs and the results of compressed entries, or of the indexer's keys; called after `bind_entry_cache`.
void bind_compressed_cache(HeldDecoder& decoder, int layer, bool of_index, int inputs_group, Array<float, 3> inputs,
                           int group, AnyArray entries) {
  const DecoderLock lock(decoder);
  CompressedEntries cache;
  cache.entries = entry_cache(entries);
  const size_t series = static_cast<size_t>(decoder.entry_series(layer)), rate = static_cast<size_t>(decoder.entry_rate(layer));
  if (inputs.shape(1) != entries.shape(1) || inputs.shape(2) != 2 * series * rate * entries.shape(2))
    throw std::invalid_argument("the inputs of entries do not fit the entries");
  cache.inputs = inputs.data();
  cache.inputs_group = inputs_group;
  cache.num_inputs = static_cast<int>(inputs.shape(0));
  cache.group = group;
  cache.num_blocks = static_cast<int>(entries.shape(0));
  decoder.set_compressed_cache(layer, of_index, cache);
  HeldCache& held = decoder.caches.at(static_cast<size_t>(layer));
  held.compressed.emplace_back(inputs);
  held.compressed.push_back(std::move(entries));
}

void bind_conv_cache(HeldDecoder& decoder, int layer, int group, Array<float, 3> inputs) {
  const DecoderLock lock(decoder);
  if (inputs.shape(2) != static_cast<size_t>(decoder.hidden()) || inputs.shape(1) == 0)
    throw std::invalid_argument("inputs of a convolution must be [blocks, block size, hidden]");
  decoder.set_conv_cache(layer, group, inputs.data(), static_cast<int>(inputs.shape(0)),
                         static_cast<int>(inputs.shape(1)));
  HeldCache held;
  held.inputs = std::move(inputs);
  hold_cache(decoder, layer, std::move(held));
}

// The distance of blocks, the first axis of an array whose blocks are contiguous.
template <class Blocks>
size_t block_stride(const Blocks& array) {
  size_t size = 1;
  for (size_t axis = array.ndim(); axis-- > 1; size *= array.shape(axis))
    if (array.stride(axis) != static_cast<int64_t>(size)) throw std::invalid_argument("the blocks of a cache must be contiguous");
  if (array.stride(0) < static_cast<int64_t>(size)) throw std::invalid_argument("the blocks of a cache overlap");
  return static_cast<size_t>(array.stride(0));
}

void bind_cache(HeldDecoder& decoder, int layer, int group, BlockArray keys, BlockArray values, Scales key_scales,
                Scales value_scales) {
  const DecoderLock lock(decoder);
  if (keys.ndim() != 4 || values.ndim() != 4 || store_of(keys) != store_of(values))
    throw std::invalid_argument("keys and values must be [blocks, kv heads, block size, head dim] of one type");
  for (size_t i = 0; i < 3; ++i)
    if (keys.shape(i) != values.shape(i)) throw std::invalid_argument("keys and values differ in shape");
  PagedCache cache{keys.data(), values.data()};
  cache.store = store_of(keys);
  cache.key_stride = block_stride(keys);
  cache.value_stride = block_stride(values);
  const bool is_scaled = cache.store == Store::I8;
  for (const Scales* scales : {&key_scales, &value_scales}) {
    if (scales->has_value() != is_scaled) throw std::invalid_argument("an int8 cache must have scales, other caches must not");
    for (size_t i = 0; is_scaled && i < 3; ++i)
      if ((*scales)->shape(i) != keys.shape(i)) throw std::invalid_argument("keys and their scales differ in shape");
  }
  if (is_scaled) {
    cache.key_scales = key_scales->data();
    cache.value_scales = value_scales->data();
    cache.scale_stride = block_stride(*key_scales);
    if (block_stride(*value_scales) != cache.scale_stride) throw std::invalid_argument("scales of keys and values are apart");
  }
  cache.kv_heads = static_cast<int>(keys.shape(1));
  cache.block_size = static_cast<int>(keys.shape(2));
  cache.head_dim = static_cast<int>(keys.shape(3));
  cache.value_dim = static_cast<int>(values.shape(3));
  decoder.set_cache(layer, group, cache, static_cast<int>(keys.shape(0)));
  hold_cache(decoder, layer,
             {std::move(keys), std::move(values), std::move(key_scales), std::move(value_scales), std::nullopt, {}});
}

using MaybeVector = std::optional<FloatVector>;

Vector copied(const MaybeVector& array) {
  return array ? Vector(array->data(), array->data() + array->size()) : Vector();
}

void add_latent_layer(HeldDecoder& self, const LayerFrame& frame, const Linear& q, const Linear& kv_down,
                      std::optional<Linear> q_up, const Linear& o, std::optional<FloatVector> q_norm, FloatVector kv_norm,
                      std::vector<Linear> absorb, std::vector<Linear> expand, int nope_dim, int rope_dim, float scale,
                      float eps, int rope, std::optional<EntryIndexer> index, bool shares_index,
                      std::optional<Linear> gate) {
  Layer layer(frame);
  LatentAttention latent;
  if (absorb.empty() || expand.size() != absorb.size()) throw std::invalid_argument("absorb and expand need a matrix per head");
  latent.q = q;
  latent.kv_down = kv_down;
  latent.q_up = std::move(q_up);
  latent.q_norm = vector_of(q_norm, static_cast<size_t>(q.rows()), "q_norm");
  latent.kv_norm = vector_of(kv_norm, static_cast<size_t>(absorb[0].w.rows), "kv_norm");
  latent.heads = static_cast<int>(absorb.size());
  latent.nope_dim = nope_dim;
  latent.rope_dim = rope_dim;
  latent.value_dim = static_cast<int>(expand[0].w.rows);
  latent.cache.rank = static_cast<int>(absorb[0].w.rows);
  latent.cache.width = latent.cache.rank + rope_dim;
  latent.absorb = std::move(absorb);
  latent.expand = std::move(expand);
  latent.scale = scale;
  latent.eps = eps;
  latent.index = std::move(index);
  latent.shares_index = shares_index;
  latent.gate = std::move(gate);
  layer.latent = std::move(latent);
  layer.o = o;
  layer.rope = rope;
  self.add_layer(std::move(layer));
}

CompressedEntries compressed_entries(Array<const float, 2> bias, FloatVector norm) {
  CompressedEntries entries;
  entries.bias.assign(bias.data(), bias.data() + bias.size());
  entries.norm = copied(norm);
  entries.entries.width = static_cast<int>(norm.size());
  return entries;
}

void add_compressed_layer(HeldDecoder& self, const LayerFrame& frame, std::vector<Linear> in, const Linear& q_up,
                          std::vector<Linear> out, const Linear& o, FloatVector q_norm, FloatVector kv_norm,
                          FloatVector sinks, int window, float scale, float eps, int rope, int rate, bool overlaps,
                          std::optional<CompressedEntries> entries, std::optional<CompressedAttention::Index> index) {
  Layer layer(frame);
  CompressedAttention mixer;
  if ((rate > 0) != entries.has_value()) throw std::invalid_argument("compressed entries and their rate must be given together");
  mixer.in = std::move(in);
  mixer.q_up = q_up;
  mixer.out = std::move(out);
  mixer.q_norm = copied(q_norm);
  mixer.kv_norm = copied(kv_norm);
  mixer.sinks = copied(sinks);
  mixer.heads = static_cast<int>(sinks.size());
  mixer.window = window;
  mixer.scale = scale;
  mixer.eps = eps;
  mixer.keys.width = mixer.keys.rank = static_cast<int>(kv_norm.size());
  mixer.rate = rate;
  mixer.overlaps = overlaps;
  if (entries) mixer.compressed = std::move(*entries);
  mixer.index = std::move(index);
  layer.compressed = std::move(mixer);
  layer.o = o;
  layer.rope = rope;
  self.add_layer(std::move(layer));
}

void add_conv_layer(HeldDecoder& self, const LayerFrame& frame, const Linear& in, const Linear& out,
                    Array<const float, 2> weight, MaybeVector bias) {
  Layer layer(frame);
  ShortConv conv;
  conv.in = in;
  conv.weight.assign(weight.data(), weight.data() + weight.size());
  conv.bias = vector_of(bias, static_cast<size_t>(self.hidden()), "bias");
  conv.kernel = static_cast<int>(weight.shape(0));
  layer.conv = std::move(conv);
  layer.o = out;
  self.add_layer(std::move(layer));
}

void add_recurrent_layer(HeldDecoder& self, const LayerFrame& frame, std::vector<Linear> in, const Linear& out,
                         bool is_delta, int key_heads, int value_heads, int key_dim, int value_dim,
                         Array<const float, 2> conv, MaybeVector conv_bias, FloatVector rates, FloatVector step_bias,
                         MaybeVector skip, MaybeVector norm, int norm_groups, bool is_norm_shared, bool gates_first,
                         float eps, float min_step, float max_step, float step_scale, float gate_scale,
                         float out_scale, bool has_channel_decays, bool gates_by_sigmoid, bool is_tiled,
                         float strength_scale, float lowest_decay, std::optional<ScanInputs> scan) {
  Layer layer(frame);
  Recurrent mixer;
  mixer.in = std::move(in);
  mixer.kernel = static_cast<int>(conv.shape(0));
  mixer.shape = {is_delta, has_channel_decays, key_heads, value_heads, key_dim, value_dim, mixer.kernel, is_tiled,
                 scan.has_value()};
  mixer.scan = std::move(scan);
  mixer.conv.assign(conv.data(), conv.data() + conv.size());
  mixer.conv_bias = copied(conv_bias);
  mixer.ones.assign(conv.shape(1), 1.0f);
  mixer.rates = copied(rates);
  mixer.step_bias = copied(step_bias);
  mixer.skip = copied(skip);
  mixer.norm = copied(norm);
  mixer.norm_groups = norm_groups;
  mixer.is_norm_shared = is_norm_shared;
  mixer.gates_first = gates_first;
  mixer.gates_by_sigmoid = gates_by_sigmoid;
  mixer.eps = eps;
  mixer.min_step = min_step;
  mixer.max_step = max_step;
  mixer.step_scale = step_scale;
  mixer.gate_scale = gate_scale;
  mixer.out_scale = out_scale;
  mixer.strength_scale = strength_scale;
  mixer.lowest_decay = lowest_decay;
  layer.recurrent = std::move(mixer);
  layer.o = out;
  self.add_layer(std::move(layer));
}

void bind_recurrent_cache(HeldDecoder& decoder, int layer, int group, int state_group, Array<float, 3> conv_inputs,
                          Array<float, 4> keys, Array<float, 4> updates, AnyArray decays, Array<float, 4> states,
                          Array<float, 3> tails) {
  const DecoderLock lock(decoder);
  const RecurrentShape shape = decoder.recurrent_shape(layer);
  const auto is = [](const auto& array, std::vector<size_t> dims) {
    if (array.ndim() != dims.size()) return false;
    for (size_t i = 0; i < dims.size(); ++i)
      if (array.shape(i) != dims[i]) return false;
    return true;
  };
  const auto at = [](int size) { return static_cast<size_t>(size); };
  const size_t blocks = conv_inputs.shape(0), size = conv_inputs.shape(1), slots = states.shape(0);
  const std::vector<size_t> decay_dims =
      shape.is_scan              ? std::vector<size_t>{blocks, size, at(shape.values())}
      : shape.has_channel_decays ? std::vector<size_t>{blocks, at(shape.value_heads), size, at(shape.key_dim)}
                                 : std::vector<size_t>{blocks, size, at(shape.value_heads)};
  if (!is(conv_inputs, {blocks, size, at(shape.channels())}) ||
      !is(keys, {blocks, at(shape.key_heads), size, at(shape.key_dim)}) ||
      !is(updates, {blocks, at(shape.value_heads), size, at(shape.value_dim)}) ||
      store_of(decays) != Store::F32 || !is(decays, decay_dims) ||
      !is(states, {slots, at(shape.value_heads), at(shape.key_dim), at(shape.value_dim)}) ||
      !is(tails, {slots, at(shape.kernel - 1), at(shape.channels())}))
    throw std::invalid_argument("cells and states do not fit the layer");
  Recurrent cache;
  cache.conv_inputs = conv_inputs.data();
  cache.keys = keys.data();
  cache.updates = updates.data();
  cache.decays = static_cast<float*>(decays.data());
  cache.states = states.data();
  cache.tails = tails.data();
  cache.block_size = static_cast<int>(size);
  cache.state_group = state_group;
  cache.num_states = static_cast<int>(slots);
  decoder.set_recurrent_cache(layer, group, cache, static_cast<int>(blocks));
  HeldCache held;
  held.recurrent = {AnyArray(conv_inputs), AnyArray(keys), AnyArray(updates), AnyArray(decays), AnyArray(states),
                    AnyArray(tails)};
  hold_cache(decoder, layer, std::move(held));
}

// `sites`: (rows, columns, is it an embedding) of every matrix that adapters may change.
void set_adapter_sites(HeldDecoder& decoder, int slots, const std::vector<std::tuple<int, int, bool>>& sites) {
  const DecoderLock lock(decoder);
  std::vector<AdapterSlots::Site> all;
  for (const auto& [rows, cols, is_embedding] : sites) all.push_back({rows, cols, is_embedding});
  decoder.set_adapter_sites(slots, std::move(all));
}

// Stores an adapter in a slot; its parts are (site, a, b, gain).
void set_adapter(HeldDecoder& decoder, int slot,
                 const std::vector<std::tuple<int, Matrix, Matrix, std::optional<FloatVector>>>& parts) {
  const DecoderLock lock(decoder);
  AdapterSlots::Parts all;
  for (const auto& [site, a, b, gain] : parts) {
    Linear shrink;
    shrink.w = a;
    all.emplace_back(site, LowRank{std::move(shrink), b, vector_of(gain, static_cast<size_t>(b.rows), "a gain")});
  }
  decoder.set_adapter(slot, std::move(all));
}

HeadNorm head_norm_named(const std::string& name) {
  if (name.empty()) return HeadNorm::None;
  if (name == "head") return HeadNorm::Before;
  if (name == "head_after_rope" || name == "l2_after_rope") return HeadNorm::After;
  if (name == "all") return HeadNorm::Joint;
  throw std::invalid_argument("unknown norm of heads " + name);
}

void add_layer(HeldDecoder& self, const LayerFrame& frame, const Linear& q, std::optional<Linear> k,
               std::optional<Linear> v, const Linear& o, std::optional<Linear> gate, bool is_gate_per_head,
               bool is_softplus_gate, const std::string& head_norm, MaybeVector q_norm, MaybeVector k_norm,
               float clip, bool has_value_norm, float value_scale, MaybeVector sinks, MaybeVector slopes, int heads, int kv_heads,
               int head_dim, int value_dim, float scale, int window, bool is_chunked, float softcap, int rope, float growth,
               int growth_length, int growth_first, const std::vector<int>& head_borders,
               std::optional<BlockIndex> block_index) {
  Layer layer(frame);
  layer.block_index = std::move(block_index);
  layer.head_borders = head_borders;
  layer.head_norm = head_norm_named(head_norm);
  layer.q_norm = copied(q_norm);
  layer.k_norm = copied(k_norm);
  layer.clip = clip;
  layer.has_value_norm = has_value_norm;
  layer.value_scale = value_scale;
  layer.sinks = vector_of(sinks, static_cast<size_t>(heads), "sinks");
  layer.slopes = vector_of(slopes, static_cast<size_t>(heads), "slopes");
  layer.growth = {growth, growth_length, growth_first};
  layer.q = q;
  if (k) layer.k = *k;
  if (v) layer.v = *v;
  layer.o = o;
  if (gate) {
    layer.gate = *gate;
    layer.output_gate = is_gate_per_head ? OutputGate::PerHead : OutputGate::PerElement;
    layer.is_softplus_gate = is_softplus_gate;
  }
  layer.attention.heads = heads;
  layer.attention.cache.kv_heads = kv_heads;
  layer.attention.cache.head_dim = head_dim;
  layer.attention.cache.value_dim = value_dim;
  layer.attention.scale = scale;
  layer.attention.window = window;
  layer.attention.is_chunked = is_chunked;
  layer.attention.softcap = softcap;
  layer.rope = rope;
  self.add_layer(std::move(layer));
}

Score score_named(const std::string& name) {
  if (name == "softmax") return Score::Softmax;
  if (name == "sigmoid") return Score::Sigmoid;
  if (name == "sqrt_softplus") return Score::SqrtSoftplus;
  throw std::invalid_argument("unknown score of experts " + name);
}

void bind_parts(nb::module_& m) {
  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* self, FloatVector weight, MaybeVector bias) {
    new (self) Norm{copied(weight), vector_of(bias, weight.size(), "the bias of a norm")};
  }, "weight"_a, "bias"_a.none());

  nb::class_<Mlp>(m, "Mlp").def("__init__", [](Mlp* self, std::optional<Linear> gate, const Linear& up, const Linear& down,
                                               const std::string& activation, std::optional<float> cutoff,
                                               std::optional<std::array<float, 4>> curve) {
    if ((gate && (gate->w.rows != up.w.rows || gate->borders != up.borders || gate->w.cols != up.w.cols)) ||
        down.w.cols != up.rows())
      throw std::invalid_argument("gate, up and down do not fit together");
    if (curve ? gate || cutoff || !((*curve)[3] <= 0.0f) : activation == "xielu")
      throw std::invalid_argument("an xielu has four numbers, of which the last is not above zero, and no gate");
    std::optional<XieluCurve> numbers;
    if (curve) numbers = XieluCurve{(*curve)[0], (*curve)[1], (*curve)[2], (*curve)[3]};
    const Activation kind = curve ? Activation::Silu : activation_named(activation);
    new (self) Mlp{gate.value_or(Linear()), up, down, kind, cutoff, numbers};
  }, "gate"_a.none(), "up"_a, "down"_a, "activation"_a, "cutoff"_a.none() = nb::none(), "curve"_a.none() = nb::none());

  nb::class_<Routing>(m, "Routing").def("__init__", [](Routing* self, int num_active, const std::string& score,
                                                       bool renormalize, float epsilon, MaybeVector choice_bias,
                                                       int num_groups, int kept_groups, int judged_by, float scale,
                                                       MaybeVector expert_scales, bool weights_input,
                                                       bool is_bias_on_logits, std::optional<float> jitter,
                                                       std::optional<Array<const int32_t, 2>> table) {
    std::vector<int32_t> experts;
    if (table) experts.assign(table->data(), table->data() + table->size());
    new (self) Routing{num_active, score_named(score), renormalize, epsilon, copied(choice_bias), num_groups, kept_groups,
                       judged_by, scale, copied(expert_scales), weights_input, is_bias_on_logits, jitter,
                       std::move(experts)};
  }, "num_active"_a, "score"_a = "softmax", "renormalize"_a = true, "epsilon"_a = 0.0f, "choice_bias"_a.none() = nb::none(),
     "num_groups"_a = 1, "kept_groups"_a = 1, "judged_by"_a = 2, "scale"_a = 1.0f,
     "expert_scales"_a.none() = nb::none(), "weights_input"_a = false,
     "is_bias_on_logits"_a = false, "jitter"_a.none() = nb::none(), "table"_a.none() = nb::none());

  nb::class_<Moe>(m, "Moe").def("__init__", [](Moe* self, const Linear& router, std::vector<std::optional<Mlp>> given_experts,
                                               const Routing& routing, std::optional<Mlp> shared, MaybeVector shared_gate,
                                               MaybeVector router_norm, std::optional<Linear> latent_in,
                                               std::optional<Linear> latent_out, std::vector<std::vector<int>> owners) {
    std::vector<Mlp> experts;  // empty for experts of other ranks
    for (std::optional<Mlp>& expert : given_experts) experts.push_back(expert ? std::move(*expert) : Mlp());
    if (router.w.rows != static_cast<int>(experts.size())) throw std::invalid_argument("the router does not fit the experts");
    const size_t hidden = static_cast<size_t>(router.w.cols);
    new (self) Moe{router, std::move(experts), routing, std::move(shared), vector_of(shared_gate, hidden, "shared_gate"),
                   vector_of(router_norm, hidden, "router_norm"), latent_in.value_or(Linear()),
                   latent_out.value_or(Linear()), std::move(owners)};
  }, "router"_a, "experts"_a, "routing"_a, "shared"_a.none() = nb::none(), "shared_gate"_a.none() = nb::none(),
     "router_norm"_a.none() = nb::none(), "latent_in"_a.none() = nb::none(), "latent_out"_a.none() = nb::none(),
     "owners"_a = std::vector<std::vector<int>>());

  nb::class_<EntryIndexer>(m, "EntryIndexer").def("__init__", [](EntryIndexer* self, const Linear& q, const Linear& k,
      const Linear& weights, FloatVector norm, FloatVector norm_bias, int heads, int top_k, float scale, float eps) {
    EntryIndexer index;
    index.q = q;
    index.k = k;
    index.weights = weights;
    index.norm = copied(norm);
    index.norm_bias = copied(norm_bias);
    index.heads = heads;
    index.top_k = top_k;
    index.scale = scale;
    index.eps = eps;
    index.keys.width = static_cast<int>(k.rows());
    new (self) EntryIndexer(std::move(index));
  }, "q"_a, "k"_a, "weights"_a, "norm"_a, "norm_bias"_a, "heads"_a, "top_k"_a, "scale"_a, "eps"_a);

  nb::class_<ScanInputs>(m, "ScanInputs").def("__init__", [](ScanInputs* self, const Linear& inner, const Linear& step,
      MaybeVector step_norm, MaybeVector key_norm, MaybeVector query_norm, float eps) {
    new (self) ScanInputs{inner, step, copied(step_norm), copied(key_norm), copied(query_norm), eps};
  }, "inner"_a, "step"_a, "step_norm"_a.none(), "key_norm"_a.none(), "query_norm"_a.none(), "eps"_a);

  nb::class_<BlockIndex>(m, "BlockIndex").def("__init__", [](BlockIndex* self, const Linear& q, const Linear& k,
      FloatVector q_norm, FloatVector k_norm, int heads, int block_size, int top_k, int num_local) {
    BlockIndex index{q, k, copied(q_norm), copied(k_norm), heads, block_size, top_k, num_local, {}, 0, 0};
    index.keys.width = static_cast<int>(k.rows());
    new (self) BlockIndex(std::move(index));
  }, "q"_a, "k"_a, "q_norm"_a, "k_norm"_a, "heads"_a, "block_size"_a, "top_k"_a, "num_local"_a);

  nb::class_<CompressedEntries>(m, "CompressedEntries")
      .def("__init__", [](CompressedEntries* self, Array<const float, 2> bias, FloatVector norm) {
        new (self) CompressedEntries(compressed_entries(bias, norm));
      }, "bias"_a, "norm"_a);

  nb::class_<CompressedAttention::Index>(m, "CompressedIndex")
      .def("__init__", [](CompressedAttention::Index* self, const Linear& q, int heads, int top_k, float scale,
                          const CompressedEntries& keys) {
        new (self) CompressedAttention::Index{q, heads, top_k, scale, keys};
      }, "q"_a, "heads"_a, "top_k"_a, "scale"_a, "keys"_a);

  nb::class_<AltUp>(m, "AltUp")
      .def("__init__", [](AltUp* self, const Linear& router, FloatVector router_norm, Array<const float, 2> predict,
                          Array<const float, 2> correct, MaybeVector scale, const Linear& left, const Linear& right,
                          const Norm& branch_norm) {
        new (self) AltUp{router, copied(router_norm), Vector(predict.data(), predict.data() + predict.size()),
                         Vector(correct.data(), correct.data() + correct.size()), copied(scale), left, right, branch_norm};
      }, "router"_a, "router_norm"_a, "predict"_a, "correct"_a, "scale"_a.none(), "left"_a, "right"_a, "branch_norm"_a);

  nb::class_<Connection>(m, "Connection")
      .def("__init__", [](Connection* self, const Linear& weight, FloatVector base, FloatVector scale) {
        new (self) Connection{weight, copied(base), copied(scale)};
      }, "weight"_a, "base"_a, "scale"_a);

  nb::class_<Connections>(m, "Connections")
      .def("__init__", [](Connections* self, const Connection& mixer, const Connection& feed) {
        new (self) Connections{mixer, feed};
      }, "mixer"_a, "feed"_a);

  nb::class_<LayerInput>(m, "LayerInput").def("__init__", [](LayerInput* self, const Linear& gate, const Linear& up,
                                                             const Norm& norm, const std::string& activation) {
    new (self) LayerInput{gate, up, norm, activation_named(activation)};
  }, "gate"_a, "up"_a, "norm"_a, "activation"_a);

  nb::class_<LayerFrame>(m, "LayerFrame").def("__init__", [](LayerFrame* self, int hidden, std::optional<Norm> attn_norm,
      std::optional<Norm> mlp_norm, std::optional<Norm> attn_post_norm, std::optional<Norm> mlp_post_norm,
      std::optional<Mlp> mlp, std::optional<Moe> moe, std::optional<Norm> side_norm, std::optional<Norm> side_post_norm,
      std::optional<Norm> side_mlp_post_norm, bool is_parallel, float residual_scale, std::optional<LayerInput> input,
      float stream_scale, bool is_held, std::optional<AltUp> altup, std::optional<Connections> connections) {
    const auto given = [&](const std::optional<Norm>& norm) {
      if (norm && norm->weight.size() != static_cast<size_t>(hidden)) throw std::invalid_argument("a norm is not [hidden]");
      return norm.value_or(Norm());
    };
    new (self) LayerFrame{given(attn_norm), given(mlp_norm), given(attn_post_norm), given(mlp_post_norm), std::move(mlp),
                          std::move(moe), {given(side_norm), given(side_post_norm), given(side_mlp_post_norm)}, is_parallel,
                          residual_scale, std::move(input), stream_scale, is_held, std::move(altup),
                          std::move(connections)};
  }, "hidden"_a, "attn_norm"_a.none() = nb::none(), "mlp_norm"_a.none() = nb::none(), "attn_post_norm"_a.none() = nb::none(),
     "mlp_post_norm"_a.none() = nb::none(), "mlp"_a.none() = nb::none(), "moe"_a.none() = nb::none(),
     "side_norm"_a.none() = nb::none(), "side_post_norm"_a.none() = nb::none(), "side_mlp_post_norm"_a.none() = nb::none(),
     "is_parallel"_a = false, "residual_scale"_a = 1.0f, "input"_a.none() = nb::none(), "stream_scale"_a = 1.0f,
     "is_held"_a = false, "altup"_a.none() = nb::none(), "connections"_a.none() = nb::none());
}

}  // namespace

nb::class_<HeldDecoder> bind_decoders(nb::module_& m) {
  bind_parts(m);
  nb::class_<HeldDecoder> decoder(m, "Decoder");
  decoder
      .def("__init__", [](HeldDecoder* self, int hidden, int vocab, float eps, float embedding_scale, float logit_softcap,
                          int threads, float outlier_threshold, const std::string& isa) {
        if (!(outlier_threshold >= 0)) throw std::invalid_argument("outlier_threshold must not be negative");
        new (self) HeldDecoder(hidden, vocab, eps, embedding_scale, logit_softcap, threads, outlier_threshold,
                               kernels_or_best(isa));
      }, "hidden"_a, "vocab"_a, "eps"_a, "embedding_scale"_a, "logit_softcap"_a, "threads"_a,
           "outlier_threshold"_a = kNever,
           "isa"_a = "")
      .def("add_rope", [](HeldDecoder& self, Array<const float, 2> cos, Array<const float, 2> sin) {
        if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1))
          throw std::invalid_argument("cos and sin differ in shape");
        RopeTable table;
        table.positions = static_cast<int>(cos.shape(0));
        table.half = static_cast<int>(cos.shape(1));
        table.cos.assign(cos.data(), cos.data() + cos.size());
        table.sin.assign(sin.data(), sin.data() + sin.size());
        return self.add_rope(std::move(table));
      }, "cos"_a, "sin"_a)
      .def("add_layer", &add_layer, "frame"_a, "q"_a, "k"_a.none(), "v"_a.none(), "o"_a, "gate"_a.none() = nb::none(),
           "is_gate_per_head"_a = false, "is_softplus_gate"_a = false, "head_norm"_a = "", "q_norm"_a.none() = nb::none(),
           "k_norm"_a.none() = nb::none(), "clip"_a = 0.0f, "has_value_norm"_a = false, "value_scale"_a = 1.0f,
           "sinks"_a.none() = nb::none(), "slopes"_a.none() = nb::none(), "heads"_a, "kv_heads"_a, "head_dim"_a,
           "value_dim"_a, "scale"_a, "window"_a = 0, "is_chunked"_a = false, "softcap"_a = 0.0f, "rope"_a = -1,
           "growth"_a = 0.0f, "growth_length"_a = 1, "growth_first"_a = 0, "head_borders"_a = std::vector<int>(),
           "block_index"_a.none() = nb::none())
      .def("add_conv_layer", &add_conv_layer, "frame"_a, "conv_in"_a, "conv_out"_a, "weight"_a, "bias"_a.none())
      .def("set_window", &HeldDecoder::set_window, "window"_a)
      .def("set_norms", &HeldDecoder::set_norms, "are_centred"_a)
      .def("set_stage", &HeldDecoder::set_stage, "is_last"_a)
      .def_prop_ro("computed_rows", &HeldDecoder::computed_rows)
      .def_prop_ro("received_rows", &HeldDecoder::received_rows)
      .def_prop_ro("expert_counts", [](const HeldDecoder& self) { return self.expert_counts(); })
      .def("set_logit_scale", &HeldDecoder::set_logit_scale, "scale"_a)
      .def("set_layer_inputs", [](HeldDecoder& self, const Linear& table, const Linear& project, FloatVector norm) {
        self.set_layer_inputs(table, project, copied(norm));
      }, "table"_a, "project"_a, "norm"_a)
      .def("add_recurrent_layer", &add_recurrent_layer, "frame"_a, "inputs"_a, "output"_a, "is_delta"_a, "key_heads"_a,
           "value_heads"_a, "key_dim"_a, "value_dim"_a, "conv"_a, "conv_bias"_a.none(), "rates"_a, "step_bias"_a,
           "skip"_a.none(), "norm"_a.none(), "norm_groups"_a, "is_norm_shared"_a, "gates_first"_a, "eps"_a, "min_step"_a,
           "max_step"_a, "step_scale"_a, "gate_scale"_a, "out_scale"_a, "has_channel_decays"_a = false,
           "gates_by_sigmoid"_a = false, "is_tiled"_a = false, "strength_scale"_a = 1.0f, "lowest_decay"_a = 0.0f,
           "scan"_a.none() = nb::none())
      .def("bind_recurrent_cache", &bind_recurrent_cache, "layer"_a, "group"_a, "state_group"_a,
           "conv_inputs"_a.noconvert(), "keys"_a.noconvert(), "updates"_a.noconvert(), "decays"_a.noconvert(),
           "states"_a.noconvert(), "tails"_a.noconvert())
      .def("add_latent_layer", &add_latent_layer, "frame"_a, "q"_a, "kv_down"_a, "q_up"_a.none(), "o"_a, "q_norm"_a.none(),
           "kv_norm"_a, "absorb"_a, "expand"_a, "nope_dim"_a, "rope_dim"_a, "scale"_a, "eps"_a, "rope"_a,
           "index"_a.none() = nb::none(), "shares_index"_a = false, "gate"_a.none() = nb::none())
      .def("add_compressed_layer", &add_compressed_layer, "frame"_a, "inputs"_a, "q_up"_a, "out"_a, "o"_a, "q_norm"_a,
           "kv_norm"_a, "sinks"_a, "window"_a, "scale"_a, "eps"_a, "rope"_a, "rate"_a = 0, "overlaps"_a = false,
           "entries"_a.none() = nb::none(), "index"_a.none() = nb::none())
      .def("bind_compressed_cache", &bind_compressed_cache, "layer"_a, "of_index"_a, "inputs_group"_a,
           "inputs"_a.noconvert(), "group"_a, "entries"_a.noconvert())
      .def("set_altup_streams", [](HeldDecoder& self, std::vector<Linear> in, std::vector<Linear> out) {
        Streams streams;
        streams.count = static_cast<int>(in.size()) + 1;
        streams.in = std::move(in);
        streams.out = std::move(out);
        self.set_streams(std::move(streams));
      }, "into"_a, "out_of"_a)
      .def("set_connected_streams", [](HeldDecoder& self, const Connection& end, int rounds, float eps, float norm_eps) {
        Streams streams;
        streams.count = end.weight.rows();
        streams.end = end;
        streams.rounds = rounds;
        streams.eps = eps;
        streams.norm_eps = norm_eps;
        self.set_streams(std::move(streams));
      }, "end"_a, "rounds"_a, "eps"_a, "norm_eps"_a)
      .def("bind_index_cache", &bind_index_cache, "layer"_a, "group"_a, "keys"_a.noconvert())
      .def("bind_entry_cache", &bind_entry_cache, "layer"_a, "group"_a, "entries"_a.noconvert())
      .def("bind_conv_cache", &bind_conv_cache, "layer"_a, "group"_a, "inputs"_a.noconvert())
      .def("set_embedding", &HeldDecoder::set_embedding, "embedding"_a)
      .def("set_embedding_ends", [](HeldDecoder& self, std::optional<Linear> positions, std::optional<Norm> norm) {
        self.set_embedding_ends(std::move(positions), norm.value_or(Norm()));
      }, "positions"_a.none(), "norm"_a.none())
      .def("set_adapter_sites", &set_adapter_sites, "slots"_a, "sites"_a)
      .def("set_adapter", &set_adapter, "slot"_a, "parts"_a)
      .def("set_head", &HeldDecoder::set_head, "head"_a)
      .def("set_final_norm", [](HeldDecoder& self, const Norm& norm) {
        if (norm.weight.size() != static_cast<size_t>(self.hidden())) throw std::invalid_argument("final_norm is not [hidden]");
        self.set_final_norm(norm);
      }, "norm"_a)
      .def("bind_cache", &bind_cache, "layer"_a, "group"_a, "keys"_a.noconvert(), "values"_a.noconvert(),
           "key_scales"_a.none().noconvert() = nb::none(), "value_scales"_a.none().noconvert() = nb::none())
      .def_ro("kernel_s", &HeldDecoder::kernel_s)
      .def_prop_ro("weight_bytes", &HeldDecoder::weight_bytes)
      .def_prop_ro("instruction_set", [](const HeldDecoder& d) { return std::string(d.kernels().name); });
  return decoder;
}

}  // namespace tokenmill
