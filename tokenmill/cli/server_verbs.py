"""`tokenmill ps` and `stop`: list and unload the models of a running server."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tokenmill.cli.output import print_table, size
from tokenmill.cli.remote import RemoteServer

DEFAULT_URL = "http://127.0.0.1:8000"
Flag = Annotated[bool, Parameter(negative="")]


def list_running(*, url: str = DEFAULT_URL, json: Flag = False) -> int:
    """List the models of a running server: which are loaded, their memory, and how long they stay loaded.

    Parameters
    ----------
    url
        URL of the server; the API key is read from TOKENMILL_API_KEY.
    json
        Print one JSON array.
    """
    rows = _server(url).get("/models").get("data") or []
    if json:
        print(msgspec.json.encode(rows).decode())
    else:
        print_table(("NAME", "STATE", "SIZE", "DEVICE", "REQUESTS", "STAYS"), [_in_words(row) for row in rows])
    return 0


def stop_models(*models: str, url: str = DEFAULT_URL) -> int:
    """Unload models of a running server after their running requests. The next request loads them again.

    Parameters
    ----------
    models
        Names shown by `tokenmill ps`; by default all loaded models.
    url
        URL of the server; the API key is read from TOKENMILL_API_KEY.
    """
    server = _server(url)
    names = models or tuple(str(row.get("id")) for row in server.get("/models").get("data") or [] if _is_loaded(row))
    if not names:
        print("no model is loaded")
    for name in names:
        done = server.change("/models/unload", {"model": name})
        print(f"{done.get('model', name)} is {done.get('status', 'unloaded')}")
    return 0


def _server(url: str) -> RemoteServer:
    return RemoteServer(url, os.environ.get("TOKENMILL_API_KEY"))


def _is_loaded(row: dict[str, Any]) -> bool:
    return (row.get("status") or {}).get("value") == "loaded" and not row.get("parent")


def _in_words(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of `ps`; servers of other engines report fewer fields."""
    status = row.get("status") or {}
    state, taken = str(status.get("value", "")), row.get("memory_bytes")
    return (
        str(row.get("id", "")),
        f"{state}: {status['reason']}" if status.get("reason") else state,
        "" if taken is None or state == "unloaded" else size(taken),
        str(row.get("device") or ""),
        str(row.get("num_running", 0) + row.get("num_waiting", 0)),
        _stay(row) if state == "loaded" else "",
    )


def _stay(row: dict[str, Any]) -> str:
    if row.get("is_pinned"):
        return "forever"
    left_s = row.get("expires_in_s")
    return "until memory is needed" if left_s is None else f"{left_s:.0f} s"
