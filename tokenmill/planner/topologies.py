"""Every way to put replicas of a model on some devices, with memory, speed and price, and the one to take.

    8 × H200, 70B:    8 × tp 1    does not fit
                      4 × tp 2    fits, 21 requests/s within the promise
                      2 × tp 4    fits, 17
                      1 × tp 8    fits, 11; the shortest TPOT

A machine's processor is taken as one device that replicas, and the ranks of each, have equal shares of. Of the ways
that keep the promise and carry the load, the one with the fewest devices is taken; without a load to carry, the one
that carries most; then the one with the shortest TPOT.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tokenmill.arch.cost import kv_bytes_per_token
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.virtual import VirtualDevice
from tokenmill.planner.device import PlanDevice, plan_device
from tokenmill.planner.memory import Split
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Plan, Question, make_plan
from tokenmill.report.units import counted, duration

TPS = (1, 2, 4, 8, 16)
DEVICES = re.compile(r"(?P<name>.+?)(?:x(?P<number>\d{1,4}))?")
START_S = 2.0  # of an engine process, besides its weights
LOAD_BYTES_S = 8e9  # speed at which weights are loaded onto a device
BLOCK_BYTES_S = 1e9  # speed at which a replica fetches KV blocks from another one, over a socket
TOP_BATCH = 64  # up to which a virtual device's steps follow the roofline


@dataclass(frozen=True)
class Asked:
    """The requirements on a fleet: load and latencies."""

    least: int  # replicas
    most: int
    tp: int | None = None  # None: any
    pp: int = 1
    requests_s: float | None = None


@dataclass(frozen=True)
class Topology:
    """Replicas of so many ranks each, side by side."""

    num_replicas: int  # that the devices have room for, or that are allowed
    tp: int
    plan: Plan
    asked: Asked

    @property
    def name(self) -> str:
        return f"{self.num_replicas}x{self.tp}" + (f"x{self.asked.pp}" if self.asked.pp > 1 else "")

    @property
    def num_ranks(self) -> int:
        """Ranks of a replica."""
        return self.tp * self.asked.pp

    @property
    def ranks(self) -> str:
        """The ranks of a replica, in words."""
        return f"tp {self.tp}" + (f", {self.asked.pp} stages" if self.asked.pp > 1 else "")

    @property
    def why_not(self) -> str:
        """Why it can't be taken; empty: it can."""
        if not self.plan.memory.fits:
            return self.plan.why_not()
        if self.plan.best is None:
            return "misses the promised latencies even for one request"
        if self.num_replicas < max(1, self.asked.least):
            return f"there is room for {self.num_replicas} of {self.asked.least} replicas"
        if self.asked.requests_s is not None and self.requests_s < self.asked.requests_s:
            return f"carries {self.requests_s:.2f} of {self.asked.requests_s:g} requests/s"
        return ""

    @property
    def requests_s(self) -> float:
        """Requests a second within the promise, with all replicas."""
        return 0.0 if self.plan.best is None else self.num_replicas * self.plan.best.requests_s

    @property
    def num_needed(self) -> int:
        """Replicas that the load needs; at least those that are asked for."""
        if self.asked.requests_s is None or self.plan.best is None:
            return max(1, self.asked.least)
        needed = ceil(self.asked.requests_s / self.plan.best.requests_s)
        return min(self.num_replicas, max(1, self.asked.least, needed))

    @property
    def num_devices(self) -> int:
        return self.num_needed * self.num_ranks

    @property
    def usd_per_hour(self) -> float | None:
        listed = self.plan.device.peaks.price_usd_h
        return None if listed is None or self.plan.device.is_cpu else listed * self.num_devices

    @property
    def order(self) -> tuple[float, ...]:
        """The best first."""
        if self.why_not:
            return (1.0, float(not self.plan.memory.fits), -self.requests_s)
        first = -self.requests_s if self.asked.requests_s is None else float(self.num_devices)
        return (0.0, first, self.plan.tpot_s)


def named_devices(text: str) -> tuple[PlanDevice, int]:
    """Devices by name and number: `h200x8`."""
    found = DEVICES.fullmatch(text.strip())
    number = int(found["number"] or 1) if found is not None else 0
    if found is None or number < 1:
        raise InvalidConfig(f"{text!r} is no kind and number of devices", param="virtual", hint="write h200x8")
    return plan_device(found["name"]), number


def named_topology(name: str, found: Sequence[Topology]) -> Topology:
    """The topology of a name such as `4x2`: four replicas of two ranks."""
    for one in found:
        if one.name == name.strip() and one.plan.memory.fits:
            return one
    names = ", ".join(one.name for one in found if one.plan.memory.fits)
    raise InvalidConfig(f"no topology {name!r} fits here", param="take", hint=f"there are {names}" if names else None)


