"""Latency promises (`--slo`): how long a step may take, how many sequences may run, and which requests are refused.

    tpot    a step takes at most so long: answers first, prompts get what is left (`Scheduler`), and no more sequences
            run than leave a quarter of it to prompts (`Promises.rows_left`)
    ttft    a request whose first token would come later is refused at once, with the wait as `retry-after`

The first token of a new request comes when the prompts before it and its own are computed, each step taking what
answers leave; and, where no row is free, when enough of those before it have ended. Of other tenants only as much goes
before as their turn allows (`tenants.py`). So past saturation the queue stays as long as the promise allows, and what
is accepted is answered in time.
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

LEAST_PROMPT_PART = 0.25  # of the time of a step: no more sequences run than leave so much to prompts
LEAST_CHUNK_PART = 0.125  # of the time of a step that prompts may always have
LATE_PART = 0.5  # of the promised time to the first token
CHUNK_UNIT = 16  # tokens: what is longer is cut to a multiple, as kernels compute as many at once
FIRST_CHUNK = 64  # tokens of prompts in the first step beside answers, where a time between tokens is promised
STEADINESS = 20  # the newest answer weighs a twentieth in the mean length


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
        self._excess = Excess()  # of the waits of those whose first token came late in the promised time, or too late
        self._largest_chunk = FIRST_CHUNK // 2  # tokens of prompts in the steps beside answers that were measured
        self._answer_steps = 0.0  # mean number of an answer's steps; 0: none has ended yet

    def note_end(self, sequence: Sequence) -> None:
        """Learn how many steps answers take."""
        if (num_steps := sequence.num_outputs - sequence.num_accepted) > 0:
            part = 1.0 if not self._answer_steps else 1.0 / STEADINESS
            self._answer_steps += part * (num_steps - self._answer_steps)

    def note_step(self, plan: StepPlan) -> None:
        """Learn how many tokens of prompts were computed beside answers."""
        num_answers = sum(len(row.token_ids) == 1 for row in plan.rows)
        if num_answers:
            self._largest_chunk = max(self._largest_chunk, plan.num_tokens - num_answers)

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────

    def tokens_for_prompts(self, all_tokens: int, groups: Iterable[SequenceGroup]) -> int:
        """Return how many prompt tokens a step may have: as many as fit the time that decoding rows leave, and at least
        an eighth of it; all of the budget where no decoding row waits for the step."""
        answers, start = _answers_and_start(groups)
        if self.step_limit_s is None or not answers or not self._step_time.is_known:
            return all_tokens
        left_s, least_s = self._parts_s(self._step_time.seconds(_size(answers)), self.step_limit_s, start)
        fitting, least = (self._step_time.tokens_in(part_s, start) for part_s in (left_s, least_s))
        if fitting > CHUNK_UNIT:
            fitting -= fitting % CHUNK_UNIT
        if least > CHUNK_UNIT:
            least = (least + CHUNK_UNIT // 2) // CHUNK_UNIT * CHUNK_UNIT
        num_tokens = max(fitting, least)
        if self.level.tpot_s is not None:
            # What whole steps of prompts take says little about small chunks: those are approached from below.
            num_tokens = min(num_tokens, 2 * self._largest_chunk)
        return min(all_tokens, max(1, num_tokens))

    def _parts_s(self, answers_s: float, limit_s: float, start: int) -> tuple[float, float]:
        """Return the seconds for prompt tokens in a step with decoding rows: what these leave, and what prompts have
        at least, an eighth of the step, even where decoding alone takes longer than promised: they must go on."""
        planned_s = self._planned_s(limit_s)
        beside_s = answers_s + self._step_time.prompts_s(start)
        least_s = max(LEAST_CHUNK_PART * planned_s, beside_s * LEAST_CHUNK_PART / (1.0 - LEAST_CHUNK_PART))
        return planned_s - beside_s, least_s

    def _planned_s(self, limit_s: float) -> float:
        """Return the target duration of a step with prompts, below the promised one, so that nearly all steps keep the
        promise and not just half of them."""
        return limit_s if self.level.tpot_s is None else limit_s / self._step_time.excess.factor

    def rows_left(self) -> int:
        """Return how many more sequences may run within the promised time per output token. Where not even one alone
        would meet it, as many may run as make its steps a third longer: an unattainable promise must not stop all
        work."""
        num_running = self._running.num_sequences
        if self.level.tpot_s is None or not self._step_time.is_known or not num_running:
            return self._running.row_allocator.num_rows
        members = [sequence for group in self._running.groups for sequence in group.members]
        context = sum(sequence.planned for sequence in members) // num_running
        lone_s = self._step_time.seconds(StepSize(1, 1, context))
        most_s = max((1.0 - LEAST_PROMPT_PART) * self.level.tpot_s, lone_s / (1.0 - LEAST_PROMPT_PART))
        row_s = self._step_time.cost_s(1, context, 1 << 30)
        left_s = most_s - self._step_time.seconds(_size(members))
        return 0 if left_s < 0.0 else max(1, int(left_s / row_s))  # what one more costs is known once it was tried

    # ── a request ──────────────────────────────────────────────────────────────────────────────────────

    def require(self, request: Request, account: TenantAccount, num_cached: int, now_s: float) -> float | None:
        """In how many seconds the first token of a request is expected, counted from when it was sent: that was while
        the last step ran. One whose token would come too late is refused. None: nothing is promised to it."""
        most_s = self.level.ttft_s
        if most_s is None or request.priority >= BACKGROUND_PRIORITY or request.given:
            return None
        sent_before_s = min(max(0.0, now_s - request.arrival_s), self.step_limit_s or 0.0)
        expected_s = sent_before_s + self.wait_s(len(request.prompt_token_ids) - num_cached, account)
        wait_s = expected_s * self._excess.factor
        if wait_s > most_s:
            raise Overloaded(
                f"the first token would come in about {wait_s:.1f} s, and {most_s:g} s are promised",
                retry_after_s=wait_s,
            )
        return expected_s

    def note_first_token(self, state: RequestState, now_s: float) -> None:
        """Learn how late first tokens are which were expected late in the promised time: those decide on refusals."""
        if state.expected_s is not None and state.expected_s > LATE_PART * (self.level.ttft_s or 0.0):
            self._excess.note((now_s - state.request.arrival_s) / state.expected_s)

    def wait_s(self, num_tokens: int, account: TenantAccount) -> float:
        """In how many seconds the first token of a new request would come that has so many tokens to compute."""
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
            part_s = max(self._parts_s(answers_s, self.step_limit_s, num_tokens // 2))
            prompts_s *= (part_s + self._step_time.prompts_s(num_tokens // 2) + answers_s) / part_s
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
        """Seconds of prompts, and groups, that start before a new request of a tenant: its own, and of each other
        tenant as much as brings that to where this one will be then."""
        costs: dict[TenantAccount, list[float]] = {}
        for group in self._waiting.groups:
            if group.priority < BACKGROUND_PRIORITY:
                costs.setdefault(group.state.account, []).append(len(group.leader.window) * token_s)
        own = costs.pop(account, [])
        turn_s = account.counter_s + (sum(own) + own_s) / account.tenant.weight
        total_s, num_groups = sum(own), len(own)
        for other, theirs in costs.items():
            left_s = (turn_s - other.counter_s) * other.tenant.weight
            for cost_s in theirs:
                if left_s <= 0.0:
                    break
                left_s -= cost_s
                total_s += cost_s
                num_groups += 1
        return total_s, num_groups


def _answers_and_start(groups: Iterable[SequenceGroup]) -> tuple[list[Sequence], int]:
    """The sequences that want one token or none, and how much is computed of the first prompt that is underway."""
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
    """A step that computes one token of each."""
    return StepSize(len(answers), len(answers), sum(sequence.planned for sequence in answers))
