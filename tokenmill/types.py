"""The types that are passed between packages and between processes: frozen, plain data without behaviour.

    front process                                   engine process (or the same one)
    ─────────────                                   ────────────────────────────────
    ChatRequest / PromptRequest ──► InputProcessor ──► Request ──► scheduler ──► StepPlan ──► runner
    Event ◄── OutputProcessor ◄── SequenceOutput ◄──────────────── scheduler ◄── StepResult ◄──┘

Only the left side handles text; the engine process works on token ids. Everything is a msgspec struct, so it can be
sent over a socket without pickle. `FinishReason` uses OpenAI's values; "abort" and "error" are not in OpenAI's schema
and are never sent to its clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenmill.params import Guided, SamplingParams

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
BACKGROUND_PRIORITY = 1000  # of batch jobs: see scheduler/plan_builder.py
ToolKind = Literal["function", "custom"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# ── from a client to the engine ────────────────────────────────────────────────────────────────────────


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tool call: `arguments` is the JSON text as the model wrote it; for a custom tool, its raw input."""

    id: str
    name: str
    arguments: str = "{}"
    kind: ToolKind = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, independent of the API dialect."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None  # for the role "tool": the call whose result this is


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call, or a custom tool, which takes free text instead of JSON arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments; None: there are none
    strict: bool | None = None  # True: refuse a schema that can't be enforced; False: arguments may be any object
    kind: ToolKind = "function"
    input_grammar: Guided | None = None  # of a custom tool: Lark or regex; None: any text


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The setting of which tools the model may or must call."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: list[str] | None = None  # only these; None: all
    parallel: bool = True  # allow several calls in one answer


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a model's reasoning before its answer; None: the chat template's default."""

    effort: Effort | None = None
    is_on: bool | None = None
    budget: int | None = None  # maximum tokens, after which the closing marker is forced
    keep_history: bool = False  # show the model its reasoning of all earlier turns, not only since the last question


class TokenPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a conversation up to the end of an earlier turn, and the rendered text that they encode."""

    token_ids: list[int]
    num_characters: int
    digest: bytes  # SHA-256 of the text
    model: str  # the fingerprint of the model whose ids they are


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The client that a request belongs to; tenants share the engine by weight (scheduler/tenants.py)."""

    id: str = ""
    weight: float = 1.0
    max_sequences: int | None = None  # that run at the same time; further ones wait


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to continue."""

    messages: list[Message]
    params: SamplingParams = SamplingParams()
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice()
    reasoning: Reasoning = Reasoning()
    template_args: dict[str, Any] = {}  # extra variables for the chat template
    chat_template: str | None = None  # instead of the model's own
    add_generation_prompt: bool = True
    continues_last: bool = False  # continue the last message, which is the assistant's, instead of beginning a new one
    extends: TokenPrefix | None = None  # reused if the rendered conversation begins with its text
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    adapter: str | None = None  # the name of a loaded adapter


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue, as text or token ids."""

    prompt: str | list[int]
    suffix: str | None = None  # fill in the middle: the answer is inserted between the prompt and this text
    files: list[tuple[str, str]] = []  # with a suffix: other files of the project, as (name, text)
    params: SamplingParams = SamplingParams()
    add_special_tokens: bool = True
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    adapter: str | None = None


class Pooling(msgspec.Struct, frozen=True):
    """How hidden states become one embedding vector, for requests that return a vector instead of tokens."""

    kind: Literal["mean", "last", "cls"] = "mean"
    normalize: bool = True


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or token ids, to compute an embedding of."""

    prompt: str | list[int]
    pooling: Pooling | None = None  # None: the mean
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    adapter: str | None = None


class ContextShift(msgspec.Struct, frozen=True):
    """How a sequence continues past the context: the first `keep` tokens stay, and the oldest others are dropped,
    `drop` at a time."""

    context: int
    keep: int
    drop: int


