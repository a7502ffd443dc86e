"""The ranks of a model on this host: starting, watching and ending them. `rank_part.py` is what one rank does.

    core's process ── rank 0: scheduler, sampler, its part of the model
      ├── rank 1: a process (`rank_main.py`) or a thread, its part of the model
      └── ...

The ranks of one stage (`parallel/stages.py`) form a group for collective operations; a ring of connections joins the
ranks with the same position in each stage.

If a rank ends or is stopped, its whole group ends: all waits raise `PeerDied`, and `when_rank_dies` is called
immediately. Ranks in processes end by themselves when their core has ended.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.core_process import EXIT_TIMEOUT_S, SECRETS, STOPPED, python_command, wait_for_trouble
from tokenmill.engine.joined_ranks import (
    JOIN_S,
    RankListener,
    accept_stages,
    call_when_closed,
    group_key,
    hang_up,
    ring_ends,
    split_address,
)
from tokenmill.engine.rank_part import RankPart, RankReady, RankStart, run_follower
from tokenmill.engine.resolve_ranks import gpu_of_each_rank
from tokenmill.engine.stage_ring import StageRing
from tokenmill.errors import InvalidConfig, PeerDied
from tokenmill.kv.pool_memory import pool_file
from tokenmill.ops.cpu import is_available
from tokenmill.parallel.group import RankGroup, SingleRank
from tokenmill.parallel.shared import SharedGroup
from tokenmill.parallel.stage_link import StageLink
from tokenmill.parallel.stages import Mesh
from tokenmill.parallel.threads import ThreadGroup
from tokenmill.runner.ranked import Followers, RankedRunner
from tokenmill.runner.staged import PipelineRunner
from tokenmill.sampling.sampler import Sampler

if TYPE_CHECKING:
    from tokenmill.runner.mirrored import MirroredRunner

log = logging.getLogger(__name__)

ForkRank = Callable[[Connection, Collection[int]], int]
"""(connection, descriptors) → process id. Fork this process; the copy serves as a rank over the connection and keeps
the descriptors."""

STACK_SIGNAL = signal.SIGUSR2  # makes a rank's process write the stacks of its threads
STACK_WAIT_S = 0.2
FORKED_CHECK_S = 0.005


class ForkedProcess:
    """A forked copy of this process, with the methods of `subprocess.Popen` that `Ranks` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._has_ended = False
        self._lock = threading.Lock()  # once the process was waited for, its id may belong to another one

    def send_signal(self, number: int) -> None:
        with self._lock:
            if not self._has_ended:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        ends_s = None if timeout is None else time.monotonic() + timeout
        while not self._ended():
            if ends_s is not None and time.monotonic() >= ends_s:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            threading.Event().wait(FORKED_CHECK_S)

    def _ended(self) -> bool:
        with self._lock:
            if not self._has_ended:
                self._has_ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            return self._has_ended


