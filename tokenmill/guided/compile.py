"""Compilation of grammars in worker threads (llguidance releases the GIL), and a bounded cache of the results.

A compilation can't be interrupted, so its size is limited: the text, the grammar, the lexer's states, the fuel of each
phase. It ends with a trial of the first tokens, which detects grammars that no text satisfies or that become too large
only in use. The workers run at a lower priority than the engine's steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import llguidance
import numpy as np

from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.guided.grammar import explain, grammar_text
from tokenmill.guided.matcher import Matcher
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided

CACHE_BYTES = 64 << 20
MAX_COMPILE_S = 1.8
MAX_WAIT_S = 30.0  # for a worker, and for the vocabulary of a large model
TRIAL_TOKENS = 64
GRAMMAR_BYTES, BYTES_PER_CHARACTER = 64 << 10, 64  # memory of a grammar: an upper estimate, measured on hundreds
NUM_WORKERS = 2
WORKER_NICENESS = 5
MAX_RECOMPILE_S = 0.2  # a grammar that took longer to compile is not compiled again during a step
# The grammar engine's defaults, so that every grammar it can handle is accepted.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, max_lexer_states=250_000, max_grammar_size=500_000, verbose_errors=False
)


class Compiled:
    """A compiled grammar: a matcher in its initial state, which each sequence forks.

    The forks fill one lexer with states, up to a limit. When it is full, rows that need more reopen the grammar: first
    with a new lexer that all rows share from then on; a row that fills that one too gets its own lexer.
    """

    def __init__(self, matcher: Matcher, num_bytes: int, compile_s: float, build: Callable[[], Matcher]) -> None:
        self.matcher = matcher
        self.num_bytes = num_bytes
        self.is_full = False  # permanently: a worker must compile the grammar again
        self._compile_s = compile_s
        self._build = build
        self._reopen_lock = threading.Lock()

    def reopen(self, full: Matcher, num_reopened: int) -> Matcher:
        """Return a matcher in its initial state with another lexer than `full` has."""
        with self._reopen_lock:
            is_replaced_already = full.lexer is not self.matcher.lexer
            if num_reopened == 0 and is_replaced_already:
                return self.matcher.fork()
            if num_reopened > 1:
                raise InvalidRequest(f"the grammar is too complex for this answer: {full.error}", param="guided")
            if self._compile_s > MAX_RECOMPILE_S:
                self.is_full = True
                raise Overloaded("the grammar's tables are full, and it must be compiled again: send the request again")
            fresh = self._build()
            if num_reopened == 0:
                self.matcher = fresh
                return fresh.fork()
            return fresh


@dataclass
class Compilation:
    """A compilation in progress."""

    future: Future[Compiled]
    clock: Callable[[], float] = time.monotonic  # the CPU time of its worker thread, once that has started
    started_s: list[float] = field(default_factory=list)  # by `clock`; empty until a worker has started
    is_cancelled: bool = False
    requested_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start the clock. Called in the worker thread, so that only its own CPU time counts."""
        self.clock = thread_clock()
        self.started_s.append(self.clock())

    @property
    def is_done(self) -> bool:
        return self.future.done() or self.is_late or self.is_kept_waiting

    @property
    def is_kept_waiting(self) -> bool:
        """Return whether it has waited for a worker for too long."""
        return not self.started_s and not self.future.done() and time.monotonic() - self.requested_s > MAX_WAIT_S

    @property
    def is_late(self) -> bool:
        return not self.future.done() and bool(self.started_s) and self.clock() - self.started_s[0] > MAX_COMPILE_S

    def result(self) -> Compiled:
        """Return the compiled grammar of a finished compilation, or raise InvalidRequest with the reason."""
        if self.future.done():
            return self.future.result()
        self.is_cancelled = True
        if not self.started_s:
            raise Overloaded("too many grammars are being compiled", retry_after_s=5)
        raise InvalidRequest(f"the grammar takes more than {MAX_COMPILE_S:g} s to compile", param="guided")


