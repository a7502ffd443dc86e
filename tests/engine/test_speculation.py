"""Speculation changes no token: 300 mixed requests with every mode, chunked, cached, preempted, with grammars."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.mixed_requests import Answers, RandomRequest, make_requests, run_together, slow_but
from tests.support.scripted_engine import CONFIG, VOCAB, byte_input_processor, tokens_of
from tokenmill import LLM, SamplingParams
from tokenmill.engine.build import assemble
from tokenmill.engine.core import EngineCore
from tokenmill.engine.resolve import resolve_speculation
from tokenmill.engine.speculation import draft_model
from tokenmill.errors import InvalidConfig
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.cpu import is_available
from tokenmill.params import BeamParams, Guided
from tokenmill.testing.scripted_models import ContextModel, ScriptedModel
from tokenmill.types import PromptRequest

NUM_REQUESTS = 300
GRAMMARS = (
    Guided("regex", r"(Lily|Tim|The (dog|cat)) (is|was) [0-9]{2,4} (years|days) old\. (Yes|No)*"),
    Guided.schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "ages": {"type": "array", "maxItems": 5}},
            "required": ["name", "ages"],
            "additionalProperties": False,
        }
    ),
)
TIGHT = {"num_blocks": 40, "max_running": 24, "token_budget": 48}


def mixed_asks() -> list[RandomRequest]:
    """Those of the promise, a third of them greedy as they are, and 100 more of which half follow a grammar."""
    rng = random.Random(11)
    asks = [RandomRequest(ask.prompt, cheap(ask.params, rng)) for ask in make_requests(3)]
    asks += [RandomRequest(rng.choice(asks).prompt, guided(rng)) for _ in range(NUM_REQUESTS - len(asks))]
    return asks


def cheap(params: SamplingParams, rng: random.Random) -> SamplingParams:
    """Logprobs for some only: with them nothing is jumped."""
    return msgspec.structs.replace(params, logprobs=rng.choice([None, None, 0]))


def guided(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**31),
        max_tokens=rng.choice([20, 60]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logprobs=rng.choice([None, None, 1]),
        guided=rng.choice([*GRAMMARS, None, None]),
    )


@pytest.fixture(scope="module")
def backend() -> str:
    """Native where it is built: a row's logits are the same to the last bit however many rows there are."""
    return "cpu" if is_available()[0] else "reference"


@pytest.fixture(scope="module")
def without(stories_dir: Path, backend: str) -> Answers:
    llm = LLM(str(stories_dir), backend=backend, threads=1, speculate="off")
    answers = run_together(llm, mixed_asks(), random.Random(0))
    assert llm.core.stats().drafted_tokens == 0
    return answers


