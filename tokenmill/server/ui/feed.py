"""The load of the server, once a second while someone looks, and the abort of a request.

    GET /ui/events   server-sent events: {series, replicas, requests, num_requests}
    POST /ui/abort   {"id": …} of a row of `requests`

`series` are the numbers of /metrics, read from the same registry. One reading a second serves all who look, and nothing
runs while no page is open. With several API keys the list of requests holds those of the key that asks, and a key
aborts only those, unless its record says that it sees all. The series and replicas are of the whole server, as those of
/metrics are, and so for such a key only.

These routes are for the server's own page: a page of another origin is refused, whatever CORS allows it elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import tokenmill
from tokenmill.errors import TokenmillError
from tokenmill.observe.metrics import SeriesValue
from tokenmill.server.body import BodyFields
from tokenmill.server.dialect import SSE_HEADERS, sse_frame
from tokenmill.server.replica_admin import replica_rows
from tokenmill.server.routing import COUNT, READING, TEXT, Endpoint, RouteContext, json_response, list_of, object_of

TAG = "Page"
ANY_OBJECT = {"type": "object"}
INTERVAL_S = 1.0
MAX_ROWS = 200  # requests in one event
SAME_ORIGIN = ("same-origin", "none")  # values of sec-fetch-site; none: the address was typed

SHOWN = (
    "requests",
    "requests_running",
    "requests_waiting",
    "kv_usage_ratio",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "prefix_hits",
    "prefix_queries",
    "draft_tokens",
    "accepted_draft_tokens",
)
"""The families of /metrics that the page shows."""

ReadSeries = Callable[[Sequence[str]], dict[str, SeriesValue]]


class ForeignPage(TokenmillError):
    """A web page of another origin asked."""

    code = "foreign_page"
    http_status = 403


def require_own_page(request: Request) -> None:
    """Refuse requests that come from pages of others. A client that is no browser says nothing of its origin; a browser
    says `sec-fetch-site`, or, to an address that is neither https nor this machine, the origin alone."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_foreign_origin = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if is_foreign_origin if site is None else site not in SAME_ORIGIN:
        raise ForeignPage("this route is for the server's own page")


class LoadFeed:
    """Readings of the load, at most one an interval however many look."""

    def __init__(self, context: RouteContext, read_series: ReadSeries) -> None:
        self._context = context
        self._read_series = read_series
        self._shared: dict[str, Any] = {}
        self._taken_s = 0.0

    def view(self, key_id: str) -> str | None:
        """The key whose requests a key sees: itself, or None for those of all."""
        key = self._context.keys.get(key_id) if self._context.keys else None
        return None if key is not None and key.sees_all else key_id

    def reading(self, key_id: str) -> dict[str, Any]:
        now = time.monotonic()
        if not self._shared or now - self._taken_s > INTERVAL_S / 2:
            self._shared, self._taken_s = self._take(), now
        live, seen = self._context.live, self.view(key_id)
        is_operator = seen is None or not self._context.keys
        whole: dict[str, Any] = {} if is_operator else {"series": {}, "replicas": []}
        return {
            **self._shared,
            **whole,
            "num_read": live.num_read(seen),
            "num_generated": live.num_generated(seen),
            "requests": live.rows(seen, MAX_ROWS),
            "num_requests": live.count(seen),
        }

    def _take(self) -> dict[str, Any]:
        health, replicas = self._context.registry.health(), replica_rows(self._context)
        return {
            "time": time.time(),
            "version": tokenmill.__version__,
            "state": health.state,
            "series": self._read_series(SHOWN),
            "replicas": replicas if len(replicas) > 1 else [],
        }

    async def frames(self, key_id: str) -> AsyncIterator[bytes]:
        """Events until the client leaves or the server stops."""
        while self._context.registry.health().state != "draining":
            yield sse_frame(orjson.dumps(self.reading(key_id)))
            await asyncio.sleep(INTERVAL_S)


def feed_endpoints(context: RouteContext, read_series: ReadSeries) -> list[Endpoint]:
    feed = LoadFeed(context, read_series)

    async def load_events(request: Request) -> Response:
        require_own_page(request)
        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        return StreamingResponse(feed.frames(request.state.record.key_id), headers=headers)

    async def abort_request(request: Request) -> Response:
        require_own_page(request)
        run_id = await context.parsed(request, lambda body: BodyFields(body).required_text("id"))
        await context.live.abort(run_id, feed.view(request.state.record.key_id))
        return json_response({"aborted": run_id})

    row = object_of(id=TEXT, path=TEXT, state=TEXT, prompt_tokens=COUNT, generated_tokens=COUNT)
    return [
        Endpoint(
            "GET",
            "/ui/events",
            load_events,
            TAG,
            object_of(
                series={"type": "object"},
                replicas=list_of({"type": "object"}),
                requests=list_of(row),
                num_requests=COUNT,
            ),
            (403,),
            description="The load of the server, once a second: the requests of this key, and for one that sees all "
            "those of all keys, the numbers of /metrics, and the replicas where there are several.",
            media_type="text/event-stream",
        ),
        Endpoint(
            "POST",
            "/ui/abort",
            abort_request,
            TAG,
            object_of(aborted=TEXT),
            (*READING, 403),
            {"type": "object", "required": ["id"], "properties": {"id": TEXT}},
            description="End a request of this key. Its client gets an error with the code `aborted`.",
        ),
    ]
