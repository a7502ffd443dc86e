"""`tokenmill host`: run replicas on this machine for a cluster whose front end runs elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tokenmill.cli.flags import Count, Switch
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig
from tokenmill.store import is_scripted

if TYPE_CHECKING:
    from tokenmill.fleet.host import HostAgent

PARENT_CHECK_S = 0.5
STAGE_CHECK_S = 0.1
STAGE_SCHEME = "tcp://"


def command(
    *,
    join: str,
    key_file: Path | None = None,
    name: str = "",
    replicas: Count | None = None,
    tls_ca: Path | None = None,
    ends_with_parent: Switch = False,
    seats: Annotated[Count | None, Parameter(show=False)] = None,
) -> int:
    """Run replicas for a cluster started elsewhere by `tokenmill up`, until stopped. This machine opens no port.

    Parameters
    ----------
    join
        Address of the cluster: ws://HOST:PORT, or wss:// with TLS. With tcp://HOST:PORT this machine instead runs a
        pipeline stage of the engine that listens there (`--stages-at`), with the key in TOKENMILL_RANK_KEY.
    key_file
        File with the cluster's key; by default the key is read from TOKENMILL_CLUSTER_KEY.
    name
        Name of this machine in the cluster; by default its host name.
    replicas
        Number of replicas that this machine can hold; by default one per GPU, or one on the CPU.
    tls_ca
        File with the certificate authority of the cluster (PEM); by default the system's.
    ends_with_parent
        Exit when the parent process has ended.
    seats
        Deprecated name of --replicas.
    """
    if join.startswith(STAGE_SCHEME):
        return _be_stage(join.removeprefix(STAGE_SCHEME), os.getppid() if ends_with_parent else None)
    from tokenmill.fleet.host import HostAgent
    from tokenmill.fleet.link import HostInfo, read_key
    from tokenmill.hardware.cpu import probe_cpu
    from tokenmill.hardware.gpu import probe_nvidia
    from tokenmill.hardware.torch_build import torch_computes_on_gpus
    from tokenmill.observe.log import configure_logging
    from tokenmill.version import VERSION

    key = read_key(key_file, os.environ.get("TOKENMILL_CLUSTER_KEY"))
    gpus = probe_nvidia() if torch_computes_on_gpus() else []
    if seats is not None:
        print("tokenmill: --seats is deprecated: use --replicas", file=sys.stderr)
    capacity = replicas or seats or max(1, len(gpus))
    device = f"{len(gpus)} × {gpus[0].name}" if gpus else probe_cpu().name
    configure_logging()
    info = HostInfo(name or socket.gethostname(), capacity, device, VERSION)
    agent = HostAgent(join, key, info, Fitting(capacity, len(gpus)).fit, tls=_tls(join, tls_ca))
    return asyncio.run(_run(agent, os.getppid() if ends_with_parent else None))


def _be_stage(address: str, parent_pid: int | None) -> int:
    """Run a stage's process, and a new one when it ends, since the core restarts all ranks after a failure."""
    from tokenmill.engine.core_process import is_stopped, python_command, stays_stopped
    from tokenmill.engine.joined_ranks import group_key, split_address

    split_address(address)
    group_key()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        command = [*python_command(), "-m", "tokenmill.engine.rank_main", "--join", address, str(os.getpid())]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        try:
            while child.poll() is None and not stopped.is_set():
                stopped.wait(STAGE_CHECK_S)
                if parent_pid is not None and os.getppid() != parent_pid:
                    stopped.set()
                if is_stopped(child.pid) and stays_stopped(child.pid):
                    print("tokenmill: the stage's process was stopped: it is replaced", file=sys.stderr)
                    break
        finally:
            child.kill()
            child.wait()
        stopped.wait(STAGE_CHECK_S)
    return 0


async def _run(agent: HostAgent, parent_pid: int | None) -> int:
    """Run until a signal arrives or the parent has ended; then stop the cores."""
    running = asyncio.create_task(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    while parent_pid is not None and not running.done():
        await asyncio.wait({running}, timeout=PARENT_CHECK_S)
        if os.getppid() != parent_pid:
            running.cancel()
            break
    try:
        await running
    except asyncio.CancelledError:
        return 0
    return 0


def _tls(url: str, ca: Path | None) -> ssl.SSLContext | None:
    if not url.startswith("wss://"):
        if ca is not None:
            raise InvalidConfig("--tls-ca needs a wss:// address", param="tls_ca")
        return None
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as problem:
        raise InvalidConfig(f"{ca} is not a usable certificate: {problem}", param="tls_ca") from None


class Fitting:
    """Adapts a core's settings to this machine: its share of threads and memory."""

    def __init__(self, capacity: int, num_gpus: int) -> None:
        self._capacity = capacity
        self._num_gpus = num_gpus

    def fit(self, config: EngineConfig, path: Path) -> EngineConfig:
        if is_scripted(config.model.model) or self._num_gpus:
            return config
        from tokenmill.hardware.cpu import probe_cpu
        from tokenmill.hardware.memory import probe_memory
        from tokenmill.planner.serving import serving_memory

        here = config.parallel.tp * (1 if config.parallel.stages_at else config.parallel.pp)
        ranks = self._capacity * here
        threads = config.ops.threads or max(1, probe_cpu().usable_cores // ranks)
        share = probe_memory().total_bytes // self._capacity
        available = min(share, probe_memory().available_bytes)
        _, memory = serving_memory(config, path, config.model.model, available=available)
        cache = replace(config.cache, num_blocks=config.cache.num_blocks or memory.num_blocks)
        return replace(config, ops=replace(config.ops, threads=threads), cache=cache)
