"""Quotas of an API key: requests and tokens per minute or day, and concurrent requests.

A limit is a token bucket that is refilled evenly: "60 requests a minute" allows a burst of 60 and gains one more each
second. Before a request runs it takes its prompt and its longest possible answer from the bucket, and at its end it
returns what it did not use, so a key exceeds a limit by at most one request. A request larger than the whole bucket
runs once the bucket is full, and leaves a negative level.

    begin: one request ──► reserve: prompt + max_tokens ──► end: replaced by the tokens that were used

Buckets last as long as the server's process. Every reply has the remaining amounts, in the headers that OpenAI's and
Anthropic's clients read.
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
        """Return the remaining amount; negative after a request that was larger than the bucket."""
        now_s = self._clock()
        self._level = min(float(self.limit), self._level + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` can be taken; 0 if it can be taken now."""
        return max(0.0, (min(amount, self.limit) - self.level) / self._rate)

    def resized(self, limit: int, period_s: float) -> Bucket:
        """Return a bucket with another limit and the same used amount."""
        bucket = Bucket(limit, period_s, self._clock)
        bucket.take(self.limit - self.level)
        return bucket

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def give(self, amount: float) -> None:
        self._level = min(float(self.limit), self.level + amount)


LimitHeaders = Callable[[str, Bucket], list[Header]]  # name of the limit, its bucket ─► headers


class KeyLimits:
    """The buckets of one key, and its number of running requests."""

    def __init__(self, record: KeyRecord, clock: Clock = time.monotonic) -> None:
        self.num_running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.daily_tokens: Bucket | None = None
        self._clock = clock
        self.change(record)

    def change(self, record: KeyRecord) -> None:
        """Apply the limits of a changed record. The used amounts and the running requests still count."""
        self.record = record
        self.requests = self._bucket(self.requests, record.requests_per_minute, MINUTE_S)
        self.tokens = self._bucket(self.tokens, record.tokens_per_minute, MINUTE_S)
        self.daily_tokens = self._bucket(self.daily_tokens, record.tokens_per_day, DAY_S)

    def _bucket(self, current: Bucket | None, limit: int | None, period_s: float) -> Bucket | None:
        if limit is None or current is None:
            return None if limit is None else Bucket(limit, period_s, self._clock)
        return current if current.limit == limit else current.resized(limit, period_s)

    def begin(self) -> None:
        """Count a request that is about to run, or refuse it."""
        limit = self.record.max_running
        if limit is not None and self.num_running >= limit:
            raise Overloaded(f"this API key may have {limit} requests at a time", retry_after_s=BUSY_RETRY_S)
        if self.requests is not None:
            _require(self.requests, 1, "requests a minute")
            self.requests.take(1)
        self.num_running += 1

    def reserve(self, num_tokens: int) -> None:
        """Reserve the most tokens that a request may use, or refuse it."""
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
        """Return the remaining amounts as headers of a dialect. Of two token limits it shows the one with the smaller
        remaining share."""
        tokens = [bucket for bucket in (self.tokens, self.daily_tokens) if bucket is not None]
        tightest = min(tokens, key=lambda bucket: bucket.level / bucket.limit, default=None)
        buckets = {"requests": self.requests, "tokens": tightest}
        return [header for name, bucket in buckets.items() if bucket is not None for header in write(name, bucket)]


class RunQuota:
    """What one generation takes from its key's limits."""

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
        """Return the unused part of the reservation. Further calls do nothing."""
        if self._is_running:
            self._is_running = False
            self._limits.num_running -= 1
            self._limits.settle(self._num_reserved, num_used)


class Quotas:
    """The limits of all keys that have any."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_id: dict[str, KeyLimits] = {}

    def of(self, record: KeyRecord | None) -> KeyLimits | None:
        """Return the limits of a key by its newest record; None if it has none."""
        if record is None or not record.has_limits:
            return None
        known = self._by_id.get(record.id)
        if known is None:
            known = self._by_id[record.id] = KeyLimits(record, self._clock)
        elif known.record is not record and known.record != record:
            known.change(record)
        return known


def _require(bucket: Bucket, amount: float, what: str) -> None:
    wait_s = bucket.wait_s(amount)
    if wait_s > 0:
        raise Overloaded(
            f"the limit of this API key is reached: {bucket.limit} {what}, {max(0, int(bucket.level))} left, "
            f"{int(amount)} needed",
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
    """Format a duration as OpenAI's headers do: 12ms, 1.5s, 6m0s, 2h3m4s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if not hours and not minutes:
        return f"{round(rest, 3):g}s"
    return (f"{hours}h" if hours else "") + f"{minutes}m{int(rest)}s"
