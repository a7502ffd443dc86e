"""Families of the last years through the paged path: tiny random models against transformers, and tiny trained ones
against golden answers that were computed in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.dense_models import DENSE
from tests.support.native_models import native_model
from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import CURRENT, FAMILIES, NATIVE_SIZES, VOCAB, load_ours, make_reference
from tokenmill.arch.read import read_spec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.ops.cpu import is_available, unsupported_reason
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_weights

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINED = (
    "deepseek_v4", "exaone4", "gemma3n", "gemma4", "gemma4_moe", "glm4_moe", "gpt_oss", "lfm2_moe", "llama4",
    "minimax_m2", "ministral3", "mixtral", "olmo3", "qwen3_moe", "smollm3",
)  # fmt: skip
CLOSE_CALL = 1e-3  # a smaller margin in the reference may fall either way


@pytest.mark.parametrize("name", [*CURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_reference(name)
    compare_logits(load_ours(theirs, tmp_path), theirs, block_size=4)


def test_mimo_is_qwen2_with_layers_beside(tmp_path: Path) -> None:
    theirs = make_reference("qwen2")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    more = {"model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True, "use_mrope": False}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(8, 16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec = read_spec(tmp_path)
    weights = open_weights(tmp_path, spec)
    weights.check()
    assert (spec.family, spec.num_extra_layers) == ("mimo", 1)
    compare_logits(Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu"))), theirs, 4)


@pytest.mark.slow
@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize("name", [*FAMILIES, *CURRENT])
def test_native_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_reference(name, **NATIVE_SIZES.get(name, {}))
    ours = load_ours(theirs, tmp_path)
    assert unsupported_reason(ComputeRequest(ours.spec, "cpu", "float32", "float32", 16)) is None
    native = native_model(ours.spec, open_weights(tmp_path, ours.spec), max_context=ours.spec.max_context)
    compare_logits(native, theirs, block_size=16)


@pytest.mark.slow
@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize("name", DENSE)
def test_native_rows_are_the_same_alone_and_together(name: str, tmp_path: Path) -> None:
    """Rows at different points, one decoding, two in chunks: bit for bit what each is alone."""
    spec = load_ours(make_reference(name), tmp_path).spec
    native = native_model(spec, open_weights(tmp_path, spec), max_context=spec.max_context)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, VOCAB, (count,), generator=generator).tolist() for count in (30, 17, 40)]
    run = PagedRun(native, num_rows=3, max_len=48, block_size=16)
    run.feed({0: rows[0][:-1]})
    run.feed({2: rows[2][:9]})
    together = run.feed({2: rows[2][9:], 0: rows[0][-1:], 1: rows[1]})
    alone = [feed_in_chunks(PagedRun(native, 1, 48, 16), 0, row, 64) for row in rows]
    assert torch.equal(together, torch.cat([alone[2][9:], alone[0][-1:], alone[1]]))


def compare_logits(
    ours: Decoder | NativeDecoder, theirs: transformers.PreTrainedModel, block_size: int, tolerance: float = 2e-4
) -> None:
    """Require the same logits in chunks of 1, 3 and 7 tokens and at once, the last beside a row that decodes."""
    tokens = torch.randint(3, VOCAB, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    run = PagedRun(ours, num_rows=5, max_len=48, block_size=block_size)
    for row, chunk in enumerate((1, 3, 7)):
        torch.testing.assert_close(feed_in_chunks(run, row, tokens, chunk), expected, atol=tolerance, rtol=0)
    run.feed({3: tokens[:20]})
    together = run.feed({3: tokens[20:21], 4: tokens})
    torch.testing.assert_close(together, torch.cat((expected[20:21], expected)), atol=tolerance, rtol=0)
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
