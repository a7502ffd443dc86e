"""The types that travel between packages and between processes. Frozen, plain data, no behaviour.

    front process                                   engine process (or the same one)
    ─────────────                                   ────────────────────────────────
    ChatRequest / PromptRequest ──► InputProcessor ──► Request ──► scheduler ──► StepPlan ──► runner
    Event ◄── OutputProcessor ◄── SequenceOutput ◄──────────────── scheduler ◄── StepResult ◄──┘

Only the left side handles text: the engine process sees token ids. Everything is a msgspec struct, so it crosses a
socket without pickle. `FinishReason` uses OpenAI's values; "abort" and "error" are not shown to clients with a schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenmill.params import Guided, SamplingParams

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
BACKGROUND_PRIORITY = 1000  # lines of batches: see scheduler/budget.py
ToolKind = Literal["function", "custom"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# ── from a client to the engine ────────────────────────────────────────────────────────────────────────


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model made: `arguments` is the JSON text as it was written; for a custom tool, its raw input."""

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
    tool_call_id: str | None = None  # of a message with the role "tool": the call that it answers


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call, or a custom tool, which takes free text instead of JSON arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments; None: there are none
    strict: bool | None = None  # True: refuse a schema that can't be enforced; False: arguments are any object
    kind: ToolKind = "function"
    input_grammar: Guided | None = None  # of a custom tool: Lark or regex; None: any text


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The rule for which tools may or must be called."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: list[str] | None = None  # only these; None: all
    parallel: bool = True  # several calls in one answer


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of how a model thinks before it answers; None: as its chat template does by itself."""

    effort: Effort | None = None
    is_on: bool | None = None
    budget: int | None = None  # tokens; then the closing marker is forced
    keep_history: bool = False  # show the model what it thought in all earlier turns, not only since the last question


class TokenPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids with which an earlier turn of a conversation ended, and the rendered text that they stand for."""

    token_ids: list[int]
    num_characters: int
    digest: bytes  # SHA-256 of the text
    model: str  # the fingerprint of the model whose ids they are


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The client that a request belongs to; tenants share the engine by weight (scheduler/tenants.py)."""

    id: str = ""
    weight: float = 1.0
    max_sequences: int | None = None  # computed at a time; further ones wait


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
    continues_last: bool = False  # go on with the last message, which is the assistant's, instead of a new one
    extends: TokenPrefix | None = None  # used where the rendered conversation begins with its text
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    adapter: str | None = None  # the name of one that the model has loaded


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or token ids, to continue."""

    prompt: str | list[int]
    suffix: str | None = None  # the answer belongs between the prompt and this text
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
    """A text, or token ids, of which the client wants an embedding."""

    prompt: str | list[int]
    pooling: Pooling | None = None  # None: the mean
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    adapter: str | None = None


class ContextShift(msgspec.Struct, frozen=True):
    """How a sequence continues past the context: the first `keep` tokens stay, the oldest others go, `drop` at a
    time."""

    context: int
    keep: int
    drop: int