class TokenizedParams(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of those parameters that users give as text."""

    dry_break_ids: list[int] = []  # tokens that contain a DRY sequence breaker
    dry_breakers: list[list[int]] = []  # token sequences that form one
    stop_pieces: dict[int, bytes] = {}  # for beams: tokens that may be part of a stop string, and their bytes
    think_start_ids: list[int] = []
    think_end_ids: list[int] = []
    starts_thinking: bool = False  # the prompt ends inside a think section


class SequenceProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of a sequence that another engine has generated; the engine that resumes it continues after that."""

    token_ids: list[int] = []
    mirostat_mu: float | None = None  # mirostat's limit after the last of them
    num_drafted: int = 0
    num_accepted: int = 0
    is_finished: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the engine's form: token ids in, token ids (or a vector) out."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    max_tokens: int  # prompt + max_tokens fits the context, unless the context shifts
    seed: int  # the user's, or a random one from the input processor
    priority: int = 0  # smaller runs first; from BACKGROUND_PRIORITY on, after all interactive requests
    arrival_s: float = 0.0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    pooling: Pooling | None = None
    shift: ContextShift | None = None  # None: generation ends at the end of the context
    tokenized: TokenizedParams = TokenizedParams()
    adapter: str = ""  # the digest of an adapter; empty: none
    progress: list[SequenceProgress] = []  # by sequence, if another engine has started the request; empty: a new one
    fetch_from: str = ""  # the address of another engine that may have some of its KV blocks


# ── one step ───────────────────────────────────────────────────────────────────────────────────────────


PENDING = -1  # instead of an input token id: the token sampled by the previous step, which only the device knows


class BlockTableUpdate(msgspec.Struct, frozen=True):
    """Sets entries [start, start + len(blocks)) of a row's block table in one KV group to `blocks`."""

    group: int
    start: int
    blocks: list[int]


class RowInit(msgspec.Struct, frozen=True, kw_only=True):
    """The initial state of a permanent row of the runner, for a new sequence or one that returns from preemption."""

    row: int
    params: SamplingParams
    seed: int  # already mixed with the sequence's index
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # non-empty when forked or resumed
    stop_token_ids: list[int]  # eos and stop ids, which min_tokens excludes
    pooling: Pooling | None = None
    tokenized: TokenizedParams = TokenizedParams()
    mirostat_mu: float | None = None  # mirostat's limit after the last sampled token (None: none yet)
    adapter_slot: int = 0  # 0: no adapter
    part: int = 0  # the rank that stores its blocks, if each rank stores those of some sequences


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one row in one step.

    tokens of the sequence:  [0 .......... start | start .. start+len(token_ids) | .......... total]
                               in the KV cache     fed in this step                 later (a chunk)

    with drafts:             [0 .......... start | start ............ total | drafts ]
                                                   fed in this step ─────────────────

    pending:                 [0 ................... start | PENDING ]      the row's last token is sampled by a step in
                                                                           flight, and only the device knows it

    Positions are those in the cache. After a context shift, `num_dropped` tokens of the sequence are missing from it
    (see scheduler/request.py), so a token's position in the sequence is that much higher.
    """

    row: int
    start: int
    token_ids: list[int]
    table_updates: list[BlockTableUpdate] = []
    sample: bool = False  # the last fed token is the sequence's last: sample the next one
    num_drafts: int = 0  # number of drafts at the end of `token_ids`: sample after each until one is rejected
    output_index: int = 0  # number of output tokens before the sampled one (position in the random stream)
    num_logprobs: int | None = None  # for the sampled token
    num_prompt_logprobs: int | None = None  # for the prompt tokens that these positions predict
    num_dropped: int = 0

    @property
    def sequence_position(self) -> int:
        """The position of the first fed token among all tokens of the sequence."""
        return self.start + self.num_dropped


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a runner for one step. Plans are launched in order, and the next may be launched before this one
    is collected."""

    step: int = 0  # identifies the result that belongs to this plan
    new_rows: list[RowInit] = []
    freed_rows: list[int] = []  # applied before new_rows
    adapter_loads: list[tuple[int, str]] = []  # (slot, digest of the adapter in it from this step on)
    copies: list[tuple[int, int]] = []  # (from block, to block), before anything is written
    rows: list[RowPlan] = []

    @property
    def num_tokens(self) -> int:
        return sum([len(row.token_ids) for row in self.rows])


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """A token, its logprob and rank (1 = most likely), and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one row in one step."""

    row: int
    token_ids: list[int] = []  # sampled tokens (one more than accepted drafts); empty for an unfinished chunk
    logprobs: list[TokenLogprobs] | None = None  # one per sampled token, if requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions start+1 ..., if requested
    embedding: list[float] | None = None
    mirostat_mu: float | None = None  # mirostat's next limit; kept for the row's return from preemption
    error: str | None = None  # this row could not be computed (NaN logits ...)
    error_code: str | None = None  # code of the error in `errors.py`, if known


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one step, for every row of its plan."""

    step: int = 0
    rows: list[RowResult]
    step_s: float = 0.0


# ── from the engine to a client ────────────────────────────────────────────────────────────────────────


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence of a request. The last output of a sequence has `finish_reason`.

    One is sent for every token, so fields with default values are left out of the message.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # once, complete, on the first output of index 0
    cumulative_logprob: float | None = None  # on the last output, if known
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop id that ended it (never part of the text)
    num_cached_tokens: int = 0
    embedding: list[float] | None = None
    error: str | None = None  # with finish_reason "error"
    error_code: str | None = None  # code of the error in `errors.py`, if known
    error_param: str | None = None  # the parameter that caused the error
    retry_after_s: float = 0.0  # for a temporary error: retry after this time
    queue_s: float = 0.0  # on the first output: time between arrival and first being scheduled
    device_s: float = 0.0  # the request's share of step time so far; on the first, the last, and some other outputs
    num_drafted: int = 0  # draft tokens of this sequence computed so far
    num_accepted: int = 0  # ... and accepted
    mirostat_mu: float | None = None  # mirostat's limit after the last token, for an engine that resumes the sequence


class KVCacheEvents(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hashes of the blocks in a core's prefix cache, or the changes since the previous message."""

    number: int  # one more than in the previous message; a gap means that a message was lost
    is_snapshot: bool = False  # `stored` has all blocks of the cache
    stored: list[bytes] = []
    gone: list[bytes] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0  # draft tokens of speculative decoding
    accepted_tokens: int = 0  # ... that were accepted
    reasoning_tokens: int = 0  # completion tokens in think sections, markers included
    device_s: float = 0.0  # the request's share of the engine's step time, as last reported


class TokenInfo(msgspec.Struct, frozen=True):
    """A sampled or prompt token as text, with its alternatives; `raw` are its exact bytes."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int
    top: list[tuple[int, str, bytes, float]] = []  # id, text, bytes, logprob; best first


class TextPart(msgspec.Struct, frozen=True):
    """Text of the answer, in contrast to reasoning and tool calls."""

    text: str


class ThoughtPart(msgspec.Struct, frozen=True):
    """Reasoning text."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a tool call; calls are numbered from 0 and do not overlap."""

    index: int
    id: str
    name: str
    kind: ToolKind = "function"


class CallArguments(msgspec.Struct, frozen=True):
    """A fragment of a call's arguments. All fragments joined are a JSON object (the raw input of a custom tool), and
    the fragments so far are always a prefix of valid JSON."""

    index: int
    fragment: str


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a tool call."""

    index: int


Part = TextPart | ThoughtPart | CallStart | CallArguments | CallEnd


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one choice (always whole characters), and at its end the finish reason.

    `text` is the visible answer. If the model reasons or may call tools, `parts` has the whole content in order,
    including the text; None: there is only `text`.
    """

    request_id: str
    index: int = 0
    text: str = ""
    parts: list[Part] | None = None
    token_ids: list[int] = []
    logprobs: list[TokenInfo] | None = None
    prompt_logprobs: Sequence[TokenInfo | None] | None = None  # None for the first token, which has no prediction
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that was found
    cumulative_logprob: float | None = None
    usage: Usage | None = None  # of the whole request so far; on its first event and those with finish_reason
    embedding: list[float] | None = None
    queue_s: float | None = None  # on the first event of a request: how long it waited to be scheduled
