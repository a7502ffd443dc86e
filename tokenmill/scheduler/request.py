"""The scheduler's state of a request: its sequences, the groups they run in, and which tokens they want computed.

A sequence wants tokens: those it has minus those that are computed or being computed. There are no phases.

    tokens:  [ prompt ............................ | outputs ... | pending ]
             [ computed (in the KV cache) | in flight | wanted ........... ]

A long prompt, a prefix hit, a return from preemption and ordinary decoding differ only in how much is wanted. Steps in
flight are counted as if they were done: their tokens as computed, and the token that one of them draws as `pending`,
which a later step can feed because the device knows it. Where a grammar forces tokens behind a drawn one, what the next
step draws is void: it has fed the drawn token, and the forced ones come in place of its own draw. What is in the cache
is the sequence's window: all its tokens, unless they have outgrown the context (below). Drafts are tokens that may
follow: they are fed behind the wanted ones, and those that turn out right count as computed.

A sequence group is what is admitted, planned and preempted as one. Samples of one prompt (`n`) are independent once the
prompt is computed: each is a group of one. Beams choose their next tokens together, so they are one group. Either way
the prompt is computed once: the leader computes all of it but the last token, then the pending forks branch off, and
each computes the last prompt token itself.

    leader:    [ prompt without its last token ][ last ][ outputs ...
    siblings:    shared blocks ─────────────────┴[ last ][ outputs ...

A sequence that has outgrown the context (`ContextShift`) keeps a window of it in the cache:

    tokens:  [ kept | dropped ................... | recent ............ ]
    window:  [ kept | recent ............ ]         at positions 0 ... context - 1

The first tokens stay, since attention rests on them (StreamingLLM calls them sinks); of the others the older half goes
whenever the window is full. What has gone depends on the number of tokens alone: the same tokens have the same window
whether they came as a prompt, were drawn, or are computed again after a preemption. A new window is computed like a
prompt of its own tokens. The keys could be turned to their new positions instead, which saves that computation, but
then what they hold would depend on all that went before: every return from preemption and every longer prompt would
have to go through it again, and no other request could share it. This way a window is a prompt like any other to the
prefix cache, to preemption and to every kind of attention layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tokenmill.kv.blocks import BlockTable, HashChain
from tokenmill.sampling.rng import GOLDEN, mix
from tokenmill.scheduler.tenants import TenantAccount
from tokenmill.speculate.draft_state import DraftState
from tokenmill.types import (
    ContextShift,
    FinishReason,
    Request,
    RowInit,
    RowResult,
    SequenceOutput,
    SequenceProgress,
    TokenLogprobs,
)

NOT_PLANNED = -1  # the last step of a sequence that no plan has held yet


class Ending(NamedTuple):
    """Why a sequence is over."""

    reason: FinishReason
    stop_token_id: int | None = None


class OutputMode(Protocol):
    """The way sampled tokens become outputs: at once, or held back until the best sequences are known."""

    num_logprobs: int | None  # what the runner is asked for with each drawn token
    holds_back: bool  # outputs come at the end only, numbered by rank

    def take(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        """Turn the result of a fully computed sequence into outputs; mark the sequence finished when it is over."""
        ...


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────


class RequestState:
    """A request that is waiting or running."""

    def __init__(self, request: Request, number: int, account: TenantAccount) -> None:
        """`number`: the request's place in the order of arrival."""
        self.request = request
        self.account = account
        self.number = number
        self.continues = False  # a step may feed a token that was drawn before the host has seen it
        self.groups: list[SequenceGroup] = []
        self.stop_token_ids = stop_ids(request)
        self.draws_tokens = request.pooling is None and request.max_tokens > 0
        # Pooling over all positions may mean attention in both directions, whose blocks fit no other prompt.
        self.is_shareable = request.pooling is None or request.pooling.kind == "last"
        self.output_mode: OutputMode  # set in `build_request_state`, once the sequences exist
        self.prompt_logprobs: list[TokenLogprobs] = []  # entry i belongs to prompt position i + 1
        self.num_cached_tokens = 0
        self.queue_s: float | None = None  # None: not scheduled yet
        self.expected_s: float | None = None  # to its first token; None: nothing was promised
        self.device_s = 0.0  # its part of the steps so far
        self.adapter_slot = 0  # while one of its groups runs; 0: it has no adapter

    @property
    def num_sequences(self) -> int:
        return 1 if self.request.pooling else self.request.params.num_sequences

    @property
    def may_reuse_prefix(self) -> bool:
        """Tell whether cached blocks may stand in for computing: not where every position must be computed (prompt
        logprobs, vectors pooled over positions)."""
        return self.is_shareable and not self.wants_prompt_logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        asked = self.request.params.prompt_logprobs is not None
        return asked and self.num_scored < len(self.request.prompt_token_ids) - 1

    @property
    def num_scored(self) -> int:
        """Prompt tokens that have their logprobs; the first one never gets any."""
        return len(self.prompt_logprobs)

    def lacks_prompt_logprobs(self, end: int) -> bool:
        """Tell whether tokens before sequence position `end` predict prompt tokens that have no logprobs yet."""
        return self.wants_prompt_logprobs and end > self.num_scored

    def keep_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Append the logprobs of positions start+1 ...; what a recomputed chunk repeats is dropped."""
        self.prompt_logprobs.extend(logprobs[self.num_scored - start :])

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        assert sequence.group is not None, "every sequence of a request belongs to a group"
        return sequence.group

    def sequences(self) -> Iterator[Sequence]:
        for group in self.groups:
            yield from group.members
            yield from group.pending_forks

    def open_sequence(self, index: int) -> Sequence | None:
        return next((sequence for sequence in self.sequences() if sequence.index == index), None)

    def open_indices(self) -> list[int]:
        """Return the sample indices whose end has not been output yet."""
        if self.output_mode.holds_back:
            return list(range(self.request.params.n))
        return sorted(sequence.index for sequence in self.sequences())


def stop_ids(request: Request) -> list[int]:
    """Eos ids (unless ignored) and the user's stop ids, each once. A grammar that is over always ends with one."""
    is_ignored = request.params.ignore_eos and request.params.guided is None
    eos = [] if is_ignored else request.eos_token_ids
    return list(dict.fromkeys([*eos, *request.params.stop_token_ids]))


