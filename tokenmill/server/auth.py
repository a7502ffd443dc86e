"""API keys: every path needs one except a short public list, so a new route is closed until it is listed here.

A key may come in the header of any dialect, and several may come together: one that is right admits. Keys are found by
their digests (`keys.py`), and never logged.
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
    """Refuse to listen beyond this machine without a key, unless that was asked for."""
    if keys or config.allow_open or is_loopback(config.host):
        return
    raise InvalidConfig(
        f"listening on {config.host} without an API key would let anyone use this server",
        param="host",
        hint="set --api-key, or --allow-open if that is what you want",
    )


def may_manage(request: Request, config: ServerConfig) -> bool:
    """Return whether a client may change models. Where that rests on the server's address, the request must name this
    machine too: a web page whose name was made to lead here (DNS rebinding) names its own. And of several keys it must
    be one that sees all: a proxy on this machine lets all tenants in, and none may unload the model of the others."""
    if config.manage_models is not None:
        return config.manage_models
    return is_operator(request.scope) and is_loopback(config.host) and is_loopback(request.url.hostname or "")


def is_operator(scope: Scope) -> bool:
    """Return whether a request has a key that sees all, as a lone key does, or needs none."""
    record: RequestRecord = scope["state"]["record"]
    return record.key is None or record.key.sees_all


def require_operator(request: Request) -> None:
    """Refuse a tenant what is about all of them: how much others use at a time is theirs to know."""
    if not is_operator(request.scope):
        raise OperatorsOnly(
            "of several keys, only one that sees all reads what is about the whole server",
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
    """Return all keys in a request's headers; never one in the URL, which proxies log."""
    return [_key(name, headers[name]) for name in KEY_HEADERS if name in headers]


def _key(name: str, value: str) -> bytes:
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        value = value if scheme.lower() == "bearer" else ""
    return value.strip().encode("latin-1", "replace")


def may_be_local(host: str, allowed: Collection[str]) -> bool:
    """Tell whether a Host header names this machine. A page's own domain can be made to point here (DNS rebinding), an
    address or a name without a dot can't."""
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
    """Refuses requests to a server of this machine that was called by a name of the internet. The server has no keys,
    so any web page that its user visits could otherwise ask it, and read the answers."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], dialects: Dialects) -> None:
        self._app = app
        names = {name.lower() for name in allowed}
        self._may_be_local = lru_cache(maxsize=64)(lambda host: may_be_local(host, names))  # most name the same one
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_be_local(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        error = UnknownHost("this server has no API keys and does not answer to this Host", hint="--allowed-host NAME")
        record.error_code = error.code
        await self._dialects.of(head_of(scope)).error_response(error, record.request_id)(scope, receive, send)


OnRefusal = Callable[[str, str], None]  # the address of a client, and why it was refused


class RequireKey:
    """Asks every request for a key but those of a few public paths, before routing: a path that does not exist needs
    one too, so nothing can be probed."""

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
            raise RuntimeError("only HTTP is served: other ways in would need no key")
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
        self._on_refusal(str((scope.get("client") or ["unknown"])[0]), self._keys.why_not(offered))
        dialect = self._dialects.of(head_of(scope))
        error = MissingKey("a valid API key is required", hint=dialect.key_hint)
        record.error_code = error.code
        await dialect.error_response(error, record.request_id)(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        return scope["path"] in self._public_paths and scope["method"] in PUBLIC_METHODS
