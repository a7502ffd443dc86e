"""The other process of a measured link: `python -m tokenmill.bench.link_peer KIND FILE READS WRITES` (descriptors)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tokenmill.parallel.group import RankGroup
from tokenmill.parallel.shared import SharedGroup
from tokenmill.parallel.stage_link import StageLink

SMALL, LARGE = 4096, 1 << 22  # bytes of one rank's part
ROUNDS = 40


def join(kind: str, rank: int, descriptor: int) -> RankGroup:
    if kind == "shared":
        return SharedGroup.over_file(descriptor, rank, 2)
    from tokenmill.parallel.gloo import GlooGroup  # a second's import that others do without

    return GlooGroup(rank, 2, Path(f"/proc/self/fd/{descriptor}"))


def play(group: RankGroup | None, link: StageLink | None, *, is_first: bool) -> Callable[[torch.Tensor], None]:
    """Exchange a matrix once: gathered by both sides, or sent there and back."""

    def exchange(sent: torch.Tensor) -> None:
        if group is not None:
            group.all_gather(sent, [sent.shape[1]] * 2)
        elif link is not None and is_first:
            link.send(sent)
            link.receive()
        elif link is not None:
            link.send(link.receive())

    return exchange


def main() -> int:
    kind, descriptor, before, behind = sys.argv[1], *map(int, sys.argv[2:5])
    link = StageLink(Connection(before), Connection(behind), reads_ahead=False) if kind == "pipe" else None
    exchange = play(None if link is not None else join(kind, 1, descriptor), link, is_first=False)
    for size in (SMALL, LARGE):
        sent = torch.zeros(1, size // 4)
        for _ in range(ROUNDS):
            exchange(sent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
