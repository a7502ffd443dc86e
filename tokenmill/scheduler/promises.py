"""Latency objectives (`--slo`): how long a step may take, how many sequences may run, and which requests are refused.

    tpot    the time limit of a step: decoding sequences first, prompts get the rest (`Scheduler`), and so many
            sequences may run that a quarter of the time is left for prompts (`Promises.rows_left`)
    ttft    a request whose first token is expected later is refused immediately, with the wait as `retry-after`

The expected time to a request's first token is the time to compute the prompts before it and its own, in the part of
each step that decoding leaves, or, if no row is free, the time until enough earlier requests have ended. Of other
tenants' prompts only those count that come first by fair sharing (`tenants.py`). So under overload the queue grows only
as long as the objective allows, and accepted requests are answered in time.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.config.promises import ServiceLevel
from tokenmill.errors import Overloaded
from tokenmill.scheduler.request import RequestState, Sequence, SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.step_time import Excess, StepSize, StepTime
from tokenmill.scheduler.tenants import TenantAccount
from tokenmill.scheduler.waiting import WaitingQueue
from tokenmill.types import BACKGROUND_PRIORITY, Request, StepPlan

MIN_PROMPT_SHARE = 0.25  # share of a step's time left for prompts, which limits the number of running sequences
MIN_CHUNK_SHARE = 0.125  # share of a step's time that prompts always get, beside the reading of their contexts
MAX_STRETCH = 0.4  # what that share and the reading may add to a step, relative to the time of decoding alone
LATE_SHARE = 0.5  # first tokens expected later than this share of the limit are used to correct the estimate
CHUNK_UNIT = 16  # tokens: longer chunks are rounded to a multiple, because kernels compute tiles of this size
LONG_UNIT = 32  # tokens: behind a long context, where attention is most of the cost, 48 take as long as 64 on a GPU
LONG_CONTEXT = 16_384  # tokens
FIRST_CHUNK = 64  # prompt tokens in the first step that also decodes, if there is a tpot objective
MEAN_LENGTH_STEPS = 20  # moving average of answer lengths: the newest answer has a weight of 1/20


class Promises:
    def __init__(
        self,
        level: ServiceLevel,
        step_limit_s: float | None,
        step_time: StepTime,
        running: RunningSet,
        waiting: WaitingQueue,
    ) -> None:
        self.level = level
        self.step_limit_s = step_limit_s if level.tpot_s is None else min(level.tpot_s, step_limit_s or level.tpot_s)
        self._step_time = step_time
        self._running = running
        self._waiting = waiting
        self._excess = Excess()  # measured over expected time to the first token, for requests expected late
        self._largest_chunk = FIRST_CHUNK // 2  # the most prompt tokens in a measured step that also decoded
        self._answer_steps = 0.0  # mean number of an answer's steps; 0: none has ended yet

    def note_output(self, sequence: Sequence, num_before: int, now_s: float) -> None:
        """Note that a sequence, which had `num_before` outputs, has got its next ones."""
        state = sequence.state
        if state.expected_s is not None and not num_before and sequence.index == 0:
            self._note_first_token(state, state.expected_s, now_s)
        if sequence.is_finished:
            self._note_end(sequence)

    def _note_end(self, sequence: Sequence) -> None:
        """Update the mean number of steps of an answer."""
        if (num_steps := sequence.num_outputs - sequence.num_accepted) > 0:
            weight = 1.0 if not self._answer_steps else 1.0 / MEAN_LENGTH_STEPS
            self._answer_steps += weight * (num_steps - self._answer_steps)

    def note_step(self, plan: StepPlan) -> None:
        """Note how many prompt tokens were computed in a step that also decoded."""
        num_answers = sum(len(row.token_ids) == 1 for row in plan.rows)
        if num_answers:
            self._largest_chunk = max(self._largest_chunk, plan.num_tokens - num_answers)

    # ── limits of a step ───────────────────────────────────────────────────────────────────────────────

    def tokens_for_prompts(self, all_tokens: int, groups: Iterable[SequenceGroup]) -> int:
        """Return how many prompt tokens a step may have: as many as fit into the time that decoding rows leave, but at
        least `_least_tokens`; the whole budget if no row decodes."""
        answers, start = _answers_and_start(groups)
        if self.step_limit_s is None or not answers or not self._step_time.is_known:
            return all_tokens
        answers_s = self._step_time.seconds(_size(answers))
        num_fitting = self._step_time.tokens_in(self._left_s(answers_s, self.step_limit_s, start), start)
        num_tokens = max(_whole_units(num_fitting, start), self._least_tokens(answers_s, self.step_limit_s, start))
        if self.level.tpot_s is not None:
            # Steps of prompts only say little about the time of small chunks, so the chunk size grows step by step.
            num_tokens = min(num_tokens, 2 * self._largest_chunk)
        return min(all_tokens, max(1, num_tokens))

    def _left_s(self, answers_s: float, limit_s: float, start: int) -> float:
        """Return the seconds that decoding rows and the reading of a prompt's context leave for its tokens."""
        return self._planned_s(limit_s) - answers_s - self._step_time.prompts_s(start)

    def _least_tokens(self, answers_s: float, limit_s: float, start: int) -> int:
        """Return the prompt tokens that a step has at least, so that prompts make progress even if decoding alone
        exceeds the limit. Behind a long context the reading alone makes a step much longer: then only one unit of
        tokens is added, since fewer would take nearly as long."""
        num_shared = self._step_time.tokens_in(self._share_s(answers_s, limit_s, start), start)
        num_stretched = self._step_time.tokens_in(self._stretch_s(answers_s, start), start)
        return min(_nearest_units(num_shared, start), max(CHUNK_UNIT, _whole_units(num_stretched, start)))

    def _share_s(self, answers_s: float, limit_s: float, start: int) -> float:
        """Return an eighth of a step, which prompts get beside the reading of their contexts."""
        fixed_s = answers_s + self._step_time.prompts_s(start)
        return max(MIN_CHUNK_SHARE * self._planned_s(limit_s), fixed_s * MIN_CHUNK_SHARE / (1.0 - MIN_CHUNK_SHARE))

    def _stretch_s(self, answers_s: float, start: int) -> float:
        """Return the seconds for prompt tokens with which they and the reading of their context add as much to a step
        as the least share may add."""
        return MAX_STRETCH * answers_s - self._step_time.read_s(start)

    def _least_s(self, answers_s: float, limit_s: float, start: int) -> float:
        """Return the seconds of `_least_tokens`."""
        unit_s = CHUNK_UNIT * self._step_time.token_s(start)
        return min(self._share_s(answers_s, limit_s, start), max(unit_s, self._stretch_s(answers_s, start)))

    def _planned_s(self, limit_s: float) -> float:
        """Return the target duration of a step with prompts. It is below the limit, so that nearly all steps meet the
        objective and not just half of them."""
        return limit_s if self.level.tpot_s is None else limit_s / self._step_time.excess.factor

    def rows_left(self) -> int:
        """Return how many more sequences may run within the objective for the time per output token. If not even one
        alone meets it, as many may run as make its steps a third longer: an unattainable objective must not stop all
        work."""
        num_running = self._running.num_sequences
        if self.level.tpot_s is None or not self._step_time.is_known or not num_running:
            return self._running.row_allocator.num_rows
        members = [sequence for group in self._running.groups for sequence in group.members]
        context = sum(sequence.planned for sequence in members) // num_running
        lone_s = self._step_time.seconds(StepSize(1, 1, context))
        max_s = max((1.0 - MIN_PROMPT_SHARE) * self.level.tpot_s, lone_s / (1.0 - MIN_PROMPT_SHARE))
        row_s = self._step_time.cost_s(1, context, 1 << 30)
        left_s = max_s - self._step_time.seconds(_size(members))
        return 0 if left_s < 0.0 else max(1, int(left_s / row_s))  # at least 1: its cost is only known once it runs

    # ── limits of a request ────────────────────────────────────────────────────────────────────────────

    def require(self, request: Request, account: TenantAccount, num_cached: int, now_s: float) -> float | None:
        """Return the expected time to a request's first token, counted from when it was sent, which was during the last
        step; refuse it if that is too late. None: there is no objective for this request."""
        max_s = self.level.ttft_s
        if max_s is None or request.priority >= BACKGROUND_PRIORITY or request.progress:
            return None
        sent_before_s = min(max(0.0, now_s - request.arrival_s), self.step_limit_s or 0.0)
        expected_s = sent_before_s + self.wait_s(len(request.prompt_token_ids) - num_cached, account)
        wait_s = expected_s * self._excess.factor
        if wait_s > max_s:
            raise Overloaded(
                f"the first token is expected in about {wait_s:.1f} s, which exceeds the limit of {max_s:g} s",
                retry_after_s=wait_s,
            )
        return expected_s

    def _note_first_token(self, state: RequestState, expected_s: float, now_s: float) -> None:
        """Correct the estimate with a request whose first token was expected late: those estimates decide about
        refusals."""
        if expected_s > LATE_SHARE * (self.level.ttft_s or 0.0):
            self._excess.note((now_s - state.request.arrival_s) / expected_s)

    def wait_s(self, num_tokens: int, account: TenantAccount) -> float:
        """Return the expected time to the first token of a new request with `num_tokens` to compute."""
        if not self._step_time.is_known:
            return 0.0
        answers, _ = _answers_and_start(self._running.groups)
        token_s = self._step_time.token_s(0)
        own_s = num_tokens * token_s
        running_s = token_s * sum(
            max(0, group.wants(sequence) - 1) for group in self._running.groups for sequence in group.members
        )
        ahead_s, num_ahead = self._ahead(account, own_s, token_s)
        answers_s = self._step_time.seconds(_size(answers)) if answers else 0.0
        prompts_s = running_s + ahead_s + own_s
        if answers and self.step_limit_s is not None:
            times = answers_s, self.step_limit_s, num_tokens // 2
            chunk_s = max(self._left_s(*times), self._least_s(*times))
            prompts_s *= (chunk_s + self._step_time.prompts_s(num_tokens // 2) + answers_s) / chunk_s
        free = min(self._running.row_allocator.num_free, self.rows_left())
        return max(prompts_s + answers_s, self._rows_s(num_ahead + 1 - free, answers_s, prompts_s - running_s))

    def _rows_s(self, num_lacking: int, answers_s: float, prompts_s: float) -> float:
        """Estimate the seconds until this many rows are free, from the mean number of steps of an answer."""
        num_running = self._running.num_sequences
        if num_lacking <= 0 or not num_running or not self._answer_steps:
            return 0.0
        step_s = max(answers_s, self.step_limit_s or 0.0) if self._waiting else answers_s
        return num_lacking * self._answer_steps * step_s / num_running

    def _ahead(self, account: TenantAccount, own_s: float, token_s: float) -> tuple[float, int]:
        """Return the prompt seconds and the number of groups that start before a new request of a tenant: all of the
        same tenant, and of each other tenant those that start before its counter reaches this tenant's."""
        costs: dict[TenantAccount, list[float]] = {}
        for group in self._waiting.groups:
            if group.priority < BACKGROUND_PRIORITY:
                costs.setdefault(group.state.account, []).append(len(group.leader.window) * token_s)
        own = costs.pop(account, [])
        counter_s = account.counter_s + (sum(own) + own_s) / account.tenant.weight
        total_s, num_groups = sum(own), len(own)
        for other, other_costs in costs.items():
            left_s = (counter_s - other.counter_s) * other.tenant.weight
            for cost_s in other_costs:
                if left_s <= 0.0:
                    break
                left_s -= cost_s
                total_s += cost_s
                num_groups += 1
        return total_s, num_groups


def _whole_units(num_tokens: int, start: int) -> int:
    """Round down to units, if it is more than one; `start`: the tokens before the chunk."""
    unit = _unit(num_tokens, start)
    return num_tokens // unit * unit


def _nearest_units(num_tokens: int, start: int) -> int:
    """Round to units, if it is more than one."""
    unit = _unit(num_tokens, start)
    return (num_tokens + unit // 2) // unit * unit


def _unit(num_tokens: int, start: int) -> int:
    if num_tokens <= CHUNK_UNIT:
        return 1
    return LONG_UNIT if num_tokens >= LONG_UNIT and start >= LONG_CONTEXT else CHUNK_UNIT


def _answers_and_start(groups: Iterable[SequenceGroup]) -> tuple[list[Sequence], int]:
    """Return the sequences that want at most one token, and the position reached in the first started prompt."""
    answers: list[Sequence] = []
    start = 0
    for group in groups:
        for sequence in group.members:
            if group.wants(sequence) <= 1:
                answers.append(sequence)
            else:
                start = start or sequence.planned
    return answers, start


def _size(answers: list[Sequence]) -> StepSize:
    """Return the size of a step that computes one token of each sequence."""
    return StepSize(len(answers), len(answers), sum(sequence.planned for sequence in answers))
