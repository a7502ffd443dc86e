"""Families of the last years through the paged path: tiny random models against transformers, and tiny trained ones
against golden answers that were computed in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import CURRENT, VOCAB, load_ours, make_reference
from tokenmill.arch.read import read_spec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_weights

TRAINED = (
    "exaone4", "gemma4", "gemma4_moe", "glm4_moe", "gpt_oss", "lfm2_moe", "llama4", "minimax_m2", "ministral3",
    "mixtral", "olmo3", "qwen3_moe", "smollm3",
)  # fmt: skip
CLOSE_CALL = 1e-3  # a smaller margin in the reference may fall either way


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small take longer with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CURRENT)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In chunks of 1, 3 and 7 tokens and at once, the last beside a row that decodes."""
    theirs = make_reference(name)
    ours = load_ours(theirs, tmp_path)
    tokens = torch.randint(3, VOCAB, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    run = PagedRun(ours, num_rows=5, max_len=48, block_size=4)
    for row, chunk in enumerate((1, 3, 7)):
        torch.testing.assert_close(feed_in_chunks(run, row, tokens, chunk), expected, atol=2e-4, rtol=0)
    run.feed({3: tokens[:20]})
    together = run.feed({3: tokens[20:21], 4: tokens})
    torch.testing.assert_close(together, torch.cat((expected[20:21], expected)), atol=2e-4, rtol=0)
    assert float(expected.std()) > 0.1, "flat logits prove little"


@pytest.mark.parametrize("name", TRAINED)
def test_golden_answers_of_trained_models(name: str, shared_dir: Path) -> None:
    folder = shared_dir / "goldens" / "tiny" / name
    spec = read_spec(folder)
    weights = open_weights(folder, spec)
    weights.check()
    model = Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu")))
    cases: list[dict[str, Any]] = json.loads((folder / "golden_greedy.json").read_text())["cases"]
    compared = sum(_compare(model, case) for case in (*cases[:2], *cases[-2:]))
    assert compared > 100


def _compare(model: Decoder, case: dict[str, Any]) -> int:
    """Compare log-probabilities of a prompt and its answer; how many tokens of the answer."""
    prompt, golden = case["prompt_ids"], case["greedy"]
    tokens = prompt + [step["id"] for step in golden[:-1]]
    run = PagedRun(model, num_rows=1, max_len=len(tokens), block_size=16)
    logprobs = torch.log_softmax(feed_in_chunks(run, 0, tokens, chunk=37), -1)
    of_prompt = logprobs[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:]).view(-1, 1)).flatten().tolist()
    assert of_prompt == pytest.approx(case["prompt_logprobs_from_second_token"], abs=1e-3)
    for number, (step, ours) in enumerate(zip(golden, logprobs[len(prompt) - 1 :], strict=True)):
        if step["margin"] < CLOSE_CALL:
            return number
        assert int(ours.argmax()) == step["id"]
        assert float(ours[step["id"]]) == pytest.approx(step["logprob"], abs=1e-3)
    return len(golden)
