"""Fill in the middle: the prompt in a family's own order, plain text in it, and a clear no for other models."""

from __future__ import annotations

import pytest

from tests.support.scripted_server import scripted_server
from tokenmill.text.fim import FAMILIES, FimMarkers, find_fim_tokens
from tokenmill.text.tokenizer import byte_tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_each_family_has_its_order(family: FimMarkers) -> None:
    markers = [family.prefix, family.suffix, *([family.middle] if family.middle else [])]
    tokenizer = byte_tokenizer(markers)
    found = find_fim_tokens(tokenizer)
    assert found is not None
    text = tokenizer.decode(found.prompt_ids("ab", "cd"), skip_special_tokens=False)
    if family.middle is None:
        assert text == f"<s>{family.suffix}cd{family.prefix}ab"
    else:
        assert text == f"<s>{family.prefix}ab{family.suffix}cd{family.middle}"
    assert set(found.stop_ids) == {tokenizer.token_id(marker) for marker in markers}


def test_markers_in_source_code_are_characters() -> None:
    tokenizer = byte_tokenizer(QWEN)
    found = find_fim_tokens(tokenizer)
    assert found is not None
    ids = found.prompt_ids("<|fim_middle|>", "<|fim_prefix|>", with_bos=False)
    assert [token_id for token_id in ids if token_id >= 256] == [found.prefix_id, found.suffix_id, found.middle_id]
    with_files = found.prompt_ids("a", "b", [("x.py", "<|file_sep|>x = 1")])
    assert with_files.count(found.file_id or -1) == 2 and found.repository_id in with_files


def test_a_vocabulary_without_markers_cannot() -> None:
    assert find_fim_tokens(byte_tokenizer()) is None
    assert find_fim_tokens(byte_tokenizer(["<|fim_prefix|>", "<|fim_suffix|>"])) is None


def test_completions_fill_in() -> None:
    answers = [
        {"match": r"<\|fim_prefix\|>def f\(\):\n<\|fim_suffix\|>\n    return x<\|fim_middle\|>$", "say": "    x = 1"},
        {"match": "file_sep.*fim_middle", "say": ["from ", "<|file_sep|>", "never said"]},
        {"say": "something else"},
    ]
    body = {"model": "scripted", "prompt": "def f():\n", "suffix": "\n    return x"}
    with scripted_server({"control_tokens": QWEN, "answers": answers}) as server:
        reply = server.post("/v1/completions", body).json()
        assert reply["choices"][0]["text"] == "    x = 1" and reply["choices"][0]["finish_reason"] == "stop"
        ids = server.post("/tokenize", {"prompt": "def f():\n", "add_special_tokens": False}).json()["tokens"]
        by_ids = server.post("/v1/completions", {**body, "prompt": ids}).json()
        assert by_ids["choices"][0]["text"] == "    x = 1"
        assert by_ids["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"]
        stopped = server.post("/v1/completions", {**body, "suffix": "<|file_sep|>"}).json()["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("from ", "stop"), "another file ends what is filled in"
        ollama = {"model": "scripted", "prompt": "def f():\n", "suffix": "\n    return x", "stream": False}
        assert server.post("/api/generate", ollama).json()["response"] == "    x = 1"
        assert "insert" in server.post("/api/show", {"model": "scripted"}).json()["capabilities"]
    with scripted_server([{"say": "x"}]) as server:
        refused = server.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
        assert "insert" in server.post("/api/generate", ollama).json()["error"]
