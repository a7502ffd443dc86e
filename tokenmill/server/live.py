"""The generations in progress: the load page lists them, and an abort looks up its request here.

A run is added when it is submitted and removed when it is closed. Nothing is done per token: the progress of a run is
read from its engine on demand.
"""

from __future__ import annotations

from typing import Any, Protocol

from tokenmill.errors import TokenmillError
from tokenmill.server.accounting import RequestRecord


class LiveRun(Protocol):
    """A generation in progress: what is shown of it, and a way to abort it."""

    @property
    def record(self) -> RequestRecord: ...
    @property
    def run_id(self) -> str: ...
    def num_prompt_tokens(self) -> int: ...
    def num_generated(self) -> int: ...
    async def abort(self) -> None: ...


class UnknownRequest(TokenmillError):
    """No request of this id is running, or it belongs to another key."""

    code = "request_not_found"
    http_status = 404


class LiveRequests:
    """All generations in progress, the oldest first. A client sees and aborts those of its own key.

    `key_id`: the id of the client's key; None for an operator, who sees the requests of all keys. On a server without
    keys the id is always "".
    """

    def __init__(self) -> None:
        self._runs: dict[str, LiveRun] = {}

    def add(self, run: LiveRun) -> None:
        self._runs[run.run_id] = run

    def remove(self, run: LiveRun) -> None:
        self._runs.pop(run.run_id, None)

    def rows(self, key_id: str | None, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` runs; for an operator each with the id of its key."""
        rows = [_row(run) for run in self._of(key_id)[:limit]]
        return rows if key_id is not None else [{**row, "key": self._runs[row["id"]].record.key_id} for row in rows]

    def count(self, key_id: str | None) -> int:
        return len(self._of(key_id))

    def _of(self, key_id: str | None) -> list[LiveRun]:
        return [run for run in self._runs.values() if key_id is None or run.record.key_id == key_id]

    def interactive(self) -> tuple[int, int]:
        """Return how many interactive runs are in progress, and how many of them have no token yet."""
        records = [run.record for run in self._runs.values() if not run.record.is_batch_line]
        return len(records), sum(record.first_token_s is None for record in records)

    def num_generated(self, key_id: str | None) -> int:
        """Return the number of tokens that the runs in progress have generated so far."""
        return sum(run.num_generated() for run in self._of(key_id))

    def num_read(self, key_id: str | None) -> int:
        """Return the number of prompt tokens of the runs in progress that have generated a token."""
        begun = (run for run in self._of(key_id) if run.record.first_token_s is not None)
        return sum(run.num_prompt_tokens() for run in begun)

    async def abort(self, run_id: str, key_id: str | None) -> None:
        run = self._runs.get(run_id)
        if run is None or (key_id is not None and run.record.key_id != key_id):
            raise UnknownRequest(f"no request {run_id[:200]!r} is in progress")
        await run.abort()


def _row(run: LiveRun) -> dict[str, Any]:
    record = run.record
    num_prompt = run.num_prompt_tokens()
    return {
        "id": run.run_id,
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model,
        "state": "answering" if record.first_token_s is not None else "prompt" if num_prompt else "preparing",
        "age_s": round(record.elapsed_s(), 3),
        "ttft_s": record.first_token_s,
        "prompt_tokens": num_prompt,
        "generated_tokens": run.num_generated(),
    }
