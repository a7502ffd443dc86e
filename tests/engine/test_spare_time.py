"""An engine without work prepares what later steps will need, a moment at a time, and hears of new work in between.
It does not begin while somebody may be about to ask."""

from __future__ import annotations

from tests.support.scripted_engine import byte_input_processor, scripted_core
from tokenmill.engine.loop import QUIET_S, run_loop
from tokenmill.engine.messages import FromCore, Outputs, Shutdown, Submit, ToCore
from tokenmill.params import SamplingParams
from tokenmill.types import PromptRequest


class ScriptedMailbox:
    """Has mail at the times given, counted in looks; shuts down whoever waits for more."""

    def __init__(self, mail: dict[int, ToCore]) -> None:
        self.mail = mail
        self.num_looks = 0
        self.timeouts: list[float | None] = []
        self.sent: list[FromCore] = []

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        self.num_looks += 1
        self.timeouts.append(timeout_s)
        if self.num_looks in self.mail:
            return [self.mail[self.num_looks]]
        return [Shutdown()] if timeout_s is None else []

    def send(self, message: FromCore) -> None:
        self.sent.append(message)


def test_spare_time_is_used_until_nothing_is_left_and_never_while_there_is_work() -> None:
    core = scripted_core()
    left, seen = 5, []

    def next_idle_task() -> bool:
        nonlocal left
        seen.append(core.has_work)
        left -= left > 0
        return left > 0

    core.runner.next_idle_task = next_idle_task  # type: ignore[method-assign]
    asked = PromptRequest(prompt="ab", params=SamplingParams(max_tokens=6, ignore_eos=True), request_id="x")
    mailbox = ScriptedMailbox({3: Submit(byte_input_processor().process(asked))})
    run_loop(core, mailbox)
    outputs = [one for message in mailbox.sent if isinstance(message, Outputs) for one in message.outputs]
    assert sum(len(one.token_ids) for one in outputs) == 6
    assert left == 0 and not any(seen), "it prepares when it has nothing to do, to the end"
    calm = [QUIET_S, 0.0, 0.0]  # nobody asked, one thing was prepared, a second one, and then somebody asked
    assert mailbox.timeouts == [*calm, *[0.0] * 5, QUIET_S, 0.0, 0.0, None], "quiet before the first, and after work"


def test_an_engine_without_work_loads_what_grammars_need() -> None:
    core, loads = scripted_core(), []
    core.prepare_grammars = lambda: loads.append(len(mailbox.timeouts))  # type: ignore[method-assign]
    mailbox = ScriptedMailbox({})
    run_loop(core, mailbox)
    assert loads == [1], "once, after a quiet moment"
