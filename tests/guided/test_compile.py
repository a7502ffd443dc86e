"""The compiler's cache and its workers: bounded, shared, patient with no one else's grammar."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest
from msgspec import structs

from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.guided import compile as compiling
from tokenmill.guided.compile import MAX_COMPILE_S, NUM_WORKERS, Compilation, Compiled, Compiler, compile_grammar
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided, SamplingParams
from tokenmill.types import Request, RowInit, RowPlan, StepPlan


def request(name: str, guided: Guided) -> Request:
    params = SamplingParams(guided=guided)
    return Request(request_id=name, prompt_token_ids=[1], params=params, max_tokens=5, seed=0)


def finished(compilation: Compilation) -> Compilation:
    wait([compilation.future], timeout=10)
    return compilation


def choice(number: int) -> Guided:
    return Guided.choice([f"word {number}", "x" * 2000])


def test_the_cache_is_bounded_by_bytes_and_forgets_the_oldest(vocabulary: Vocabulary) -> None:
    compiler = Compiler(lambda: vocabulary, cache_bytes=1 << 20)
    for number in range(12):
        compiler.finish(choice(number), finished(compiler.start(choice(number))))
        assert compiler.cached_bytes <= 1 << 20
    assert compiler.known(choice(0)) is None
    assert compiler.known(choice(11)) is not None


def test_one_compilation_serves_all_who_ask_meanwhile(vocabulary: Vocabulary) -> None:
    gate = threading.Event()

    def load() -> Vocabulary:
        gate.wait(10)
        return vocabulary

    compiler = Compiler(load)
    first, second, other = compiler.start(choice(1)), compiler.start(choice(1)), compiler.start(choice(2))
    assert first is second and other is not first
    gate.set()
    assert compiler.finish(choice(1), finished(first)) is compiler.known(choice(1))


def test_tenants_take_turns_and_share_no_grammars(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that another tenant has compiled would be ready sooner, which tells that it was used."""
    gate, compiled = threading.Event(), list[str]()

    def of(owner: str, number: int) -> Guided:
        return structs.replace(choice(number), owner=owner)

    def load() -> Vocabulary:
        gate.wait(10)
        return vocabulary

    def note(guided: Guided, vocabulary: Vocabulary) -> Compiled:
        compiled.extend([guided.owner] if guided.owner else [])  # not those of an earlier test
        return compile_grammar(guided, vocabulary)

    monkeypatch.setattr(compiling, "NUM_WORKERS", 1)
    monkeypatch.setattr(compiling, "compile_grammar", note)
    compiler = Compiler(load, cache_bytes=1 << 20)
    flood = [of("flood", number) for number in range(10)]
    started = {guided: compiler.start(guided) for guided in [*flood, of("polite", 1), of("third", 1), of("polite", 2)]}
    gate.set()
    results = {guided: compiler.finish(guided, finished(compilation)) for guided, compilation in started.items()}
    assert compiled[:6] == ["flood", "flood", "polite", "third", "flood", "polite"]
    assert results[of("polite", 1)] is not results[of("flood", 1)] is not results[of("third", 1)]
    assert compiler.usable(of("fourth", 1)) is None
    del results, started
    known = [owner for owner in ("flood", "polite", "third") if compiler.known(of(owner, 1)) is not None]
    assert known == ["polite", "third"], "who has most of the cache loses its oldest"


def test_a_compilation_that_takes_too_long_is_refused(vocabulary: Vocabulary) -> None:
    now = [0.0]
    compilation = Compilation(Compiler(lambda: vocabulary).start(choice(1)).future.__class__(), lambda: now[0])
    assert not compilation.is_done
    compilation.started_s.append(0.0)
    now[0] = MAX_COMPILE_S + 0.1
    assert compilation.is_done
    with pytest.raises(InvalidRequest, match="to compile"):
        compilation.result()


def test_a_grammar_stays_while_its_request_is_open(vocabulary: Vocabulary) -> None:
    grammars = Grammars(Compiler(lambda: vocabulary, cache_bytes=1), 4, 258)
    grammars.prepare(request("a", choice(1)))
    assert grammars.is_ready(request("a", choice(1)))
    grammars.prepare(request("b", choice(2)))  # pushes the first one out of the cache
    new = RowInit(
        row=0,
        params=SamplingParams(guided=choice(1)),
        seed=0,
        prompt_token_ids=[1],
        output_token_ids=[],
        stop_token_ids=[],
    )
    plan = StepPlan(new_rows=[new], rows=[RowPlan(row=0, start=0, token_ids=[1], sample=True)])
    assert grammars.note_plan(plan)
    masks = grammars.masks(plan)
    assert masks.bits([0]).any()
    assert not grammars.note_plan(StepPlan(freed_rows=[0], rows=[]))
    grammars.release(lambda request_id: False)
    grammars.prepare(request("b", choice(2)))
    assert not grammars.is_ready(request("c", choice(1)))


