"""The scheduler's state of a request: its sequences, their groups, and the tokens that still have to be computed.

A sequence *wants* its tokens that are neither computed nor in flight. There are no separate phases.

    tokens:  [ prompt ............................ | outputs ... | pending ]
             [ computed (in the KV cache) | in flight | wanted ........... ]

A long prompt, a prefix hit, a return from preemption and ordinary decoding differ only in the number of wanted tokens.
Steps in flight are treated as done: their tokens count as computed, and the token that one of them samples counts as
`pending`; a later step can take it as input because the device has it. If a grammar forces tokens after a sampled one,
the sample of the next step in flight is void: that step took the sampled token as input, and the forced tokens replace
its own sample. The cache holds the sequence's window: all its tokens, unless they have outgrown the context (below).
Draft tokens are computed after the wanted ones; accepted ones count as computed.

A sequence group is admitted, planned and preempted as a unit. Samples of one prompt (`n`) are independent once the
prompt is computed: each is a group of one. Beams choose their next tokens together, so they are one group. In both
cases the prompt is computed once: the leader computes all of it except the last token, then the pending forks branch
off, and each computes the last prompt token itself.

    leader:    [ prompt without its last token ][ last ][ outputs ...
    siblings:    shared blocks ─────────────────┴[ last ][ outputs ...

A sequence that has outgrown the context (`ContextShift`) keeps a window of it in the cache:

    tokens:  [ kept | dropped ................... | recent ............ ]
    window:  [ kept | recent ............ ]         at positions 0 ... context - 1

The first tokens stay because they are attention sinks (StreamingLLM); of the others the older half is dropped whenever
the window is full. The dropped tokens depend only on the number of tokens: the same tokens have the same window,
whether they were a prompt, were sampled, or are recomputed after a preemption. A new window is computed like a prompt
of its own tokens. Rotating the keys to their new positions instead would save that computation, but then their values
would depend on all earlier tokens: every return from preemption and every longer prompt would have to repeat all
shifts, and no other request could share the blocks. This way a window is an ordinary prompt for the prefix cache, for
preemption and for every kind of attention layer.
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

NOT_PLANNED = -1  # `Sequence.last_step` before its first plan


class Ending(NamedTuple):
    """Why a sequence has ended."""

    reason: FinishReason
    stop_token_id: int | None = None


class OutputMode(Protocol):
    """How sampled tokens become outputs: immediately, or held back until the best sequences are known."""

    num_logprobs: int | None  # alternatives to request from the runner for each sampled token
    holds_back: bool  # outputs are returned at the end only, with their rank as index

    def process(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        """Turn the result of a fully computed sequence into outputs; mark the sequence finished if it has ended."""
        ...


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────


class RequestState:
    """A request that is waiting or running."""

    def __init__(self, request: Request, number: int, account: TenantAccount) -> None:
        """`number`: the request's index in the order of arrival."""
        self.request = request
        self.account = account
        self.number = number
        self.continues = False  # a step may take a sampled token as input before the host has seen it
        self.groups: list[SequenceGroup] = []
        self.stop_token_ids = stop_ids(request)
        self.draws_tokens = request.pooling is None and request.max_tokens > 0
        # Pooling over all positions may use bidirectional attention, whose blocks fit no other prompt.
        self.is_shareable = request.pooling is None or request.pooling.kind == "last"
        self.output_mode: OutputMode  # set in `build_request_state`, once the sequences exist
        self.prompt_logprobs: list[TokenLogprobs] = []  # entry i belongs to prompt position i + 1
        self.wants_prompt_logprobs = request.params.prompt_logprobs is not None and len(request.prompt_token_ids) > 1
        self.num_cached_tokens = 0
        self.queue_s: float | None = None  # None: not scheduled yet
        self.expected_s: float | None = None  # estimated time to its first token; None: there is no objective
        self.device_s = 0.0  # its share of the steps' durations so far
        self.adapter_slot = 0  # valid while one of its groups runs; 0: it has no adapter

    @property
    def num_sequences(self) -> int:
        return 1 if self.request.pooling else self.request.params.num_sequences

    @property
    def may_reuse_prefix(self) -> bool:
        """Tell whether cached blocks may be used: not if every position must be computed (prompt logprobs, vectors
        pooled over positions)."""
        return self.is_shareable and not self.wants_prompt_logprobs

    @property
    def num_scored(self) -> int:
        """The number of prompt tokens that have logprobs; the first one never gets any."""
        return len(self.prompt_logprobs)

    def keep_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Append the logprobs of positions start+1 ...; those that a recomputed chunk repeats are dropped."""
        self.prompt_logprobs.extend(logprobs[self.num_scored - start :])
        self.wants_prompt_logprobs = self.num_scored < len(self.request.prompt_token_ids) - 1

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
    """Return the EOS ids (unless ignored) and the user's stop ids, without duplicates. A completed grammar always ends
    with an EOS id."""
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
        "is_gone",
        "is_running",
        "key",
        "members",
        "num_rows",
        "pending_fetch",
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
        self.pending_fetch: object | None = None  # set while blocks are fetched for it (`fetches.py`)
        self.is_gone = False
        self.is_running = False
        self.refused_room = -1  # free blocks (minus the reserve) when it was last refused
        self.waiting_since_s = 0.0  # when it reached its present priority level
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
        """Return the end position up to which a sequence may compute its window now: a leader stops where its siblings
        fork."""
        if self.pending_forks and sequence.is_whole:
            return len(sequence.window) - sequence.num_outputs - 1
        return len(sequence.window)

    def wants(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence the next step could compute."""
        if self.pending_fetch is not None:
            return 0
        return self.target(sequence) + sequence.num_pending - sequence.planned

    def collapse(self) -> None:
        """Reduce the group to one member; the others will fork from it again."""
        self.pending_forks = self.members[1:] + self.pending_forks
        self.members = self.members[:1]

    def forget(self, sequence: Sequence) -> None:
        """Remove one of several samples before they fork."""
        if sequence in self.members:
            self.members.remove(sequence)
        else:
            self.pending_forks.remove(sequence)
        if not self.members:
            self.members = [self.pending_forks.pop(0)]
        self.num_rows -= 1


