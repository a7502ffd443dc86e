"""The adapters of a core: read in a thread, kept in memory by their digest, put into the model's slots by plans.

A name is a client's word for an adapter, its digest is what requests carry. Loading another file under the same name
changes what new requests get; those that run keep theirs until they are over. An adapter that no name stands for any
more is forgotten once no request uses it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.arch.unproven import VARIABLE
from tokenmill.engine.status import FailedAdapter, LoadedAdapter
from tokenmill.errors import TokenmillError, UnknownModel, UnsupportedModel

if TYPE_CHECKING:
    from tokenmill.lora.adapter import Adapter  # torch, which a front does without

MAX_ADAPTERS = 4096


class AdapterStore:
    def __init__(
        self, read: Callable[[Path], Adapter], matrices: set[str] | None = None, max_rank: int = 0, max_values: int = 0
    ) -> None:
        """`matrices`: those that the model's kernels can add to; None: it has no slots. `max_rank`, `max_values`: what
        a slot holds."""
        self._read = read
        self._matrices = matrices
        self._max_rank = max_rank
        self._max_values = max_values
        self.by_digest: dict[str, Adapter] = {}
        self._names: dict[str, LoadedAdapter] = {}
        self._retired: set[str] = set()  # digests without a name
        self._results: queue.SimpleQueue[tuple[LoadedAdapter, Adapter] | FailedAdapter] = queue.SimpleQueue()
        self._num_loading = 0

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._names.values())

    @property
    def is_loading(self) -> bool:
        return self._num_loading > 0

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def require(self, digest: str) -> None:
        if digest not in self.by_digest:
            raise UnknownModel("the adapter was unloaded before the request could begin", param="model")

    def load(self, name: str, path: Path) -> LoadedAdapter:
        """Read an adapter now."""
        loaded, adapter = self._loaded(name, path)
        self._keep(loaded, adapter)
        return loaded

    def start_loading(self, name: str, path: Path) -> None:
        """Read an adapter in a thread: steps go on meanwhile."""
        self._num_loading += 1
        threading.Thread(target=self._load_beside, args=(name, path), name="adapter", daemon=True).start()

    def _load_beside(self, name: str, path: Path) -> None:
        try:
            self._results.put(self._loaded(name, path))
        except TokenmillError as error:
            self._results.put(FailedAdapter(name=name, message=str(error), code=error.code))
        except (OSError, MemoryError, ValueError, RuntimeError) as error:
            message = f"the adapter could not be read: {error}"
            self._results.put(FailedAdapter(name=name, message=message, code="model_error"))

    def finish_loading(self, patience_s: float = 0.0) -> list[LoadedAdapter | FailedAdapter]:
        """Return the adapters that threads have read since the last call; wait up to the given time where there is none
        yet."""
        finished: list[LoadedAdapter | FailedAdapter] = []
        while self._num_loading:
            waits = patience_s > 0 and not finished
            try:
                result = self._results.get(timeout=patience_s) if waits else self._results.get_nowait()
            except queue.Empty:
                break
            self._num_loading -= 1
            if isinstance(result, FailedAdapter):
                finished.append(result)
            else:
                self._keep(*result)
                finished.append(result[0])
        return finished

    def unload(self, name: str) -> None:
        """Forget a name; one that is unknown is no error."""
        if (loaded := self._names.pop(name, None)) is not None:
            self._retire(loaded.digest)

    def forget_unused(self, is_used: Callable[[str], bool]) -> None:
        """Free the memory of adapters that no name stands for and no request uses."""
        for digest in [one for one in self._retired if not is_used(one)]:
            self._retired.discard(digest)
            del self.by_digest[digest]

    def _loaded(self, name: str, path: Path) -> tuple[LoadedAdapter, Adapter]:
        self._require_slots()
        adapter = self._read(path)
        self._require_fit(adapter, path)
        loaded = LoadedAdapter(
            name=name, digest=adapter.digest, rank=adapter.rank, num_values=adapter.num_values, path=str(path)
        )
        return loaded, adapter

    def _require_slots(self) -> None:
        if self._matrices is None:
            raise UnsupportedModel(
                "this model was loaded without slots for adapters", hint="start it with --adapter-slots"
            )
        if len(self._names) >= MAX_ADAPTERS:
            raise UnsupportedModel(f"{MAX_ADAPTERS} adapters are loaded already", hint="unload some")

    def _require_fit(self, adapter: Adapter, path: Path) -> None:
        missing = sorted(adapter.matrices.keys() - (self._matrices or set()))
        if missing:
            hint = None
            if ".experts." in missing[0]:
                hint = f"on a GPU: {VARIABLE}=gpu_expert_adapters, and name the adapter when the model is started"
            raise UnsupportedModel(f"{path}: there is no room for an adapter of {missing[0]}", hint=hint)
        if adapter.rank > self._max_rank:
            hint = f"start with --max-adapter-rank {adapter.rank}"
            raise UnsupportedModel(
                f"{path}: rank {adapter.rank} is more than a slot holds, {self._max_rank}", hint=hint
            )
        if adapter.num_values > self._max_values:
            raise UnsupportedModel(
                f"{path}: {adapter.num_values:,} numbers are more than a slot holds, {self._max_values:,}",
                hint="name the adapter when the model is started, or raise --max-adapter-rank",
            )

    def _keep(self, loaded: LoadedAdapter, adapter: Adapter) -> None:
        old = self._names.get(loaded.name)
        self._names[loaded.name] = loaded
        self.by_digest[loaded.digest] = adapter
        self._retired.discard(loaded.digest)
        if old is not None and old.digest != loaded.digest:
            self._retire(old.digest)

    def _retire(self, digest: str) -> None:
        if all(one.digest != digest for one in self._names.values()):
            self._retired.add(digest)


def no_adapters() -> AdapterStore:
    def read(path: Path) -> Adapter:
        raise UnsupportedModel("this model takes no adapters")

    return AdapterStore(read)
