"""Limits of a key: requests and tokens in a time, and requests at the same time.

A limit is a bucket that fills evenly: "60 requests a minute" has room for 60 at once and gets one more each second. A
request takes its prompt and the longest answer it may have before it runs, and gives back at its end what it did not
use, so that a key can't exceed a limit by more than one request. One larger than the whole bucket runs once that is
full, and leaves a debt.

    begin: one request ──► reserve: prompt + max_tokens ──► end: what was used, instead

Buckets live as long as the server's process. What is left of them goes to the client with every reply, in the headers
that OpenAI's and Anthropic's clients know.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from tokenmill.errors import Overloaded
from tokenmill.server.keys import KeyRecord

MINUTE_S, DAY_S = 60.0, 86_400.0
BUSY_RETRY_S = 1.0

Clock = Callable[[], float]
Header = tuple[bytes, bytes]


class Bucket:
    """A token bucket: units per time, refilled evenly."""

    def __init__(self, limit: int, period_s: float, clock: Clock) -> None:
        self.limit = limit
        self._rate = limit / period_s
        self._clock = clock
        self._level = float(limit)
        self._seen_s = clock()

    @property
    def level(self) -> float:
        """Return what is left; negative where a request used more than it had reserved."""
        now_s = self._clock()
        self._level = min(float(self.limit), self._level + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` can be taken; 0: now."""
        return max(0.0, (min(amount, self.limit) - self.level) / self._rate)

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def give(self, amount: float) -> None:
        self._level = min(float(self.limit), self.level + amount)


LimitHeaders = Callable[[str, Bucket], list[Header]]  # what is limited, and what is left of it ─► headers


class KeyLimits:
    """The remaining limits of one key."""

    def __init__(self, record: KeyRecord, clock: Clock = time.monotonic) -> None:
        self.record = record
        self.num_running = 0
        self.requests = _bucket(record.requests_per_minute, MINUTE_S, clock)
        self.tokens = _bucket(record.tokens_per_minute, MINUTE_S, clock)
        self.daily_tokens = _bucket(record.tokens_per_day, DAY_S, clock)

    def begin(self) -> None:
        """Count a request that is about to run, or refuse it."""
        most = self.record.max_running
        if most is not None and self.num_running >= most:
            raise Overloaded(f"this API key may have {most} requests at a time", retry_after_s=BUSY_RETRY_S)
        if self.requests is not None:
            _require(self.requests, 1, "requests a minute")
            self.requests.take(1)
        self.num_running += 1

    def reserve(self, num_tokens: int) -> None:
        """Set aside the most that a request may use, or refuse it."""
        buckets = ((self.tokens, "tokens a minute"), (self.daily_tokens, "tokens a day"))
        for bucket, what in buckets:
            if bucket is not None:
                _require(bucket, num_tokens, what)
        for bucket, _ in buckets:
            if bucket is not None:
                bucket.take(num_tokens)

    def settle(self, num_reserved: int, num_used: int) -> None:
        for bucket in (self.tokens, self.daily_tokens):
            if bucket is not None:
                bucket.give(num_reserved - num_used)

    def headers(self, write: LimitHeaders) -> list[Header]:
        """Return what is left as headers of a dialect. Of several token limits the one that is nearest its end is
        shown."""
        tokens = [bucket for bucket in (self.tokens, self.daily_tokens) if bucket is not None]
        told = {"requests": self.requests, "tokens": min(tokens, key=lambda one: one.level / one.limit, default=None)}
        return [header for name, bucket in told.items() if bucket is not None for header in write(name, bucket)]


class RunQuota:
    """The part of a key's limits that one run takes."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits
        self._num_reserved = 0
        self._is_running = False

    def begin(self) -> None:
        self._limits.begin()
        self._is_running = True

    def reserve(self, num_tokens: int) -> None:
        self._limits.reserve(num_tokens)
        self._num_reserved += num_tokens

    def end(self, num_used: int) -> None:
        """Give back what was not used; once, however often it is called."""
        if self._is_running:
            self._is_running = False
            self._limits.num_running -= 1
            self._limits.settle(self._num_reserved, num_used)


class Quotas:
    """The limits of all keys that have some."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_id: dict[str, KeyLimits] = {}

    def of(self, record: KeyRecord | None) -> KeyLimits | None:
        """Return the limits of a key; None where it has none. Changed limits start full."""
        if record is None or not record.has_limits:
            return None
        known = self._by_id.get(record.id)
        if known is None or known.record != record:
            num_running = known.num_running if known is not None else 0
            known = self._by_id[record.id] = KeyLimits(record, self._clock)
            known.num_running = num_running
        return known


def _bucket(limit: int | None, period_s: float, clock: Clock) -> Bucket | None:
    return None if limit is None else Bucket(limit, period_s, clock)


def _require(bucket: Bucket, amount: float, what: str) -> None:
    wait_s = bucket.wait_s(amount)
    if wait_s > 0:
        raise Overloaded(
            f"the limit of this API key is reached: {bucket.limit} {what}, {max(0, int(bucket.level))} left, "
            f"{int(amount)} asked for",
            retry_after_s=wait_s,
        )


def openai_limit_headers(name: str, bucket: Bucket) -> list[Header]:
    values = {
        "limit": str(bucket.limit),
        "remaining": str(max(0, int(bucket.level))),
        "reset": duration(bucket.wait_s(bucket.limit)),
    }
    return [(f"x-ratelimit-{part}-{name}".encode(), value.encode()) for part, value in values.items()]


def anthropic_limit_headers(name: str, bucket: Bucket) -> list[Header]:
    full = datetime.fromtimestamp(time.time() + bucket.wait_s(bucket.limit), UTC)
    values = {
        "limit": str(bucket.limit),
        "remaining": str(max(0, int(bucket.level))),
        "reset": full.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
    return [(f"anthropic-ratelimit-{name}-{part}".encode(), value.encode()) for part, value in values.items()]


def duration(seconds: float) -> str:
    """A time as OpenAI's headers write it: 12ms, 1.5s, 6m0s, 2h3m4s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if not hours and not minutes:
        return f"{round(rest, 3):g}s"
    return (f"{hours}h" if hours else "") + f"{minutes}m{int(rest)}s"
