"""Stop strings cut anywhere, against str.find on the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.text.stops import StopStrings

letters = st.text(alphabet="abc", max_size=40)
some_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + (length if include_stop else 0)], stop


@given(st.lists(letters, max_size=8), some_stops, st.booleans())
def test_a_stream_ends_where_find_says(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    watch = StopStrings(stops, include_stop=include_stop)
    sent, arrived = "", ""
    for piece in pieces:
        emit, matched = watch.push(piece)
        sent, arrived = sent + emit, arrived + piece
        if matched is None:
            held = arrived[len(sent) :]
            assert arrived.startswith(sent)
            assert not held or any(stop.startswith(held[:1]) for stop in stops)
    sent += watch.flush()
    assert (sent, watch.matched) == naive("".join(pieces), stops, include_stop)


@given(letters, some_stops)
def test_nothing_is_held_that_begins_no_stop(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    sent, matched = watch.push(text)
    if matched is None and not any(
        text[at:] and stop.startswith(text[at:]) for stop in stops for at in range(len(text))
    ):
        assert sent == text


def test_across_token_borders() -> None:
    watch = StopStrings(["</answer>"])
    assert watch.push("42</ans") == ("42", None)
    assert watch.push("wer") == ("", None)
    assert watch.push("> more") == ("", "</answer>")
    assert watch.push("ignored") == ("", "</answer>")
    assert watch.flush() == ""


def test_false_alarm_is_released() -> None:
    watch = StopStrings(["###"])
    assert watch.push("a##") == ("a", None)
    assert watch.push("b#") == ("##b", None)
    assert watch.flush() == "#"


def test_without_stops_all_passes() -> None:
    watch = StopStrings([])
    assert watch.push("anything") == ("anything", None)
    assert watch.flush() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        StopStrings(["ok", ""])


@pytest.mark.serial
def test_time_is_linear_in_the_text() -> None:
    def seconds(length: int) -> float:
        watch = StopStrings(["a" * 400 + "b"])
        begun = time.perf_counter()
        for _ in range(length):
            watch.push("a")
        return time.perf_counter() - begun

    short = min(seconds(4_000) for _ in range(3))
    assert min(seconds(16_000) for _ in range(3)) < 12 * short
