"""Long operations on the model store (pulling and creating models), whose progress a client reads line by line.

    {"status": "pulling manifest"}
    {"status": "pulling 4f0c…", "digest": "sha256:…", "total": 98362432, "completed": 1048576}   repeated
    {"status": "verifying sha256 digest"}, {"status": "writing manifest"}, {"status": "success"}

Each operation runs in a thread; their number is limited. When the client disconnects, its download stops, and the
partial file is kept for the next attempt. An error is the last line.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.errors import InvalidRequest, Overloaded, TokenmillError, UnknownModel
from tokenmill.observe.log import get_log
from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.errors import InternalError
from tokenmill.server.ollama.options import require_options
from tokenmill.server.ollama.parse import MAX_MESSAGES, model_name_in
from tokenmill.server.ollama.render import error_text
from tokenmill.store import Customization, LocalModel, Manifest, Store, create_model, parse_name, plain_name, pull
from tokenmill.store.created import require_new_name, stored_files
from tokenmill.store.modelfile import ROLES, require_jinja

log = get_log("server")
LINE_INTERVAL_S = 0.1  # between two reads of the progress
SUCCESS = {"status": "success"}


class ConcurrencyLimit:
    """A limit on the number of concurrent long operations."""

    def __init__(self, limit: int, what: str) -> None:
        self._semaphore, self._what = threading.BoundedSemaphore(limit), what

    def acquire(self) -> None:
        if not self._semaphore.acquire(blocking=False):
            raise Overloaded(f"too many {self._what} at the same time", retry_after_s=10.0)

    def release(self) -> None:
        self._semaphore.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


# ── operations with progress ───────────────────────────────────────────────────────────────────────────


class ClientDisconnected(Exception):
    """The client that reads the progress has disconnected."""


class Progress:
    """The progress that an operation reports from its thread. Of a download only the newest state is kept, so that
    memory does not grow when the client reads slowly."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []
        self._file: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._is_new = False
        self.is_abandoned = False

    def say(self, status: str) -> None:
        with self._lock:
            self._lines.append({"status": status})

    def take(self) -> list[dict[str, Any]]:
        with self._lock:
            lines, self._lines = self._lines, []
            if self._file is not None and self._is_new:
                lines.append(dict(self._file))
                self._is_new = False
            return lines

    # Called by `pull`.

    def note(self, line: str) -> None:
        self.say(line)

    def begin(self, file: str, total_bytes: int | None, done_bytes: int, sha256: str | None = None) -> None:
        digest = {"digest": f"sha256:{sha256}"} if sha256 else {}
        with self._lock:
            total = {} if total_bytes is None else {"total": total_bytes}
            self._file = {"status": f"pulling {(sha256 or file)[:12]}", **digest, **total, "completed": done_bytes}
            self._is_new = True

    def advance(self, num_bytes: int) -> None:
        if self.is_abandoned:
            raise ClientDisconnected
        with self._lock:
            if self._file is not None:
                self._file["completed"] += num_bytes
                self._is_new = True

    def end(self) -> None:
        with self._lock:
            if self._file is not None:
                self._lines.append(self._file)
            self._file = None


class ProgressTask:
    """An operation in a daemon thread, whose progress is read as lines."""

    def __init__(self, work: Callable[[Progress], object], limit: ConcurrencyLimit) -> None:
        limit.acquire()
        self.error: TokenmillError | None = None
        self._progress = Progress()
        self._work, self._limit = work, limit
        self._thread = threading.Thread(target=self._run, daemon=True, name="models")
        self._thread.start()

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        try:
            while self._thread.is_alive():
                for line in self._progress.take():
                    yield line
                await asyncio.sleep(LINE_INTERVAL_S)
            for line in self._progress.take():
                yield line
            yield SUCCESS if self.error is None else {"error": error_text(self.error)}
        finally:
            self._progress.is_abandoned = True

    def _run(self) -> None:
        try:
            self._work(self._progress)
        except ClientDisconnected:
            return
        except TokenmillError as error:
            self.error = error
        except Exception:
            log.exception("an operation on the model store failed")
            self.error = InternalError()
        finally:
            self._limit.release()


def pull_named(name: str, progress: Progress) -> Manifest:
    """Pull a model by name. Names come from clients, so paths are refused."""
    progress.say("pulling manifest")
    try:
        model = parse_name(plain_name(name))
    except UnknownModel:
        model = None
    if model is None or isinstance(model, LocalModel):
        raise UnknownModel("pull model manifest: file does not exist", hint=f"there is no model called {shown(name)}")
    manifest = pull(model, Store(), progress)
    progress.say("verifying sha256 digest")
    progress.say("writing manifest")
    return manifest


class CreateCall:
    """A parsed body of /api/create."""

    def __init__(self, body: dict[str, Any]) -> None:
        fields = BodyFields(body)
        self.name = require_new_name(model_name_in(body))
        self.base = fields.text("from") or ""
        self.is_stream = fields.boolean("stream", True)
        self.files = _digests(fields)
        if not self.base and not self.files:
            raise InvalidRequest("neither 'from' or 'files' was specified")
        if self.base and self.files:
            raise InvalidRequest("from and files do not combine", param="files")
        parameters = fields.object("parameters")
        self.custom = Customization(
            system=fields.text("system") or "",
            template=fields.text("template") or "",
            parameters={} if parameters is None else parameters.values,
            messages=_messages(fields),
            license=_license(fields),
        )
        require_jinja(self.custom.template)
        require_options(self.custom.parameters)


def parse_create(body: dict[str, Any]) -> CreateCall:
    fields = BodyFields(body)
    fields.refuse_any(("adapters",), hint="tokenmill create takes a Modelfile with ADAPTER PATH")
    fields.refuse_any(("quantize", "quantization"), hint="upload a quantised file")
    fields.refuse_any(("modelfile", "path"), hint="send the Modelfile's fields: from, system, parameters, …")
    return CreateCall(body)


def _digests(fields: BodyFields) -> dict[str, str]:
    values = fields.object("files")
    files = {} if values is None else values.values
    for name, digest in files.items():
        if not isinstance(digest, str) or not digest.startswith("sha256:"):
            refuse(f"files.{name[:60]}", f"must be a digest sha256:…, got {shown(digest)}")
    return {name: digest.removeprefix("sha256:") for name, digest in files.items()}


def _messages(fields: BodyFields) -> list[tuple[str, str]]:
    messages = []
    for number, value in enumerate(fields.items("messages", MAX_MESSAGES) or []):
        message = BodyFields(value if isinstance(value, dict) else {}, f"messages[{number}].")
        role = message.one_of("role", ROLES) or "user"
        messages.append((role, message.required_text("content")))
    return messages


def _license(fields: BodyFields) -> str:
    value = fields.get("license")
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return "\n".join(value)
    return fields.text("license") or ""


def create_named(call: CreateCall, base: Manifest | None, progress: Progress) -> None:
    """Create a model from uploaded files or from `base`, which is pulled first if it is None."""
    store = Store()
    if call.files:
        progress.say("parsing files")
        base = Manifest(name="", source="uploaded", files=stored_files(store, call.files))
    elif base is None:
        base = pull_named(call.base, progress)
    for file in base.files:
        progress.say(f"using existing layer sha256:{file.sha256}")
    progress.say("writing manifest")
    create_model(store, call.name, base, call.custom)
