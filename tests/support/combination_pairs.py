"""Runs every pair of features on the trained model of 260K parameters, and records whether it works or why it is
refused.

A pair runs alone, and again in one batch with all other pairs; both runs must give the same tokens. Then each feature
is checked against the same request without it (`combination_features.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.support.combination_features import BY_NAME, FEATURES, tokens
from tokenmill import LLM, SamplingParams
from tokenmill.config.server import ServerConfig
from tokenmill.engine.argument_checks import RequestRows
from tokenmill.engine.results import CompletionOutput, EventFold, RequestOutput, request_output
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.openai.parse import parse_completion
from tokenmill.types import Event, PromptRequest

Pair = tuple[str, ...]
CONTEXT = 128
PROMPT, LONG_PROMPT = 40, 120  # tokens; the long one leaves no room for an answer
MAX_TOKENS = 40
STEPS_BEFORE = 2  # of a request before it is preempted; few, since constrained answers are short
PAIRS: list[Pair] = list(combinations([feature.name for feature in FEATURES], 2))
STORY = "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her friends. "


@dataclass(frozen=True)
class PairVerdict:
    """The result of a pair: it works if `refusal` is None."""

    refusal: str | None = None


class TrialEngines:
    """The engines that run the trials; each is opened once."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self._alone: dict[Pair, RequestOutput] = {}
        self.open = cache(self._open)
        tokenizer = self.open().frontend.tokenizer
        assert tokenizer is not None
        self.story = tokenizer.encode(STORY * 3)

    def _open(self, **settings: Any) -> LLM:
        usual = {"prefix_caching": False, "speculate": "off"}
        return LLM(self._model, threads=1, max_context=CONTEXT, **{**usual, **settings})

    # ── one request ────────────────────────────────────────────────────────────────────────────────────

    def body(self, names: Pair, is_tried: bool = True) -> dict[str, Any]:
        """Build the request of some features. With `is_tried` the stop string is part of the answer."""
        length = LONG_PROMPT if "context shift" in names else PROMPT
        body: dict[str, Any] = {
            "model": self.open().frontend.name,
            "prompt": self.story[:length],
            "max_tokens": MAX_TOKENS,
            "seed": 7,
            "ignore_eos": not {"schema", "regex"} & set(names),
        }
        for name in names:
            body |= BY_NAME[name].body
        if "stop string" in names and is_tried:
            free = self.alone(tuple(name for name in names if name != "stop string")).outputs[0].text
            body["stop"] = [free[len(free) // 2 :][:2]]
        return body

    def request_of(self, names: Pair) -> PromptRequest:
        llm = self.open()
        call = parse_completion(self.body(names), llm.frontend.info(CONTEXT), ServerConfig())
        return call.requests[0]

    def alone(self, names: Pair) -> RequestOutput:
        """Answer a request alone in its engine, with the engine's features set up so that they take effect."""
        if names not in self._alone:
            self._alone[names] = self._run(names)
        return self._alone[names]

    def _run(self, names: Pair) -> RequestOutput:
        client_request, has_cache, is_preempted = self.request_of(names), "prefix cache" in names, "preemption" in names
        llm = self.open(
            prefix_caching=has_cache,
            speculate="ngram" if "speculation" in names else "off",
            max_running=3 if is_preempted else 8,
        )
        if has_cache or "speculation" in names:  # fills the prefix cache and the recent answers
            generate(llm, [client_request])
        return self._run_preempted(llm, client_request) if is_preempted else generate(llm, [client_request])[0]

    def _run_preempted(self, llm: LLM, client_request: PromptRequest) -> RequestOutput:
        """Answer a request that is preempted after some steps, when requests of higher priority need every row."""
        before = llm.core.stats().preemptions
        events: list[Event | TokenmillError] = []
        request = llm._submit(client_request, lambda output, arrived, is_over: events.extend(arrived))
        folds = [EventFold() for _ in range(client_request.params.n)]
        for number in range(MAX_TOKENS * 10):
            if number == STEPS_BEFORE:
                self._crowd_out(llm)
            llm._step()
            if not llm._open:
                break
        for event in events:
            assert isinstance(event, Event)
            folds[event.index].add(event)
        answer = request_output(request, None, folds)
        assert llm.core.stats().preemptions > before and answer.finished, "no request was preempted"
        return answer

    def _crowd_out(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
        for number in range(3):
            urgent = PromptRequest(prompt=self.story[number : number + 20], params=params)
            llm._submit(urgent, lambda output, arrived, is_over: None)

    def together(self, several: list[Pair]) -> list[RequestOutput]:
        """Answer all pairs in one batch, by an engine with different settings."""
        llm = self.open(prefix_caching=True, token_budget=61, max_running=24, speculate="ngram")
        return generate(llm, [self.request_of(names) for names in several])


def generate(llm: LLM, requests: list[PromptRequest]) -> list[RequestOutput]:
    """Answer requests through the engine's front, which also accepts priorities."""
    answers = llm._answer(RequestRows(requests, None, lambda one, _: one), progress=False)
    for answer in answers:
        if answer.error is not None:
            raise InvalidRequest(answer.error)
    return answers


class PairTrial:
    """The result of running a pair of features alone."""

    def __init__(self, bench: TrialEngines, names: Pair) -> None:
        self.bench, self.names = bench, names
        self.body = bench.body(names)
        self.answer = bench.alone(names)

    def has(self, name: str) -> bool:
        return name in self.names

    def without(self, name: str) -> RequestOutput:
        return self.bench.alone(tuple(other for other in self.names if other != name))

    def rescored(self, choice: CompletionOutput) -> list[float]:
        prompt = self.answer.prompt_token_ids
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, context_shift=True)
        scored = generate(self.bench.open(), [PromptRequest(prompt=prompt + choice.token_ids, params=params)])[0]
        assert scored.prompt_logprobs is not None
        return [info.logprob for info in scored.prompt_logprobs[len(prompt) :] if info is not None]


def verdict(bench: TrialEngines, names: Pair) -> PairVerdict:
    """Run a pair and return its verdict. Raises AssertionError if the pair is accepted but does not work as it
    should."""
    try:
        trial = PairTrial(bench, names)
    except InvalidRequest as error:
        return PairVerdict(error.message)
    for name in names:
        BY_NAME[name].check(trial)
    return PairVerdict()


def same_together(bench: TrialEngines, several: list[Pair]) -> None:
    for names, answer in zip(several, bench.together(several), strict=True):
        alone = bench.alone(names)
        assert tokens(answer) == tokens(alone), f"{names} answers differently in a batch with others"
        assert [choice.text for choice in answer.outputs] == [choice.text for choice in alone.outputs]
