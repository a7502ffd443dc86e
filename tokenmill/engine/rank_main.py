"""The program of a rank's process: `python -m tokenmill.engine.rank_main DESCRIPTOR PARENT`, or a forked copy of the
core's process (`fork_rank`), which has loaded all libraries. On another machine: `... --join HOST:PORT PARENT`, which
starts the other ranks of its stage: `... --join HOST:PORT PARENT TICKET PLACE DESCRIPTOR`.

The process loads its part of a model and executes the messages of rank 0 (`runner/ranked.py`); it ends when rank 0
closes the connection or ends. SIGUSR2 writes the stacks of its threads to standard error.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.engine.core_process import STOP_SIGNAL

if TYPE_CHECKING:
    from tokenmill.engine.rank_part import RankStart

ORPHAN_CHECK_S = 0.1
PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> int:
    if sys.argv[1] == "--join":
        ticket, place, descriptor = sys.argv[4:] or ("", "0", "-1")
        return serve_joined_rank(sys.argv[2], int(sys.argv[3]), ticket, int(place), int(descriptor))
    return serve_rank(Connection(int(sys.argv[1])), int(sys.argv[2]))


def fork_rank(leader: Connection, descriptors: Collection[int]) -> int:
    """Fork this process to serve as a rank, and return the copy's id. Of all open descriptors, the copy keeps these and
    the standard ones. Only for core processes: their other threads hold no locks that a rank needs."""
    core = os.getpid()
    if (pid := os.fork()) != 0:
        return pid
    try:
        os.setpgid(0, 0)
        end_with_core(core)
        gc.enable()  # it was paused for the core's start
        keep_only({0, 1, 2, leader.fileno(), *descriptors})
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os._exit(serve_rank(leader, core))
    finally:  # the copy must never return into the core's code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def end_with_core(core: int) -> None:
    """Let the kernel kill this process when the main thread of its parent, which started it, ends: a thread here would
    notice later, and not at all while a signal has stopped it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != core:
        os._exit(1)


def keep_only(kept: Collection[int]) -> None:
    """Close all file descriptors except these."""
    for before, descriptor in pairwise((-1, *sorted(kept), os.sysconf("SC_OPEN_MAX"))):
        if descriptor > before + 1:  # an empty range from 0 on would close all of them
            os.closerange(before + 1, descriptor)


def serve_joined_rank(address: str, parent_pid: int, ticket: str, place: int, descriptor: int) -> int:
    """Serve as a rank of a pipeline stage whose core is on another machine. `ticket`: of the stage; without one this is
    its first rank, which starts the others. `descriptor`: of the file that they share."""
    if ticket:
        end_with_core(parent_pid)
    prepare_process(parent_pid)
    from tokenmill.engine.joined_ranks import (
        JOIN_S,
        RANK,
        RankHello,
        RankListener,
        call_when_closed,
        connect,
        group_key,
        ring_ends,
        send_hello,
        send_port,
        split_address,
    )

    (host, port), key, until_s = split_address(address), group_key(), time.monotonic() + JOIN_S
    leader = connect(host, port, RANK, key, until_s)
    call_when_closed(leader, lambda: os._exit(1))
    invite = send_hello(leader, RankHello(ticket, place))
    if invite is not None and invite.num_ranks > 1:
        descriptor = os.memfd_create("tokenmill-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, invite.file_bytes)
        for sibling in range(1, invite.num_ranks):
            start_sibling(address, invite.ticket, sibling, descriptor)
    listener = RankListener("", 0, key)
    send_port(leader, listener.port)
    from tokenmill.engine.rank_part import RankStart, run_follower  # torch is imported while others join
    from tokenmill.engine.ranks import join_group
    from tokenmill.parallel.stage_link import StageLink

    start = msgspec.msgpack.decode(leader.recv_bytes(), type=RankStart)
    set_up(start)
    before, behind = ring_ends(listener, *(start.behind_at or (host, start.core_port or port)), key, until_s)
    listener.close()
    group = join_group(start.config, start.rank, descriptor)
    run_follower(start, group, StageLink(before, behind, reads_ahead=False), leader)
    return 0


def start_sibling(address: str, ticket: str, place: int, descriptor: int) -> None:
    """Start another rank of this stage in a process. Each of the two ends with the other, so that the group ends."""
    from tokenmill.engine.core_process import python_command, wait_for_trouble

    command = [*python_command(), "-m", "tokenmill.engine.rank_main", "--join", address, str(os.getpid())]
    process = subprocess.Popen(
        [*command, ticket, str(place), str(descriptor)], stdin=subprocess.DEVNULL, pass_fds=[descriptor]
    )

    def watch() -> None:
        wait_for_trouble(process.pid)
        process.kill()
        os._exit(1)

    threading.Thread(target=watch, name=f"sibling-{place}", daemon=True).start()


def serve_rank(leader: Connection, parent_pid: int) -> int:
    """Load the part of the model that rank 0 assigns, and execute its messages until it closes the connection."""
    prepare_process(parent_pid)
    from tokenmill.engine.rank_part import RankStart, open_link, run_follower
    from tokenmill.engine.ranks import join_group

    try:
        start = msgspec.msgpack.decode(leader.recv_bytes(), type=RankStart)
    except EOFError:  # the parent ended before it sent anything
        return 0
    set_up(start)
    run_follower(start, join_group(start.config, start.rank, start.descriptor), open_link(start), leader)
    return 0


def prepare_process(parent_pid: int) -> None:
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0's process decides when this one ends
    faulthandler.register(signal.SIGUSR2)  # `ranks.STACK_SIGNAL`; that module is imported later
    threading.Thread(target=end_with_parent, args=(parent_pid,), name="orphan", daemon=True).start()
    from tokenmill.observe.log import configure_logging

    configure_logging()


def set_up(start: RankStart) -> None:
    """Set the process name and torch's number of threads."""
    import torch

    from tokenmill.engine.backends import find_backend

    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank-{start.rank}")  # shown by `ps` and `top`
    config = start.config
    assert config.ops.threads is not None
    torch.set_num_threads(config.ops.threads if find_backend(config.ops.backend).uses_torch_threads else 1)


def end_with_parent(parent_pid: int) -> None:
    """End this process, even while it waits, once its parent has ended."""
    with suppress(OSError):  # the system has no pidfd, or the parent has already ended
        select.select([os.pidfd_open(parent_pid)], [], [])
    while os.getppid() == parent_pid:
        threading.Event().wait(ORPHAN_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # skip interpreter shutdown: torch takes half a second to tear down