def ending_after(request: Request, stops: list[int], token_id: int, num_outputs: int) -> Ending | None:
    """Return the finish reason of a sequence whose `num_outputs`-th output is `token_id`: a stop id (not before
    min_tokens) or the length limit; None: it continues. Stop strings are found by the output processor."""
    grammar_is_over = request.params.guided is not None and token_id in request.eos_token_ids
    if token_id in stops and (num_outputs >= request.params.min_tokens or grammar_is_over):
        return Ending("stop", token_id)
    if num_outputs >= request.max_tokens:
        return Ending("length")
    return None


# ── groups ─────────────────────────────────────────────────────────────────────────────────────────────


class SequenceGroup:
    """Sequences of one request that are admitted, planned and preempted together."""

    __slots__ = (
        "arriving",
        "is_gone",
        "is_running",
        "key",
        "members",
        "num_rows",
        "pending_forks",
        "refused_room",
        "spare_rows",
        "state",
        "waiting_since_s",
    )

    def __init__(
        self, state: RequestState, members: list[Sequence], pending_forks: list[Sequence], num_rows: int
    ) -> None:
        self.state = state
        self.members = members
        self.pending_forks = pending_forks  # wait for members[0] to compute the prompt they share
        self.num_rows = num_rows  # needed to run at all
        self.spare_rows: list[int] = []  # held for pending forks, and for beams yet to branch
        self.key = (state.request.priority, state.number, members[0].index)
        self.arriving: object | None = None  # set while blocks are on their way to it (`fetches.py`)
        self.is_gone = False
        self.is_running = False
        self.refused_room = -1  # free blocks (less the margin) when it was last refused
        self.waiting_since_s = 0.0  # at its level
        state.groups.append(self)
        for sequence in [*members, *pending_forks]:
            sequence.group = self

    @property
    def priority(self) -> int:
        """Smaller runs first."""
        return self.key[0]

    def set_level(self, level: int) -> None:
        """Change the priority of a group that waits."""
        self.key = (level, *self.key[1:])

    @property
    def leader(self) -> Sequence:
        return self.members[0]

    def target(self, sequence: Sequence) -> int:
        """Return up to where a sequence may compute its window now: a leader stops where its siblings fork."""
        if self.pending_forks and sequence.is_whole:
            return len(sequence.window) - sequence.num_outputs - 1
        return len(sequence.window)

    def wants(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence the next step could feed."""
        if self.arriving is not None:
            return 0
        return self.target(sequence) + sequence.num_pending - sequence.planned

    def collapse(self) -> None:
        """Go back to one member: the others will fork from it again."""
        self.pending_forks = self.members[1:] + self.pending_forks
        self.members = self.members[:1]

    def forget(self, sequence: Sequence) -> None:
        """Drop one of several samples before they fork."""
        if sequence in self.members:
            self.members.remove(sequence)
        else:
            self.pending_forks.remove(sequence)
        if not self.members:
            self.members = [self.pending_forks.pop(0)]
        self.num_rows -= 1


# ── sequences ──────────────────────────────────────────────────────────────────────────────────────────


class Sequence:
    """The tokens of one sample or beam, how far they are computed, and where: its row and its block table."""

    __slots__ = (
        "chain",
        "computed",
        "draft_state",
        "epoch",
        "group",
        "has_emitted",
        "index",
        "is_finished",
        "is_on_runner",
        "last_step",
        "logprob_sum",
        "logprobs",
        "mirostat_mu",
        "num_accepted",
        "num_drafted",
        "num_dropped",
        "num_in_flight",
        "num_pending",
        "num_void_draws",
        "prompt_len",
        "row",
        "seed",
        "state",
        "table",
        "tokens",
        "window",
    )

    def __init__(self, state: RequestState, index: int, chain: HashChain) -> None:
        self.state = state
        self.group: SequenceGroup | None = None
        self.index = index
        self.seed = mixed_seed(state.request.seed, index)
        self.tokens = list(state.request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.window = self.tokens  # what is to be in the cache; a list of its own once something was dropped
        self.num_dropped = 0
        self.computed = 0  # tokens of the window
        self.num_in_flight = 0  # tokens of the window behind those, fed by steps that were not collected yet
        self.num_pending = 0  # tokens that those steps draw and a later step may feed
        self.num_void_draws = 0  # ... and that count for nothing: other tokens came in their place
        self.last_step = NOT_PLANNED  # the id of the last plan that holds the sequence
        self.epoch = 0  # what steps of an earlier epoch bring is void
        self.chain = chain  # block hashes of the window
        self.table: BlockTable | None = None
        self.row = -1
        self.is_on_runner = False  # the runner knows the row
        self.is_finished = False
        self.has_emitted = False  # an output was emitted
        self.draft_state: DraftState | None = None  # what speculation remembers of it
        self.num_drafted = 0  # drafts that were computed
        self.num_accepted = 0  # ... and right
        self.logprob_sum = 0.0
        self.mirostat_mu: float | None = None
        self.logprobs: list[TokenLogprobs] = []  # kept only where results are held back to the end
        self.update_window()

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def planned(self) -> int:
        """Return the position at which the next step begins: after the tokens that are computed or in flight."""
        return self.computed + self.num_in_flight

    @property
    def held_table(self) -> BlockTable:
        assert self.table is not None, "a running sequence has a table"
        return self.table

    def may_continue(self) -> bool:
        """Tell whether the token drawn behind all others can be fed before the host knows it: the device has it, it is
        not the last one, and it still fits the window."""
        state = self.state
        if not state.continues or self.num_outputs + self.num_pending + 1 >= state.request.max_tokens:
            return False
        shift = state.request.shift
        return shift is None or len(self.window) + self.num_pending < shift.context

    def void_steps(self) -> None:
        """Start again at what is computed: steps in flight count for nothing."""
        self.epoch += 1
        self.num_in_flight = self.num_pending = self.num_void_draws = 0

    def void_draws(self) -> None:
        """Let the draws of steps in flight count for nothing. What those steps feed stays computed."""
        self.num_void_draws += self.num_pending
        self.num_pending = 0

    def note_draw(self) -> None:
        """Count a pending draw as arrived. Draws arrive in order: void ones come first."""
        if self.num_void_draws:
            self.num_void_draws -= 1
        else:
            self.num_pending -= 1

    # ── the window ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_whole(self) -> bool:
        """Tell whether the window reaches to the last token."""
        return self.num_dropped + len(self.window) == len(self.tokens)

    @property
    def has_outgrown_window(self) -> bool:
        shift = self.state.request.shift
        return shift is not None and len(self.window) > shift.context

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.window is not self.tokens:
            self.window.append(token_id)

    def resume(self, given: SequenceProgress) -> None:
        """Take over what another engine has computed of the sequence."""
        for token_id in given.token_ids:
            self.append(token_id)
        self.mirostat_mu = given.mirostat_mu
        self.num_drafted, self.num_accepted = given.num_drafted, given.num_accepted
        self.update_window()

    def update_window(self) -> bool:
        """Move the window where it is not (or no longer) the right one; True: what was computed is void.

        While a prompt longer than the context is scored, the window is that of the next token without a score.
        """
        shift = self.state.request.shift
        if shift is None:
            return False
        num_tokens = self.state.num_scored + 1 if self.state.wants_prompt_logprobs else len(self.tokens)
        dropped = num_dropped(shift, num_tokens)
        if dropped == self.num_dropped and len(self.window) <= shift.context:
            return False
        self.window, self.num_dropped = window_of(shift, self.tokens, dropped), dropped
        self.chain = self.chain.fresh()
        return True

    def adopt_prefix(self, parent: Sequence) -> None:
        """Take over the window of a sequence with the same tokens, as far as it is computed."""
        self.window = self.tokens if parent.window is parent.tokens else list(parent.window)
        self.num_dropped, self.computed, self.chain = parent.num_dropped, parent.computed, parent.chain.fork()

    # ── copies ─────────────────────────────────────────────────────────────────────────────────────────

    def row_init(self) -> RowInit:
        """Return what the runner needs to place the sequence on a row."""
        request = self.state.request
        return RowInit(
            row=self.row,
            params=request.params,
            seed=self.seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.outputs,
            stop_token_ids=self.state.stop_token_ids,
            pooling=request.pooling,
            tokenized=request.tokenized,
            mirostat_mu=self.mirostat_mu,
            adapter_slot=self.state.adapter_slot,
            part=0 if self.table is None else self.table.part,
        )

    def fork(self) -> Sequence:
        """A copy with the same tokens; table and row are the caller's to give."""
        copy = Sequence(self.state, self.index, self.chain)
        copy.tokens = list(self.tokens)
        copy.adopt_prefix(self)
        copy.logprob_sum = self.logprob_sum
        copy.logprobs = list(self.logprobs)
        return copy


def mixed_seed(seed: int, index: int) -> int:
    """A seed of its own for every sequence of a request (SplitMix64's stream), as a non-negative 63-bit number."""
    return mix(seed + index * GOLDEN) >> 1


def num_dropped(shift: ContextShift, num_tokens: int) -> int:
    """Tokens that have gone from a sequence of `num_tokens`: as many times `drop` as it takes for the rest to fit."""
    surplus = num_tokens - shift.context
    return max(0, -(-surplus // shift.drop) * shift.drop)


def window_of(shift: ContextShift, tokens: list[int], dropped: int) -> list[int]:
    """Return at most `context` tokens; the last ones are missing while a long prompt is scored window by window."""
    return tokens[: shift.keep] + tokens[shift.keep + dropped : shift.context + dropped]
