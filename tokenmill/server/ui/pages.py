"""The files of the pages, read once and served from memory.

The content security policy (`POLICY`) lets browsers load resources from this server only, and no inline scripts, so
text of a model could not run even if it became markup. Browsers revalidate on every visit and get a 304 if nothing has
changed.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenmill.server.routing import TEXT, Endpoint, JsonHandler, get_route

POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept",  # clients other than browsers get a different reply at `/`
    "x-content-type-options": "nosniff",
}
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
PAGES = {"/": "index.html", "/docs": "docs.html"}
PARTS = (
    "answer.js",
    "api.js",
    "app.js",
    "chat.js",
    "code_samples.js",
    "conversation.js",
    "docs.js",
    "dom.js",
    "icon.svg",
    "library.js",
    "load.js",
    "markdown.js",
    "models.js",
    "settings.js",
    "style.css",
    "theme.js",
    "tokens.js",
)
PAGE_PATHS = frozenset({*PAGES, *(f"/ui/{name}" for name in PARTS)})


def page_routes() -> list[Route]:
    """Return the routes of all files except the page at `/`, a path that has several endpoints."""
    pages = [get_route(path, _serving(name)) for path, name in PAGES.items() if path != "/"]
    return [*pages, *(get_route(f"/ui/{name}", _serving(name)) for name in PARTS)]


def page_endpoints() -> list[Endpoint]:
    """Return the endpoint of the page at `/`, for browsers; other clients get what Ollama's clients expect there."""
    page = _serving(PAGES["/"])

    async def web_page(request: Request) -> Response:
        return await page(request)

    return [Endpoint("GET", "/", web_page, "Operation", TEXT, media_type="text/html")]


def _serving(name: str) -> JsonHandler:
    content = files("tokenmill.server.ui").joinpath("assets", name).read_bytes()
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def serve(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return serve
