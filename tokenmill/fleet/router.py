"""Prefix-aware routing: choose the core that is predicted to finish a request's prompt first, considering later turns.

    seconds(core) = wait                                 earlier prompts on the core, at its measured rate
                  + uncached own tokens × seconds × 4    keeping a conversation on one core saves work in later turns
                  + uncached shared tokens × seconds     minus the extra recent work of the cores that have them cached
                  + a small share of its recent work     prefers the less used of equal cores

A prompt starts with a part shared by many requests (a system prompt, tools), followed by its own part (the earlier
turns of its conversation). A core that has cached the own part computes less now and in later turns, so conversations
stay on their core without any header. The shared part alone would attract every new conversation to the first core that
had it. Computing it again on another core costs only once, so that is done as soon as the first core has done that much
more work; soon all cores have it. Shared blocks are recognised from the requests: they were followed by many different
blocks.

Ties are broken by a rendezvous hash of the conversation's first own block, so that several fronts choose the same core.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from tokenmill.engine.messages import Outputs, WatchBlocks
from tokenmill.engine.replica import Replica, RequestRun, Route
from tokenmill.fleet.block_index import BlockIndex
from tokenmill.fleet.step_rate import StepRate, StepSeconds, common_rates, usual_rate
from tokenmill.kv.blocks import HashChain
from tokenmill.types import Request

AFFINITY = 4.0  # weight of a cached token of the conversation itself, because it saves work in later turns too
RECENT_S = 30.0  # time constant of the decay of recent work
LEVELLING = 0.002  # weight of recent work: small enough never to separate a conversation from its cache
MAX_KNOWN_BLOCKS = 1 << 17  # remembered blocks of earlier prompts
RUNNING_TOKENS = 8  # cost of a running request, in prompt tokens
EQUAL_S = 1e-6
MIN_EXTRA_BLOCKS = 4  # another core must have this many more blocks of a prompt for them to be fetched
EWMA_WEIGHT = 0.05  # weight of the newest request in the mean duration of a request


class Prediction(NamedTuple):
    """The predicted cost of a request on one core."""

    replica: Replica
    num_cached: int  # tokens
    wait_s: float
    seconds: float


class SharedBlocks:
    """Recognises blocks shared by many conversations: those that were followed by many different blocks. The least
    recently seen blocks are dropped."""

    def __init__(self, num_followers: int) -> None:
        """`num_followers`: how many different blocks must have followed a shared block."""
        self._num_followers = num_followers
        self._followers: OrderedDict[bytes, int] = OrderedDict()

    def num_shared(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks of a request that are shared, and remember the request's blocks."""
        followers, shared = self._followers, 0
        for index, block_hash in enumerate(hashes):
            if block_hash in followers:
                followers.move_to_end(block_hash)
                if followers[block_hash] >= self._num_followers:
                    shared = index + 1
                continue
            followers[block_hash] = 0
            if index:
                followers[hashes[index - 1]] += 1
        while len(followers) > MAX_KNOWN_BLOCKS:
            followers.popitem(last=False)
        return shared


