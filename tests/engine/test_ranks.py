"""A model on several ranks, through the whole engine: the same answers as on one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.random_adapters import llama_shapes, plain_config, write_adapter
from tokenmill import LLM, AsyncEngine, SamplingParams
from tokenmill.config.by_name import engine_config
from tokenmill.errors import InvalidConfig, PeerDied
from tokenmill.ops.cpu import is_available
from tokenmill.params import Guided
from tokenmill.types import PromptRequest

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 120, "max_context": 128}
PROMPTS = ["Once upon a time", "One day, a girl", "The sun", "Tom and his dog went to the park to"]
MATRICES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64),
            "gate_proj": (172, 64), "up_proj": (172, 64), "down_proj": (64, 172)}  # fmt: skip
PARAMS = (
    SamplingParams(max_tokens=10, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=3, n=2),
    SamplingParams(max_tokens=8, temperature=0.7, repetition_penalty=1.3, prompt_logprobs=1, seed=5),
    SamplingParams(max_tokens=12, temperature=0.0, guided=Guided("regex", r"[a-z ]+\.")),
)


def said(llm: LLM) -> str:
    """A digest of all ids and logprobs."""
    digest = hashlib.sha256()
    for params in PARAMS:
        for output in llm.generate(PROMPTS, params, progress=False):
            digest.update(repr(output.prompt_logprobs).encode())
            for answer in output.outputs:
                digest.update(repr((list(answer.token_ids), answer.logprobs, answer.cumulative_logprob)).encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def expected(stories_dir: Path) -> str:
    return said(LLM(str(stories_dir), **SETTINGS))


@pytest.mark.parametrize(
    "ranks",
    [{"tensor_parallel_size": 2}, {"tp": 3}, {"tp": 4}, {"pipeline_parallel_size": 2}, {"pp": 3, "lanes": 5},
     {"pp": 2, "tp": 2}, {"pp": 2, "lanes": 1}, {"tp": 2, "dp_attention": True},
     {"tp": 4, "dp_attention": True}, {"tp": 2, "pp": 2, "dp_attention": True}],
    ids=str,
)  # fmt: skip
def test_ranks_in_threads_say_what_one_rank_says(stories_dir: Path, expected: str, ranks: dict[str, Any]) -> None:
    assert said(LLM(str(stories_dir), link="threads", **ranks, **SETTINGS)) == expected


def test_ranks_that_attend_for_some_sequences_each_have_room_for_more(stories_dir: Path) -> None:
    """Each rank keeps a few contexts only, and sequences make way for others of the same rank."""
    prompts = [f"{prompt} {number}" for number in range(6) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=11, n=2, ignore_eos=True)
    answers = []
    for ranks in ({"num_blocks": 400}, {"num_blocks": 16, "tp": 2, "dp_attention": True, "link": "threads"}):
        llm = LLM(str(stories_dir), **{**SETTINGS, **ranks})
        answers.append([[list(one.token_ids) for one in answer.outputs]
                        for answer in llm.generate(prompts, params, progress=False)])  # fmt: skip
    assert answers[0] == answers[1]
    assert llm.core.info.num_blocks == 31


def test_a_sequence_past_its_context_may_go_on_with_another_rank(stories_dir: Path) -> None:
    """The window of a shifted context moves, and its blocks may then belong to another part of the cache."""
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=2, ignore_eos=True)
    settings = {**SETTINGS, "max_context": 96, "context_shift": True}
    answers = []
    for ranks in ({}, {"num_blocks": 20, "tp": 2, "dp_attention": True, "link": "threads"}):
        llm = LLM(str(stories_dir), **{**settings, **ranks})
        found = llm.generate(PROMPTS * 2, params, progress=False)
        answers.append([list(one.outputs[0].token_ids) for one in found])
    assert answers[0] == answers[1]


def test_torch_ranks_say_what_one_rank_says(stories_dir: Path) -> None:
    """Only ids are compared: the last bits of a library's product may depend on its number of columns."""
    settings = {**SETTINGS, "backend": "reference"}
    several = {"tp": 2, "link": "gloo"}, {"pp": 2, "tp": 2, "link": "threads"}
    models = [LLM(str(stories_dir), **settings), *(LLM(str(stories_dir), **ranks, **settings) for ranks in several)]
    said = [[one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS[0], progress=False)] for llm in models]
    assert said[0] == said[1] == said[2]


