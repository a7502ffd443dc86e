"""Choice of a core for a request: the one predicted to finish its prompt first, taking later turns into account.

    seconds(core) = wait                                 prompts that it has to compute before, at its own measured rate
                  + uncached own tokens × seconds × 4    keeping a conversation together saves later turns too
                  + uncached shared tokens × seconds     less as much as the cores that have them did more lately
                  + a little for what it did lately      of cores that are equal, the one that had less to do

A prompt begins with what many requests share (a system prompt, tools), and goes on with what is its own (the earlier
turns of its conversation). A core that has the own part computes less now and in later turns, so conversations stay
where their cache is, without any header. The shared part would pull every new conversation to the core that had it
first. Computing it once more elsewhere is paid once, so it is worth it as soon as that core has done that much more
than the other: all cores have it soon. What is shared is seen in the requests themselves: blocks that many different
blocks have followed.

Cores that are still equal are told apart by a rendezvous hash of the conversation's first own block, so that several
fronts choose alike.
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

TOGETHER = 4.0  # what a cached token of the conversation itself is worth, in tokens that need not be computed now
LATELY_S = 30.0  # work that long ago counts a third
LEVELLING = 0.002  # weight of what cores did lately: little enough to part no conversation from its cache
MAX_KNOWN_BLOCKS = 1 << 17  # that requests began with
RUNNING_TOKENS = 8  # what a request that runs on a core counts for, in tokens that it has to compute
SAME_S = 1e-6
FETCHED_BLOCKS = 4  # by which another core must have more of a prompt for its blocks to be asked for
STEADINESS = 0.05  # weight of the newest request in the mean time that one takes


class Prediction(NamedTuple):
    """The predicted cost of a request on one core."""

    replica: Replica
    num_cached: int  # tokens
    wait_s: float
    seconds: float


class SharedBlocks:
    """The blocks that many conversations begin with: those that many different blocks have followed. Those not seen
    for longest are forgotten."""

    def __init__(self, num_followers: int) -> None:
        """`num_followers`: how many different blocks must have followed one for it to be shared."""
        self._least = num_followers
        self._followers: OrderedDict[bytes, int] = OrderedDict()

    def num_shared(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks of a request that others begin with too, and remember the request."""
        followers, shared = self._followers, 0
        for index, block_hash in enumerate(hashes):
            if block_hash in followers:
                followers.move_to_end(block_hash)
                if followers[block_hash] >= self._least:
                    shared = index + 1
                continue
            followers[block_hash] = 0
            if index:
                followers[hashes[index - 1]] += 1
        while len(followers) > MAX_KNOWN_BLOCKS:
            followers.popitem(last=False)
        return shared


