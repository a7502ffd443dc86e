"""Adapters through the engine: many in one batch, loaded and unloaded while it runs, beside every other feature."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.peft_cases import CASES, OF_EXPERTS, model_folder
from tests.support.random_adapters import llama_shapes, plain_config, write_adapter
from tests.support.trained_models import GREEDY, golden_cases, num_equal_tokens
from tokenmill import LLM, Guided, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import MoeSpec
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine.adapter_room import resolve_adapters
from tokenmill.errors import TokenmillError, UnknownModel
from tokenmill.lora.sizes import adapter_size
from tokenmill.params import BeamParams
from tokenmill.planner.serving import serving_memory

TRAINED = ("dora_r8_robots", "lora_pattern_reversed", "lora_r8_upper", "rslora_r16_bang")
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES = {"q_proj": (64, 64), "v_proj": (32, 64), "down_proj": (64, 172)}
ONCE = "Once upon a time"


@pytest.fixture(scope="module")
def trained_dir(shared_dir: Path) -> Path:
    return shared_dir / "goldens" / "tiny" / "adapters"


@pytest.fixture(scope="module")
def random_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sixteen adapters of different ranks."""
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for number in range(16):
        rank = (1, 4, 8, 17)[number % 4]
        config = plain_config(r=rank, lora_alpha=rank * (1 + number), target_modules=list(SIZES))
        found[f"a{number}"] = write_adapter(root / f"a{number}", config, llama_shapes(SIZES, 5, rank))
    return found


@pytest.fixture(scope="module")
def llm(stories_dir: Path, random_dirs: dict[str, Path]) -> Iterator[LLM]:
    model = LLM(stories_dir, adapters=random_dirs, adapter_slots=16, threads=1, packed_cache=False)
    yield model
    model.close()


def tokens(llm: LLM, prompts: list[str], params: SamplingParams, adapter: list[str | None]) -> list[list[int]]:
    answers = llm.generate(prompts, params, adapter=adapter, progress=False)
    assert [answer.error for answer in answers] == [None] * len(prompts)
    return [output.token_ids for answer in answers for output in answer.outputs]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_trained_adapters_answer_as_recorded_all_in_one_batch(
    backend: str, stories_dir: Path, trained_dir: Path
) -> None:
    llm = LLM(stories_dir, backend=backend, adapters={name: trained_dir / name for name in TRAINED}, threads=1)
    asked = [(name, case) for name in TRAINED for case in golden_cases(trained_dir / name)[:6]]
    asked += [(None, case) for case in golden_cases(stories_dir.parent)[:6]]
    cases, names = [case for _, case in asked], [name for name, _ in asked]
    answers = llm.generate([case["prompt_ids"] for case in cases], GREEDY, adapter=names, progress=False)
    assert num_equal_tokens(cases, answers, 1e-3) > 1000
    llm.close()


def test_sixteen_adapters_and_the_base_together_are_each_alone(llm: LLM) -> None:
    names: list[str | None] = [None, *(f"a{number}" for number in range(16))]
    prompts = [f"{ONCE}, {number}" for number in range(17)]
    together = tokens(llm, prompts, SHORT, names)
    assert together == [tokens(llm, [p], SHORT, [n])[0] for p, n in zip(prompts, names, strict=True)]
    same = tokens(llm, [ONCE] * 17, SHORT, names)
    assert len({tuple(one) for one in same}) > 12  # adapters do change answers


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=3),
        SamplingParams(temperature=0.0, max_tokens=10, beam=BeamParams(width=3)),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=12, guided=Guided(kind="regex", text="[A-Za-z ,.]{4,30}")),
    ],
    ids=["samples", "beams", "logprobs", "guided"],
)
def test_adapters_beside_other_features_do_not_depend_on_the_batch(llm: LLM, params: SamplingParams) -> None:
    names: list[str | None] = [None, "a1", "a2", "a3"]
    together = tokens(llm, [ONCE] * 4, params, names)
    alone = [one for name in names for one in tokens(llm, [ONCE], params, [name])]
    assert together == alone


