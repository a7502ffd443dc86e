"""An engine whose front was killed while it was answering ends by itself: nobody reads what it says any more. It takes
the folder of their sockets with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.server_process import is_alive, real_server
from tests.support.timing import SOON_S, eventually


@pytest.mark.parametrize("is_answering", [True, False])
def test_an_engine_without_a_front_ends(stories_dir: Path, is_answering: bool) -> None:
    with real_server(stories_dir, dtype="float32") as process:
        process.wait_for("ready", 120)
        (engine,) = process.children()
        folder = Path(Path(f"/proc/{engine}/cmdline").read_text().split("\0")[-3])
        assert (folder / "to-core").is_socket()
        asked = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True, "n": 4}
        if is_answering:
            with process.http.stream("POST", "/v1/completions", json=asked) as reply:
                next(reply.iter_lines())
                os.kill(process.child.pid, signal.SIGKILL)
        else:
            os.kill(process.child.pid, signal.SIGKILL)
        process.child.wait(SOON_S)
        assert eventually(lambda: not is_alive(engine)) and not folder.exists()