class TokenizedParams(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of the parameters that users write as text."""

    dry_break_ids: list[int] = []  # tokens that hold a DRY sequence breaker
    dry_breakers: list[list[int]] = []  # token sequences that form one
    stop_pieces: dict[int, bytes] = {}  # for beams: tokens that may be part of a stop string, and their bytes
    think_start_ids: list[int] = []
    think_end_ids: list[int] = []
    starts_thinking: bool = False  # the prompt ends inside a think section


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client has of one sequence already: an engine that resumes it goes on with the next token."""

    token_ids: list[int] = []
    mirostat_mu: float | None = None  # mirostat's limit after the last of them
    num_drafted: int = 0
    num_accepted: int = 0
    is_finished: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine computes it: token ids in, token ids (or a vector) out."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    max_tokens: int  # prompt + max_tokens fits the context, unless the context shifts
    seed: int  # the user's, or a random one of the input processor
    priority: int = 0  # smaller runs first; from BACKGROUND_PRIORITY on behind all that is interactive
    arrival_s: float = 0.0
    cache_salt: str = ""
    tenant: Tenant = Tenant()
    pooling: Pooling | None = None
    shift: ContextShift | None = None  # None: generation ends at the end of the context
    tokenized: TokenizedParams = TokenizedParams()
    adapter: str = ""  # the digest of one; empty: the model alone
    given: list[Given] = []  # by sequence, where another engine has begun with it; empty: it is new
    fetch_from: str = ""  # the address of another engine that may have computed some of its blocks


# ── one step ───────────────────────────────────────────────────────────────────────────────────────────


PENDING = -1  # fed in place of a token id: the token that the row draws in the step before, which only the device knows


class BlockTableUpdate(msgspec.Struct, frozen=True):
    """Entries [start, start + len(blocks)) of a row's block table in one KV group become `blocks`."""

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
    part: int = 0  # of the cache: the rank that keeps its blocks, where ranks keep those of some sequences each


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one row in one step.

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
    sample: bool = False  # the last fed token is the sequence's last: sample the next one
    num_drafts: int = 0  # how many of the last `token_ids` are drafts: sample after each, as far as they are accepted
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

    step: int = 0  # ties the result to the plan
    new_rows: list[RowInit] = []
    freed_rows: list[int] = []  # applied before new_rows
    adapter_loads: list[tuple[int, str]] = []  # (slot, digest of the adapter that it holds from this step on)
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
    """The result of one step, for every row of its plan."""

    step: int = 0
    rows: list[RowResult]
    step_s: float = 0.0


# ── from the engine to a client ────────────────────────────────────────────────────────────────────────


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence of a request. The last output of a sequence has `finish_reason`.

    There is one for every token, so fields with default values are left out of the message.
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
    error_param: str | None = None  # the parameter to blame
    retry_after_s: float = 0.0  # with an error that is over after so long
    queue_s: float = 0.0  # on the first output: time between arrival and first being scheduled
    device_s: float = 0.0  # its request's part of the time of steps so far; on the first, the last, and some
    num_drafted: int = 0  # draft tokens of this sequence that were computed so far
    num_accepted: int = 0  # ... and accepted
    mirostat_mu: float | None = None  # mirostat's limit after the last token, for an engine that resumes the sequence


class KVNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The blocks of a core that can be found in its prefix cache, by their hashes, or what has changed among them since
    the last news."""

    number: int  # one more than that of the news before; a gap means that some were lost
    is_snapshot: bool = False  # `stored` is all there is
    stored: list[bytes] = []
    gone: list[bytes] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0  # draft tokens of speculative decoding
    accepted_tokens: int = 0  # ... that were accepted
    reasoning_tokens: int = 0  # completion tokens that were thought, markers included
    device_s: float = 0.0  # its part of the time of the engine's steps, as last reported


class TokenInfo(msgspec.Struct, frozen=True):
    """A sampled or prompt token as text, with its alternatives; `raw` are its exact bytes."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int
    top: list[tuple[int, str, bytes, float]] = []  # id, text, bytes, logprob; best first


class TextPart(msgspec.Struct, frozen=True):
    """Text for the reader of the answer."""

    text: str


class ThoughtPart(msgspec.Struct, frozen=True):
    """Text that the model wrote while thinking."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The model calls a tool; calls are numbered from 0 and do not overlap."""

    index: int
    id: str
    name: str
    kind: ToolKind = "function"


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments. All fragments joined are a JSON object (the raw input of a custom tool); while they
    come, what there is so far is the beginning of valid JSON."""

    index: int
    fragment: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call is complete."""

    index: int


Part = TextPart | ThoughtPart | CallStart | CallArguments | CallEnd


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one choice for a client (always whole characters), and at the end the reason why it ended.

    `text` is what a reader sees. Where a model thinks or may call tools, `parts` has all of the content in order, text
    included; None: there is nothing but `text`.
    """

    request_id: str
    index: int = 0
    text: str = ""
    parts: list[Part] | None = None
    token_ids: list[int] = []
    logprobs: list[TokenInfo] | None = None
    prompt_logprobs: Sequence[TokenInfo | None] | None = None  # None for the first token, which has no prediction
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended it
    cumulative_logprob: float | None = None
    usage: Usage | None = None  # of the whole request so far; on its first event and on those with finish_reason
    embedding: list[float] | None = None
    queue_s: float | None = None  # on the first event of a request: how long it waited to be scheduled
