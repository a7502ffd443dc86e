// A decoder as Python builds it: parts, layers, caches.
#include <stdexcept>

#include "bindings/held_decoder.h"

namespace tokenmill {
namespace {

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu") return Activation::Gelu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  throw std::invalid_argument("unknown activation " + name);
}

Store store_of(const AnyArray& array) {
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

void bind_cache(HeldDecoder& decoder, int layer, int group, AnyArray keys, AnyArray values, Scales key_scales,
                Scales value_scales) {
  const DecoderLock lock(decoder);
  if (keys.ndim() != 4 || values.ndim() != 4 || store_of(keys) != store_of(values))
    throw std::invalid_argument("keys and values must be [blocks, kv heads, block size, head dim] of one type");
  for (size_t i = 0; i < 4; ++i)
    if (keys.shape(i) != values.shape(i)) throw std::invalid_argument("keys and values differ in shape");
  PagedCache cache{keys.data(), values.data()};
  cache.store = store_of(keys);
  const bool is_scaled = cache.store == Store::I8;
  for (const Scales* scales : {&key_scales, &value_scales}) {
    if (scales->has_value() != is_scaled) throw std::invalid_argument("an int8 cache has scales, no other one has");
    for (size_t i = 0; is_scaled && i < 3; ++i)
      if ((*scales)->shape(i) != keys.shape(i)) throw std::invalid_argument("keys and their scales differ in shape");
  }
  if (is_scaled) {
    cache.key_scales = key_scales->data();
    cache.value_scales = value_scales->data();
  }
  cache.kv_heads = static_cast<int>(keys.shape(1));
  cache.block_size = static_cast<int>(keys.shape(2));
  cache.head_dim = static_cast<int>(keys.shape(3));
  decoder.set_cache(layer, group, cache, static_cast<int>(keys.shape(0)));
  hold_cache(decoder, layer,
             {std::move(keys), std::move(values), std::move(key_scales), std::move(value_scales), std::nullopt});
}

// What all layers have, whatever their mixer is.
Layer layer_of(const HeldDecoder& self, FloatVector attn_norm, FloatVector mlp_norm,
               std::optional<FloatVector> attn_post_norm, std::optional<FloatVector> mlp_post_norm,
               std::optional<Mlp> mlp, std::optional<Moe> moe) {
  Layer layer;
  const size_t hidden = static_cast<size_t>(self.hidden());
  layer.attn_norm = vector_of(attn_norm, hidden, "attn_norm");
  layer.mlp_norm = vector_of(mlp_norm, hidden, "mlp_norm");
  layer.attn_post_norm = vector_of(attn_post_norm, hidden, "attn_post_norm");
  layer.mlp_post_norm = vector_of(mlp_post_norm, hidden, "mlp_post_norm");
  layer.mlp = std::move(mlp);
  layer.moe = std::move(moe);
  return layer;
}

void add_conv_layer(HeldDecoder& self, FloatVector attn_norm, FloatVector mlp_norm,
                    std::optional<FloatVector> attn_post_norm, std::optional<FloatVector> mlp_post_norm,
                    const Linear& in, const Linear& out, Array<const float, 2> weight, std::optional<FloatVector> bias,
                    std::optional<Mlp> mlp, std::optional<Moe> moe) {
  Layer layer = layer_of(self, attn_norm, mlp_norm, attn_post_norm, mlp_post_norm, std::move(mlp), std::move(moe));
  ShortConv conv;
  conv.in = in;
  conv.weight.assign(weight.data(), weight.data() + weight.size());
  conv.bias = vector_of(bias, static_cast<size_t>(self.hidden()), "bias");
  conv.kernel = static_cast<int>(weight.shape(0));
  layer.conv = std::move(conv);
  layer.o = out;
  self.add_layer(std::move(layer));
}

void add_layer(HeldDecoder& self, FloatVector attn_norm, FloatVector mlp_norm, std::optional<FloatVector> attn_post_norm,
               std::optional<FloatVector> mlp_post_norm, const Linear& q, const Linear& k, const Linear& v,
               const Linear& o, std::optional<FloatVector> q_norm, std::optional<FloatVector> k_norm,
               std::optional<FloatVector> sinks, int heads, int kv_heads, int head_dim, float scale, int window,
               float softcap, int rope, std::optional<Mlp> mlp, std::optional<Moe> moe) {
  Layer layer = layer_of(self, attn_norm, mlp_norm, attn_post_norm, mlp_post_norm, std::move(mlp), std::move(moe));
  layer.q_norm = vector_of(q_norm, static_cast<size_t>(head_dim), "q_norm");
  layer.k_norm = vector_of(k_norm, static_cast<size_t>(head_dim), "k_norm");
  layer.sinks = vector_of(sinks, static_cast<size_t>(heads), "sinks");
  layer.q = q;
  layer.k = k;
  layer.v = v;
  layer.o = o;
  layer.attention.heads = heads;
  layer.attention.cache.kv_heads = kv_heads;
  layer.attention.cache.head_dim = head_dim;
  layer.attention.scale = scale;
  layer.attention.window = window;
  layer.attention.softcap = softcap;
  layer.rope = rope;
  self.add_layer(std::move(layer));
}

}  // namespace

nb::class_<HeldDecoder> bind_decoders(nb::module_& m) {
  nb::class_<Mlp>(m, "Mlp").def("__init__", [](Mlp* self, const Linear& gate, const Linear& up, const Linear& down,
                                               const std::string& activation) {
    if (gate.w.rows != up.w.rows || gate.w.cols != up.w.cols || down.w.cols != gate.w.rows)
      throw std::invalid_argument("gate, up and down do not fit together");
    new (self) Mlp{gate, up, down, activation_named(activation)};
  }, "gate"_a, "up"_a, "down"_a, "activation"_a);

  nb::class_<Moe>(m, "Moe").def("__init__", [](Moe* self, const Linear& router, std::vector<Mlp> experts, int num_active,
                                               bool renormalize, std::optional<Mlp> shared) {
    if (router.w.rows != static_cast<int>(experts.size()) || num_active < 1 || num_active > router.w.rows)
      throw std::invalid_argument("the router does not fit the experts");
    new (self) Moe{router, std::move(experts), num_active, renormalize, std::move(shared)};
  }, "router"_a, "experts"_a, "num_active"_a, "renormalize"_a, "shared"_a.none());

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
      .def("add_layer", &add_layer, "attn_norm"_a, "mlp_norm"_a, "attn_post_norm"_a.none(), "mlp_post_norm"_a.none(),
           "q"_a, "k"_a, "v"_a, "o"_a, "q_norm"_a.none(), "k_norm"_a.none(), "sinks"_a.none(), "heads"_a, "kv_heads"_a,
           "head_dim"_a, "scale"_a, "window"_a, "softcap"_a, "rope"_a, "mlp"_a.none(), "moe"_a.none())
      .def("add_conv_layer", &add_conv_layer, "attn_norm"_a, "mlp_norm"_a, "attn_post_norm"_a.none(),
           "mlp_post_norm"_a.none(), "conv_in"_a, "conv_out"_a, "weight"_a, "bias"_a.none(), "mlp"_a.none(), "moe"_a.none())
      .def("bind_conv_cache", &bind_conv_cache, "layer"_a, "group"_a, "inputs"_a.noconvert())
      .def("set_embedding", &HeldDecoder::set_embedding, "embedding"_a)
      .def("set_head", &HeldDecoder::set_head, "head"_a)
      .def("set_final_norm", [](HeldDecoder& self, FloatVector weight) {
        self.set_final_norm(vector_of(weight, static_cast<size_t>(self.hidden()), "final_norm"));
      }, "weight"_a)
      .def("bind_cache", &bind_cache, "layer"_a, "group"_a, "keys"_a.noconvert(), "values"_a.noconvert(),
           "key_scales"_a.none().noconvert() = nb::none(), "value_scales"_a.none().noconvert() = nb::none())
      .def_ro("kernel_s", &HeldDecoder::kernel_s)
      .def_prop_ro("weight_bytes", &HeldDecoder::weight_bytes)
      .def_prop_ro("instruction_set", [](const HeldDecoder& d) { return std::string(d.kernels().name); });
  return decoder;
}

}  // namespace tokenmill
