"""The ranks of a model on this host: started, loaded with their parts of it, watched, ended.

    core's process ── rank 0: scheduler, sampler, its part of the model
      ├── rank 1: a process (`rank_main.py`) or a thread, its part of the model
      └── ...

A rank that ends or is stopped takes its group with it: all waits end with `PeerDied`, and whoever started the core is
told at once (`when_rank_dies`). Ranks in processes end by themselves when their core is gone.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.engine.backends import find_backend
from tokenmill.engine.core_process import EXIT_TIMEOUT_S, SECRETS, own_python
from tokenmill.engine.model import kv_storage, open_source
from tokenmill.errors import InvalidConfig, PeerDied, TokenmillError
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.cpu import is_available
from tokenmill.parallel.cuts import Cuts, cut_model, cut_spec
from tokenmill.parallel.group import RankGroup, Shard
from tokenmill.parallel.shared import SharedGroup
from tokenmill.parallel.threads import ThreadGroup
from tokenmill.runner.ranked import FollowingSampler, RankedRunner, follow
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.weights.rank_weights import RankWeights

log = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGUSR2  # a rank's process then writes the stacks of its threads
STACK_PATIENCE_S = 0.2
STOPPED = "was stopped"
STOPPED_PATIENCE_S = 0.5  # a debugger stops a process for a moment; a rank that stays stopped is lost


class RankStart(msgspec.Struct, frozen=True):
    """First message to a rank: what it is, and what it loads."""

    config: EngineConfig  # resolved
    model_path: str
    rank: int
    descriptor: int  # of a file without a name, by which ranks find each other or which they share


class RankReady(msgspec.Struct, frozen=True):
    """A rank's first answer: it has loaded its part, or why it could not."""

    rank: int
    error: str | None = None
    hint: str | None = None


# ── one rank ───────────────────────────────────────────────────────────────────────────────────────────


def load_part(config: EngineConfig, spec: ModelSpec, model_path: Path, group: RankGroup) -> tuple[Model, KVStorage]:
    """One rank's part of a model, and of its KV cache."""
    cuts = Cuts(group.rank, group.size, cut_model(spec, group.size))
    source = RankWeights(open_source(config, model_path, spec), cuts)
    own = cut_spec(spec, group.size, group.rank)
    model = find_backend(config.ops.backend).build_model(config, own, source, Shard(group, cuts))
    return model, kv_storage(config, own)


def run_follower(start: RankStart, group: RankGroup, leader: Connection) -> None:
    """Load a part of the model and follow rank 0 until it closes the connection."""
    config, path = start.config, Path(start.model_path)
    try:
        model, storage = load_part(config, read_spec(path), path, group)
    except TokenmillError as error:
        _answer(leader, RankReady(start.rank, error.message, error.hint))
        return
    assert config.model.max_context is not None
    max_rows = config.scheduler.num_rows
    sampler = FollowingSampler(model.vocab_size, max_rows, storage.device)
    runner = ModelRunner(model, storage, sampler, max_rows, config.model.max_context)
    _answer(leader, RankReady(start.rank))
    follow(runner, group, leader)


def _answer(leader: Connection, ready: RankReady) -> None:
    with suppress(OSError):  # rank 0 is gone: whoever reads next learns of it
        leader.send_bytes(msgspec.msgpack.encode(ready))


# ── all ranks ──────────────────────────────────────────────────────────────────────────────────────────