def test_what_nobody_waits_for_any_more_is_not_compiled(vocabulary: Vocabulary) -> None:
    gate, loaded = threading.Event(), threading.Semaphore(0)

    def load() -> Vocabulary:
        loaded.release()
        gate.wait(10)
        return vocabulary

    compiler = Compiler(load)
    grammars = Grammars(compiler, 4, 258)
    for number in range(NUM_WORKERS):  # keep the workers busy
        grammars.start_compiling(request(f"busy {number}", choice(number)))
    loaded.acquire(timeout=10)
    for name in ("left", "stayed"):
        grammars.start_compiling(request(name, choice(8)))
    grammars.start_compiling(request("gone", choice(9)))
    shared, gone = compiler.start(choice(8)), compiler.start(choice(9))
    for name in ("left", "gone"):
        grammars.forget(name)
    gate.set()
    while grammars.num_waiting:
        grammars.wait(0.05)
        assert all(error is None for _, error in grammars.pop_compiled())
    assert shared.future.done() and not gone.future.done()
    assert compiler.start(choice(9)) is not gone


def test_waiting_requests_settle_one_by_one(vocabulary: Vocabulary) -> None:
    grammars = Grammars(Compiler(lambda: vocabulary), 4, 258)
    for name, guided in {"good": choice(1), "bad": Guided("regex", "(")}.items():
        grammars.start_compiling(request(name, guided))
    grammars.start_compiling(request("gone", choice(3)))
    grammars.forget("gone")
    outcomes: dict[str, InvalidRequest | None] = {}
    began = time.monotonic()
    while grammars.num_waiting and time.monotonic() - began < 60:
        grammars.wait(0.05)
        outcomes |= {settled.request_id: error for settled, error in grammars.pop_compiled()}
    assert set(outcomes) == {"good", "bad"}
    assert outcomes["good"] is None and isinstance(outcomes["bad"], InvalidRequest)


def test_no_vocabulary_is_the_request_s_error() -> None:
    def load() -> Vocabulary:
        raise RuntimeError("the tokenizer is gone")

    grammars = Grammars(Compiler(load), 4, 258)
    with pytest.raises(InvalidRequest, match="the tokenizer is gone"):
        grammars.prepare(request("a", choice(1)))


def test_a_schema_of_hundreds_of_kilobytes_compiles(vocabulary: Vocabulary) -> None:
    words = [f"a word that is quite long, number {number}" for number in range(8000)]
    compiled = compile_grammar(Guided.schema({"type": "array", "items": {"enum": words}}), vocabulary)
    assert compiled.matcher.advance(f'["{words[7999]}"]'.encode()) and compiled.matcher.is_complete


def test_only_the_work_of_the_grammar_itself_counts(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the vocabulary nor a machine that is busy with others makes a grammar late."""
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 0.3)
    real = compiling.compile_grammar

    def load() -> Vocabulary:
        time.sleep(0.5)
        return vocabulary

    def compile_slowly(guided: Guided, vocabulary: Vocabulary) -> Compiled:
        time.sleep(0.5)
        return real(guided, vocabulary)

    monkeypatch.setattr(compiling, "compile_grammar", compile_slowly)
    compiler = Compiler(load)
    compilation = compiler.start(choice(1))
    while not compilation.future.done():
        assert not compilation.is_late
        time.sleep(0.02)
    compiler.finish(choice(1), compilation)


def test_the_vocabulary_can_be_loaded_before_it_is_needed(vocabulary: Vocabulary) -> None:
    num_loads = 0

    def load() -> Vocabulary:
        nonlocal num_loads
        num_loads += 1
        return vocabulary

    compiler = Compiler(load)
    compiler.load_vocabulary()
    compiler.finish(choice(1), finished(compiler.start(choice(1))))
    compiler.load_vocabulary()
    assert num_loads == 1


def test_who_waits_too_long_for_a_worker_is_told_to_come_back(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_WAIT_S", 0.1)
    gate = threading.Event()

    def load() -> Vocabulary:
        gate.wait(10)
        return vocabulary

    compiler = Compiler(load)
    compilation = compiler.start(choice(1))
    time.sleep(0.15)
    assert compilation.is_done
    with pytest.raises(Overloaded):
        compiler.finish(choice(1), compilation)
    gate.set()
