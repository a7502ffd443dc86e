"""The types that travel between packages and between processes. Frozen, plain data, no behaviour.

    front process                                   engine process (or the same one)
    ─────────────                                   ────────────────────────────────
    ChatRequest / PromptRequest ──► InputProcessor ──► Request ──► scheduler ──► StepPlan ──► runner
    Event ◄── OutputProcessor ◄── SequenceOutput ◄──────────────── scheduler ◄── StepResult ◄──┘

Text lives on the left only: the engine process sees token ids. Everything is a msgspec struct, so it crosses
a socket without pickle. `FinishReason` has OpenAI's words; "abort" and "error" never reach a typed client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenmill.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


# ── from a client to the engine ────────────────────────────────────────────────────────────────────────


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, already free of any dialect."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[Message]
    params: SamplingParams = SamplingParams()
    tools: list[dict[str, Any]] = []
    template_args: dict[str, Any] = {}  # extra variables for the chat template
    add_generation_prompt: bool = True
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[int]
    params: SamplingParams = SamplingParams()
    add_special_tokens: bool = True
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""


class Pooling(msgspec.Struct, frozen=True):
    """Asks for one vector instead of tokens."""

    kind: Literal["mean", "last", "cls"] = "mean"
    normalize: bool = True


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[int]
    pooling: Pooling | None = None  # None: the mean
    request_id: str = ""
    priority: int = 0


class ContextShift(msgspec.Struct, frozen=True):
    """How a sequence goes on past the context: its first `keep` tokens stay, the oldest others go, `drop` at a time."""

    context: int
    keep: int
    drop: int


class TokenizedParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that users write as text, as the token ids that the core needs."""

    dry_break_ids: list[int] = []  # tokens that hold a DRY sequence breaker
    dry_breakers: list[list[int]] = []  # tokens that spell one together
    stop_pieces: dict[int, bytes] = {}  # for beams: tokens that a stop string may be spelled with, and their bytes
    think_start_ids: list[int] = []
    think_end_ids: list[int] = []
    starts_thinking: bool = False  # the prompt ends inside a think section


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine computes: token ids in, token ids (or a vector) out."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    max_tokens: int  # settled: never None; prompt + max_tokens fits the context, or the context shifts
    seed: int  # settled: the user's, or drawn by the input processor
    priority: int = 0  # smaller runs first
    arrival_s: float = 0.0
    cache_salt: str = ""
    pooling: Pooling | None = None
    shift: ContextShift | None = None  # None: the context is the end
    tokenized: TokenizedParams = TokenizedParams()


# ── one step ───────────────────────────────────────────────────────────────────────────────────────────


PENDING = -1  # fed in place of a token id: the token that the row draws in the step before, which only the device knows


class BlockTableUpdate(msgspec.Struct, frozen=True):
    """Entries [start, start + len(blocks)) of a row's block table in one KV group become `blocks`."""

    group: int
    start: int
    blocks: list[int]


class RowInit(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a permanent row in the runner (also on return from preemption)."""

    row: int
    params: SamplingParams
    seed: int  # already mixed with the sequence's index
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # non-empty when forked or resumed
    stop_token_ids: list[int]  # what min_tokens must hold back (eos and stop ids)
    pooling: Pooling | None = None
    tokenized: TokenizedParams = TokenizedParams()
    mirostat_mu: float | None = None  # what the row's last draw left (None: it has drawn nothing yet)


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one row computes in one step.

    tokens of the sequence:  [0 .......... start | start .. start+len(token_ids) | .......... total]
                               in the KV cache     fed in this step                 later (a chunk)

    with drafts:             [0 .......... start | start ............ total | drafts ]
                                                   fed in this step ─────────────────

    pending:                 [0 ................... start | PENDING ]      the row's last token is drawn by a step in
                                                                           flight, and the device knows it

    Positions are those in the cache. Where the context has shifted, `num_dropped` tokens of the sequence are missing
    from it (see scheduler/request.py), so a fed token's position in the sequence is that much higher.
    """

    row: int
    start: int
    token_ids: list[int]
    table_updates: list[BlockTableUpdate] = []
    sample: bool = False  # the last fed token is the sequence's last: draw the next one
    num_drafts: int = 0  # the last so many of `token_ids` are drafts: draw after each, as far as they were right
    output_index: int = 0  # how many output tokens precede the one drawn (position in the seed's stream)
    num_logprobs: int | None = None  # for the drawn token
    num_prompt_logprobs: int | None = None  # for the prompt tokens that these positions predict
    num_dropped: int = 0

    @property
    def sequence_position(self) -> int:
        """The position of the first fed token among all tokens of the sequence."""
        return self.start + self.num_dropped


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a runner needs for one step. Plans are launched in order, and the next may be launched before this one
    is collected."""

    step: int = 0  # ties the result to the plan
    new_rows: list[RowInit] = []
    freed_rows: list[int] = []  # applied before new_rows
    copies: list[tuple[int, int]] = []  # (from block, to block), before anything is written
    rows: list[RowPlan] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """A token, its logprob and rank (1 = most likely), and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    row: int
    token_ids: list[int] = []  # drawn tokens (one more than drafts were right); empty for an unfinished chunk
    logprobs: list[TokenLogprobs] | None = None  # one per drawn token, where asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions start+1 ..., where asked for
    embedding: list[float] | None = None
    mirostat_mu: float | None = None  # what the next draw goes by; kept for the row's return from preemption
    error: str | None = None  # this row could not be computed (NaN logits ...)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step brought, for every row of its plan."""

    step: int = 0
    rows: list[RowResult]
    step_s: float = 0.0


# ── from the engine to a client ────────────────────────────────────────────────────────────────────────


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step brought to one sequence of a request. The last one of a sequence has `finish_reason`. There is one
    for every token, so what has not changed from its default does not travel."""

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # once, complete, on the first output of index 0
    cumulative_logprob: float | None = None  # on the last output where known
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop id that ended it (never part of the text)
    num_cached_tokens: int = 0
    embedding: list[float] | None = None
    error: str | None = None  # with finish_reason "error"
    error_code: str | None = None  # which error of `errors.py` it was, where that is known
    queue_s: float = 0.0  # on the first output: time between arrival and first being scheduled
    num_drafted: int = 0  # tokens of this sequence that were guessed and computed so far
    num_accepted: int = 0  # ... of which so many were right


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0  # guessed by speculation
    accepted_tokens: int = 0  # ... and right


class TokenInfo(msgspec.Struct, frozen=True):
    """A drawn or prompt token as text, with its alternatives; `raw` are its exact bytes."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int
    top: list[tuple[int, str, bytes, float]] = []  # id, text, bytes, logprob; best first


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What a client sees of one choice: new text (never half a character), and at the end why it ended."""

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenInfo] | None = None
    prompt_logprobs: Sequence[TokenInfo | None] | None = None  # None for the first token, which nothing predicts
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended it
    cumulative_logprob: float | None = None
    usage: Usage | None = None  # of the whole request so far; always on an event with finish_reason
    embedding: list[float] | None = None
    queue_s: float | None = None  # on the first event of a request: how long it waited to be scheduled