def topologies(
    model: PlannedModel, device: PlanDevice, num_devices: int, question: Question, asked: Asked
) -> list[Topology]:
    """Return every topology of these devices, the best first. `num_devices`: of a processor, the threads to share
    out."""
    found = [
        Topology(num_replicas, tp, make_plan(model, share, replace(question, split=Split(tp, asked.pp))), asked)
        for num_replicas, tp, share in _candidates(model, device, num_devices, asked)
    ]
    if not found:
        least = (asked.tp or 1) * asked.pp
        ranks = f" of {'' if asked.tp else 'at least '}{counted(least, 'rank')}" if least > 1 else ""
        raise InvalidConfig(f"no replica{ranks} can be put on {num_devices} × {device.name}", param="tp")
    return sorted(found, key=lambda one: one.order)


def _candidates(
    model: PlannedModel, device: PlanDevice, num_devices: int, asked: Asked
) -> Iterator[tuple[int, int, PlanDevice]]:
    for tp in TPS if asked.tp is None else (asked.tp,):
        try:
            Split(tp, asked.pp).check(model.spec)
        except InvalidConfig:
            continue
        num_ranks = tp * asked.pp
        if not device.is_cpu and num_ranks <= num_devices:
            yield min(asked.most, num_devices // num_ranks), tp, device
        elif device.is_cpu and num_ranks <= num_devices:
            # Replicas share a processor, so as many are planned as there may be: more than threads, if it is asked for.
            number = asked.most
            yield number, tp, share_of(device, number * num_ranks)


def share_of(device: PlanDevice, num_shares: int) -> PlanDevice:
    """One of several equal shares of a processor and its memory."""
    flops = {dtype: value / num_shares for dtype, value in device.peaks.flops.items()}
    peaks = replace(
        device.peaks,
        memory_bytes=device.peaks.memory_bytes // num_shares,
        bandwidth_bytes_s=device.peaks.bandwidth_bytes_s / num_shares,
        flops=flops,
    )
    return replace(device, peaks=peaks, available_bytes=device.available_bytes // num_shares)


# ── telling ──────────────────────────────────────────────────────────────────────────────────────────────


TITLES = ("replicas", "tp", "GB on one", "KV tokens", "TTFT", "TPOT", "requests/s", "$/h", "")


def rows(found: Sequence[Topology]) -> list[tuple[str, ...]]:
    return [_row(one, is_chosen=index == 0 and not one.why_not) for index, one in enumerate(found)]


def _row(one: Topology, *, is_chosen: bool) -> tuple[str, ...]:
    memory, price = one.plan.memory, one.usd_per_hour
    best = one.plan.best
    return (
        str(one.num_replicas),
        str(one.tp),
        f"{memory.total / 1e9:.1f}",
        f"{memory.num_blocks * one.plan.block_size:,}",
        "–" if best is None else duration(best.ttft_s),
        "–" if best is None else duration(best.tpot_s),
        "–" if best is None else f"{one.requests_s:.2f}",
        "–" if price is None else f"{price:.2f}",
        one.why_not or ("taken" if is_chosen else ""),
    )


def reason(found: Sequence[Topology]) -> str:
    """Why the first topology was taken, in a sentence; InvalidConfig where none can be."""
    best, others = found[0], [one for one in found[1:] if not one.why_not]
    if best.why_not:
        raise InvalidConfig(
            f"no topology does what is asked: {counted(best.num_replicas, 'replica')} of {best.ranks} {best.why_not}",
            hint="ask for less, or give it more devices",
        )
    load = best.plan.best
    assert load is not None
    what = f"{counted(best.num_replicas, 'replica')} of {best.ranks}"
    carried = f"{best.requests_s:.2f} requests/s, a token after {duration(load.tpot_s)}"
    if not others:
        return f"{what}: {carried}; no other topology does what is asked"
    other = others[0]
    if best.asked.requests_s is not None and best.num_devices < other.num_devices:
        why = f"its load needs {counted(best.num_devices, 'device')}, with tp {other.tp} {other.num_devices}"
    else:
        why = f"tp {other.tp} would carry {other.requests_s:.2f}"
    return f"{what}: {carried}; {why}"


# ── trying it before it is bought ────────────────────────────────────────────────────────────────────────


def virtual_device(plan: Plan) -> VirtualDevice:
    """A core that sleeps as long as the planned device would compute."""
    q, roofline = plan.question, plan.roofline
    short = max(1, q.input_len // 4)
    alone_s = roofline.decode_s(1, short)
    rows = max(2, min(TOP_BATCH, q.max_running, plan.memory.max_concurrency))
    row_s = max(0.0, roofline.decode_s(rows, short) - alone_s) / (rows - 1)
    context_s = max(0.0, roofline.decode_s(1, short + q.context) - alone_s) / max(1, q.context)
    prompt_s = max(0.0, roofline.prefill_s(q.input_len) - alone_s) / q.input_len
    return VirtualDevice(
        step_s=alone_s - row_s,
        token_s=prompt_s,
        row_s=row_s,
        context_s=context_s,
        num_blocks=plan.memory.num_blocks,
        block_size=plan.block_size,
        max_running=q.max_running,
        token_budget=q.token_budget,
        max_context=min(q.context, plan.model.spec.max_context),
        start_s=START_S + plan.memory.weights / LOAD_BYTES_S,
        block_s=plan.block_size * kv_bytes_per_token(plan.model.spec, plan.kv_dtype) / BLOCK_BYTES_S,
    )
