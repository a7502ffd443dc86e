"""A stream of ids, cut anywhere, says what decoding all of them says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenmill.arch.gguf_file import read_gguf
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.tokenizer import EOS_ID, IncrementalDetokenizer, Tokenizer, Traits, byte_tokenizer

with_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
VOCABULARIES = ["bytes", "llama-spm", "gpt-2", "bert-bge", "phi-3"]
SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space: a text that holds it can't be told from one that holds a space."""


@cache
def vocabulary(name: str, shared: Path) -> Tokenizer:
    if name == "bytes":
        return byte_tokenizer()
    return tokenizer_from_gguf(read_gguf(shared / "vocab" / f"ggml-vocab-{name}.gguf").metadata)


def streamed(stream: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> str:
    sent, at = "", 0
    for cut in cuts:
        sent += stream.push(ids[at : at + cut])
        at += cut
    return sent + stream.push(ids[at:]) + stream.finish()


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("skip", [True, False])
@with_fixtures
@given(data=st.data())
def test_any_ids(shared_dir: Path, name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = vocabulary(name, shared_dir)
    low_or_any = st.one_of(st.integers(0, 300), st.integers(0, tokenizer.vocab_size + 5))  # low ids: bytes
    ids = data.draw(st.lists(low_or_any, max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 3), max_size=30))
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert streamed(stream, ids, cuts) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name != "bert-bge"])
@with_fixtures
@example(text=" ", prompt="")
@example(text=" a", prompt="")
@given(text=st.text(max_size=40).filter(lambda text: SPACE_MARK not in text), prompt=st.text(max_size=8))
def test_any_text_round_trips_and_no_character_is_split(shared_dir: Path, name: str, text: str, prompt: str) -> None:
    tokenizer = vocabulary(name, shared_dir)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    pieces = [stream.push([token_id]) for token_id in ids] + [stream.finish()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    going_on = IncrementalDetokenizer(tokenizer, prompt_ids=tokenizer.encode(prompt), skip_special_tokens=False)
    # Behind a prompt, tokenizers that put a space before a text keep it.
    assert streamed(going_on, ids, [1] * len(ids)) in (text, " " + text)


def test_bytes_wait_for_their_character() -> None:
    stream = IncrementalDetokenizer(byte_tokenizer())
    llama = "🦙".encode()
    assert [stream.push([byte]) for byte in llama] == ["", "", "", "🦙"]
    assert stream.push(llama[:2]) == ""
    assert stream.push(b"a") == "\ufffda"  # proven wrong by what follows
    assert stream.push(llama[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    raw = list("né🦙".encode())
    for cut in range(1, len(raw)):
        stream = IncrementalDetokenizer(byte_tokenizer(), prompt_ids=raw[:cut])
        rest = stream.push(raw[cut:]) + stream.finish()
        assert rest == bytes(raw).decode()[len(bytes(raw[:cut]).decode("utf-8", "ignore")) :]


def test_what_a_prompt_left_half_finished_is_no_answer() -> None:
    stream = IncrementalDetokenizer(byte_tokenizer(), prompt_ids=list("é".encode())[:1])
    assert stream.push([EOS_ID]) + stream.finish() == ""


def test_space_after_a_prompt_is_kept(shared_dir: Path) -> None:
    tokenizer = vocabulary("llama-spm", shared_dir)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(hello) == "hello"
    assert IncrementalDetokenizer(tokenizer, prompt_ids=[1]).push(hello) == " hello"


def test_a_decoder_that_looks_at_neighbours() -> None:
    vocab = {"[UNK]": 0, "hello": 1, ",": 2, "world": 3, "##s": 4, "do": 5, "not": 6, "!": 7}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=True)
    tokenizer = Tokenizer(backend, None, Traits())
    ids = tokenizer.encode("hello , worlds do not !")
    text = tokenizer.decode(ids)
    assert text == backend.decode(ids) and "hello," in text
    assert streamed(IncrementalDetokenizer(tokenizer), ids, [1] * len(ids)) == text
    prompt = [1, 3]
    assert streamed(IncrementalDetokenizer(tokenizer, prompt_ids=prompt), ids, [1] * len(ids)) == " " + text


def test_cost_per_token_does_not_grow() -> None:
    tokenizer = byte_tokenizer()
    asked: list[int] = []
    original = tokenizer.token_bytes
    tokenizer.token_bytes = lambda token_id: (asked.append(token_id), original(token_id))[1]  # type: ignore[method-assign]
    stream = IncrementalDetokenizer(tokenizer, prompt_ids=[65] * 10_000)
    for _ in range(1_000):
        stream.push([65])
    assert len(asked) <= 1_004
