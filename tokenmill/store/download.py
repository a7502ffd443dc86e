"""Download of one file over HTTP, resumable and verified.

    destination:  [0 ............... done | done ................ size]
                   from an earlier attempt   requested with `Range: bytes=done-`

Bytes already on disk are hashed first, so that the final digest covers the whole file. The hub library's own download
deletes its partial file when interrupted; this one keeps it, because models have many gigabytes.
"""

from __future__ import annotations

import hashlib
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, Protocol

from tokenmill.store.fetched import CHUNK_BYTES, SourceUnavailable, is_disk_full
from tokenmill.store.progress import PullProgress

STALL_S = 30.0
MAX_FAILED_ATTEMPTS = 3  # in a row, without receiving any bytes
RETRY_PAUSE_S = 1.0


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class RemoteFile:
    url: str
    name: str
    size_bytes: int
    sha256: str | None = None  # large files
    git_sha1: str | None = None  # small ones: SHA-1 of "blob <size>\0" + content
    headers: tuple[tuple[str, str], ...] = ()  # sent to the first host only, never along a redirect

    @property
    def key(self) -> str:
        """The name of the partial file, derived from the content, so that it is never continued with other content."""
        return self.sha256 or self.git_sha1 or hashlib.sha256(self.url.encode()).hexdigest()


def download(remote: RemoteFile, destination: Path, progress: PullProgress) -> str:
    """Complete a partial download, verify it, and return its SHA-256."""
    digests = _Digests(remote)
    with open(destination, "ab+") as file:
        _hash_existing(file, digests, remote.size_bytes)
        progress.begin(remote.name, remote.size_bytes, file.tell(), remote.sha256)
        try:
            _fill(remote, file, digests, progress)
        finally:
            progress.end()
    if problem := digests.mismatch():
        destination.unlink()
        raise SourceUnavailable(f"{remote.name} was damaged in transfer: {problem}")
    return digests.sha256.hexdigest()


class _Digests:
    def __init__(self, remote: RemoteFile) -> None:
        self.remote = remote
        self.restart()

    def restart(self) -> None:
        self.sha256: Digest = hashlib.sha256()
        self.git: Digest = hashlib.sha1(b"blob %d\0" % self.remote.size_bytes, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        self.sha256.update(chunk)
        if self.remote.git_sha1:
            self.git.update(chunk)

    def mismatch(self) -> str | None:
        if self.remote.sha256:
            return (
                None if self.sha256.hexdigest() == self.remote.sha256 else "its SHA-256 differs from the published one"
            )
        if self.remote.git_sha1 and self.git.hexdigest() != self.remote.git_sha1:
            return "its checksum differs from the published one"
        return None


def _hash_existing(file: BinaryIO, digests: _Digests, size_bytes: int) -> None:
    if file.seek(0, 2) > size_bytes:
        file.truncate(0)
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        digests.update(chunk)


def _fill(remote: RemoteFile, file: BinaryIO, digests: _Digests, progress: PullProgress) -> None:
    """Repeat requests until the file is complete; after a broken connection the download is resumed."""
    num_failed = 0
    while (done := file.tell()) < remote.size_bytes:
        try:
            _receive(remote, file, digests, progress)
            problem = "the server closed the connection early"
        except (OSError, HTTPException) as error:
            if is_disk_full(error):
                raise
            problem = _one_line(error)
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise SourceUnavailable(f"{remote.name}: {problem}") from error
        file.flush()
        if file.tell() >= remote.size_bytes:
            return
        num_failed = 0 if file.tell() > done else num_failed + 1
        if num_failed >= MAX_FAILED_ATTEMPTS:
            raise SourceUnavailable(f"{remote.name}: {problem}; the next pull resumes the partial download")
        time.sleep(RETRY_PAUSE_S)


def _receive(remote: RemoteFile, file: BinaryIO, digests: _Digests, progress: PullProgress) -> None:
    done = file.tell()
    with _open(remote, done) as response:
        if done and response.status != 206:  # the server ignores the range and sends the whole file
            file.truncate(0)
            file.seek(0)
            digests.restart()
            progress.advance(-done)
        while (left := remote.size_bytes - file.tell()) > 0 and (chunk := response.read(min(CHUNK_BYTES, left))):
            file.write(chunk)
            digests.update(chunk)
            progress.advance(len(chunk))


def _open(remote: RemoteFile, start: int) -> HTTPResponse:
    request = urllib.request.Request(remote.url)
    for name, value in remote.headers:
        request.add_unredirected_header(name, value)
    if start:
        request.add_header("Range", f"bytes={start}-")
    response: HTTPResponse = urllib.request.urlopen(request, timeout=STALL_S)
    return response


def _one_line(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server responded with HTTP status {error.code}"
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split())[:200] or type(error).__name__
