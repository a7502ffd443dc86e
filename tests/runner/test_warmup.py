"""No step has to wait for a compiler that a start, or the time beside the first requests, could have called: what steps
of every kind launch is asked for beforehand. On tensors without memory, since only their shapes matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

pytest.importorskip("triton")

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.tensors import TensorSpec, tensors_of
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import DTYPES, KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch.kernel import Kernel
from tokenmill.runner.decode_graphs import IDLE_KINDS, DecodeGraphs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.memory import graph_sizes
from tokenmill.runner.warmup import WarmUp

META = torch.device("meta")
MAX_ROWS, MAX_CONTEXT, BUDGET = 256, 4096, 8192
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip
PROMPTS = [2, 5, 12, 16, 17, 24, 33, 64, 65, 100, 128, 129, 300, 600, 900]


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "sliding_window": 512, "sliding_window_pattern": 4, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip


class Shapes:
    """Weights of a model, without numbers; plain ones or, where they are stacked with such, blocks of two formats: some
    layers have the second one in places, as in files of llama.cpp."""

    def __init__(self, tensors: dict[str, TensorSpec], blocks: tuple[str, str] | None = None) -> None:
        self._tensors = tensors
        self._blocks = blocks

    def get(self, name: str) -> RawTensor:
        tensor = self._tensors[name]
        if self._blocks is not None and tensor.kind != "vector" and "router" not in name:
            quant = self._blocks[(".v." in name or "down" in name) and int(name.split(".")[1]) % 4 == 0]
            row_bytes = GGML_TYPE_BY_NAME[quant].row_bytes(tensor.shape[-1])
            blocks = torch.empty(*tensor.shape[:-1], row_bytes, dtype=torch.uint8, device=META)
            return RawTensor(name, tensor.shape, blocks, quant)
        dtype = torch.float32 if tensor.kind == "vector" else torch.bfloat16
        return RawTensor(name, tensor.shape, torch.empty(tensor.shape, dtype=dtype, device=META))


class Compiled:
    """Notes are looked at when they are made."""

    def __init__(self) -> None:
        self._noted: list[Callable[[], object]] = []

    def join(self) -> None:
        pass

    def note(self, ask: Callable[[], object]) -> None:
        self._noted.append(ask)

    def make(self) -> None:
        for ask in self._noted:
            ask()


def asked_at_once(*asks: Callable[[], object]) -> Compiled:
    for ask in asks:
        ask()
    return Compiled()


def warm_up_for(
    config: dict[str, Any],
    quantization: str = "none",
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    blocks: tuple[str, str] | None = None,
) -> WarmUp:
    spec = spec_from_hf(config)
    source: Any = Shapes(tensors_of(spec), blocks)
    ops = build_ops(quantization, deterministic=deterministic)
    model = Decoder(spec, Loader(source, ops, dtype, META), MAX_CONTEXT)
    names = {kept: name for name, kept in DTYPES.items()}
    storage = KVStorage(KVLayout.from_spec(spec, CacheDtypes(names[kv_dtype or dtype], names[dtype])), 2, 16, META)
    with patch("torch.cuda.graph_pool_handle"):
        graphs = DecodeGraphs(model, storage, DeviceSampler(spec.vocab_size, 4, META), 4, 13, MAX_CONTEXT)
    return WarmUp(model, storage, graphs, MAX_ROWS, MAX_CONTEXT)


def specialised(parameter: Any, value: Any) -> Any:
    """What a compiled kernel depends on"""
    if isinstance(value, torch.Tensor):
        is_aligned = value.storage_offset() * value.element_size() % 16 == 0
        return value.dtype, is_aligned or bool(parameter.do_not_specialize)
    if parameter.is_constexpr:
        return value
    is_number = isinstance(value, int) and not parameter.do_not_specialize
    return (value == 1, value % 16 == 0) if is_number else type(value)


def forms(work: Callable[[], object]) -> set[Any]:
    found = set()

    def launch(self: Kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        jitted = self._jitted
        kinds = [specialised(parameter, value) for parameter, value in zip(jitted.params, args, strict=False)]
        found.add((jitted.fn.__name__, *kinds, *options.items()))

    with (
        patch.object(Kernel, "_launch", launch),
        patch.object(torch.Tensor, "pin_memory", lambda self: self),
        patch("tokenmill.runner.warmup.compile_beside", asked_at_once),
    ):
        work()
    return found


def test_graphs_of_greedy_and_of_drawing_steps_are_captured_when_there_is_time() -> None:
    """Smallest first, whatever was met already left out; those of drawing steps when all greedy ones are there."""
    graphs = warm_up_for(LLAMA)._graphs
    captured: list[tuple[int, str]] = []

    def capture(size: int, kind: Any, *, keeps_room: bool = False) -> None:
        graphs._captured[(size, kind)] = Mock()
        captured.append((size, kind))

    with patch.object(graphs, "_capture", capture):
        graphs.capture_largest()
        capture(1, "sample")  # a step that was met before there was time
        for prepare in graphs.captures():
            prepare()
    assert captured == [(4, "greedy"), (1, "sample"), (1, "greedy"), (2, "greedy"), (2, "sample"), (4, "sample")]


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        (QWEN, "none"), (LLAMA, "none"), (LLAMA, "fp8"), (LLAMA, "int8"), (LLAMA, "int4"), (LLAMA, ("Q4_K", "Q4_K")),
        (LLAMA, ("Q4_K", "Q6_K")), (QWEN, ("Q4_K", "Q6_K")), (QWEN, "int4"), (GEMMA, "none"),
    ],
)  # fmt: skip
def test_what_steps_launch_is_asked_for_beforehand(config: dict[str, Any], quantization: str | tuple[str, str]) -> None:
    is_blocks = isinstance(quantization, tuple)
    warm_up = warm_up_for(config, blocks=quantization) if is_blocks else warm_up_for(config, quantization)
    at_start = forms(lambda: warm_up.compile_first(BUDGET, list))
    asked = at_start | forms(warm_up.compile_rest)
    warm_up._model = warm_up._graphs._model  # with all its layers
    # One request after another, prompts or what of them is not cached: right after a start.
    for length in (16, 100, 128):
        assert not forms(lambda length=length: warm_up._rehearse([(64, length)])) - at_start
    assert not forms(lambda: warm_up._compute(warm_up._decoding(1))) - at_start
    for length in PROMPTS:
        assert not forms(lambda length=length: warm_up._rehearse([(0, length)])) - asked, length
        beside = [(700, 1)] * 2 + [(5, length)]
        assert not forms(lambda beside=beside: warm_up._rehearse(beside)) - asked, length
    for size in graph_sizes(MAX_ROWS):
        assert not forms(lambda size=size: warm_up._compute(warm_up._decoding(size))) - asked, size
    for size in (1, 2, 4):
        for kind in IDLE_KINDS:
            step = partial(warm_up._graphs._step, size, warm_up._graphs._padding, kind)
            assert not forms(step) - asked, (size, kind)


@pytest.mark.parametrize(
    ("config", "how", "num_asked"),
    [
        (LLAMA, {}, 3), (LLAMA, {"quantization": "fp8"}, 3), (LLAMA, {"deterministic": True}, 3),
        (LLAMA, {"blocks": ("Q4_K", "Q6_K")}, 6), (GEMMA, {}, 6), (GEMMA, {"kv_dtype": torch.int8}, 6),
        (QWEN, {}, 3), (QWEN | {"mlp_only_layers": [0, 1, 2]}, {}, 6), (QWEN, {"blocks": ("Q4_K", "Q6_K")}, 6),
    ],
)  # fmt: skip
def test_one_layer_of_each_kind_asks_for_what_all_layers_do(
    config: dict[str, Any], how: dict[str, Any], num_asked: int
) -> None:
    warm_up = warm_up_for(config | {"num_hidden_layers": 8}, **how)
    model: Any = warm_up._model
    assert len(model.layers) == num_asked

    def asked() -> list[set[Any]]:
        return [forms(lambda: warm_up.compile_first(BUDGET, list)), forms(warm_up.compile_rest)]

    in_short = asked()
    warm_up._model = warm_up._graphs._model
    assert in_short == asked()
