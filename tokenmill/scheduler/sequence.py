"""A sequence wants tokens: those it has minus those that are computed. There are no phases.

    tokens:  [ prompt ............................ | outputs ... ]
             [ computed (in the KV cache) | wanted ............. ]

A long prompt, a prefix hit, a return from preemption and ordinary decoding differ only in how much is wanted. What is
in the cache is the sequence's window: all its tokens, unless they have outgrown the context (see `window.py`). Drafts
are tokens that may follow: they are fed behind the wanted ones, and those that turn out right count as computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.kv.blocks import BlockTable, HashChain
from tokenmill.sampling.rng import GOLDEN, mix
from tokenmill.scheduler.window import num_dropped, window_of
from tokenmill.speculate.draft_state import DraftState
from tokenmill.types import RowInit, TokenLogprobs

if TYPE_CHECKING:
    from tokenmill.scheduler.request_state import RequestState, SequenceGroup


def mixed_seed(seed: int, index: int) -> int:
    """A seed of its own for every sequence of a request (SplitMix64's stream), as a non-negative 63-bit number."""
    return mix(seed + index * GOLDEN) >> 1


class Sequence:
    __slots__ = (
        "chain",
        "computed",
        "group",
        "has_emitted",
        "index",
        "is_finished",
        "is_on_runner",
        "logprob_sum",
        "logprobs",
        "mirostat_mu",
        "num_accepted",
        "num_drafted",
        "num_dropped",
        "prompt_len",
        "row",
        "seed",
        "state",
        "table",
        "tokens",
        "trail",
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
        self.computed = 0  # of the window
        self.chain = chain  # of the window
        self.table: BlockTable | None = None
        self.row = -1
        self.is_on_runner = False  # the runner knows the row
        self.is_finished = False
        self.has_emitted = False  # an output was emitted
        self.trail: DraftState | None = None  # what speculation remembers of it
        self.num_drafted = 0  # guesses that were computed
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
    def held_table(self) -> BlockTable:
        assert self.table is not None, "a running sequence has a table"
        return self.table

    # ── the window ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_whole(self) -> bool:
        """The window reaches to the last token."""
        return self.num_dropped + len(self.window) == len(self.tokens)

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.window is not self.tokens:
            self.window.append(token_id)

    def update_window(self) -> bool:
        """Cuts another window where this one is not (or no longer) the right one; True: what was computed is void.

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

    def join(self, parent: Sequence) -> None:
        """Takes over the window of a sequence with the same tokens, as far as it is computed."""
        self.window = self.tokens if parent.window is parent.tokens else list(parent.window)
        self.num_dropped, self.computed, self.chain = parent.num_dropped, parent.computed, parent.chain.fork()

    # ── its likes ──────────────────────────────────────────────────────────────────────────────────────

    def new_row(self) -> RowInit:
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
        )

    def fork(self) -> Sequence:
        """A twin with the same tokens; table and row are the caller's to give."""
        twin = Sequence(self.state, self.index, self.chain)
        twin.tokens = list(self.tokens)
        twin.join(self)
        twin.logprob_sum = self.logprob_sum
        twin.logprobs = list(self.logprobs)
        return twin