class Ranks:
    """Starts, watches and ends ranks 1 and up of one model."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        when_rank_dies: Callable[[str], None] = lambda _how: None,
        fork: ForkRank | None = None,
        *,
        shares_pools: bool = False,
    ) -> None:
        """Start the ranks; they load in parallel with rank 0, which the caller loads. `config`: resolved. `fork`: how
        to start ranks as copies of a core process; None for other programs, whose threads may make forking unsafe.
        `shares_pools`: put their parts of the KV pool in files, `pools`, that this process can map."""
        self._fork = fork if config.ops.device == "cpu" else None  # a forked process can't use the GPU
        self.group: RankGroup
        self.link: StageLink | None = None
        self._config = config
        self._when_rank_dies = when_rank_dies
        self._followers: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        self._is_closed = False
        self._descriptors: list[int] = []
        self.pools: list[int] = []  # by rank, from rank 1 on
        mesh, link = Mesh(config.parallel.tp, config.parallel.pp), config.parallel.link
        if config.parallel.stages_at is not None:
            self._wait_for_machines(config.parallel.stages_at, mesh, model_path)
            return
        ring = StageRing(mesh)
        self.pools = [pool_file() for _ in range(1, mesh.size)] if shares_pools else []
        pools = self.pools or [-1] * (mesh.size - 1)
        if link == "threads":
            groups = [group for _ in range(mesh.pp) for group in thread_groups(config)]
            for rank in range(1, mesh.size):
                start = RankStart(config, str(model_path), rank, pool=pools[rank - 1])
                self._start_thread(start, groups[rank], ring.link(rank, config, model_path))
            self.group = groups[0]
        else:
            self._descriptors = [shared_file(mesh.tp, link) for _ in range(mesh.pp if mesh.tp > 1 else 0)]
            for rank in range(1, mesh.size):
                descriptor = self._descriptors[mesh.stage(rank)] if self._descriptors else -1
                before, behind = ring.descriptors(rank)
                start = RankStart(config, str(model_path), rank, descriptor, before, behind, pool=pools[rank - 1])
                self._start_process(start)
            self.group = join_group(config, 0, self._descriptors[0] if self._descriptors else -1)
        self.link = ring.link(0, config, model_path)
        if link != "threads":
            ring.close_others(0)  # only the ranks keep them open, so that neighbours notice a rank's end

    def _wait_for_machines(self, address: str, mesh: Mesh, model_path: Path) -> None:
        """Wait until other machines have joined, and start them as the later stages; the first stage's ranks are
        here."""
        (host, port), key, until_s = split_address(address), group_key(), time.monotonic() + JOIN_S
        listeners = [RankListener(host, port if place == 0 else 0, key) for place in range(mesh.tp)]
        ends: list[tuple[Connection, Connection]] = []
        try:
            log.info("waiting for %d machines to join at %s", mesh.pp - 1, address)
            file_bytes = group_file_bytes(mesh.tp, self._config.parallel.link)
            joined = accept_stages(listeners[0], mesh, file_bytes, until_s)
            for rank, one in sorted(joined.items()):
                behind, core_port = joined.get(rank + mesh.tp), listeners[mesh.place(rank)].port
                start = RankStart(
                    self._config, str(model_path), rank,
                    behind_at=None if behind is None else behind.address, core_port=core_port,
                )  # fmt: skip
                one.connection.send_bytes(msgspec.msgpack.encode(start))
            for place, listener in enumerate(listeners):
                ends.append(ring_ends(listener, *joined[mesh.tp + place].address, key, until_s))
        except (OSError, EOFError) as error:
            raise PeerDied(f"a rank ended before it had joined: {error}") from None
        finally:
            for listener in listeners:
                listener.close()
        self._descriptors = [shared_file(mesh.tp, self._config.parallel.link)] if mesh.tp > 1 else []
        for rank in range(1, mesh.tp):
            before, behind_rank = ends[rank]
            with before, behind_rank:  # only the rank keeps them open, so that neighbours notice its end
                self._start_process(
                    RankStart(
                        self._config, str(model_path), rank, self._descriptors[0],
                        before.fileno(), behind_rank.fileno(),
                    )
                )  # fmt: skip
        self.group = join_group(self._config, 0, self._descriptors[0] if self._descriptors else -1)
        self.link = StageLink(*ends[0], reads_ahead=True)
        for rank, one in sorted(joined.items()):
            self._followers.append(one.connection)
            call_when_closed(one.connection, partial(self._end_group, rank, "or its machine has ended"))

    def _end_group(self, rank: int, how: str) -> None:
        """End the group because a rank on another machine has ended."""
        if self._is_closed:
            return
        log.error("rank %d %s: its group ends", rank, how)
        self.group.abort()
        self.close()
        self._when_rank_dies(f"rank {rank} {how}")

    def _start_thread(self, start: RankStart, group: RankGroup, link: StageLink | None) -> None:
        ours, theirs = Pipe()
        self._followers.append(ours)
        thread = threading.Thread(
            target=run_follower, args=(start, group, link, theirs), name=f"rank-{start.rank}", daemon=True
        )
        thread.start()

    def _start_process(self, start: RankStart) -> None:
        ours, theirs = Pipe()
        self._followers.append(ours)
        descriptors = [one for one in start.descriptors if one >= 0]
        process: subprocess.Popen[bytes] | ForkedProcess
        with theirs:
            if self._fork is not None:
                process = ForkedProcess(self._fork(theirs, descriptors))
            else:
                process = subprocess.Popen(
                    [*python_command(), "-m", "tokenmill.engine.rank_main", str(theirs.fileno()), str(os.getpid())],
                    env=rank_environment(start),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *descriptors],
                    process_group=0,
                )
        self._processes.append(process)
        ours.send_bytes(msgspec.msgpack.encode(start))
        threading.Thread(
            target=self._watch, args=(start.rank, process), name=f"watch-{start.rank}", daemon=True
        ).start()

    def wait_until_loaded(self) -> set[str]:
        """Wait until all ranks have loaded their parts; raise the error of one that could not. Return the names of
        their matrices that adapters may change."""
        adapted: set[str] = set()
        for follower in self._followers:
            try:
                ready = msgspec.msgpack.decode(follower.recv_bytes(), type=RankReady)
            except (EOFError, OSError):
                raise PeerDied("a rank ended while it loaded its part of the model") from None
            if ready.error is not None:
                raise InvalidConfig(f"rank {ready.rank}: {ready.error}", hint=ready.hint)
            adapted.update(ready.adapted)
        return adapted

    def make_runner(self, part: RankPart, sampler: Sampler) -> RankedRunner | PipelineRunner | MirroredRunner:
        """Make the runner of all ranks, with rank 0's part of the model; the ranks end when it is freed."""
        parallel, followers = self._config.parallel, Followers(self._followers)
        runner: RankedRunner | PipelineRunner | MirroredRunner
        if self._config.ops.device == "cuda" and parallel.pp > 1:
            from tokenmill.runner.staged_cuda import DevicePipelineRunner

            on_gpu = part.staged_cuda_runner(sampler)
            beside, depth = parallel.tp - 1, parallel.num_lanes
            runner = DevicePipelineRunner(on_gpu, self.group, followers, beside=beside, depth=depth)
        elif self._config.ops.device == "cuda":
            from tokenmill.parallel.device import DeviceGroup
            from tokenmill.runner.mirrored import MirroredRunner

            assert isinstance(self.group, DeviceGroup), "see `resolve_parallel`"
            runner = MirroredRunner(part.cuda_runner(sampler), self.group, followers)
        elif parallel.pp == 1:
            runner = RankedRunner(part.row_runner(sampler), self.group, followers)
        else:
            own = part.stage_runner(sampler)
            runner = PipelineRunner(own, self.group, followers, beside=parallel.tp - 1, depth=parallel.num_lanes)
        weakref.finalize(runner, self.close)
        return runner

    def close(self) -> None:
        """Close the connections, which ends the ranks; those that hang are killed."""
        if self._is_closed:
            return
        self._is_closed = True
        for follower in self._followers:
            if self._config.parallel.stages_at is not None:
                hang_up(follower)
            follower.close()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.group.close()
        if self.link is not None:
            self.link.close()
        for descriptor in (*self._descriptors, *self.pools):
            os.close(descriptor)

    def _watch(self, rank: int, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        how = wait_for_trouble(process.pid)
        if self._is_closed:
            return
        log.error("rank %d (process %d) %s: its group ends", rank, process.pid, how)
        if how == STOPPED:
            self._log_stacks()
        self.group.abort()
        for other in self._processes:
            other.kill()
        for other in self._processes:
            other.wait()
        self._when_rank_dies(f"rank {rank} {how}")

    def _log_stacks(self) -> None:
        """Write the stacks of all ranks to standard error. Stopped ranks are continued so that they can do so."""
        faulthandler.dump_traceback()
        for process in self._processes:
            process.send_signal(STACK_SIGNAL)
            process.send_signal(signal.SIGCONT)
        threading.Event().wait(STACK_WAIT_S)


def thread_groups(config: EngineConfig) -> Sequence[RankGroup]:
    """Make the groups of the ranks of one stage, if ranks are threads; native kernels exchange within a step."""
    size = config.parallel.tp
    if size == 1:
        return [SingleRank()]
    return SharedGroup.in_threads(size) if is_available()[0] else ThreadGroup.make(size)


def shared_file(size: int, link: str) -> int:
    """Return the descriptor of an anonymous shared file, which is freed with the last process that has it open."""
    descriptor = os.memfd_create("tokenmill-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, group_file_bytes(size, link))
    return descriptor


def group_file_bytes(size: int, link: str) -> int:
    """Return the bytes of the file that the ranks of a stage share."""
    if size > 1 and link == "shared":
        return SharedGroup.file_bytes(size)
    if size > 1 and link == "ipc":
        from tokenmill.parallel.device import DeviceGroup

        return DeviceGroup.file_bytes(size)
    return 0


def join_group(config: EngineConfig, rank: int, descriptor: int) -> RankGroup:
    """Join the group of a stage's ranks from a rank's process."""
    stage_rank = rank % config.parallel.tp
    if config.parallel.tp == 1:
        return SingleRank()
    if config.parallel.link == "shared":
        return SharedGroup.over_file(descriptor, stage_rank, config.parallel.tp)
    if config.parallel.link == "ipc":
        from tokenmill.parallel.device import DeviceGroup  # needs Triton

        shared = Counter((config.parallel.rank_gpus or "").split(","))
        return DeviceGroup.over_file(
            descriptor, stage_rank, config.parallel.tp, torch.device("cuda"), ranks_of_device=max(shared.values())
        )
    from tokenmill.parallel.gloo import GlooGroup  # imported only for gloo: it takes a second

    return GlooGroup(stage_rank, config.parallel.tp, Path(f"/proc/self/fd/{descriptor}"))


def rank_environment(start: RankStart) -> dict[str, str]:
    """Return the environment of a rank's process. The rank's own GPU is the first visible one, so that all its threads
    use it; the other GPUs are visible too, because it maps their memory."""
    env = {name: value for name, value in os.environ.items() if name not in SECRETS}
    if start.config.ops.device == "cuda":
        seen = env.get("CUDA_VISIBLE_DEVICES")
        names = list(map(str, range(torch.cuda.device_count()))) if seen is None else seen.split(",")
        own = names.pop(gpu_of_each_rank(start.config.parallel)[start.rank])
        env["CUDA_VISIBLE_DEVICES"] = ",".join((own, *names))
    return env