@pytest.fixture(scope="module")
def adapters(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained ones, one with gains of rows among them, and one that changes every matrix, embedding and head too."""
    trained = shared_dir / "goldens" / "tiny" / "adapters"
    shapes = llama_shapes(MATRICES, 5, 4)
    model = "base_model.model"
    shapes |= {f"{model}.model.embed_tokens.lora_embedding_A": [4, 512], f"{model}.lm_head.lora_A.weight": [4, 64]}
    shapes |= {f"{model}.model.embed_tokens.lora_embedding_B": [64, 4], f"{model}.lm_head.lora_B.weight": [512, 4]}
    config = plain_config(target_modules=[*MATRICES, "embed_tokens", "lm_head"])
    every = write_adapter(tmp_path_factory.mktemp("every"), config, shapes)
    return {"dora": trained / "dora_r8_robots", "pattern": trained / "lora_pattern_reversed", "every": every}


def adapted(llm: LLM, adapters: dict[str, Path]) -> list[Any]:
    """Ids and logprobs of the model itself and of each adapter, all in one batch."""
    names = [None, *adapters]
    found = [
        llm.generate(["Once upon a time"] * len(names), params, adapter=names, progress=False) for params in PARAMS[:3]
    ]
    return [
        (
            answer.prompt_logprobs,
            [(list(one.token_ids), one.logprobs, one.cumulative_logprob) for one in answer.outputs],
        )
        for answers in found
        for answer in answers
    ]


@pytest.mark.parametrize(
    "ranks",
    [{"tp": 2}, {"tp": 3}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp_attention": True}, {"tp": 2, "link": "shared"}],
    ids=str,
)
def test_adapters_are_cut_like_their_matrices(
    stories_dir: Path, adapters: dict[str, Path], ranks: dict[str, Any]
) -> None:
    settings = {**SETTINGS, "adapters": adapters, "adapter_slots": 2}  # fewer slots than adapters: they are exchanged
    alone = adapted(LLM(str(stories_dir), **settings), adapters)
    assert adapted(LLM(str(stories_dir), **{"link": "threads", **ranks}, **settings), adapters) == alone
    assert len({repr(one) for one in alone[: 1 + len(adapters)]}) == 1 + len(adapters), "each adapter changes answers"


def test_adapters_are_cut_where_torch_multiplies(stories_dir: Path, adapters: dict[str, Path]) -> None:
    """Only ids are compared, as above; what GPUs have of an adapter is cut by the same code."""
    settings = {**SETTINGS, "adapters": adapters, "adapter_slots": 2, "backend": "reference"}
    several = {"tp": 3, "link": "threads"}, {"tp": 2, "pp": 2, "link": "threads"}
    models = [LLM(str(stories_dir), **settings), *(LLM(str(stories_dir), **ranks, **settings) for ranks in several)]
    names = [None, *adapters]
    said = [
        [one.outputs[0].token_ids for one in llm.generate(["Once upon a time"] * 4, PARAMS[0], adapter=names)]
        for llm in models
    ]
    assert said[0] == said[1] == said[2]
    assert len({tuple(tokens) for tokens in said[0]}) == 4, "each adapter changes answers"


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def rank_processes() -> list[int]:
    """The processes of ranks 1 and up."""
    return [pid for pid in children_of(os.getpid()) if name_of(pid).startswith("rank-")]


def test_a_core_copies_itself_for_its_ranks(stories_dir: Path) -> None:
    """Forked ranks share the loaded libraries of their parent, none of its sockets, and end with it."""
    config = engine_config(str(stories_dir), {**SETTINGS, "tp": 2})
    params = SamplingParams(max_tokens=10, temperature=0.0)
    request = PromptRequest(prompt=PROMPTS[0], params=params)

    async def asked() -> tuple[list[int], int]:
        engine = await AsyncEngine.start(config)
        try:
            ranks = [
                pid
                for core in children_of(os.getpid())
                for pid in children_of(core)
                if name_of(pid).startswith("rank-")
            ]
            (rank,) = ranks
            assert b"core_main" in Path(f"/proc/{rank}/cmdline").read_bytes()
            sockets = [os.readlink(one) for one in Path(f"/proc/{rank}/fd").iterdir()]
            assert sum(one.startswith("socket:") for one in sockets) == 1, "the one to rank 0"
            return [token async for event in engine.submit(request) for token in event.token_ids], rank
        finally:
            await engine.close()

    tokens, rank = asyncio.run(asyncio.wait_for(asked(), 120))
    expected = LLM(str(stories_dir), **SETTINGS).generate(PROMPTS[:1], params, progress=False)
    assert tokens == list(expected[0].outputs[0].token_ids)
    until(lambda: not Path(f"/proc/{rank}").exists())


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_in_processes_say_what_one_rank_says_and_end_with_their_model(
    stories_dir: Path, expected: str, ranks: dict[str, Any]
) -> None:
    llm = LLM(str(stories_dir), **ranks, **SETTINGS)
    (child,) = rank_processes()
    assert said(llm) == expected
    os.kill(child, signal.SIGKILL)
    with pytest.raises(PeerDied):
        llm.generate(PROMPTS, PARAMS[0], progress=False)
    until(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.parametrize(
    "settings",
    [{"link": "gloo"}, {"tp": 1, "link": "threads"},
     {"tp": 100}, {"device": "cuda"}, {"lanes": 2}, {"pp": 6}, {"pp": 40},
     {"pp": 2, "speculate": "ngram"}, {"tp": 1, "dp_attention": True}, {"dp_attention": True, "backend": "reference"}],
)  # fmt: skip
def test_what_ranks_cannot_do_yet_is_refused_by_name(stories_dir: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        LLM(str(stories_dir), **{**SETTINGS, "tp": 2, **settings})
