"""Read GGUF metadata as a `ModelSpec`, or refuse it by the name of the feature that is not implemented.

The tensors provide what the metadata lacks: an untied head is `output.weight`, a bias exists or not, and Llama 3's rope
scaling is a tensor of factors. Those few numbers are read here; weights are left to the loader.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tokenmill.arch.families import BY_GGUF_ARCH, BY_NAME
from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import config_from_gguf
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.hf_config import ACTIVATIONS, longrope_mscale, spec_from_hf, yarn_mscale
from tokenmill.arch.spec import (
    FrequencyFactors,
    Gqa,
    LayerSpec,
    LinearScaling,
    LongRopeScaling,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeScaling,
    RopeSpec,
    ShortConv,
    YarnScaling,
)
from tokenmill.errors import UnsupportedModel

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_LAYERS = 10_000
DEFAULT_LOCAL_THETA = 10000.0
UNSUPPORTED_EXPERT_KEYS = (
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "leading_dense_block_count",
    "expert_group_count",
)


def spec_from_gguf(gguf: GGUFFile) -> ModelSpec:
    family = _family(gguf)
    reader = _Reader(gguf, family)
    keys = family.gguf_traits.config_keys
    if keys is None:
        return reader.spec()
    config = config_from_gguf(gguf, keys)
    return reader.named(spec_from_hf({"model_type": family.model_types[0], **config}))


def _family(gguf: GGUFFile) -> Family:
    arch = gguf.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in BY_GGUF_ARCH:
        known = ", ".join(sorted(BY_GGUF_ARCH))
        raise UnsupportedModel(f"{gguf.path}: architecture {arch!r} is not implemented", hint=f"these are: {known}")
    family = BY_GGUF_ARCH[arch]
    traits = family.gguf_traits
    if traits.other_with is None:
        return family
    key, other = traits.other_with
    found = gguf.metadata.get(f"{arch}.{key}")
    return BY_NAME[other] if (found if traits.other_value is None else found == traits.other_value) else family


class _Reader:
    def __init__(self, gguf: GGUFFile, family: Family) -> None:
        self.traits = family.gguf_traits
        arch = gguf.metadata["general.architecture"]
        prefix = f"{arch}."
        own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
        self.gguf = gguf
        self.family = family
        self.fields = ConfigFields(own, f"{gguf.path} ({arch})")
        self.num_layers = self.fields.integer("block_count")
        self.hidden = self.fields.integer("embedding_length")
        if self.num_layers > MAX_LAYERS:
            self.fields.refuse(f"block_count is {self.num_layers}, more than {MAX_LAYERS}")

    def spec(self) -> ModelSpec:
        metadata = ConfigFields(self.gguf.metadata, self.fields.source)
        bos = metadata.integers("tokenizer.ggml.bos_token_id")
        return ModelSpec(
            family=self.family.name,
            vocab_size=self._vocab_size(),
            hidden_size=self.hidden,
            layers=self._layers(),
            norm_eps=self.fields.positive("attention.layer_norm_rms_epsilon"),
            max_context=self.fields.integer("context_length"),
            tied_head="output.weight" not in self.gguf.tensors,
            embedding_scale=self.hidden**0.5 if self.family.scaled_embeddings else 1.0,
            logit_softcap=self._softcap("final_logit_softcapping"),
            dtype=self._dtype(),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=self._eos_ids(metadata),
            name=str(self.gguf.metadata.get("general.name", "")),
            extra=self._extra(),
        )

    def named(self, spec: ModelSpec) -> ModelSpec:
        """Return a spec read from the translated config, with dtype, name and special tokens of the file."""
        metadata = ConfigFields(self.gguf.metadata, self.fields.source)
        bos = metadata.integers("tokenizer.ggml.bos_token_id")
        return replace(
            spec,
            dtype=self._dtype(),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=self._eos_ids(metadata),
            name=str(self.gguf.metadata.get("general.name", "")),
            extra=self._extra(),
        )

    # ── the whole model ──

    def _vocab_size(self) -> int:
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            return embedding.shape[0]
        return self.fields.integer("vocab_size")

    def _softcap(self, key: str) -> float | None:
        return self.fields.positive_or_none(key) if self.family.has_softcaps else None

    def _dtype(self) -> str:
        kinds = Counter(tensor.type for tensor in self.gguf.tensors.values() if len(tensor.shape) > 1)
        if not kinds or any(kind not in FLOATS for kind in kinds):
            return "quantised"
        return FLOATS[kinds.most_common(1)[0][0]]

    def _extra(self) -> dict[str, str]:
        num_bytes: Counter[str] = Counter()
        for tensor in self.gguf.tensors.values():
            num_bytes[tensor.type] += tensor.num_bytes
        shares = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in num_bytes.most_common())
        return {"tensor_types": shares} if shares else {}

    def _eos_ids(self, metadata: ConfigFields) -> tuple[int, ...]:
        """Return the end tokens that the file names; the tokenizer recognises further ones by their text."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        named = [number for key in keys for number in metadata.integers("tokenizer.ggml." + key)]
        return tuple(dict.fromkeys(named))

    # ── layers ──

    def _layers(self) -> tuple[LayerSpec, ...]:
        windows = self._windows()
        attention = {window: self._attention(window) for window in dict.fromkeys(windows)}
        mlp = self._experts() or self._mlp(self.fields.integer("feed_forward_length"))
        convolutions = self._convolutions()
        return tuple(
            LayerSpec(convolution or attention[window], mlp, self.family.norms)
            for convolution, window in zip(convolutions, windows, strict=True)
        )

    def _convolutions(self) -> tuple[ShortConv | None, ...]:
        """Return the short convolutions: the layers without key/value heads, in families that have such layers."""
        heads = self.fields.integers("attention.head_count_kv")
        if self.traits.conv_key is None or len(heads) != self.num_layers:
            return (None,) * self.num_layers
        kernel = self.fields.integer(self.traits.conv_key)
        convolution = ShortConv(self.hidden, kernel, "blk.0.shortconv.conv.bias" in self.gguf.tensors)
        return tuple(None if count else convolution for count in heads)

    def _windows(self) -> tuple[int | None, ...]:
        traits = self.traits
        window = self.fields.integer_or_none("attention.sliding_window", minimum=0) or traits.default_window
        if window is None:
            if self.family.has_local_rope:
                self.fields.refuse("attention.sliding_window is missing")
            return (None,) * self.num_layers
        if not traits.window_pattern:
            self.fields.refuse("attention.sliding_window is not implemented for this architecture in GGUF")
        return tuple(window if self._is_windowed(index) else None for index in range(self.num_layers))

    def _is_windowed(self, index: int) -> bool:
        pattern: Any = self.fields.get("attention.sliding_window_pattern")
        if isinstance(pattern, list) and len(pattern) == self.num_layers:
            return bool(pattern[index])
        if pattern is not None:
            every = self.fields.integer("attention.sliding_window_pattern")
        else:
            every = self.traits.window_pattern
        return every == 1 or (index + 1) % every != 0

    def _per_layer(self, key: str) -> int:
        """Return a value that files may give per layer; only equal values are implemented."""
        values = set(self.fields.integers(key)) - ({0} if self.traits.conv_key else set())
        if len(values) > 1:
            self.fields.refuse(f"{key} differs between layers, which is not implemented")
        return int(values.pop()) if values else 0

    def _attention(self, window: int | None) -> Gqa:
        heads = self._per_layer("attention.head_count")
        kv_heads = self._per_layer("attention.head_count_kv") or heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            self.fields.refuse(f"{heads} heads over {kv_heads} key/value heads are not possible")
        head_dim = self.fields.integer_or_none("attention.key_length") or self.hidden // heads
        if not head_dim:
            self.fields.refuse(f"{heads} heads are not possible with an embedding_length of {self.hidden}")
        if (self.fields.integer_or_none("attention.value_length") or head_dim) != head_dim:
            self.fields.refuse("keys and values of different lengths are not implemented")
        return Gqa(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=self._scale(heads, head_dim),
            rope=self._rope(head_dim, window is not None),
            qkv_bias="blk.0.attn_q.bias" in self.gguf.tensors,
            out_bias="blk.0.attn_output.bias" in self.gguf.tensors,
            qk_norm=self.family.qk_norm,
            window=window if window and window < self.fields.integer("context_length") else None,
            softcap=self._softcap("attn_logit_softcapping"),
        )

    def _scale(self, heads: int, head_dim: int) -> float:
        if self.fields.has("attention.scale"):
            return self.fields.positive("attention.scale")
        if self.traits.query_scale_from_width_at == self.num_layers:
            return float((self.hidden / heads) ** -0.5)
        return float(head_dim**-0.5)

    def _mlp(self, size: int) -> MlpSpec:
        activation = ACTIVATIONS[self.family.defaults[self.family.activation_key]]  # the metadata does not say
        return MlpSpec(size, activation, bias="blk.0.ffn_down.bias" in self.gguf.tensors)

    def _experts(self) -> MoeSpec | None:
        num_experts = self.fields.integer_or_none("expert_count", minimum=0)
        if not num_experts:
            return None
        for key in UNSUPPORTED_EXPERT_KEYS:
            if self.fields.get(key):
                self.fields.refuse(f"{key} is not implemented")
        has_own_size = self.fields.has("expert_feed_forward_length")
        size = self.fields.integer("expert_feed_forward_length" if has_own_size else "feed_forward_length")
        num_active = self.fields.integer("expert_used_count")
        if num_active > num_experts:
            self.fields.refuse(f"an expert_used_count of {num_active} is not possible with {num_experts} experts")
        return MoeSpec(num_experts, num_active, self._mlp(size))

    # ── rope ──

    def _rope(self, head_dim: int, is_windowed: bool) -> RopeSpec:
        rotary_dim = self.fields.integer_or_none("rope.dimension_count") or head_dim
        if rotary_dim > head_dim or rotary_dim % 2:
            self.fields.refuse(f"a rotation of {rotary_dim} of {head_dim} dimensions is not possible")
        if is_windowed and self.family.has_local_rope:
            return RopeSpec(self.fields.positive_or_none("rope.freq_base_swa") or DEFAULT_LOCAL_THETA, rotary_dim)
        theta = self.fields.positive_or_none("rope.freq_base") or 10000.0
        if theta <= 1.0:
            self.fields.refuse(f"rope.freq_base is {theta:g}, expected a number above 1")
        return RopeSpec(theta, rotary_dim, self._scaling(rotary_dim))

    def _scaling(self, rotary_dim: int) -> RopeScaling | None:
        kind = self.fields.get("rope.scaling.type") or "none"
        if "rope_factors_long.weight" in self.gguf.tensors:
            return self._longrope(rotary_dim)
        factors = self._factors("rope_freqs.weight", rotary_dim)
        if factors is not None and kind == "none":
            return FrequencyFactors(factors)
        if factors is not None or kind not in ("none", "linear", "yarn"):
            self.fields.refuse(f"rope scaling {kind!r} is not implemented")
        if kind == "yarn":
            return self._yarn()
        factor = self.fields.positive_or_none("rope.scaling.factor") or 1.0
        return LinearScaling(factor) if kind == "linear" and factor != 1.0 else None

    def _yarn(self) -> YarnScaling:
        factor = self.fields.positive("rope.scaling.factor")
        attention = self.fields.positive_or_none("rope.scaling.attn_factor") or 1.0
        return YarnScaling(
            factor=factor,
            original_context=self.fields.integer("rope.scaling.original_context_length"),
            beta_fast=self.fields.positive_or_none("rope.scaling.yarn_beta_fast") or 32.0,
            beta_slow=self.fields.positive_or_none("rope.scaling.yarn_beta_slow") or 1.0,
            mscale=attention * yarn_mscale(factor),
        )

    def _longrope(self, rotary_dim: int) -> LongRopeScaling:
        context = self.fields.integer("context_length")
        original = self.fields.integer_or_none("rope.scaling.original_context_length", minimum=2) or context
        short = self._factors("rope_factors_short.weight", rotary_dim)
        long = self._factors("rope_factors_long.weight", rotary_dim)
        if short is None or long is None:
            self.fields.refuse("rope_factors_short.weight is missing")
        mscale = self.fields.positive_or_none("rope.scaling.attn_factor")
        return LongRopeScaling(short, long, original, mscale or longrope_mscale(context / original, original))

    def _factors(self, name: str, rotary_dim: int) -> tuple[float, ...] | None:
        """Return the values of a small F32 tensor, one per frequency; None if the file lacks it."""
        tensor = self.gguf.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32" or tensor.shape != (rotary_dim // 2,):
            self.fields.refuse(
                f"tensor {name!r} is {tensor.type} {list(tensor.shape)}, expected F32 [{rotary_dim // 2}]"
            )
        numbers = read_floats(tensor)
        if not all(number > 0 for number in numbers):
            self.fields.refuse(f"tensor {name!r} contains factors that are not above zero")
        return tuple(numbers)
