"""What `LLM` hands back: the shape that users of other engines know, folded from the stream of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.types import Event, FinishReason, Request, TokenInfo


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, event: Event) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.stop_reason = event.stop_reason
            self.cumulative_logprob = event.cumulative_logprob


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0  # guessed by speculation, all outputs together
    num_accepted_tokens: int = 0  # ... and right
    prompt_logprobs: list[TokenInfo | None] | None = None
    error: str | None = None  # this request failed; the others did not

    @property
    def finished(self) -> bool:
        return self.error is not None or all(output.finish_reason for output in self.outputs)

    def add(self, event: Event) -> None:
        self.outputs[event.index].add(event)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.usage is not None:
            self.num_cached_tokens = event.usage.cached_tokens
            self.num_drafted_tokens = event.usage.drafted_tokens
            self.num_accepted_tokens = event.usage.accepted_tokens


@dataclass
class EmbeddingOutput:
    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]


def empty_output(request: Request, prompt: str | None, num_choices: int) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index) for index in range(num_choices)],
    )