class Ranks:
    """Ranks 1 and up of one model, from their start to their end."""

    def __init__(
        self, config: EngineConfig, model_path: Path, when_rank_dies: Callable[[str], None] = lambda _how: None
    ) -> None:
        """Start them: they load beside rank 0, which is the caller's. `config`: resolved."""
        self.group: RankGroup
        self._when_rank_dies = when_rank_dies
        self._followers: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        size, link = config.parallel.tp, config.parallel.link
        self._descriptor = -1 if link == "threads" else shared_file(size, link)
        if link == "threads":
            groups = thread_groups(config)
            self.group = groups[0]
            for group in groups[1:]:
                self._start_thread(RankStart(config, str(model_path), group.rank, -1), group)
        else:
            self.group = join_group(config, 0, self._descriptor)
            for rank in range(1, size):
                self._start_process(RankStart(config, str(model_path), rank, self._descriptor))

    def _start_thread(self, start: RankStart, group: RankGroup) -> None:
        ours, theirs = Pipe()
        self._followers.append(ours)
        thread = threading.Thread(
            target=run_follower, args=(start, group, theirs), name=f"rank-{start.rank}", daemon=True
        )
        thread.start()

    def _start_process(self, start: RankStart) -> None:
        ours, theirs = Pipe()
        self._followers.append(ours)
        with theirs:
            process = subprocess.Popen(
                [*own_python(), "-m", "tokenmill.engine.rank_main", str(theirs.fileno()), str(os.getpid())],
                env={name: value for name, value in os.environ.items() if name not in SECRETS},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._descriptor),
                process_group=0,
            )
        self._processes.append(process)
        ours.send_bytes(msgspec.msgpack.encode(start))
        threading.Thread(
            target=self._watch, args=(start.rank, process), name=f"watch-{start.rank}", daemon=True
        ).start()

    def wait_until_loaded(self) -> None:
        """Wait for all ranks; raise what kept one of them from loading its part."""
        for follower in self._followers:
            try:
                ready = msgspec.msgpack.decode(follower.recv_bytes(), type=RankReady)
            except (EOFError, OSError):
                raise PeerDied("a rank ended while it loaded its part of the model") from None
            if ready.error is not None:
                raise InvalidConfig(f"rank {ready.rank}: {ready.error}", hint=ready.hint)

    def make_runner(
        self, model: Model, storage: KVStorage, sampler: Sampler, max_rows: int, max_context: int
    ) -> RankedRunner:
        """The runner of all ranks, with rank 0's part of the model; they end with it."""
        runner = RankedRunner(ModelRunner(model, storage, sampler, max_rows, max_context), self.group, self._followers)
        weakref.finalize(runner, self.close)
        return runner

    def close(self) -> None:
        """Close the connections, which ends the ranks; those that hang are killed."""
        if self._is_closed:
            return
        self._is_closed = True
        for follower in self._followers:
            follower.close()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.group.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
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
        """Write the stacks of all ranks to standard error: of those that are stopped too, which go on for that."""
        faulthandler.dump_traceback()
        for process in self._processes:
            process.send_signal(STACK_SIGNAL)
            process.send_signal(signal.SIGCONT)
        threading.Event().wait(STACK_PATIENCE_S)


def thread_groups(config: EngineConfig) -> Sequence[RankGroup]:
    """A group of each rank, where ranks are threads; native kernels exchange within a step."""
    size = config.parallel.tp
    return SharedGroup.in_threads(size) if is_available()[0] else ThreadGroup.make(size)


def shared_file(size: int, link: str) -> int:
    """The descriptor of a file of which nothing is left when the processes have ended that have it."""
    descriptor = os.memfd_create("tokenmill-ranks", os.MFD_CLOEXEC)
    if link == "shared":
        os.ftruncate(descriptor, SharedGroup.file_bytes(size))
    return descriptor


def join_group(config: EngineConfig, rank: int, descriptor: int) -> RankGroup:
    """The group of a rank that is a process."""
    if config.parallel.link == "shared":
        return SharedGroup.over_file(descriptor, rank, config.parallel.tp)
    from tokenmill.parallel.gloo import GlooGroup  # a second's import that others do without

    return GlooGroup(rank, config.parallel.tp, Path(f"/proc/self/fd/{descriptor}"))


def wait_for_trouble(pid: int) -> str:
    """Wait until a child has ended, or is stopped and stays so; how, in words."""
    while True:
        try:
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        except ChildProcessError:  # it was waited for elsewhere
            return "has ended"
        if state is None or state.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            return "has ended"
        if not _goes_on(pid):
            return STOPPED


def _goes_on(pid: int) -> bool:
    """Tell whether a child that was stopped runs again within a moment."""
    threading.Event().wait(STOPPED_PATIENCE_S)
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return True