def test_answers_survive_preemption_and_few_slots(stories_dir: Path, random_dirs: dict[str, Path], llm: LLM) -> None:
    """Every request is answered as with slots and blocks for all."""
    names: list[str | None] = [f"a{number // 2 % 16}" for number in range(40)]
    prompts = [f"{ONCE} there was number {number}" for number in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = tokens(llm, prompts, params, names)
    tight = LLM(
        stories_dir, adapters=random_dirs, adapter_slots=3, num_blocks=9, max_context=96, max_running=6, threads=1
    )
    assert tokens(tight, prompts, params, names) == expected
    assert tight.core.stats().preemptions > 0
    tight.close()


def test_a_reload_under_the_same_name_never_meets_the_old_cache(
    stories_dir: Path, random_dirs: dict[str, Path], tmp_path: Path
) -> None:
    llm = LLM(stories_dir, adapter_slots=2, max_adapter_rank=32, threads=1)
    prompt = f"{ONCE} there was a little girl named Lily. She liked to play in the park with her friends."
    folder = tmp_path / "adapter"
    found = []
    for name in ("a1", "a2", "a1"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(random_dirs[name], folder)
        llm.load_adapter("mine", folder)
        answer = llm.generate(prompt, SHORT, adapter="mine", progress=False)[0]
        again = llm.generate(prompt, SHORT, adapter="mine", progress=False)[0]
        assert again.outputs[0].token_ids == answer.outputs[0].token_ids
        assert again.num_cached_tokens > 0
        found.append((answer.outputs[0].token_ids, answer.num_cached_tokens))
    assert found[0][0] != found[1][0]
    assert found[1][1] == 0  # nothing of the first one's blocks
    assert found[2][0] == found[0][0]
    assert found[2][1] > 0  # the same file is the same adapter
    base = llm.generate(prompt, SHORT, progress=False)[0]
    assert base.num_cached_tokens == 0
    llm.close()


def test_names_come_and_go(llm: LLM, random_dirs: dict[str, Path]) -> None:
    llm.load_adapter("extra", random_dirs["a5"])
    assert tokens(llm, [ONCE], SHORT, ["extra"]) == tokens(llm, [ONCE], SHORT, ["a5"])
    llm.unload_adapter("extra")
    with pytest.raises(UnknownModel, match="extra"):
        llm.generate(ONCE, SHORT, adapter="extra", progress=False)
    with pytest.raises(UnknownModel):
        llm.unload_adapter("extra")


class VllmRequest:
    lora_name = "from vllm"
    lora_int_id = 1
    lora_path = ""


def test_vllm_requests_name_adapters_too(llm: LLM, random_dirs: dict[str, Path]) -> None:
    request = VllmRequest()
    request.lora_name, request.lora_path = "other", str(random_dirs["a7"])
    answer = llm.generate(ONCE, SHORT, lora_request=request, progress=False)[0]
    assert [answer.outputs[0].token_ids] == tokens(llm, [ONCE], SHORT, ["a7"])
    llm.unload_adapter("other")


def test_an_adapter_larger_than_a_slot_is_refused_by_name(stories_dir: Path, random_dirs: dict[str, Path]) -> None:
    llm = LLM(stories_dir, adapter_slots=1, max_adapter_rank=4, threads=1)
    with pytest.raises(TokenmillError, match="rank 17"):
        llm.load_adapter("large", random_dirs["a3"])
    llm.close()
    without = LLM(stories_dir, threads=1)
    with pytest.raises(TokenmillError, match="adapter-slots"):
        without.load_adapter("a", random_dirs["a0"])
    without.close()


@pytest.mark.slow
def test_two_hundred_adapters_and_eight_slots_under_load(stories_dir: Path, tmp_path: Path) -> None:
    """Requests of all kinds that come, are aborted and end: each is answered, as with its adapter alone."""
    folders = {}
    for number in range(200):
        config = plain_config(r=2, lora_alpha=1 + number, target_modules=list(SIZES))
        folders[f"a{number}"] = write_adapter(tmp_path / f"a{number}", config, llama_shapes(SIZES, 5, 2))
    llm = LLM(stories_dir, adapters=folders, adapter_slots=8, num_blocks=60, max_running=24, threads=1)
    rng = random.Random(0)
    names: list[str | None] = [f"a{rng.randrange(200)}" if rng.random() < 0.95 else None for _ in range(1000)]
    prompts = [f"{ONCE} there was {rng.randrange(30)}" for _ in names]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=1, max_tokens=rng.randrange(1, 24), ignore_eos=True)
        for _ in names
    ]
    answers = llm.generate(prompts, params, adapter=names, progress=False)
    assert all(answer.error is None for answer in answers)
    assert [len(a.outputs[0].token_ids) for a in answers] == [p.max_tokens for p in params]
    for number in rng.sample(range(1000), 60):
        alone = llm.generate(prompts[number], params[number], adapter=names[number], progress=False)[0]
        assert alone.outputs[0].token_ids == answers[number].outputs[0].token_ids
    llm.close()


def test_slots_are_planned_as_they_are_made(stories_dir: Path, random_dirs: dict[str, Path]) -> None:
    adapter = tuple(f"{name}={path}" for name, path in random_dirs.items())
    config = EngineConfig(ModelConfig(model=str(stories_dir), adapter=adapter, adapter_slots=3))
    room = resolve_adapters(config.model, read_spec(stories_dir), 4)
    assert (room.slots, room.rank) == (3, 17)
    _, memory = serving_memory(config, stories_dir, "stories")
    _, without = serving_memory(EngineConfig(ModelConfig(model=str(stories_dir))), stories_dir, "stories")
    assert (memory.adapters, without.adapters) == (room.total_bytes, 0)
    assert room.total_bytes == 3 * room.slot_values * 4 > 0


def test_room_for_experts_is_planned_where_a_named_adapter_changes_some(shared_dir: Path, tmp_path: Path) -> None:
    """A parameter of all experts has their ranks one below the other: 4 of each."""
    title = OF_EXPERTS[0]
    spec = read_spec(model_folder(shared_dir, title))
    write_adapter(tmp_path / "all", CASES[title]["config"], CASES[title]["shapes"])
    shapes = {name: shape for name, shape in CASES[title]["shapes"].items() if ".experts." not in name}
    assert 0 < len(shapes) < len(CASES[title]["shapes"])
    write_adapter(tmp_path / "attention", CASES[title]["config"], shapes)
    assert adapter_size(tmp_path / "all", spec)[::2] == (4, 4)
    assert adapter_size(tmp_path / "attention", spec)[::2] == (4, 0)

    def values(name: str) -> int:
        config = ModelConfig(model="m", adapter=(f"a={tmp_path / name}",), adapter_slots=2)
        return resolve_adapters(config, spec, 4).slot_values

    moes = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    of_experts = sum(moe.num_experts * 3 * 16 * (spec.hidden_size + moe.expert.intermediate_size) for moe in moes)
    assert values("all") - values("attention") == of_experts > 0