class Compiler:
    """Compiles and caches grammars. Its methods are called from one thread; only the compilation itself runs in
    others."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._cache_bytes = cache_bytes
        self._workers: ThreadPoolExecutor | None = None
        self._in_progress: dict[Guided, Compilation] = {}
        self._queued: dict[str, deque[tuple[Guided, Compilation]]] = {}  # by tenant; the first one's turn is next
        self._queue_lock = threading.Lock()
        self._cache: OrderedDict[Guided, Compiled] = OrderedDict()  # least recently used first
        self._alive: WeakValueDictionary[Guided, Compiled] = WeakValueDictionary()  # cached, or used by a request

    @property
    def cached_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._cache.values())

    def known(self, guided: Guided) -> Compiled | None:
        """Return a grammar that is already compiled, else None."""
        compiled = self._alive.get(guided)
        if compiled is not None:
            self._keep(guided, compiled)
        return compiled

    def usable(self, guided: Guided) -> Compiled | None:
        """Return a grammar that is already compiled and not full, else None."""
        compiled = self.known(guided)
        return None if compiled is None or compiled.is_full else compiled

    def start(self, guided: Guided) -> Compilation:
        """Start a compilation, or return the one in progress for the same grammar."""
        in_progress = self._in_progress.get(guided)
        if in_progress is None or in_progress.is_late or in_progress.is_kept_waiting:
            in_progress = self._in_progress[guided] = self._new_compilation(guided)
        return in_progress

    def finish(self, guided: Guided, compilation: Compilation) -> Compiled:
        """Cache and return the result of a compilation; raise InvalidRequest if it failed."""
        self._remove(guided, compilation)
        compiled = compilation.result()
        self._keep(guided, compiled)
        return compiled

    def abandon(self, guided: Guided, compilation: Compilation) -> None:
        """Cancel a compilation that no request waits for; one that a worker has started runs to its end."""
        compilation.is_cancelled = True
        self._remove(guided, compilation)

    def _remove(self, guided: Guided, compilation: Compilation) -> None:
        if self._in_progress.get(guided) is compilation:
            del self._in_progress[guided]

    def _keep(self, guided: Guided, compiled: Compiled) -> None:
        self._alive[guided] = self._cache[guided] = compiled
        self._cache.move_to_end(guided)
        while self.cached_bytes > self._cache_bytes and len(self._cache) > 1:
            self._evict(guided)

    def _evict(self, newest: Guided) -> None:
        """Drop the least recently used grammar of the tenant that has most of the cache, but not the newest one."""
        num_bytes: Counter[str] = Counter()
        for guided, compiled in self._cache.items():
            num_bytes[guided.owner] += compiled.num_bytes if guided != newest else 0
        largest = max(num_bytes, key=num_bytes.__getitem__)
        del self._cache[next(guided for guided in self._cache if guided.owner == largest and guided != newest)]

    def load_vocabulary(self) -> None:
        """Start loading the vocabulary; an error is reported for the first grammar."""
        if self._vocabulary is None:
            self._pool().submit(self.vocabulary)

    def _new_compilation(self, guided: Guided) -> Compilation:
        compilation = Compilation(Future())
        with self._queue_lock:
            self._queued.setdefault(guided.owner, deque()).append((guided, compilation))
        self._pool().submit(self._work_next)
        return compilation

    def _pool(self) -> ThreadPoolExecutor:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(NUM_WORKERS, "grammar", initializer=_lower_priority)
        return self._workers

    # ── in a worker ────────────────────────────────────────────────────────────────────────────────────

    def _work_next(self) -> None:
        """Compile the oldest queued grammar of the tenant whose turn it is; the tenants take turns."""
        with self._queue_lock:
            tenant = next(iter(self._queued))
            queue = self._queued.pop(tenant)
            guided, compilation = queue.popleft()
            if queue:
                self._queued[tenant] = queue
        self._work(guided, compilation)

    def _work(self, guided: Guided, compilation: Compilation) -> None:
        if compilation.is_cancelled:
            return
        try:
            vocabulary = self.vocabulary()
            compilation.start()
            compilation.future.set_result(compile_grammar(guided, vocabulary))
        except BaseException as error:  # a Rust panic is not an Exception, and its request must get an error too
            compilation.future.set_exception(as_invalid_request(error))

    def vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary


def compile_grammar(guided: Guided, vocabulary: Vocabulary) -> Compiled:
    """Compile and test a grammar; raise InvalidRequest with the reason if it can't be used."""
    text, began_s = grammar_text(guided), time.perf_counter()

    def build() -> Matcher:
        return Matcher(llguidance.LLMatcher(vocabulary.ll, text, log_level=0, limits=LIMITS), vocabulary)

    matcher = build()
    compile_s = time.perf_counter() - began_s
    if matcher.ll.is_error():
        explain(guided, matcher.ll.get_error())
    if warnings := matcher.ll.get_grammar_warnings():
        explain(guided, warnings[0])
    _check_first_tokens(guided, matcher, vocabulary.vocab_size)
    return Compiled(matcher, GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(guided.text), compile_s, build)


def _check_first_tokens(guided: Guided, matcher: Matcher, vocab_size: int) -> None:
    """Raise InvalidRequest if the first forced tokens, or the mask after them, show that the grammar can't be used."""
    trial = matcher.fork()
    mask = np.ones(-(-vocab_size // 32), np.int32)
    trial.advance(trial.forced()[:TRIAL_TOKENS])
    if trial.error is None:
        trial.forced()
        trial.fill(mask)
    if trial.error is not None or not mask.any():
        explain(guided, f"no text satisfies it, or it is too complex ({trial.error or 'no first token is allowed'})")


def as_invalid_request(error: BaseException) -> InvalidRequest:
    if isinstance(error, InvalidRequest):
        return error
    return InvalidRequest(f"the grammar could not be compiled: {error}", param="guided")


def thread_clock() -> Callable[[], float]:
    """Return a clock of this thread's CPU time that other threads can read; where there is none, of elapsed time."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


def _lower_priority() -> None:
    """Lower the priority of this thread, where threads have individual priorities (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICENESS)
