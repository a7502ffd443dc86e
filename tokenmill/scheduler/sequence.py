"""A sequence wants tokens: those it has minus those that are computed. There are no phases.

    tokens:  [ prompt ............................ | outputs ... ]
             [ computed (in the KV cache) | wanted ............. ]

A long prompt, a prefix hit, a return from preemption and ordinary decoding differ only in how much is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.kv.prefix import HashChain
from tokenmill.kv.table import Table
from tokenmill.types import NewRow, TokenLogprobs

if TYPE_CHECKING:
    from tokenmill.scheduler.job import Gang, Job

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mixed_seed(seed: int, index: int) -> int:
    """A seed of its own for every sequence of a request (splitmix64), as a non-negative 63-bit number."""
    z = (seed + (index + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class Sequence:
    __slots__ = (
        "chain",
        "computed",
        "gang",
        "has_spoken",
        "index",
        "is_finished",
        "is_seated",
        "job",
        "logprob_sum",
        "logprobs",
        "prompt_len",
        "row",
        "seed",
        "table",
        "tokens",
    )

    def __init__(self, job: Job, index: int, chain: HashChain) -> None:
        self.job = job
        self.gang: Gang | None = None
        self.index = index
        self.seed = mixed_seed(job.request.seed, index)
        self.tokens = list(job.request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.chain = chain
        self.table: Table | None = None
        self.row = -1
        self.is_seated = False  # the runner knows the row
        self.is_finished = False
        self.has_spoken = False  # an output was emitted
        self.logprob_sum = 0.0
        self.logprobs: list[TokenLogprobs] = []  # kept only where results are held back to the end

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def held_table(self) -> Table:
        assert self.table is not None, "a running sequence has a table"
        return self.table

    def new_row(self) -> NewRow:
        request = self.job.request
        return NewRow(
            row=self.row,
            params=request.params,
            seed=self.seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.outputs,
            stop_token_ids=self.job.stop_token_ids,
            pooling=request.pooling,
        )

    def fork(self) -> Sequence:
        """A twin with the same tokens; table and row are the caller's to give."""
        twin = Sequence(self.job, self.index, self.chain.fork())
        twin.tokens = list(self.tokens)
        twin.computed = self.computed
        twin.logprob_sum = self.logprob_sum
        twin.logprobs = list(self.logprobs)
        return twin
