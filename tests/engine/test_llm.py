"""The offline front: lists in, lists out in order, in the shape that users of other engines know."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tokenmill import LLM, BeamParams, Guided, SamplingParams
from tokenmill.engine import offline
from tokenmill.engine.offline import Interrupted
from tokenmill.errors import InvalidConfig, InvalidRequest, ModelError
from tokenmill.types import Pooling, SequenceOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_a_list_comes_back_in_order(stories: LLM) -> None:
    prompts = ["Once upon a time", "Lily", [1, 403], "The cat"]
    answers = stories.generate(prompts, GREEDY)
    assert [answer.prompt for answer in answers] == ["Once upon a time", "Lily", None, "The cat"]
    assert answers[2].prompt_token_ids == [1, 403]
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = stories.generate(prompt, GREEDY)[0]
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids
        assert answer.finished and answer.error is None
        assert answer.outputs[0].finish_reason == "length"


def test_more_prompts_than_may_wait_are_all_answered(stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), threads=1, max_running=4)
    answers = llm.generate([[1, 400 + n % 100] for n in range(60)], SamplingParams(temperature=0, max_tokens=1))
    assert len(answers) == 60 and all(len(answer.outputs[0].token_ids) == 1 for answer in answers)


def test_n_samples_differ_and_are_reproducible(stories: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.2, seed=11, max_tokens=12)
    first, second = stories.generate(["Once upon a time"] * 2, params)
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3


def test_a_prefix_is_computed_once(stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), threads=1)
    prompt = [1, *range(300, 360)]
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 48


def test_beams_are_at_least_as_likely_as_greedy(stories: LLM) -> None:
    greedy = stories.generate("Once upon", SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True))
    beams = stories.generate("Once upon", SamplingParams(n=2, beam=BeamParams(4), max_tokens=10, ignore_eos=True))
    best, second = (output.cumulative_logprob for output in beams[0].outputs)
    alone = greedy[0].outputs[0].cumulative_logprob
    assert best is not None and second is not None and alone is not None
    assert best >= alone - 1e-4 and best >= second


def test_embeddings_are_unit_vectors_and_depend_on_the_text(stories: LLM) -> None:
    same, again, other = stories.embed(["a cat sat", "a cat sat", "the big red dog"])
    assert math.isclose(math.hypot(*same.embedding), 1.0, rel_tol=1e-5)
    assert same.embedding == again.embedding != other.embedding
    last = stories.embed("a cat sat", pooling=Pooling("last"))[0]
    assert last.embedding != same.embedding


def test_streams_join_to_the_answer_and_may_be_left(stories: LLM) -> None:
    whole = stories.generate("Once upon a time", GREEDY)[0].outputs[0].text
    assert "".join(event.text for event in stories.stream("Once upon a time", GREEDY)) == whole
    left = stories.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
    next(left)
    left.close()  # type: ignore[attr-defined]  # a generator
    assert not stories.core.has_work and stories.core.stats().kv_blocks_used == 0


def test_each_reader_gets_what_is_its_own(stories: LLM) -> None:
    """Streams may stand still while others are read, or whole lists are answered."""
    prompts = ["Once upon a time", "Lily", "The cat"]
    alone = [answer.outputs[0].text for answer in stories.generate(prompts, GREEDY)]
    streams = [stories.stream(prompt, GREEDY) for prompt in prompts[:2]]
    texts = [next(stream).text for stream in streams]
    assert stories.generate(prompts[2], GREEDY)[0].outputs[0].text == alone[2]
    assert len(stories.embed("a cat")[0].embedding) > 1
    assert [text + "".join(e.text for e in rest) for text, rest in zip(texts, streams, strict=True)] == alone[:2]
    assert not stories.core.has_work


def test_threads_take_turns(stories: LLM) -> None:
    """Whole answers and streams at once; two steps of one core at the same time would end the process."""
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [f"{name} went to the park" for name in ("Tom", "Lily", "Ben", "Anna", "Max", "Mia")]
    alone = [stories.generate(prompt, params)[0].outputs[0].text for prompt in prompts]

    def ask(number: int) -> str:
        if number % 2:
            return "".join(event.text for event in stories.stream(prompts[number], params))
        return stories.generate(prompts[number], params)[0].outputs[0].text

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(ask, range(len(prompts)))) == alone


def test_a_call_that_breaks_off_leaves_nothing_behind(stories: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest):
        stories.embed(["fine", "cat " * 5000])
    step, num_steps = stories.core.step, iter(range(3))

    def interrupted() -> list[SequenceOutput]:
        if next(num_steps, None) is None:
            raise KeyboardInterrupt
        return step()

    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as stopped:
        patched.setattr(stories.core, "step", interrupted)
        stories.generate(["Once upon a time", "Lily"], [SamplingParams(max_tokens=1), long])
    assert not stories.core.has_work
    assert isinstance(stopped.value, Interrupted)
    finished, cut_off = stopped.value.outputs
    assert finished.finished and finished.error is None and len(finished.outputs[0].token_ids) == 1
    assert cut_off.error == "interrupted before it was finished" and cut_off.number == 1
    assert stories.generate("Lily", GREEDY)[0].outputs[0].finish_reason == "length"


def test_ctrl_c_waits_for_the_end_of_a_step(
    stories: LLM, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What a step has finished is not lost, and what a step has begun is not left half done."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits deafness
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    step, num_steps = stories.core.step, iter(range(1, 1000))

    def pressed() -> list[SequenceOutput]:
        if next(num_steps) == 5:
            signal.raise_signal(signal.SIGINT)
        return step()

    params = [SamplingParams(temperature=0, max_tokens=5 if n else 100, ignore_eos=True) for n in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(stories.core, "step", pressed)
        answers = stories.generate_iter(["Lily", "Tom"], params)
        assert next(answers).number == 1
        with pytest.raises(KeyboardInterrupt):
            next(answers)
    with monkeypatch.context() as patched, pytest.raises(Interrupted) as stopped:
        num_steps = iter(range(1, 1000))
        patched.setattr(stories.core, "step", pressed)
        stories.generate(["Lily", "Tom"], params)
    assert [answer.error is None for answer in stopped.value.outputs] == [False, True]
    assert not stories.core.has_work and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_wrong_row_is_an_answer_with_its_number(stories: LLM, caplog: pytest.LogCaptureFixture) -> None:
    schema = SamplingParams(temperature=0, max_tokens=4, guided=Guided("json_schema", '{"type": "nothing"}'))
    prompts = ["fine", [], 7, "fine", "fine"]
    params = [GREEDY, GREEDY, GREEDY, schema, GREEDY]
    answers = stories.generate(prompts, params)
    assert [answer.error is None for answer in answers] == [True, False, False, False, True]
    assert [answer.number for answer in answers] == list(range(5))
    assert "got int" in (answers[2].error or "") and answers[2].outputs[0].text == ""
    assert "3 of 5 rows failed; the first is row 1" in caplog.text
    with pytest.raises(InvalidRequest, match="empty"):
        stories.generate([[]], GREEDY)
    with pytest.raises(InvalidRequest, match="prompt 1: "):
        stories.embed(["fine", 7])


def test_answers_come_as_they_end_and_rows_are_read_as_there_is_room(stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), threads=1, max_running=4)
    num_read = 0

    def rows() -> Iterator[list[int]]:
        nonlocal num_read
        for number in range(300):
            num_read += 1
            yield [1, 400 + number % 100] if number != 40 else []

    params = (SamplingParams(temperature=0, max_tokens=30 if n == 0 else 1, ignore_eos=True) for n in count())
    numbers = []
    for answer in llm.generate_iter(rows(), params):
        numbers.append(answer.number)
        assert num_read - len(numbers) <= 64 and (answer.error is None) == (answer.number != 40)
    assert sorted(numbers) == list(range(300)) and numbers[0] != 0
    assert llm.generate_iter([]) is not None and list(llm.generate_iter([])) == []
    left = llm.chat_iter([[{"role": "user", "content": "hi"}]] * 3, SamplingParams(max_tokens=50, ignore_eos=True))
    assert next(left).finished
    left.close()  # type: ignore[attr-defined]  # a generator
    assert not llm.core.has_work


def test_progress_is_a_line_every_few_seconds_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = 0.0, list[str]()
    monkeypatch.setattr(offline.time, "monotonic", lambda: now)
    with offline.progress_over(5000, enabled=True, done_before=100, write=lines.append) as report:
        assert report is not None
        for step in range(60):
            now = step * 0.2
            report(done=step * 10, failed=step // 30, new_tokens=20)
    assert lines == [
        "answered 350 of 5,000, 104 tokens/s",
        "answered 600 of 5,000, 1 failed, 102 tokens/s",
    ]
    with offline.progress_over(None, enabled=False) as off:
        assert off is None


@pytest.mark.slow
def test_a_program_over_thousands_of_rows_killed_twice(stories_dir: Path, tmp_path: Path) -> None:
    """`generate_iter` hands out every answer at once, so a program that keeps them goes on where it was."""
    target = tmp_path / "answers"
    command = [sys.executable, "-c", PROGRAM, str(stories_dir), str(target)]
    for least in (1000, 3000):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            deadline = time.monotonic() + 250
            while not target.exists() or target.read_text().count("\n") < least:
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            child.kill()
    grown = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert int(grown.stdout) < 40, f"{grown.stdout} MB more than at the beginning"
    lines = target.read_text().splitlines()
    answers = {int(line.split()[0]): line.split()[1] for line in lines}
    assert len(answers) == len(lines) == 5000 and {n for n, said in answers.items() if said == "bad"} == BAD


BAD = set(range(50, 5000, 100))
PROGRAM = """
import pathlib, sys
from tokenmill import LLM, SamplingParams

