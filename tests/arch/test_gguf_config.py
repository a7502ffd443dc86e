"""GGUF metadata to spec: facts only metadata carries, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.arch.gguf_config import spec_from_gguf
from tokenmill.arch.gguf_file import GGUFFile, GGUFTensor, read_gguf
from tokenmill.arch.spec import LinearScaling, MoeSpec, RopeSpec, YarnScaling
from tokenmill.errors import UnsupportedModel

PATH = Path("model.gguf")


def gguf_of(arch: str, tensors: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> GGUFFile:
    """Metadata of a small model; in `changes` a double underscore stands for a dot."""
    own: dict[str, Any] = {
        "block_count": 6,
        "context_length": 1000,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "vocab_size": 50,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    metadata = {f"{arch}.{key}": value for key, value in own.items() if value is not None}
    entries = {
        name: GGUFTensor(name, "F16", shape, 0, 0, PATH)
        for name, shape in {"output.weight": (50, 64), **(tensors or {})}.items()
    }
    return GGUFFile(PATH, {"general.architecture": arch, **metadata}, entries)


def test_defaults() -> None:
    spec = spec_from_gguf(gguf_of("llama"))
    attention = spec.attentions[0]
    assert (attention.num_kv_heads, attention.head_dim, attention.rope) == (4, 16, RopeSpec(10000.0, 16))
    assert (spec.tied_head, spec.dtype, spec.vocab_size) == (False, "float16", 50)


def test_biases_are_where_their_tensors_are() -> None:
    spec = spec_from_gguf(gguf_of("qwen2", {"blk.0.attn_q.bias": (64,)}))
    assert spec.attentions[0].qkv_bias and not spec.attentions[0].out_bias


def test_mixtral_calls_itself_llama() -> None:
    spec = spec_from_gguf(gguf_of("llama", expert_count=8, expert_used_count=2))
    assert spec.family == "mixtral"
    assert isinstance(spec.layers[0].mlp, MoeSpec) and spec.layers[0].mlp.routing.renormalize


def test_gemma_windows_and_ropes() -> None:
    changes = {"attention__sliding_window": 100, "rope__freq_base": 1e6}
    spec = spec_from_gguf(gguf_of("gemma3", **changes, rope__scaling__type="linear", rope__scaling__factor=8.0))
    assert [layer.mixer.window for layer in spec.layers] == [100] * 5 + [None]
    assert spec.attentions[0].rope == RopeSpec(10000.0, 16)
    assert spec.attentions[5].rope == RopeSpec(1e6, 16, LinearScaling(8.0))
    assert spec.layers[0].mlp.activation == "gelu_tanh"  # type: ignore[union-attr]
    listed = spec_from_gguf(gguf_of("gemma3", **changes, attention__sliding_window_pattern=[True, False] * 3))
    assert [layer.mixer.window for layer in listed.layers] == [100, None] * 3
    wide = spec_from_gguf(gguf_of("gemma3", rope__freq_base=1e6, attention__sliding_window=5000))
    assert {layer.mixer.window for layer in wide.layers} == {None}  # a window beyond the context is none
    assert wide.layers[0].mixer.rope != wide.layers[5].mixer.rope


def test_the_large_gemmas_scale_by_width() -> None:
    changes = {"attention__sliding_window": 100, "attention__key_length": 32}
    assert spec_from_gguf(gguf_of("gemma2", **changes)).layers[0].mixer.scale == 32**-0.5
    assert spec_from_gguf(gguf_of("gemma2", block_count=46, **changes)).layers[0].mixer.scale == 16**-0.5


def test_yarn() -> None:
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    spec = spec_from_gguf(gguf_of("qwen2", **scaling, rope__scaling__original_context_length=250))
    rope = spec.attentions[0].rope
    assert rope is not None and rope.scaling == YarnScaling(4.0, 250, mscale=1.1386294361119891)


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("rwkv7", {}, "rwkv7"),
        ("llama", {"block_count": None}, "block_count"),
        ("llama", {"block_count": 10**9}, "block_count"),
        ("llama", {"attention__head_count": [4, 8]}, "attention.head_count"),
        ("llama", {"attention__head_count": 0}, "0 heads"),
        ("llama", {"rope__freq_base": 0.5}, "freq_base"),
        ("qwen3moe", {"expert_count": 4, "expert_used_count": 5}, "expert_used_count"),
        ("llama", {"attention__head_count": 10**6, "attention__head_count_kv": 10**6}, "1000000 heads"),
        ("llama", {"attention__value_length": 8}, "different lengths"),
        ("llama", {"rope__scaling__type": "dynamic"}, "dynamic"),
        ("llama", {"rope__dimension_count": 99}, "99"),
        ("qwen2", {"attention__sliding_window": 10}, "sliding_window"),
        ("gemma3", {}, "sliding_window"),
        ("qwen3moe", {"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1}, "expert_shared_count"),
    ],
)
def test_variants_are_refused_by_name(arch: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_from_gguf(gguf_of(arch, **changes))


def test_vocabulary_files_are_read(shared_dir: Path) -> None:
    files = sorted((shared_dir / "vocab").glob("*.gguf"))
    assert files
    for path in files:
        file = read_gguf(path)
        assert not file.tensors and len(file.metadata["tokenizer.ggml.tokens"]) > 1000
