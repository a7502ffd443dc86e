"""Parsing of a user's MODEL: a path, a short name from the catalog, or a Hugging Face id.

    ./model.gguf   /models/llama/            a path: an existing file or directory takes precedence
    ./config.json                            a bare config
    smollm2:135m   qwen3                     a short name
    owner/name     owner/name:Q4_K_M         a hub repository; after the colon a GGUF file or a quantisation
    owner/name:sub/file.gguf
    hf.co/owner/name                         the same, as Ollama's users write it; also the URL of its page
    scripted:./script.json                   a test model that gives the answers of a script

Names become directory names and URLs, so they are checked here, once: no `..`, no extra separators, limited length.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import UnknownModel
from tokenmill.store.catalog import CatalogEntry, find_entry, load_catalog

MAX_NAME_LENGTH = 200
SCRIPT_PREFIX = "scripted:"
MODEL_FILES = (".gguf", ".json")  # weights, or a bare config: enough to plan, and to run with dummy weights
HUB_HOSTS = ("hf.co/", "huggingface.co/")  # prefixes that Ollama's users write before a hub id
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(:(?P<file>{_PART}(/{_PART})*))?")


@dataclass(frozen=True)
class LocalModel:
    path: Path


@dataclass(frozen=True)
class ScriptFile(LocalModel):
    """The script of a scripted model, which has no weights."""


@dataclass(frozen=True)
class HubModel:
    repo: str
    file: str | None = None  # a GGUF file of the repository, or a quantisation such as Q4_K_M

    @property
    def name(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo


ModelName = LocalModel | CatalogEntry | HubModel


def parse_name(text: str) -> ModelName:
    """Parse a model name; raise UnknownModel with similar names if there is no such model."""
    found = _script(text) or existing_path(text) or find_entry(text) or _hub_id(text)
    if found is None:
        raise UnknownModel(f"there is no model {shown(text)}", hint=_suggestion(text))
    return found


def is_model_name(text: str) -> bool:
    """Return whether `text` can be a MODEL, in contrast to a sentence."""
    return (
        _script(text) is not None
        or existing_path(text) is not None
        or find_entry(text) is not None
        or _hub_id(text) is not None
    )


def is_scripted(text: str) -> bool:
    """Return whether `text` names a script instead of a model."""
    return text.startswith(SCRIPT_PREFIX)


def shown(text: str) -> str:
    """Quote and shorten a user's text for a one-line message."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _script(text: str) -> ScriptFile | None:
    if not text.startswith(SCRIPT_PREFIX) or "\0" in text:
        return None
    path = Path(text.removeprefix(SCRIPT_PREFIX)).expanduser()
    return ScriptFile(path) if path.is_file() else None


def existing_path(text: str) -> LocalModel | None:
    """Return the model file or folder at this path; None if there is none."""
    if not text or "\0" in text or len(text) > 4096:
        return None
    try:
        path = Path(text).expanduser()
        usable = path.is_dir() or (path.is_file() and path.suffix in MODEL_FILES)
    except (OSError, RuntimeError):  # RuntimeError: `~user` does not exist or has no home directory
        return None
    # A name of the catalog is a path only with a separator or suffix: a folder "qwen3" must not hide the catalog's.
    named_as_path = (
        "/" in text or "\\" in text or text in (".", "..") or path.suffix in MODEL_FILES or find_entry(text) is None
    )
    return LocalModel(path) if usable and named_as_path else None


def _hub_id(text: str) -> HubModel | None:
    text = text.removeprefix("https://")
    match = _HUB_ID.fullmatch(next((text.removeprefix(host) for host in HUB_HOSTS if text.startswith(host)), text))
    if match is None or len(text) > MAX_NAME_LENGTH or ".." in text or match["repo"].endswith(".gguf"):
        return None
    return HubModel(match["repo"], match["file"])


def _suggestion(text: str) -> str:
    with suppress(OSError, RuntimeError, ValueError):
        if Path(text).expanduser().is_file():
            return "that file is not a model: a model is a GGUF file, a folder with config.json, or a config.json"
    if text.endswith(".gguf") or text.startswith((SCRIPT_PREFIX, ".", "/", "~")):
        return "there is no such file or directory"
    near = difflib.get_close_matches(text.lower(), load_catalog(), n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "see `tokenmill list --catalog`, or give a path to a GGUF file or a Hugging Face id (owner/name)"