class PrefixRouter:
    """Chooses a core by predicted seconds."""

    def __init__(self, num_replicas: int) -> None:
        self.index = BlockIndex(num_replicas)
        self._started: list[Replica] = []  # all that were ever ready
        self._measured = [StepRate() for _ in range(num_replicas)]
        self._rates = common_rates(self._measured)
        self._shared = SharedBlocks(2 * num_replicas)
        self._lately = [0.0] * num_replicas  # seconds of work, fading
        self._faded_s = -math.inf
        self._request_s = 1.0  # that a request takes from beginning to end, on average

    # ── choosing ───────────────────────────────────────────────────────────────────────────────────────

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Route:
        self._fade()
        self._rates = common_rates(self._measured)
        num_tokens, block_size = len(request.prompt_token_ids), replicas[0].info.block_size
        chain = HashChain(request.cache_salt, block_size, request.adapter)
        places = {replica.index for replica in replicas}
        # Those that get no more requests may have blocks for those that do.
        others = [one for one in self._started if one.is_ready and one.index not in places]
        having = [*replicas, *others]
        blocks = self.index.matches(request.prompt_token_ids, chain, block_size, [one.index for one in having])
        cached = [number * block_size for number in blocks[: len(replicas)]]
        num_shared = self._shared.num_shared(chain.hashes) * block_size
        # The most that a core which has the shared part has done lately.
        sharing_s = max(
            (self._work_s(r) for r, found in zip(replicas, cached, strict=True) if found >= num_shared), default=0.0
        )
        found = [
            self._predicted(replica, num_tokens, number, num_shared, sharing_s)
            for replica, number in zip(replicas, cached, strict=True)
        ]
        best = min(one.seconds for one in found)
        equal = [one for one in found if one.seconds <= best + SAME_S]
        first_own = chain.hashes[min(num_shared // block_size, len(chain.hashes) - 1)] if chain.hashes else b""
        chosen = max(equal, key=lambda one: rendezvous(first_own, one.replica.index))
        most, has_most = max(zip(blocks, having, strict=True), key=lambda one: one[0])
        source = has_most if most * block_size - chosen.num_cached >= FETCHED_BLOCKS * block_size else None
        return Route(chosen.replica, reason(chosen, found, num_shared), num_tokens - chosen.num_cached, source)

    def usual_rate(self) -> StepSeconds:
        """Return the step time that most cores have in common."""
        return usual_rate(self._measured)

    def _predicted(
        self, replica: Replica, num_tokens: int, num_cached: int, num_shared: int, sharing_s: float
    ) -> Prediction:
        rate, work_s = self._rates[replica.index], self._work_s(replica)
        own = num_tokens - max(num_shared, num_cached)
        shared_s = max(0, num_shared - num_cached) * rate.token_s
        wait_s = self._wait_s(replica)
        seconds = wait_s + TOGETHER * own * rate.token_s
        seconds += max(0.0, shared_s - max(0.0, sharing_s - work_s)) + LEVELLING * work_s
        return Prediction(replica, num_cached, wait_s, seconds)

    def _wait_s(self, replica: Replica) -> float:
        """Return the seconds before a core begins with a new prompt: earlier prompts, the current decoding step, a free
        row."""
        rate, num_here, num_rows = self._rates[replica.index], replica.num_sequences, max(1, replica.info.max_running)
        wait_s = replica.num_prefilling * rate.token_s
        if num_here:
            wait_s += rate.step_s + RUNNING_TOKENS * num_here * rate.token_s
        if num_here >= num_rows:
            wait_s += (num_here + 1 - num_rows) / num_rows * self._request_s
        return wait_s

    def _work_s(self, replica: Replica) -> float:
        """Return the seconds of work that a core did lately and has waiting."""
        return self._lately[replica.index] + replica.num_prefilling * self._rates[replica.index].token_s

    def _fade(self) -> None:
        now = asyncio.get_running_loop().time()
        kept = math.exp((self._faded_s - now) / LATELY_S)
        self._lately = [seconds * kept for seconds in self._lately]
        self._faded_s = now

    # ── what cores say ─────────────────────────────────────────────────────────────────────────────────

    def note_ready(self, replica: Replica) -> None:
        self.index.forget(replica.index)
        if replica not in self._started:
            self._started.append(replica)
        self._measured[replica.index].forget_core()
        replica.send(WatchBlocks())

    def note_outputs(self, replica: Replica, message: Outputs) -> None:
        self._lately[replica.index] += self._measured[replica.index].note(message.stats)
        if message.cache_events is not None and not self.index.apply(replica.index, message.cache_events):
            replica.send(WatchBlocks())

    def note_end(self, run: RequestRun) -> None:
        seconds = asyncio.get_running_loop().time() - run.placed_s
        self._request_s += STEADINESS * (seconds - self._request_s)


def rendezvous(key: bytes, replica: int) -> bytes:
    """The weight of a core for a key: the heaviest is the same for everybody, and keeps most keys as cores come and
    go."""
    return blake2b(key, digest_size=8, salt=replica.to_bytes(4, "little")).digest()


def reason(chosen: Prediction, found: Sequence[Prediction], num_shared: int) -> str:
    """Why a core was chosen, in a word, for metrics and headers."""
    most = max(one.num_cached for one in found)
    if chosen.num_cached > num_shared and chosen.num_cached == most:
        return "cached"
    if most > num_shared:
        return "busy"  # the core that has more of it cached would take longer
    return "level"
