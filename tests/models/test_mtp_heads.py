"""Heads that predict one more token: read from checkpoints, and equal to transformers' on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mtp_heads import add_head, make_head
from tests.support.native_models import native_model
from tests.support.paged_run import PagedRun
from tests.support.tiny_models import VOCAB, load_ours, make_reference
from tokenmill.arch.mtp import MAX_KEPT_STATES, mtp_head, mtp_parameters
from tokenmill.arch.read import read_spec
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.models.mtp_head import KeptStates, MtpHead
from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_mtp_head, open_weights

FAMILIES = ("deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "qwen3_next", "qwen3_5",
            "qwen3_5_moe")  # fmt: skip
# What the native kernels take, and a last layer that attends, which transformers' heads are made after.
HYBRID_SIZES: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_reference(name, **(HYBRID_SIZES if name.startswith("qwen") else {}))
    theirs_head = make_head(theirs)
    model = load_ours(theirs, tmp_path)
    add_head(theirs_head, tmp_path)
    spec = read_spec(tmp_path)
    open_weights(tmp_path, spec).check()  # the head's tensors are not taken for unexpected ones

    tokens = torch.randint(3, VOCAB, (1, 33), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = theirs.model(tokens).last_hidden_state[:, :-1]
        positions = torch.arange(32).view(1, -1)
        left = theirs_head.forward_layer(0, states, positions, None, input_ids=tokens[:, 1:])
        expected = theirs_head.shared_head(left)[0]
    assert float(expected.std()) > 0.1, "flat logits prove little"

    source, head_spec = open_mtp_head(tmp_path, spec), mtp_head(spec)
    layers: list[Decoder | NativeDecoder] = [
        Decoder(head_spec, Loader(source, REFERENCE_OPS, torch.float32, CPU), ends=model)
    ]
    if is_available()[0]:
        layers.append(native_model(head_spec, source))
    for layer in layers:
        run = PagedRun(layer, num_rows=2, max_len=32, block_size=16)
        head = MtpHead(head_spec, source, layer)
        run.model = head  # type: ignore[assignment]
        head.states = states[0]
        torch.testing.assert_close(run.feed({0: tokens[0, 1:].tolist()}), expected, atol=2e-4, rtol=0)
        for first, end in ((0, 9), (9, 10), (10, 32)):
            head.states = states[0, first:end]
            found = run.feed({1: tokens[0, 1 + first : 1 + end].tolist()})
            torch.testing.assert_close(found, expected[first:end], atol=2e-4, rtol=0)
            assert len(head.outputs) == end - first


def test_counted_numbers_are_those_of_the_tensors(tmp_path: Path) -> None:
    theirs = make_reference("glm4_moe")
    head = make_head(theirs)
    load_ours(theirs, tmp_path)
    add_head(head, tmp_path)
    buffers = [value for name, value in head.named_buffers() if "correction_bias" in name]
    own = [value for name, value in head.named_parameters() if name.startswith("layers.")]
    assert mtp_parameters(read_spec(tmp_path)) == sum(value.numel() for value in (*own, *buffers))


def test_missing_and_damaged_heads_are_refused_by_name(tmp_path: Path) -> None:
    theirs = make_reference("glm4_moe")
    load_ours(theirs, tmp_path)
    spec = read_spec(tmp_path)
    with pytest.raises(UnsupportedModel, match="no multi-token-prediction"):
        open_mtp_head(tmp_path, spec)
    head = make_head(theirs)
    head.layers[0].mtp_block.self_attn.o_proj.weight = torch.nn.Parameter(torch.zeros(3, 3))
    add_head(head, tmp_path)
    with pytest.raises(DamagedFile, match=r"self_attn\.o_proj\.weight \[3, 3\]"):
        open_mtp_head(tmp_path, read_spec(tmp_path))
    with pytest.raises(UnsupportedModel, match="llama: multi-token-prediction"):
        mtp_head(load_ours(make_reference("llama"), tmp_path / "llama").spec)


def test_kept_states_are_those_of_the_last_tokens_that_were_fed() -> None:
    kept = KeptStates()
    states = torch.arange(600.0).view(-1, 1)
    kept.keep(1, 0, states[:400])
    kept.keep(1, 400, states[400:])
    assert kept.first(1) == 600 - MAX_KEPT_STATES
    found = kept.of(1, 590, 600)
    assert found is not None and found[0, 0] == 590
    kept.keep(1, 598, -states[598:600])  # drafts were wrong: the same places again
    found = kept.of(1, 597, 600)
    assert found is not None and found.flatten().tolist() == [597, -598, -599]
    kept.forget_before(1, 599)
    assert kept.first(1) == 599 and kept.of(1, 598, 600) is None
    kept.keep(1, 700, states[:1])  # a context that has shifted
    assert kept.first(1) == 700
    kept.drop(1)
    assert kept.first(1) is None
