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

from tests.support.warm_up import (
    BUDGET,
    GEMMA,
    LFM2,
    LLAMA,
    MAX_ROWS,
    QWEN,
    FinishedCompilation,
    compile_at_once,
    warm_up_for,
)
from tokenmill.ops.triton.launch.kernel import Kernel
from tokenmill.runner.decode_graphs import IDLE_KINDS, NO_ADAPTERS
from tokenmill.runner.memory import graph_sizes

PROMPTS = [2, 5, 12, 16, 17, 24, 33, 64, 65, 100, 128, 129, 300, 600, 900]


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
        patch("tokenmill.runner.warmup.compile_in_parallel", compile_at_once),
    ):
        work()
    return found


def test_graphs_of_greedy_and_of_drawing_steps_are_captured_when_there_is_time() -> None:
    """Smallest first, whatever was met already left out; those of drawing steps when all greedy ones are there."""
    graphs = warm_up_for(LLAMA)._graphs
    captured: list[tuple[int, str]] = []

    def capture(size: int, kind: Any, *, room_bytes: int | None = None) -> None:
        graphs._captured[(size, kind, NO_ADAPTERS)] = Mock()
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
        (LLAMA, ("Q4_K", "Q6_K")), (QWEN, ("Q4_K", "Q6_K")), (QWEN, "int4"), (GEMMA, "none"), (LFM2, "none"),
        (LFM2, "fp8"),
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
        assert not forms(lambda length=length: warm_up.rehearse([(64, length)])) - at_start
    assert not forms(lambda: warm_up.compute(warm_up.decoding(1))) - at_start
    for length in PROMPTS:
        assert not forms(lambda length=length: warm_up.rehearse([(0, length)])) - asked, length
        beside = [(700, 1)] * 2 + [(5, length)]
        assert not forms(lambda beside=beside: warm_up.rehearse(beside)) - asked, length
    for length in (1, 12, 16):  # what is left of a long prompt whose other blocks are there
        for late in ([(3999, length)], [(700, 1)] * 2 + [(3999, length)]):
            assert not forms(lambda late=late: warm_up.rehearse(late)) - asked, late
    for size in graph_sizes(MAX_ROWS):
        assert not forms(lambda size=size: warm_up.compute(warm_up.decoding(size))) - asked, size
    for size in (1, 2, 4):
        for kind in IDLE_KINDS:
            step = partial(warm_up._graphs._step, size, warm_up._graphs._padding, kind)
            assert not forms(step) - asked, (size, kind)


def test_what_is_left_is_asked_for_later_where_no_compiler_works() -> None:
    """All kernels of the first steps were on disk: the first token waits for nothing more."""
    warm_up = warm_up_for(LLAMA)
    early = forms(lambda: warm_up.compile_first(BUDGET, list)), forms(warm_up.compile_rest)
    assert not forms(warm_up.compile_rest), "it begins once"
    with patch.object(FinishedCompilation, "is_working", False):
        late = forms(lambda: warm_up.compile_first(BUDGET, list)), forms(warm_up.compile_rest)
    assert late == early and early[1] - early[0]


def test_the_end_of_a_long_prompt_is_computed_before_the_first_request() -> None:
    """Where kernels are compiled when they are launched, too: a prefix from host memory takes a tenth of the time that
    this compiler does."""
    warm_up = warm_up_for(LLAMA)

    def prepare() -> None:
        for work in warm_up.preparations(BUDGET):
            work()

    with patch.object(warm_up, "compile_rest"), patch.object(warm_up._graphs, "captures", list):
        prepared = forms(prepare)
    late = forms(lambda: warm_up.rehearse([(4000, 16)]))
    assert any(name == "_split_prefill" for name, *_ in late)
    assert not {form for form in late - prepared if form[0] == "_split_prefill"}


@pytest.mark.parametrize(
    ("config", "how", "num_asked"),
    [
        (LLAMA, {}, 3), (LLAMA, {"quantization": "fp8"}, 3), (LLAMA, {"deterministic": True}, 3),
        (LLAMA, {"blocks": ("Q4_K", "Q6_K")}, 6), (GEMMA, {}, 6), (LFM2, {}, 5), (GEMMA, {"kv_dtype": torch.int8}, 6),
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