model, target = sys.argv[1], pathlib.Path(sys.argv[2])
text = target.read_text() if target.exists() else ""
whole = text[: text.rfind("\\n") + 1]
target.write_text(whole)
done = {int(line.split()[0]) for line in whole.splitlines()}
left = [number for number in range(5000) if number not in done]
rows = ([] if number % 100 == 50 else f"Once upon a time {number}" for number in left)
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
first = 0
with target.open("a", buffering=1) as file:
    for count, answer in enumerate(LLM(model, threads=1).generate_iter(rows, params, progress=False)):
        file.write(f"{left[answer.number]} {'bad' if answer.error else 'good'}\\n")
        if count == 200:
            first = rss()
print(rss() - first)
"""


def test_wrong_input_raises_before_anything_runs(stories: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling params"):
        stories.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="role"):
        stories.chat([{"content": "hi"}])
    assert not stories.core.has_work
    with pytest.raises(InvalidConfig, match="no_such_setting"):
        LLM("anything", no_such_setting=1)


def test_what_users_of_vllm_write(stories: LLM) -> None:
    ours = stories.generate("Once", GREEDY)[0].outputs[0]
    same = stories.generate("Once", sampling_params=GREEDY, use_tqdm=False)[0].outputs[0]
    assert same.token_ids == ours.token_ids
    (turn,) = stories.chat([{"role": "user", "content": "hi"}], sampling_params=GREEDY, use_tqdm=False)
    assert len(turn.outputs[0].token_ids) == 12
    with pytest.raises(InvalidRequest, match="are the same argument"):
        stories.generate("Once", GREEDY, sampling_params=GREEDY)
    with pytest.raises(InvalidRequest, match="no variable 'enable_thinking'"):
        stories.chat([{"role": "user", "content": "hi"}], GREEDY, enable_thinking=False)
    assert stories.get_tokenizer().decode(ours.token_ids).strip() == ours.text.strip()


def test_a_format_that_is_not_there_is_refused(stories_dir: Path) -> None:
    assert LLM(str(stories_dir), load_format="safetensors", threads=1).generate([[1, 2]], GREEDY)[0].finished
    with pytest.raises(InvalidConfig, match="hf is safetensors"):
        LLM(str(stories_dir), load_format="gguf", threads=1)


def test_random_weights_from_a_config_alone(stories_dir: Path, tmp_path: Path) -> None:
    config = json.loads((stories_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), load_format="dummy", threads=1)
    answer = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert len(answer.outputs[0].token_ids) == 12
    again = LLM(str(tmp_path), load_format="dummy", threads=1).generate([[1, 2, 3]], GREEDY)[0]
    assert again.outputs[0].token_ids == answer.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(ModelError, match="safetensors"):
        LLM(str(tmp_path), threads=1)


def test_public_names_are_listed_and_found() -> None:
    import tokenmill

    assert dir(tokenmill) == sorted(tokenmill.__all__) and {"LLM", "RequestOutput", "Guided"} <= set(dir(tokenmill))
    assert all(getattr(tokenmill, name) is not None for name in dir(tokenmill))
    vector = tokenmill.EmbeddingOutput("r", [1], [0.5])
    assert vector.outputs.embedding == [0.5] and vector.finished  # as vLLM's users write it
