"""A model hub on loopback: lists one repository, serves its files with ranges, records the requests, and can cut
connections."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.cut_after: int | None = None  # bytes sent of each file before the connection is cut
        self.delay_s = 0.0  # after each piece of a response
        self.requests: list[tuple[str, str | None]] = []  # (file, Range header)
        self.corrupt = False
        hub = self

        class HubHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.split("?")[0]
        prefix = f"/{self.repo}/resolve/{COMMIT}/"
        if path == f"/api/models/{self.repo}":
            self._send(handler, 200, json.dumps(self._listing()).encode())
        elif path.startswith(prefix) and path[len(prefix) :] in self.files:
            self._send_file(handler, path[len(prefix) :])
        else:
            self._send(handler, 404, b"{}")

    def _listing(self) -> dict[str, object]:
        siblings = []
        for name, data in self.files.items():
            row: dict[str, object] = {"rfilename": name, "size": len(data)}
            row["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith((".gguf", ".safetensors")):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(row)
        return {"sha": COMMIT, "siblings": siblings, "id": self.repo}

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        data, asked = self.files[name], handler.headers.get("Range")
        self.requests.append((name, asked))
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        body = bytes(len(data) - start) if self.corrupt else data[start:]
        self._send(handler, 206 if asked else 200, body, self.cut_after)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, limit: int | None = None) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        delay_s = self.delay_s
        try:
            for at in range(0, len(body), 1 << 16):
                if limit is not None and at >= limit:
                    break
                handler.wfile.write(body[at : at + (1 << 16)])
                if delay_s:
                    threading.Event().wait(delay_s)
        except OSError:
            pass
        handler.close_connection = True