# ── sequences ──────────────────────────────────────────────────────────────────────────────────────────


class Sequence:
    """The tokens of one sample or beam, how many of them are computed, and its row and block table."""

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
        self.window = self.tokens  # the tokens in the cache; a separate list once some were dropped
        self.num_dropped = 0
        self.computed = 0  # tokens of the window
        self.num_in_flight = 0  # tokens of the window after those, computed by steps in flight
        self.num_pending = 0  # tokens that those steps sample and a later step may take as input
        self.num_void_draws = 0  # samples of those steps that are discarded: forced tokens replace them
        self.last_step = NOT_PLANNED  # the id of the last plan with a row of the sequence
        self.epoch = 0  # results of steps planned in an earlier epoch are void
        self.chain = chain  # block hashes of the window
        self.table: BlockTable | None = None
        self.row = -1
        self.is_on_runner = False  # the runner has the sequence's state in the row
        self.is_finished = False
        self.has_emitted = False  # an output was emitted
        self.draft_state: DraftState | None = None  # the proposer's state
        self.num_drafted = 0  # drafts that were computed
        self.num_accepted = 0  # drafts that were accepted
        self.logprob_sum = 0.0
        self.mirostat_mu: float | None = None
        self.logprobs: list[TokenLogprobs] = []  # kept only for beams, whose outputs are held back
        self.update_window()

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def planned(self) -> int:
        """The position at which the next step starts: after the tokens that are computed or in flight."""
        return self.computed + self.num_in_flight

    @property
    def held_table(self) -> BlockTable:
        assert self.table is not None, "a running sequence has a table"
        return self.table

    def may_continue(self) -> bool:
        """Tell whether the newly sampled token can be an input before the host knows it: the device has it, it is not
        the last one, and it still fits the window."""
        state = self.state
        if not state.continues or self.num_outputs + self.num_pending + 1 >= state.request.max_tokens:
            return False
        shift = state.request.shift
        return shift is None or len(self.window) + self.num_pending < shift.context

    def void_steps(self) -> None:
        """Discard all steps in flight: continue after the computed tokens."""
        self.epoch += 1
        self.num_in_flight = self.num_pending = self.num_void_draws = 0

    def void_draws(self) -> None:
        """Discard the samples of steps in flight. The tokens that those steps compute stay valid."""
        self.num_void_draws += self.num_pending
        self.num_pending = 0

    def note_draw(self) -> None:
        """Note that the oldest sample of the steps in flight has arrived: void ones come first."""
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

    def resume(self, earlier: SequenceProgress) -> None:
        """Append the tokens that another engine has generated for the sequence."""
        for token_id in earlier.token_ids:
            self.append(token_id)
        self.mirostat_mu = earlier.mirostat_mu
        self.num_drafted, self.num_accepted = earlier.num_drafted, earlier.num_accepted
        self.update_window()

    def update_window(self) -> bool:
        """Move the window if it is not the right one any more; return True if so, which voids the computed tokens.

        While a prompt longer than the context is scored, the window is the one of the next token without a score.
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
        """Copy the window and the computed position of a sequence with the same tokens."""
        self.window = self.tokens if parent.window is parent.tokens else list(parent.window)
        self.num_dropped, self.computed, self.chain = parent.num_dropped, parent.computed, parent.chain.fork()

    # ── copies ─────────────────────────────────────────────────────────────────────────────────────────

    def row_init(self) -> RowInit:
        """Return the data with which the runner initialises the sequence's row."""
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
        """Return a copy with the same tokens; the caller sets its table and row."""
        copy = Sequence(self.state, self.index, self.chain)
        copy.tokens = list(self.tokens)
        copy.adopt_prefix(self)
        copy.logprob_sum = self.logprob_sum
        copy.logprobs = list(self.logprobs)
        return copy


def mixed_seed(seed: int, index: int) -> int:
    """Return a different seed for every sequence of a request (SplitMix64's stream), as a non-negative 63-bit
    number."""
    return mix(seed + index * GOLDEN) >> 1


def num_dropped(shift: ContextShift, num_tokens: int) -> int:
    """Return how many tokens are dropped from a sequence of `num_tokens`: the smallest multiple of `drop` after which
    the rest fits."""
    surplus = num_tokens - shift.context
    return max(0, -(-surplus // shift.drop) * shift.drop)


def window_of(shift: ContextShift, tokens: list[int], dropped: int) -> list[int]:
    """Return the window: at most `context` tokens. While a long prompt is scored window by window, it does not reach
    the last token."""
    return tokens[: shift.keep] + tokens[shift.keep + dropped : shift.context + dropped]