class PrefixRouter:
    """Chooses the core with the fewest predicted seconds."""

    def __init__(self, num_replicas: int) -> None:
        self.index = BlockIndex(num_replicas)
        self._started: list[Replica] = []  # all cores that have ever been ready
        self._measured = [StepRate() for _ in range(num_replicas)]
        self._rates = common_rates(self._measured)
        self._shared = SharedBlocks(2 * num_replicas)
        self._recent_s = [0.0] * num_replicas  # decaying sums of seconds of work
        self._decayed_s = -math.inf  # when they were last decayed
        self._request_s = 1.0  # mean duration of a request

    # ── choosing ───────────────────────────────────────────────────────────────────────────────────────

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Route:
        self._decay()
        self._rates = common_rates(self._measured)
        num_tokens, block_size = len(request.prompt_token_ids), replicas[0].info.block_size
        chain = HashChain(request.cache_salt, block_size, request.adapter)
        candidates = {replica.index for replica in replicas}
        # Cores that get no requests (drained ones, for example) may have blocks to fetch.
        others = [one for one in self._started if one.is_ready and one.index not in candidates]
        sources = [*replicas, *others]
        blocks = self.index.matches(request.prompt_token_ids, chain, block_size, [one.index for one in sources])
        cached = [number * block_size for number in blocks[: len(replicas)]]
        num_shared = self._shared.num_shared(chain.hashes) * block_size
        # The most recent work of any core that has cached the shared part:
        sharing_s = max(
            (self._work_s(r) for r, found in zip(replicas, cached, strict=True) if found >= num_shared), default=0.0
        )
        found = [
            self._predicted(replica, num_tokens, number, num_shared, sharing_s)
            for replica, number in zip(replicas, cached, strict=True)
        ]
        best = min(one.seconds for one in found)
        equal = [one for one in found if one.seconds <= best + EQUAL_S]
        first_own = chain.hashes[min(num_shared // block_size, len(chain.hashes) - 1)] if chain.hashes else b""
        chosen = max(equal, key=lambda one: rendezvous(first_own, one.replica.index))
        most, has_most = max(zip(blocks, sources, strict=True), key=lambda one: one[0])
        source = has_most if most * block_size - chosen.num_cached >= MIN_EXTRA_BLOCKS * block_size else None
        return Route(chosen.replica, reason(chosen, found, num_shared), num_tokens - chosen.num_cached, source)

    def usual_rate(self) -> StepSeconds:
        """Return the step time fitted to all cores together."""
        return usual_rate(self._measured)

    def _predicted(
        self, replica: Replica, num_tokens: int, num_cached: int, num_shared: int, sharing_s: float
    ) -> Prediction:
        rate, work_s = self._rates[replica.index], self._work_s(replica)
        own = num_tokens - max(num_shared, num_cached)
        shared_s = max(0, num_shared - num_cached) * rate.token_s
        wait_s = self._wait_s(replica)
        seconds = wait_s + AFFINITY * own * rate.token_s
        seconds += max(0.0, shared_s - max(0.0, sharing_s - work_s)) + LEVELLING * work_s
        return Prediction(replica, num_cached, wait_s, seconds)

    def _wait_s(self, replica: Replica) -> float:
        """Return the seconds before a core starts a new prompt: earlier prompts, the current decoding step, waiting for
        a free row."""
        rate, num_here, num_rows = self._rates[replica.index], replica.num_sequences, max(1, replica.info.max_running)
        wait_s = replica.num_prefilling * rate.token_s
        if num_here:
            wait_s += rate.step_s + RUNNING_TOKENS * num_here * rate.token_s
        if num_here >= num_rows:
            wait_s += (num_here + 1 - num_rows) / num_rows * self._request_s
        return wait_s

    def _work_s(self, replica: Replica) -> float:
        """Return the seconds of a core's recent and waiting work."""
        return self._recent_s[replica.index] + replica.num_prefilling * self._rates[replica.index].token_s

    def _decay(self) -> None:
        now_s = asyncio.get_running_loop().time()
        kept = math.exp((self._decayed_s - now_s) / RECENT_S)
        self._recent_s = [seconds * kept for seconds in self._recent_s]
        self._decayed_s = now_s

    # ── events of the cores ────────────────────────────────────────────────────────────────────────────

    def note_ready(self, replica: Replica) -> None:
        self.index.forget(replica.index)
        if replica not in self._started:
            self._started.append(replica)
        self._measured[replica.index].forget_core()
        replica.send(WatchBlocks())

    def note_outputs(self, replica: Replica, message: Outputs) -> None:
        self._recent_s[replica.index] += self._measured[replica.index].note(message.stats)
        if message.cache_events is not None and not self.index.apply(replica.index, message.cache_events):
            replica.send(WatchBlocks())

    def note_end(self, run: RequestRun) -> None:
        seconds = asyncio.get_running_loop().time() - run.placed_s
        self._request_s += EWMA_WEIGHT * (seconds - self._request_s)


def rendezvous(key: bytes, replica: int) -> bytes:
    """Return the weight of a core for a key. Every front computes the same weights, and most keys keep their core when
    cores are added or removed."""
    return blake2b(key, digest_size=8, salt=replica.to_bytes(4, "little")).digest()


def reason(chosen: Prediction, found: Sequence[Prediction], num_shared: int) -> str:
    """Return the reason of a choice as one word, for metrics and headers."""
    most = max(one.num_cached for one in found)
    if chosen.num_cached > num_shared and chosen.num_cached == most:
        return "cached"
    if most > num_shared:
        return "busy"  # the core with more cached tokens would take longer
    return "level"
