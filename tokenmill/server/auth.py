"""Authentication: every path needs an API key except a short public list, so a new route is private by default.

A key may be sent in the header of any dialect. If several keys are sent, one valid key is enough. Keys are looked up by
their digests (`keys.py`) and never logged.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.dialect import Dialects, head_of
from tokenmill.server.errors import MissingKey, ModelsAreFixed, OperatorsOnly, UnknownHost
from tokenmill.server.keys import KeyRing
from tokenmill.server.middleware import PROBES
from tokenmill.server.ui.pages import PAGE_PATHS

PUBLIC_PATHS = PAGE_PATHS | PROBES | {"/version", "/api/version"}
PUBLIC_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")  # the first as `Bearer KEY`
HOST = re.compile(r"(?:\[([0-9a-f:.]*)\]|([^:\[\]]*))(?::\d*)?")  # and perhaps a port


def require_safe_exposure(config: ServerConfig, keys: KeyRing) -> None:
    """Refuse to listen beyond this machine without a key, unless `--allow-open` is set."""
    if keys or config.allow_open or is_loopback(config.host):
        return
    raise InvalidConfig(
        f"listening on {config.host} without an API key would let anyone use this server",
        param="host",
        hint="set --api-key, or --allow-open to serve without one",
    )


def may_manage(request: Request, config: ServerConfig) -> bool:
    """Return whether a client may change models.

    By default only clients of a loopback server may. The request's Host must be a loopback address too: a web page that
    reaches this server by DNS rebinding sends its own name. Where there are several keys, the request needs one with
    `sees_all`: behind a proxy on this machine every tenant seems local, and none may unload the others' model."""
    if config.manage_models is not None:
        return config.manage_models
    return is_operator(request.scope) and is_loopback(config.host) and is_loopback(request.url.hostname or "")


def is_operator(scope: Scope) -> bool:
    """Return whether a request has a key with `sees_all` (an only key always has it), or the server has no keys."""
    record: RequestRecord = scope["state"]["record"]
    return record.key is None or record.key.sees_all


def require_operator(request: Request) -> None:
    """Refuse a tenant's request for data about the whole server: it would reveal how much other tenants use."""
    if not is_operator(request.scope):
        raise OperatorsOnly(
            "this is about the whole server, so it needs a key that sees all (an operator's)",
            hint="tokenmill keys add NAME --sees-all",
        )


def require_manager(request: Request, config: ServerConfig) -> None:
    """Refuse a client that may not change models."""
    if not may_manage(request, config):
        raise ModelsAreFixed("clients may not change the models of this server", hint="see --manage-models")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keys_in(headers: Headers) -> list[bytes]:
    """Return all keys in a request's headers. A key in the URL is not accepted: proxies log URLs."""
    return [_key(name, headers[name]) for name in KEY_HEADERS if name in headers]


def _key(name: str, value: str) -> bytes:
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        value = value if scheme.lower() == "bearer" else ""
    return value.strip().encode("latin-1", "replace")


def names_this_machine(host: str, allowed: Collection[str]) -> bool:
    """Return whether a Host header names this machine: an IP address, a name without a dot, or an allowed name. Any
    other domain may belong to a web page that reaches this server by DNS rebinding."""
    found = HOST.fullmatch(host.strip().lower())
    if found is None:
        return False
    name: str = found[1] or found[2] or ""
    if "." not in name.rstrip(".") or name.endswith((".localhost", ".local", ".internal")) or name in allowed:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class RequireLocalHost:
    """Refuses requests to a loopback server without keys if their Host is an internet domain. Otherwise any web page
    that the user visits could send requests by DNS rebinding and read the replies."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], dialects: Dialects) -> None:
        self._app = app
        names = {name.lower() for name in allowed}
        self._names_this_machine = lru_cache(maxsize=64)(lambda host: names_this_machine(host, names))
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._names_this_machine(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        error = UnknownHost(
            "this server has no API keys and refuses this Host header, which could be a web page's (DNS rebinding)",
            hint="--allowed-host NAME allows a name",
        )
        record.error_code = error.code
        await self._dialects.of(head_of(scope)).error_response(error, record.request_id)(scope, receive, send)


OnRefusal = Callable[[str, str], None]  # (client address, reason)


class RequireKey:
    """Requires an API key for every path that is not public. This comes before routing, so that unknown paths need a
    key too and no one can probe which paths exist."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        public_paths: frozenset[str],
        dialects: Dialects,
        on_refusal: OnRefusal = lambda client, reason: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._on_refusal = on_refusal
        self._public_paths = public_paths
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served: other protocols would bypass the key check")
        if self._is_public(scope):
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        offered = keys_in(Headers(scope=scope))
        known = self._keys.find(offered)
        if known is not None:
            record.key_id, record.key = known.id, known
            await self._app(scope, receive, send)
            return
        self._on_refusal(str((scope.get("client") or ["unknown"])[0]), self._keys.refusal_reason(offered))
        dialect = self._dialects.of(head_of(scope))
        error = MissingKey("a valid API key is required", hint=dialect.key_hint)
        record.error_code = error.code
        await dialect.error_response(error, record.request_id)(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        return scope["path"] in self._public_paths and scope["method"] in PUBLIC_METHODS
