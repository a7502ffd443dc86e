"""The grammars of an engine: requests that wait for a compilation, and the rows of the runner that follow a grammar.

    start_compiling(request) ──► pop_compiled()  a request waits for its grammar; others are not delayed
    note_plan(plan) ──► masks(plan) ──► advance(plan, result)        one step: new and freed rows; the allowed tokens;
                                                                     then the sampled and the forced ones

While no request uses a grammar (`are_in_use`), the engine calls none of these.

Forced tokens are not sampled: if a grammar allows only one continuation, that is appended to the sampled token, and the
next step computes all of it as a chunk. A row with logprobs (or of a beam) samples the same tokens one by one, each as
the only allowed one, so that logprobs change no token.

A step may be launched before the previous one is collected; its masks are computed after that. If tokens were forced
meanwhile, the token that such a step samples for the row is discarded, because its output index no longer matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

import msgspec

from tokenmill.errors import TokenmillError
from tokenmill.guided.compile import Compilation, Compiled, Compiler
from tokenmill.guided.masks import MaskTable, StepMasks
from tokenmill.guided.matcher import RowGrammar, excluded_tokens
from tokenmill.types import Request, RowInit, RowPlan, RowResult, StepPlan, StepResult


class Grammars:
    """Grammars of waiting and running requests."""

    def __init__(self, compiler: Compiler, num_rows: int, vocab_size: int) -> None:
        self._compiler = compiler
        self._table = MaskTable(num_rows, vocab_size)
        self._rows: dict[int, RowGrammar] = {}
        self._waiting: dict[str, tuple[Request, Compilation]] = {}
        self._in_use: dict[str, Compiled] = {}  # by request id: kept while the request runs

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def are_in_use(self) -> bool:
        """Return whether a request or a row of the runner has a grammar, or a request waits for one."""
        return bool(self._in_use or self._waiting or self._rows)

    def load_vocabulary(self) -> None:
        """Begin to load the vocabulary in a worker, before a grammar needs it."""
        self._compiler.load_vocabulary()

    def start_compiling(self, request: Request) -> None:
        """Start compiling the grammar of a request, which waits for it."""
        assert request.params.guided is not None
        self._waiting[request.request_id] = request, self._compiler.start(request.params.guided)

    def is_ready(self, request: Request) -> bool:
        """Return whether the grammar is already compiled; if so, it is kept for the request."""
        assert request.params.guided is not None
        compiled = self._compiler.usable(request.params.guided)
        if compiled is not None:
            self._in_use[request.request_id] = compiled
        return compiled is not None

    def prepare(self, request: Request) -> None:
        """Compile the grammar of a request and wait for it; raise InvalidRequest if it can't be used."""
        guided = request.params.guided
        if guided is not None and self._compiler.usable(guided) is None:
            compilation = self._compiler.start(guided)
            while not compilation.is_done:
                wait([compilation.future], timeout=0.05)
            self._compiler.finish(guided, compilation)

    def pop_compiled(self) -> Iterator[tuple[Request, TokenmillError | None]]:
        """Yield the requests whose compilation has ended, with the error if it failed."""
        for request, compilation in list(self._waiting.values()):
            if compilation.is_done:
                del self._waiting[request.request_id]
                yield request, self._outcome(request, compilation)

    def _outcome(self, request: Request, compilation: Compilation) -> TokenmillError | None:
        assert request.params.guided is not None
        try:
            self._in_use[request.request_id] = self._compiler.finish(request.params.guided, compilation)
        except TokenmillError as error:
            return error
        return None

    def wait(self, timeout_s: float) -> None:
        """Block until a compilation ends or the timeout expires."""
        wait([compilation.future for _, compilation in self._waiting.values()], timeout_s, FIRST_COMPLETED)

    def forget(self, request_id: str) -> None:
        """Drop a request; cancel its compilation if no other request waits for it."""
        self._in_use.pop(request_id, None)
        request, compilation = self._waiting.pop(request_id, (None, None))
        if request is None or compilation is None or request.params.guided is None:
            return
        if all(other is not compilation for _, other in self._waiting.values()):
            self._compiler.abandon(request.params.guided, compilation)

    def release(self, is_open: Callable[[str], bool]) -> None:
        """Drop the grammars of requests that have ended."""
        for request_id in [used for used in self._in_use if not is_open(used)]:
            del self._in_use[request_id]

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────

    def note_plan(self, plan: StepPlan) -> bool:
        """Drop the rows that a plan frees and open the grammars of its new rows. Return whether a row that samples in
        this step follows a grammar, so that the step needs masks. Plans must be passed in order."""
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            if new.params.guided is not None:
                self._rows[new.row] = self._opened(new)
        return any(row.sample and row.row in self._rows for row in plan.rows)

    def masks(self, plan: StepPlan) -> StepMasks:
        """Start computing the masks of this step's sampling rows, in parallel with the model. `advance` must have been
        called for all earlier steps."""
        sampling = {row.row: self._rows[row.row] for row in plan.rows if row.sample and self._is_at(row)}
        drafts = {row.row: row.token_ids[-row.num_drafts :] for row in plan.rows if row.num_drafts}
        return self._table.start(sampling, {row: tokens for row, tokens in drafts.items() if row in sampling})

    def num_allowed(self, row: int, drafts: Sequence[int]) -> int:
        """Return how many of these drafts, in order, the row's grammar allows next; all if it has no grammar."""
        grammar = self._rows.get(row)
        return len(drafts) if grammar is None else grammar.num_allowed(drafts)

    def advance(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Advance the grammars by the sampled tokens, and append the forced tokens to the result."""
        plans = {row.row: row for row in plan.rows}
        return msgspec.structs.replace(result, rows=[self._advanced(plans[row.row], row) for row in result.rows])

    def _advanced(self, plan: RowPlan, result: RowResult) -> RowResult:
        grammar = self._rows.get(plan.row)
        if grammar is None or not plan.sample or not self._is_at(plan):
            return result
        if grammar.failure is None:
            for token_id in result.token_ids:
                grammar.advance(token_id)
            grammar.recover()
        if grammar.failure is not None:
            return RowResult(row=plan.row, error=grammar.failure.message, error_code=grammar.failure.code)
        if not result.token_ids or plan.num_logprobs is not None:
            return result
        return msgspec.structs.replace(result, token_ids=result.token_ids + grammar.jump())

    def _is_at(self, plan: RowPlan) -> bool:
        """Return whether a row has a grammar at the same output index as the plan; otherwise its sample is
        discarded."""
        grammar = self._rows.get(plan.row)
        return grammar is not None and grammar.num_outputs == plan.output_index

    def _opened(self, new: RowInit) -> RowGrammar:
        assert new.params.guided is not None
        compiled = self._compiler.known(new.params.guided)
        assert compiled is not None, "the grammar of a running request must be kept"
        is_excluded = excluded_tokens(new.params, new.stop_token_ids)
        return RowGrammar(compiled.matcher.fork(), new.output_token_ids, is_excluded, compiled)
