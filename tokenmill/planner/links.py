"""Links between devices: what a collective over them costs, and how much of a pipeline's time is lost between stages.

    seconds of a collective = α × steps of its algorithm + bytes that a device sends / β

α is the latency of one step from a device to another, β the bytes per second that a device sends while all of them do.
Both are of collectives as programs reach them. The defaults are of each kind of link, PCIe's from published throughput
(`tests/planner/test_splits.py`), the others from makers' figures; `tokenmill bench links` measures those between ranks
of this machine.

    sum       every device has all numbers of a sum over all: it reads those of all others at once, or adds up a share
              and then gets the others', two steps in which 2 (t - 1) / t of the numbers go through each
    gather    every device has the parts of all: (t - 1) / t of the whole, read from all others at once
    send      a stage hands its stream to the next
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.arch.read import read_json
from tokenmill.errors import InvalidConfig

LANE_JITTER = 0.09
"""Time of a stage that passes, for every other stage, until all have ended: steps of lanes are not equally long, mostly
because of prompts in some. From published throughput of pipelines (tests/planner/test_splits.py)."""


@dataclass(frozen=True)
class Link:
    name: str
    title: str
    latency_s: float
    bytes_s: float

    def sum_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce: until all ranks have the sum of all ranks' values."""
        if ranks == 1:
            return 0.0
        at_once_s = self.latency_s + (ranks - 1) * num_bytes / self.bytes_s
        return min(at_once_s, 2 * self.latency_s + 2 * (ranks - 1) / ranks * num_bytes / self.bytes_s)

    def gather_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-gather: until all ranks have all of `num_bytes`, of which each has a part."""
        if ranks == 1:
            return 0.0
        return self.latency_s + (ranks - 1) / ranks * num_bytes / self.bytes_s

    def send_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_s


LINKS = {
    link.name: link
    for link in (
        Link("one_gpu", "several ranks on one GPU, under CUDA MPS", 4e-6, 150e9),
        Link("nvlink", "NVLink or Infinity Fabric", 5e-6, 370e9),
        Link("pcie5", "PCIe 5 x16", 10e-6, 64e9),
        Link("pcie4", "PCIe 4 x16", 12e-6, 30e9),
        Link("ib", "InfiniBand NDR", 8e-6, 45e9),
        Link("ethernet", "100 Gbit Ethernet", 30e-6, 11e9),
        Link("shared", "shared memory of one machine", 3e-6, 8e9),
        Link("loopback", "gloo over loopback", 80e-6, 1.5e9),
    )
}


def find_link(name: str) -> Link:
    """A kind of link, or the fastest of those in a result of `tokenmill bench links`."""
    if name in LINKS:
        return LINKS[name]
    if not name.endswith(".json"):
        hint = f"one of {', '.join(LINKS)}, or a result of `tokenmill bench links`"
        raise InvalidConfig(f"unknown link {name!r}", param="link", hint=hint)
    try:
        found = [Link(**link) for link in read_json(Path(name))["links"]]
        return min(found, key=lambda link: link.sum_s(1e5, 2))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise InvalidConfig(f"{name} is no result of `tokenmill bench links`", param="link") from None


def pipeline_share(stages: int) -> float:
    """The part of the time that a stage computes, where all stages have equal work."""
    return 1 / (1 + LANE_JITTER * (stages - 1))
