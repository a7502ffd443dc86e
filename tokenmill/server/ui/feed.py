"""The server's load, sent once a second while a page shows it, and aborting a request.

    GET /ui/events   server-sent events: {series, replicas, requests, num_requests}
    POST /ui/abort   {"id": …} of a row of `requests`

`series` are the numbers of /metrics, read from the same registry. All open pages share one reading per second, and
nothing runs while no page is open. With several API keys the list has only the requests of the client's key, and a key
can abort only those, unless it has `sees_all`. The series and replicas concern the whole server, as in /metrics, so
only such a key sees them.

These routes are for the server's own page: pages of other origins are refused, whatever CORS allows elsewhere.
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
SAME_ORIGIN = ("same-origin", "none")  # values of sec-fetch-site; none: the user entered the address

SHOWN_SERIES = (
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
"""The metrics that the page shows."""

ReadSeries = Callable[[Sequence[str]], dict[str, SeriesValue]]


class ForeignPage(TokenmillError):
    """The request came from a web page of another origin."""

    code = "foreign_page"
    http_status = 403


def require_own_page(request: Request) -> None:
    """Refuse requests from web pages of other origins. Clients other than browsers do not send an origin. Browsers send
    `sec-fetch-site`, but to an address that is neither https nor this machine only `origin`."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_foreign_origin = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if is_foreign_origin if site is None else site not in SAME_ORIGIN:
        raise ForeignPage("this route is for the server's own page")


class LoadFeed:
    """Reads the server's load at most once per interval, however many pages show it."""

    def __init__(self, context: RouteContext, read_series: ReadSeries) -> None:
        self._context = context
        self._read_series = read_series
        self._shared: dict[str, Any] = {}
        self._read_at_s = 0.0

    def visible_key(self, key_id: str) -> str | None:
        """Return the id of the key whose requests a client sees; None if it sees those of all keys."""
        key = self._context.keys.get(key_id) if self._context.keys else None
        return None if key is not None and key.sees_all else key_id

    def reading(self, key_id: str) -> dict[str, Any]:
        """Return the current load for a client with this key."""
        now = time.monotonic()
        if not self._shared or now - self._read_at_s > INTERVAL_S / 2:
            self._shared, self._read_at_s = self._read(), now
        live, visible = self._context.live, self.visible_key(key_id)
        is_operator = visible is None or not self._context.keys
        hidden: dict[str, Any] = {} if is_operator else {"series": {}, "replicas": []}
        return {
            **self._shared,
            **hidden,
            "num_read": live.num_read(visible),
            "num_generated": live.num_generated(visible),
            "requests": live.rows(visible, MAX_ROWS),
            "num_requests": live.count(visible),
        }

    def _read(self) -> dict[str, Any]:
        health, replicas = self._context.registry.health(), replica_rows(self._context)
        return {
            "time": time.time(),
            "version": tokenmill.__version__,
            "state": health.state,
            "series": self._read_series(SHOWN_SERIES),
            "replicas": replicas if len(replicas) > 1 else [],
        }

    async def frames(self, key_id: str) -> AsyncIterator[bytes]:
        """Yield events until the client disconnects or the server stops."""
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
        await context.live.abort(run_id, feed.visible_key(request.state.record.key_id))
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
            description="The load of the server, once a second: the requests of this key; with `sees_all`: the "
            "requests of all keys, the numbers of /metrics, and the replicas if there are several.",
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
            description="Abort a request of this key. Its client gets an error with the code `aborted`.",
        ),
    ]
