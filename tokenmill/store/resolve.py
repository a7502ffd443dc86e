"""Resolution of a user's MODEL to files on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import InvalidConfig, UnknownModel
from tokenmill.store.created import find_created, plain_name
from tokenmill.store.layout import Customization, Manifest, Store
from tokenmill.store.names import LocalModel, ScriptFile, existing_path, parse_name, shown
from tokenmill.store.progress import PullProgress, Silent
from tokenmill.store.pull import pull


@dataclass(frozen=True)
class ResolvedModel:
    path: Path  # a GGUF file, or the directory of a safetensors checkpoint
    name: str  # for display; for a created model the name of the one it was made from
    source: str  # "local", "script", or the source in the store's manifest
    custom: Customization | None = None  # of a created model


def resolve_model(
    name: str, *, store: Store | None = None, allow_pull: bool = True, progress: PullProgress | None = None
) -> ResolvedModel:
    """Return the path of a model; with `allow_pull`, pull it first if it is not in the store."""
    if existing_path(name) is None and (created := find_created(name, store or Store())) is not None:
        return _resolved(created, store or Store())
    model = parse_name(plain_name(name))
    if isinstance(model, ScriptFile):
        _require_unicode(name)
        return ResolvedModel(model.path, model.path.stem, "script")
    if isinstance(model, LocalModel):
        _require_unicode(name)
        return ResolvedModel(model.path, _path_name(model.path), "local")
    store = store or Store()
    manifest = store.get(model.name)
    if manifest is None:
        if not allow_pull:
            raise UnknownModel(f"{model.name} is not in the store", hint=f"tokenmill pull {model.name}")
        manifest = pull(model, store, progress or Silent())
    return _resolved(manifest, store)


def _resolved(manifest: Manifest, store: Store) -> ResolvedModel:
    return ResolvedModel(store.path_of(manifest), _base_name(manifest), manifest.source, manifest.custom)


def _base_name(manifest: Manifest) -> str:
    """Return the name of the model that a created one was made from; if it was made from a path, that path's name."""
    return _path_name(Path(manifest.weights)) if manifest.weights else manifest.parent or manifest.name


def resolve_base(name: str, store: Store, progress: PullProgress) -> Manifest:
    """Return the manifest of the model that a new one is made from; pull it if it is not in the store."""
    model = parse_name(name) if (created := find_created(name, store)) is None else created
    if isinstance(model, ScriptFile):
        raise InvalidConfig("a model can't be created from a scripted one", param="from")
    if isinstance(model, LocalModel):
        path = model.path.resolve()
        return Manifest(name=_path_name(path), source="local", files=[], weights=str(path))
    return model if isinstance(model, Manifest) else pull(model, store, progress)


def _require_unicode(name: str) -> None:
    """Require a path that is valid UTF-8, because it is sent to the engine process as text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidConfig(
            f"the path {shown(name)} is not UTF-8", param="model", hint="rename it, or make a link with another name"
        ) from None


def _path_name(path: Path) -> str:
    """Return the name of a model at a path: the file's name without suffix, or the folder's name."""
    path = path.resolve()
    return path.stem if path.is_file() else path.name
