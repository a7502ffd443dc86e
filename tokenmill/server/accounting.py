"""From finished requests and the engine's state to the metric series."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from tokenmill.engine.status import EngineStats
from tokenmill.observe.metrics import EngineState, Metrics, RequestTimes
from tokenmill.server.gate import EngineGate
from tokenmill.server.request_record import RequestRecord


class Accounting:
    def __init__(self, metrics: Metrics, door: EngineGate) -> None:
        self._metrics = metrics
        self._door = door
        self._engine_pid = 0

    def finish(self, record: RequestRecord) -> None:
        if not record.is_generation:
            return
        if record.model is None:
            self._metrics.reject_request()
            return
        usage = record.usage
        self._metrics.finish_request(
            record.outcome,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            output_tokens=usage.completion_tokens if usage else 0,
            times=RequestTimes(record.elapsed_s(), record.queue_s, record.first_token_s),
            num_answers=max(1, len(record.finish_reasons)),
        )

    def render(self) -> tuple[bytes, str]:
        """The text format and its content type, with the engine's numbers of this moment."""
        stats = self._door.stats()
        if stats is not None:
            self._note_engine(stats)
        return self._metrics.render(), CONTENT_TYPE_LATEST

    def _note_engine(self, stats: EngineStats) -> None:
        if self._engine_pid and stats.engine_pid not in (0, self._engine_pid):
            self._metrics.engine_restarted()
        self._engine_pid = stats.engine_pid or self._engine_pid
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        self._metrics.set_engine(
            EngineState(
                running=stats.running,
                waiting=stats.waiting,
                kv_usage=usage,
                prefix_hits=stats.prefix_hit_tokens,
                prefix_queries=stats.prefix_query_tokens,
                preemptions=stats.preemptions,
                steps=stats.steps,
                busy_s=stats.busy_s,
                drafted=stats.drafted_tokens,
                accepted=stats.accepted_tokens,
            )
        )
