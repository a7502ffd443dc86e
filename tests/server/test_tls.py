"""https: the certificate is checked, served, and replaced on SIGHUP while a stream goes on."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import free_port, running
from tests.support.timing import SOON_S, eventually
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig
from tokenmill.server.tls import TlsFiles

SERVE = """
import sys
from tests.support.fake_engine import FakeEngine
from pathlib import Path
from tokenmill.config.server import ServerConfig
from tokenmill.observe.log import configure_logging
from tokenmill.observe.metrics import Metrics
from tokenmill.server import run
async def start():
    return FakeEngine(delay_s=0.05)
configure_logging()
port, folder = int(sys.argv[1]), Path(sys.argv[2])
config = ServerConfig(port=(port,), state=False, tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")
sys.exit(run.serve(start, config, Metrics()))
"""

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


def make_certificate(folder: Path, name: str) -> TlsFiles:
    folder.mkdir(exist_ok=True)
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(files.key), "-out", str(files.cert), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return files


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=30)


def test_a_certificate_is_served_and_replaced(tmp_path: Path) -> None:
    files = make_certificate(tmp_path / "tls", "first")
    first = files.cert.read_text()
    port = free_port()
    with running(["-c", SERVE, str(port), str(files.cert.parent)], port) as process:
        trusting = ssl.create_default_context(cafile=str(files.cert))
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, timeout=60) as client:

            def is_ready() -> bool:
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            assert eventually(is_ready, 60), process.output()
            assert served_certificate(port).strip() == first.strip()
            body = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                second = make_certificate(tmp_path / "tls", "second").cert.read_text()
                os.kill(process.child.pid, signal.SIGHUP)
                assert eventually(lambda: served_certificate(port).strip() == second.strip(), SOON_S)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            files.key.write_text("nonsense")
            os.kill(process.child.pid, signal.SIGHUP)
            assert eventually(lambda: "stays in use" in process.output(), SOON_S)
            assert served_certificate(port).strip() == second.strip()
            assert f"https://127.0.0.1:{port}" in process.output()


def test_wrong_files_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    one, other = make_certificate(tmp_path / "a", "one"), make_certificate(tmp_path / "b", "other")
    one.require_usable()
    with pytest.raises(InvalidConfig, match="not a certificate and its key"):
        TlsFiles(one.cert, other.key).require_usable()
    with pytest.raises(InvalidConfig, match="No such file"):
        TlsFiles(one.cert, tmp_path / "none.pem").require_usable()
    with pytest.raises(InvalidConfig, match="must be given together"):
        ServerConfig(tls_cert=one.cert)
