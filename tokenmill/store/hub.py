"""The Hugging Face hub as a source of models.

One request to the hub lists a repository's files with sizes and checksums; those of the model are selected and
downloaded at that commit. Token, endpoint and offline mode are the hub library's own settings (HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Files that could contain executable code are never downloaded.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import quote

import msgspec

from tokenmill.store.download import RemoteFile, download
from tokenmill.store.fetched import Fetched, SourceUnavailable, require_space
from tokenmill.store.layout import StoredFile, is_file_name
from tokenmill.store.progress import PullProgress

RESPONSE_TIMEOUT_S = 5.0  # an unreachable hub must fail quickly
MAX_RESPONSE_BYTES = 16 << 20
_CHECKPOINT = re.compile(r"[^/]+\.safetensors|[^/]+\.json|[^/]+\.jinja|tokenizer\.model|merges\.txt|vocab\.txt")
_PREFERRED = ("q4_k_m", "q4_0", "q8_0", "q5_k_m", "f16", "bf16")


Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40,64}$")]


class _Lfs(msgspec.Struct):
    sha256: Digest


class _Sibling(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0, le=2 << 40)]
    blob_id: Digest | None = None
    lfs: _Lfs | None = None


class _Info(msgspec.Struct):
    sha: Digest
    siblings: list[_Sibling] = []


@dataclass(frozen=True)
class Listing:
    repo: str
    commit: str
    files: dict[str, RemoteFile]  # by path in the repository


def fetch_from_hub(repo: str, file: str | None, sha256: str | None, folder: Path, progress: PullProgress) -> Fetched:
    listing = list_repo(repo)
    chosen = choose_files(listing, file)
    _require_names(chosen, repo)
    _require_pin(chosen, sha256)
    require_space(folder, sum(_missing_bytes(remote, folder) for remote in chosen))
    folder.mkdir(parents=True, exist_ok=True)
    files = [_fetch_one(remote, folder, progress) for remote in chosen]
    return Fetched(f"hub {repo}@{listing.commit[:12]}", files)


def list_repo(repo: str) -> Listing:
    """List the files of a repository; raise SourceUnavailable within seconds if the hub can't be reached."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise SourceUnavailable("the hub is disabled (HF_HUB_OFFLINE)")
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    token = get_token()
    headers = (("Authorization", f"Bearer {token}"),) if token else ()
    info = _get_info(f"{endpoint}/api/models/{repo}?blobs=true", headers, repo)
    files = {
        sibling.rfilename: RemoteFile(
            f"{endpoint}/{repo}/resolve/{quote(info.sha)}/{quote(sibling.rfilename)}",
            PurePosixPath(sibling.rfilename).name,
            sibling.size,
            sibling.lfs.sha256 if sibling.lfs else None,
            None if sibling.lfs else sibling.blob_id,
            headers,
        )
        for sibling in info.siblings
    }
    return Listing(repo, info.sha, files)


def _get_info(url: str, headers: tuple[tuple[str, str], ...], repo: str) -> _Info:
    request = urllib.request.Request(url)
    for name, value in headers:
        request.add_unredirected_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=RESPONSE_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(MAX_RESPONSE_BYTES), type=_Info)
    except urllib.error.HTTPError as problem:
        raise SourceUnavailable(_http_problem(problem.code, repo)) from problem
    except (OSError, HTTPException) as problem:
        reason = getattr(problem, "reason", None) or problem
        raise SourceUnavailable(f"the hub can't be reached ({' '.join(str(reason).split())[:120]})") from problem
    except msgspec.DecodeError as problem:
        raise SourceUnavailable(f"the hub's response for {repo} is not valid") from problem


def choose_files(listing: Listing, requested: str | None) -> list[RemoteFile]:
    """Select the files of the model: one GGUF (all its parts), or a safetensors checkpoint with its tokenizer."""
    paths = sorted(listing.files)
    if requested is None and any(path.endswith(".safetensors") and "/" not in path for path in paths):
        taken = [path for path in paths if _CHECKPOINT.fullmatch(path) and _is_taken(path)]
        return [listing.files[path] for path in _without_second_weights(taken)]
    ggufs = [path for path in paths if path.endswith(".gguf") and "mmproj" not in path.lower()]
    matching = _matching(ggufs, requested) if requested else _default_quantisation(ggufs)
    if not matching:
        offered = ", ".join(ggufs[:12]) or "neither GGUF files nor a safetensors checkpoint"
        raise SourceUnavailable(f"{listing.repo} on the hub has no {requested or 'usable model'}; its files: {offered}")
    return [listing.files[path] for path in _all_parts(matching[0], ggufs, listing.repo)]


def _is_taken(path: str) -> bool:
    """Return whether a file is downloaded: weights always (a bad name is an error), others if their name is valid."""
    return path.endswith(".safetensors") or is_file_name(path)


def _without_second_weights(paths: list[str]) -> list[str]:
    """Drop a second copy of the weights, which some repositories contain; loaders open model*.safetensors."""
    usual = [path for path in paths if path.startswith("model") and path.endswith(".safetensors")]
    return [path for path in paths if not usual or path in usual or not path.endswith(".safetensors")]


def _matching(ggufs: list[str], requested: str) -> list[str]:
    """Return the files that match `requested`: a path, a file name, or a quantisation between separators in a path."""
    exact = [path for path in ggufs if requested in (path, PurePosixPath(path).name)]
    tag = re.compile(rf"(^|[-._/]){re.escape(requested)}([-._/])", re.IGNORECASE)
    return exact or [path for path in ggufs if tag.search(path)]


def _default_quantisation(ggufs: list[str]) -> list[str]:
    for quantisation in _PREFERRED:
        if found := _matching(ggufs, quantisation):
            return found
    return ggufs[:1] if len(ggufs) == 1 else []


def _all_parts(path: str, ggufs: list[str], repo: str) -> list[str]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path)
    if match is None:
        return [path]
    part = re.compile(rf"{re.escape(match[1])}-\d{{5}}-of-{match[2]}\.gguf")
    parts = [other for other in ggufs if part.fullmatch(other)]
    if len(parts) != int(match[2]):
        raise SourceUnavailable(f"{repo} on the hub has only {len(parts)} of the {int(match[2])} parts of {match[1]}")
    return parts


def _require_names(chosen: list[RemoteFile], repo: str) -> None:
    """Check file names before anything is downloaded."""
    for remote in chosen:
        if not is_file_name(remote.name):
            raise SourceUnavailable(f"{repo} has a file {remote.name[:80]!r}, a name that the store does not allow")


def _require_pin(chosen: list[RemoteFile], sha256: str | None) -> None:
    if sha256 and [remote.sha256 for remote in chosen] != [sha256]:
        raise SourceUnavailable("the file on the hub is not the one in the catalog (its SHA-256 differs)")


def _missing_bytes(remote: RemoteFile, folder: Path) -> int:
    partial = folder / remote.key
    return remote.size_bytes - (partial.stat().st_size if partial.exists() else 0)


def _fetch_one(remote: RemoteFile, folder: Path, progress: PullProgress) -> tuple[StoredFile, Path]:
    path = folder / remote.key
    sha256 = download(remote, path, progress)
    return StoredFile(remote.name, sha256, remote.size_bytes), path


def _http_problem(status: int, repo: str) -> str:
    if status in (401, 403, 404):
        return f"the hub has no {repo} that you may read (a gated or private model needs HF_TOKEN)"
    return f"the hub responded with HTTP status {status}"
