"""The program of a rank's process: `python -m tokenmill.engine.rank_main DESCRIPTOR PARENT`.

It loads its part of a model and follows rank 0 (`runner/ranked.py`); it ends when rank 0 closes the connection, or is
gone. SIGUSR2 writes the stacks of its threads to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

ORPHAN_CHECK_S = 0.1


def main() -> int:
    leader, parent_pid = Connection(int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # who runs the core decides when it ends
    faulthandler.register(signal.SIGUSR2)  # see STACK_SIGNAL of `ranks.py`, which is imported later
    threading.Thread(target=end_with_parent, args=(parent_pid,), name="orphan", daemon=True).start()
    import torch

    from tokenmill.engine.backends import find_backend
    from tokenmill.engine.ranks import RankStart, held_link, join_group, run_follower
    from tokenmill.observe.log import configure_logging

    configure_logging()
    try:
        start = msgspec.msgpack.decode(leader.recv_bytes(), type=RankStart)
    except EOFError:  # the parent went away before it said anything
        return 0
    config = start.config
    assert config.ops.threads is not None
    torch.set_num_threads(config.ops.threads if find_backend(config.ops.backend).uses_torch_threads else 1)
    run_follower(start, join_group(config, start.rank, start.descriptor), held_link(start), leader)
    return 0


def end_with_parent(parent_pid: int) -> None:
    """End this process, whatever it waits for, once its parent is gone."""
    with suppress(OSError):  # a system that can't wait for others' processes, or a parent that is gone already
        select.select([os.pidfd_open(parent_pid)], [], [])
    while os.getppid() == parent_pid:
        threading.Event().wait(ORPHAN_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # torch would take half a second to take itself down
