"""Sampling parameters over HTTP: every field that is accepted reaches the engine as it was sent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.loopback import RunningServer
from tokenmill.params import SamplingParams, Watermark

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "fake/tiny", "prompt": "Hi"},
}
FIELDS: dict[str, Any] = {
    "top_n_sigma": 1.5,
    "top_a": 0.1,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02,
    "dynatemp_range": 0.3,
    "dynatemp_exponent": 1.2,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "no_repeat_ngram_size": 4,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "###"],
    "stop_regex": [r"\d{3}"],
}


@pytest.mark.parametrize("path", BODIES)
def test_every_field_arrives(server: RunningServer, path: str) -> None:
    thinking = {"thinking_token_budget": 9, "thinking_markers": ["<t>", "</t>"]}
    mark = {"watermark": {"key": 5, "gamma": 0.5, "delta": 1.0, "context": 2}}
    reply = server.post(path, {**BODIES[path], **FIELDS, **thinking, **mark})
    assert reply.status_code == 200, reply.text
    seen = server.engine.seen[-1].params  # type: ignore[union-attr]
    assert {name: getattr(seen, name) for name in FIELDS} == FIELDS
    assert (seen.thinking_budget, seen.thinking_markers) == (9, ("<t>", "</t>"))
    assert seen.watermark == Watermark(key=5, gamma=0.5, delta=1.0, context=2)


@pytest.mark.parametrize("path", BODIES)
def test_off_as_other_engines_write_it(server: RunningServer, path: str) -> None:
    body = {**BODIES[path], "top_k": -1, "top_n_sigma": -1, "mirostat": 0, "watermark": {"key": 3}, "stop_regex": "a"}
    assert server.post(path, body).status_code == 200
    seen = server.engine.seen[-1].params  # type: ignore[union-attr]
    assert (seen.top_k, seen.top_n_sigma, seen.mirostat) == (0, 0.0, 0)
    assert (seen.watermark, seen.stop_regex) == (Watermark(key=3), ["a"])


def test_an_absent_field_is_the_default(server: RunningServer) -> None:
    assert (
        server.post("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "mirostat_tau": None}).status_code == 200
    )
    seen = server.engine.seen[-1].params  # type: ignore[union-attr]
    assert seen == SamplingParams()
