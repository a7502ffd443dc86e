"""A Hugging Face config.json becomes a `ModelSpec`, or is refused by the name of what is not implemented.

Read strictly and generically: what sets families apart is data in `families/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.rope_config import rope_for
from tokenmill.arch.spec import Activation, Gqa, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from tokenmill.errors import UnsupportedModel

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
DTYPES = ("float32", "float16", "bfloat16")
_TASKS = ("ForCausalLM", "ForConditionalGeneration")
MAX_LAYERS = 10_000
MAX_EXPERTS = 4096  # the weights of each have names of their own


def spec_from_hf(config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """`generation` is generation_config.json; its stop tokens count too."""
    family = _family(config)
    whole = ConfigFields(config, str(config["model_type"]))
    _check_quantization(whole)
    _check_task(whole)
    text = whole.section("text_config")
    merged = family.common_keys({**config, **text} if text else config)
    fields = ConfigFields(merged, str(config["model_type"]), family.defaults)
    for key in family.refused_flags:
        if fields.get(key) not in (None, False):
            fields.refuse(f"{key} is set, which is not implemented")
    return _spec(fields, family, ConfigFields(generation or {}, "generation_config.json"))


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModel("config.json has no model_type", hint="is this a model's config.json?")
    if model_type not in BY_MODEL_TYPE:
        known = ", ".join(sorted(BY_MODEL_TYPE))
        raise UnsupportedModel(f"model_type {model_type!r} is not implemented", hint=f"these are: {known}")
    return BY_MODEL_TYPE[model_type]


def _check_quantization(fields: ConfigFields) -> None:
    quantization = fields.section("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") or quantization.get("quant_algo") or "unknown"
    hint = "use the unquantised checkpoint or a GGUF"
    if method not in ("gptq", "awq"):
        fields.refuse(f"quantization_config {method!r} is not supported", hint=hint)
    bits, layout = quantization.get("bits"), quantization.get("version", "gemm")
    if bits != 4 or (method == "awq" and str(layout).lower() != "gemm"):
        fields.refuse(f"{method} of {bits} bits, layout {layout!r}, is not supported: 4 bits are", hint=hint)


def _check_task(fields: ConfigFields) -> None:
    names = fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fields.refuse(f"architectures is {names!r}, expected a list of strings")
    if names and not any(name.endswith(_TASKS) for name in names):
        fields.refuse(f"architecture {names[0]!r} does not generate text")


def _spec(fields: ConfigFields, family: Family, generation: ConfigFields) -> ModelSpec:
    hidden = fields.integer("hidden_size")
    eos = dict.fromkeys((*fields.integers("eos_token_id"), *generation.integers("eos_token_id")))
    bos = fields.integers("bos_token_id")
    return ModelSpec(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=_layers(fields, family),
        norm_eps=fields.positive("rms_norm_eps"),
        max_context=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings"),
        embedding_scale=hidden**0.5 if family.scaled_embeddings else 1.0,
        logit_softcap=fields.positive_or_none("final_logit_softcapping") if family.has_softcaps else None,
        dtype=_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(eos),
        name=_name(fields),
    )


def _name(fields: ConfigFields) -> str:
    name = fields.get("_name_or_path")
    return name if isinstance(name, str) else ""


def _dtype(fields: ConfigFields) -> str:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if value not in DTYPES:
        fields.refuse(f"dtype {value!r} is not implemented")
    return str(value)


def _layers(fields: ConfigFields, family: Family) -> tuple[LayerSpec, ...]:
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        fields.refuse(f"num_hidden_layers is {num_layers}, more than {MAX_LAYERS}")
    windows = family.windows(fields, num_layers)
    # Layers that are alike share one object: specs stay small and compare fast.
    attention = {window: _attention(fields, family, window) for window in dict.fromkeys(windows)}
    mlp = _mlp(fields, family)
    return tuple(
        LayerSpec(
            family.convolution(fields, index) or attention[window],
            _with_activation(family.experts(fields, index), mlp) or mlp,
            family.post_norms,
        )
        for index, window in enumerate(windows)
    )


def _with_activation(experts: MoeSpec | None, mlp: MlpSpec) -> MoeSpec | None:
    if experts is None:
        return None
    if experts.num_experts > MAX_EXPERTS:
        raise UnsupportedModel(f"{experts.num_experts} experts in a layer, more than {MAX_EXPERTS}")
    if experts.num_active > experts.num_experts:
        raise UnsupportedModel(f"{experts.num_active} experts a token are not possible with {experts.num_experts}")
    expert = replace(experts.expert, activation=mlp.activation)
    shared = experts.shared and replace(experts.shared, activation=mlp.activation)
    return replace(experts, expert=expert, shared=shared)


def _attention(fields: ConfigFields, family: Family, window: int | None) -> Gqa:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer_or_none("num_key_value_heads") or heads
    head_dim = fields.integer_or_none("head_dim") or _even_share(fields, heads)
    if heads % kv_heads:
        fields.refuse(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    query_scale = fields.positive(family.query_scale_key) if family.query_scale_key else float(head_dim)
    return Gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=query_scale**-0.5,
        rope=rope_for(fields, family, head_dim, window is not None),
        qkv_bias=_flag(fields, family.qkv_bias),
        out_bias=_flag(fields, family.out_bias),
        qk_norm=family.qk_norm,
        window=window if window and window < fields.integer("max_position_embeddings") else None,
        softcap=fields.positive_or_none("attn_logit_softcapping") if family.has_softcaps else None,
    )


def _even_share(fields: ConfigFields, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        fields.refuse(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _flag(fields: ConfigFields, source: bool | str) -> bool:
    return fields.flag(source) if isinstance(source, str) else source


def _mlp(fields: ConfigFields, family: Family) -> MlpSpec:
    name = fields.text(family.activation_key)
    if name not in ACTIVATIONS:
        fields.refuse(f"activation {name!r} is not implemented")
    return MlpSpec(fields.integer("intermediate_size"), ACTIVATIONS[name], _flag(fields, family.mlp_bias))
