"""One client's work for the front holds up no other's stream: templates, parsing and tokenising run beside the loop."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import free_port, running

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
ASKED_S = 4.0


def tokens_in(http: httpx.Client, seconds: float) -> int:
    body = {"model": "flood", "prompt": "x", "max_tokens": 3000, "stream": True}
    began, count = time.monotonic(), 0
    with http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            count += line.startswith("data: {")
            if time.monotonic() - began > seconds:
                break
    return count


@pytest.mark.slow
def test_two_clients_with_thousands_of_messages_leave_a_neighbour_his_stream(tmp_path: Path) -> None:
    """Each sends 0.28 MB of 8,192 tiny messages, refused with 400, again and again."""
    script, template, port = tmp_path / "flood.json", tmp_path / "template.jinja", free_port()
    script.write_text(json.dumps([{"say": "word " * 3000, "token_delay_s": 0.008}]))
    template.write_text(TEMPLATE)
    command = ["-m", "tokenmill", "serve", f"scripted:{script}", "--chat-template", str(template)]
    command += ["--served-name", "flood", "--port", str(port), "--max-context", "4096", "--no-state"]
    with running(command, port) as process:
        process.wait_for("ready", 120)
        alone = tokens_in(process.http, ASKED_S)
        body = json.dumps({"model": "flood", "messages": [{"role": "user", "content": "a"}] * 8192})
        is_over, statuses = threading.Event(), set[int]()

        def attack() -> None:
            with httpx.Client(base_url=process.url, timeout=60) as http:
                while not is_over.is_set():
                    headers = {"content-type": "application/json"}
                    statuses.add(http.post("/v1/chat/completions", content=body, headers=headers).status_code)

        attackers = [threading.Thread(target=attack) for _ in range(2)]
        for attacker in attackers:
            attacker.start()
        time.sleep(0.5)
        beside = tokens_in(process.http, ASKED_S)
        is_over.set()
        for attacker in attackers:
            attacker.join()
    print(f"{alone} tokens alone, {beside} beside the attack", file=sys.stderr)
    assert statuses == {400} and beside > alone / 4, "it was a sixty-fifth once"
