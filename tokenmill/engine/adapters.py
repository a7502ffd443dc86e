"""The adapters of a core: read in a thread, kept in memory by their digest, loaded into the model's slots by plans.

Clients select an adapter by name, engine requests by digest. Loading another file under the same name changes the
adapter of new requests; running requests keep theirs. An adapter without a name is freed once no request uses it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.engine.status import FailedAdapter, LoadedAdapter
from tokenmill.errors import TokenmillError, UnknownModel, UnsupportedModel

if TYPE_CHECKING:
    from tokenmill.lora.adapter import Adapter  # torch, which a front does without

MAX_ADAPTERS = 4096


class AdapterStore:
    def __init__(
        self, read: Callable[[Path], Adapter], matrices: set[str] | None = None, max_rank: int = 0, max_values: int = 0
    ) -> None:
        """`matrices`: names of the matrices that adapters may change; None: the model has no slots. `max_rank`,
        `max_values`: the capacity of a slot."""
        self._read = read
        self._matrices = matrices
        self._max_rank = max_rank
        self._max_values = max_values
        self.by_digest: dict[str, Adapter] = {}
        self._names: dict[str, LoadedAdapter] = {}
        self.retired: set[str] = set()  # digests without a name
        self._results: queue.SimpleQueue[tuple[LoadedAdapter, Adapter] | FailedAdapter] = queue.SimpleQueue()
        self._num_loading = 0

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._names.values())

    @property
    def is_loading(self) -> bool:
        return self._num_loading > 0

    def require(self, digest: str) -> None:
        if digest not in self.by_digest:
            raise UnknownModel("the adapter was unloaded before the request could start", param="model")

    def load(self, name: str, path: Path) -> LoadedAdapter:
        """Read an adapter in this thread."""
        loaded, adapter = self._loaded(name, path)
        self._keep(loaded, adapter)
        return loaded

    def start_loading(self, name: str, path: Path) -> None:
        """Read an adapter in a background thread, while steps continue."""
        self._num_loading += 1
        threading.Thread(target=self._load_in_background, args=(name, path), name="adapter", daemon=True).start()

    def _load_in_background(self, name: str, path: Path) -> None:
        try:
            self._results.put(self._loaded(name, path))
        except TokenmillError as error:
            self._results.put(FailedAdapter(name=name, message=str(error), code=error.code))
        except (OSError, MemoryError, ValueError, RuntimeError) as error:
            message = f"the adapter could not be read: {error}"
            self._results.put(FailedAdapter(name=name, message=message, code="model_error"))

    def finish_loading(self, timeout_s: float = 0.0) -> list[LoadedAdapter | FailedAdapter]:
        """Return the adapters that background threads have read since the last call; if there is none, wait up to
        `timeout_s` for one."""
        finished: list[LoadedAdapter | FailedAdapter] = []
        while self._num_loading:
            waits = timeout_s > 0 and not finished
            try:
                result = self._results.get(timeout=timeout_s) if waits else self._results.get_nowait()
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
        """Remove a name; an unknown name is ignored."""
        if (loaded := self._names.pop(name, None)) is not None:
            self._retire(loaded.digest)

    def forget_unused(self, is_used: Callable[[str], bool]) -> None:
        """Free adapters that have no name and are used by no request."""
        for digest in [one for one in self.retired if not is_used(one)]:
            self.retired.discard(digest)
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
            raise UnsupportedModel(f"{MAX_ADAPTERS} adapters are already loaded", hint="unload some")

    def _require_fit(self, adapter: Adapter, path: Path) -> None:
        missing = sorted(adapter.matrices.keys() - (self._matrices or set()))
        if missing:
            hint = None
            if ".experts." in missing[0]:
                hint = "on a GPU name the adapter when the model is started; on several GPUs experts can't be adapted"
            raise UnsupportedModel(f"{path}: the adapter slots have no room for {missing[0]}", hint=hint)
        if adapter.rank > self._max_rank:
            hint = f"start with --max-adapter-rank {adapter.rank}"
            problem = f"rank {adapter.rank} is more than a slot's {self._max_rank}"
            raise UnsupportedModel(f"{path}: {problem}", hint=hint)
        if adapter.num_values > self._max_values:
            raise UnsupportedModel(
                f"{path}: {adapter.num_values:,} numbers are more than a slot's {self._max_values:,}",
                hint="name the adapter when the model is started, or raise --max-adapter-rank",
            )

    def _keep(self, loaded: LoadedAdapter, adapter: Adapter) -> None:
        old = self._names.get(loaded.name)
        self._names[loaded.name] = loaded
        self.by_digest[loaded.digest] = adapter
        self.retired.discard(loaded.digest)
        if old is not None and old.digest != loaded.digest:
            self._retire(old.digest)

    def _retire(self, digest: str) -> None:
        if all(one.digest != digest for one in self._names.values()):
            self.retired.add(digest)


def no_adapters() -> AdapterStore:
    def read(path: Path) -> Adapter:
        raise UnsupportedModel("this model does not support adapters")

    return AdapterStore(read)
