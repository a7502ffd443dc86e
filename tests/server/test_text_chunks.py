"""Most chunks hold nothing but text: what stands around it is made once, and the bytes are those of any chunk."""

from __future__ import annotations

import orjson
import pytest

from tests.support.fake_engine import INFO
from tokenmill.server.openai.render import ChatRendering, CompletionRendering, LegacyLogprobs, echoed_logprobs
from tokenmill.types import Event, TokenInfo


@pytest.mark.parametrize("text", ["a", '"quoted"\n\\', "\0", "–🌞", ""])
@pytest.mark.parametrize("choice", [0, 2])
@pytest.mark.parametrize("include_usage", [True, False])
def test_a_chunk_of_text_has_every_field(text: str, choice: int, include_usage: bool) -> None:
    chat = ChatRendering(INFO, num_choices=3, is_stream=True, include_usage=include_usage)
    plain = CompletionRendering(
        INFO,
        num_choices=3,
        include_usage=include_usage,
        echoes=None,
        wants_logprobs=False,
        wants_prompt_logprobs=False,
    )
    for rendering, said in ((chat, {"delta": {"content": text}}), (plain, {"text": text})):
        for _ in range(2):  # the first time and from then on
            chunk = rendering.event(choice, Event(request_id="r", index=choice, text=text))
            if not text:
                assert chunk == b"", "no client wants an empty delta"
                continue
            expected = {"index": choice, **said, "logprobs": None, "finish_reason": None}
            found = orjson.loads(chunk.removeprefix(b"data: "))
            assert chunk.endswith(b"\n\n") and found["choices"] == [expected]
            assert ("usage" in found) == include_usage and found["model"] == INFO.name


def test_offsets_count_characters_where_several_tokens_share_one() -> None:
    """A sentencepiece vocabulary writes rare characters byte by byte."""
    pieces = [b" n", "é".encode(), *(bytes([byte]) for byte in "🦙".encode()), b" x"]
    infos = [TokenInfo(1, raw.decode(errors="replace"), raw, -1.0, 1) for raw in pieces]
    assert LegacyLogprobs().render(infos)["text_offset"] == [0, 2, 3, 3, 3, 3, 4]
    echoed = echoed_logprobs("né🦙 x", [None, *infos], [])
    assert echoed["text_offset"] == [0, 0, 1, 2, 2, 2, 2, 3], "the space before the text is the tokenizer's"
