"""Resolution of a user's MODEL to files on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import InvalidConfig, UnknownModel
from tokenmill.store.layout import Store
from tokenmill.store.names import LocalModel, parse_name, shown
from tokenmill.store.progress import PullProgress, Silent
from tokenmill.store.pull import pull


@dataclass(frozen=True)
class ResolvedModel:
    path: Path  # a GGUF file, or the directory of a safetensors checkpoint
    name: str  # what to call it
    source: str  # "local", or where the store got it


def resolve_model(
    name: str, *, store: Store | None = None, allow_pull: bool = True, progress: PullProgress | None = None
) -> ResolvedModel:
    """Return the path of a model; with `allow_pull`, pull it first if it is not in the store."""
    model = parse_name(name)
    if isinstance(model, LocalModel):
        _require_unicode(name)
        return ResolvedModel(
            model.path, model.path.resolve().stem if model.path.is_file() else _folder_name(model), "local"
        )
    store = store or Store()
    manifest = store.get(model.name)
    if manifest is None:
        if not allow_pull:
            raise UnknownModel(f"{model.name} is not in the store", hint=f"tokenmill pull {model.name}")
        manifest = pull(model, store, progress or Silent())
    return ResolvedModel(store.path_of(manifest), manifest.name, manifest.source)


def _require_unicode(name: str) -> None:
    """Require a path that is valid UTF-8, since it is sent to the engine process as text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidConfig(
            f"the path {shown(name)} is not UTF-8", param="model", hint="rename it, or make a link with another name"
        ) from None


def _folder_name(model: LocalModel) -> str:
    return model.path.resolve().name