@pytest.fixture(scope="module")
def random_dir(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and vocabulary, with weights that know nothing."""
    folder = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(stories_dir, folder)
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(t.shape, generator=generator) * 0.1 for n, t in load_file(folder / FILE).items()}
    (folder / FILE).unlink()
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    return folder


FILE = "model.safetensors"
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "auto, odd chunks": ("auto", {"token_budget": 37, "max_running": 23}),
    "ngram": ("ngram", {"prefix_caching": False}),
    "ngram, far too small a pool": ("ngram", TIGHT),
    "draft, the same model": ("draft:same", {"token_budget": 96}),
    "draft, a random model, too small a pool": ("draft:random", TIGHT),
}
DEFAULT_MODES = ("auto, odd chunks", "ngram, far too small a pool", "draft, a random model, too small a pool")


@pytest.mark.parametrize("mode", slow_but(DEFAULT_MODES, MODES))
def test_tokens_are_those_without(
    mode: str, without: Answers, stories_dir: Path, random_dir: Path, backend: str
) -> None:
    speculate, settings = MODES[mode]
    speculate = speculate.replace("same", str(stories_dir)).replace("random", str(random_dir))
    llm = LLM(str(stories_dir), backend=backend, threads=1, speculate=speculate, **settings)
    answers = run_together(llm, mixed_asks(), random.Random(mode))
    assert answers == without
    stats = llm.core.stats()
    assert stats.kv_blocks_used == 0
    if settings is TIGHT:
        assert stats.preemptions > 5
    if mode.startswith("ngram"):
        assert stats.drafted_tokens > stats.accepted_tokens > 500
    if mode.startswith("draft"):
        assert stats.drafted_tokens > 0


# ── draft models, step by step ─────────────────────────────────────────────────────────────────────────


def storage_for(model: Any, num_blocks: int = 65) -> KVStorage:
    return KVStorage(model.layout, num_blocks, CONFIG.cache.tokens_per_block, torch.device("cpu"))


def drafted_core(model: Model, draft: Model | None, *, draft_blocks: int = 65, mode: str = "draft:x") -> EngineCore:
    scheduler = replace(CONFIG.scheduler, speculate=mode)
    config = replace(CONFIG, scheduler=scheduler)
    return assemble(
        config,
        model,
        storage_for(model),
        load_draft=lambda _: draft_model(draft, storage_for(draft, draft_blocks), scheduler, 256),  # type: ignore[arg-type]
    )


def run_core(core: EngineCore, asked: list[PromptRequest]) -> dict[str, list[int]]:
    outputs: dict[str, list[Any]] = {one.request_id: [] for one in asked}
    for one in asked:
        core.add(byte_input_processor().process(one))
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
    return {request_id: tokens_of(found) for request_id, found in outputs.items()}


def stories(count: int, **params: Any) -> list[PromptRequest]:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": 5, **params})
    return [PromptRequest(prompt=f"story {n} of many", params=params, request_id=str(n)) for n in range(count)]


@pytest.fixture
def fixed_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four drafts a step, whatever they cost: scripted models have no costs worth a choice."""
    monkeypatch.setattr("tokenmill.speculate.depth.DraftDepth.choose", lambda *_: 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_a_draft_of_the_same_model_is_always_right(
    temperature: float, windows: tuple[int | None, ...], fixed_depth: None
) -> None:
    """The draft's draws use the model's own random numbers, so even drawn tokens agree."""
    plain = drafted_core(ContextModel(VOCAB, windows), None, mode="off")
    expected = run_core(plain, stories(12, temperature=temperature))
    core = drafted_core(ContextModel(VOCAB, windows), ContextModel(VOCAB, windows))
    assert run_core(core, stories(12, temperature=temperature)) == expected
    stats = core.stats()
    assert stats.drafted_tokens > 200 and stats.accepted_tokens == stats.drafted_tokens
    assert stats.steps * 2 < plain.stats().steps


@pytest.mark.parametrize("draft_blocks", [65, 12, 3])
def test_a_draft_that_is_always_wrong_changes_nothing(draft_blocks: int, fixed_depth: None) -> None:
    """Also with a cache of its own that is far too small."""
    expected = run_core(drafted_core(ContextModel(VOCAB), None, mode="off"), stories(12))
    core = drafted_core(ContextModel(VOCAB), ScriptedModel(VOCAB), draft_blocks=draft_blocks)
    assert run_core(core, stories(12)) == expected
    assert core.stats().accepted_tokens < core.stats().drafted_tokens / 10 or draft_blocks == 3


def test_a_draft_whose_numbers_break_is_left_out(fixed_depth: None) -> None:
    expected = run_core(drafted_core(ContextModel(VOCAB), None, mode="off"), stories(4))
    core = drafted_core(ContextModel(VOCAB), ContextModel(VOCAB, nan_token=ord("y")))
    assert run_core(core, stories(4)) == expected
    assert core.stats().drafted_tokens == 0


def test_an_engine_goes_on_without_a_draft_model_that_fails(
    fixed_depth: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A drafter that raises after a few drafts is switched off; its requests and later ones are still answered."""
    expected = run_core(drafted_core(ContextModel(VOCAB), None, mode="off"), stories(8))
    draft, calls = ContextModel(VOCAB), iter(range(1000))
    compute = draft.forward

    def failing(*args: Any) -> Any:
        if next(calls) >= 20:
            raise MemoryError("no room for the draft model")
        return compute(*args)

    monkeypatch.setattr(draft, "forward", failing)
    core = drafted_core(ContextModel(VOCAB), draft)
    assert run_core(core, stories(8)) == expected
    drafted = core.stats().drafted_tokens
    assert drafted > 20 and next(calls) == 21  # it is not called again
    assert run_core(core, stories(8)) == expected
    assert core.stats().drafted_tokens == drafted
    assert caplog.text.count("speculation failed and is turned off") == 1


def test_a_draft_model_needs_the_same_vocabulary(stories_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(stories_dir, other)
    config = msgspec.json.decode((other / "config.json").read_bytes())
    (other / "config.json").write_bytes(msgspec.json.encode({**config, "vocab_size": config["vocab_size"] + 8}))
    with pytest.raises(InvalidConfig, match="can't propose tokens for"):
        LLM(str(stories_dir), threads=1, speculate=f"draft:{other}")


@pytest.mark.parametrize("mode", ["sometimes", "draft:", "draft", ""])
def test_wrong_modes_are_refused(mode: str, stories_dir: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"speculate|draft"):
        LLM(str(stories_dir), threads=1, speculate=mode)


def test_a_gpu_speculates_not_and_says_why() -> None:
    mode, reason = resolve_speculation("auto", overlaps="on a GPU")
    assert mode == "off" and "GPU" in reason
    for asked in ("ngram", "draft:x"):
        with pytest.raises(InvalidConfig, match="GPU"):
            resolve_speculation(asked, overlaps="on a GPU")
    assert resolve_speculation("auto", overlaps=None)[0] == "auto"


# ── what a request sees ────────────────────────────────────────────────────────────────────────────────


def test_a_request_says_what_was_proposed_and_accepted(stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), threads=1, speculate="ngram")
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    first, again = (llm.generate("Once upon a time", params, progress=False)[0] for _ in range(2))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_accepted_tokens > 90, "the answer is known from the first time"
    stats = llm.core.stats()
    assert stats.drafted_tokens == first.num_drafted_tokens + again.num_drafted_tokens
    assert stats.accepted_tokens == first.num_accepted_tokens + again.num_accepted_tokens


def test_other_salts_gain_nothing_from_an_answer(stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), threads=1, speculate="ngram")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    def accepted(salt: str, name: str) -> int:
        asked = PromptRequest(prompt="Tom had a red ball", params=params, request_id=name, cache_salt=salt)
        llm.core.add(llm.frontend.input_processor(512).process(asked))
        outputs = []
        while llm.core.has_work:
            outputs += llm.core.step()
        return outputs[-1].num_accepted

    alone = accepted("a", "1")
    assert accepted("b", "2") == alone < accepted("a", "3")


def test_beams_are_not_drafted_for(stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), threads=1, speculate="ngram")
    params = SamplingParams(beam=BeamParams(3), n=2, max_tokens=40)
    answers = llm.generate("Once upon a time", params, progress=False)[0]
    assert answers.num_drafted_tokens == 0 and len(answers.outputs[0].token_ids) > 1


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_tokens_follow_the_model_s_distribution(temperature: float) -> None:
    """Chi-square of what follows each token, with drafts that are often, not always, right."""
    vocab, rng = 7, random.Random(2)
    table = torch.tensor([[rng.gauss(0, 1.5) for _ in range(vocab)] for _ in range(vocab)])
    core = drafted_core(ScriptedModel(vocab, lambda _position, token: table[token]), None, mode="ngram")
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature)
    input_processor = byte_input_processor()
    for number in range(150):
        asked = PromptRequest(prompt=[1, 2, 3], params=msgspec.structs.replace(params, seed=number))
        core.add(input_processor.process(asked))
    said: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            said.setdefault(output.request_id, [3]).extend(output.token_ids)
    assert core.stats().drafted_tokens > core.stats().accepted_tokens > 500
    for token in range(vocab):
        follower = [after for one in said.values() for before, after in pairwise(one) if before == token]
        expected = (torch.softmax(table[token].double() / temperature, 0) * len(follower)).tolist()
        seen = Counter(follower)
        value = sum((seen[i] - want) ** 2 / want for i, want in enumerate(expected))
        assert value < 35, (token, value)  # six degrees of freedom: exceeded once in 200,000 times
