"""A `tokenmill serve` process for benchmarks: started on a free port, waited for, and ended with all that it left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

READY_S = 120.0
END_S = 60.0


class BenchmarkServer:
    """A server of one model, or of more that are among the flags; `keys` are its API keys. Its state is in `folder`,
    which outlives the process."""

    def __init__(
        self,
        model: str,
        *flags: str,
        keys: tuple[str, ...] = (),
        folder: Path | None = None,
        served_name: str | None = "m",
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._temporary = tempfile.TemporaryDirectory(prefix="served-")
        self.folder = folder or Path(self._temporary.name)
        self.keys = keys
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = Path(self._temporary.name) / "server.log"
        (self.folder / "keys.txt").write_text("\n".join(keys) + "\n")
        own = ["--port", str(self.port), "--state-dir", str(self.folder / "state")]
        own += ["--served-name", served_name] if served_name else []
        own += ["--api-key-file", str(self.folder / "keys.txt"), "--public-metrics"] if keys else []
        with self._log.open("w") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tokenmill", "serve", model, *own, *flags],
                stdout=output,
                stderr=output,
                env={**os.environ, "TOKENMILL_LOG_LEVEL": "warning"},
            )

    def __enter__(self) -> BenchmarkServer:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise SystemExit(f"the server ended with {self.child.returncode}:\n{self._log.read_text()[-2000:]}")
            try:
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.close()
        raise SystemExit(f"the server was not ready within {READY_S:.0f} s:\n{self._log.read_text()[-2000:]}")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self._temporary.cleanup()

    def get(self, path: str, key: str = "") -> Any:
        """JSON of a route, or the text of one that is not JSON."""
        offered = key or next(iter(self.keys), "")
        reply = httpx.get(self.url + path, headers={"authorization": f"Bearer {offered}"} if offered else {})
        reply.raise_for_status()
        return reply.json() if reply.headers["content-type"].startswith("application/json") else reply.text

    def metric(self, name: str) -> float:
        """The value of a series of /metrics, all of its labels together."""
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return sum(float(value) for series, value in lines if series.split("{")[0] == name)

    def wait_idle(self) -> None:
        """Wait until nothing runs or waits."""
        deadline = time.monotonic() + END_S
        while self.metric("tokenmill_requests_running") + self.metric("tokenmill_requests_waiting") > 0:
            if time.monotonic() > deadline:
                raise SystemExit("requests did not end")
            time.sleep(0.2)
