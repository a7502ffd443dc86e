"""Every format: what its writer writes, its reader reads, in one piece and in any pieces."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.speech_samples import TOOLS, cut, expected_parts, parsed, random_call, read
from tokenmill.text.speech import Speech
from tokenmill.text.speech.call_format import CallFormat
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.text.speech.thinking import THINKING_FORMATS

THINK = next(row for row in THINKING_FORMATS if row.name == "think")


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_written_calls_are_read(row: CallFormat) -> None:
    random = Random(row.name)
    speech = Speech(calls=row)
    for _ in range(12):
        calls = [random_call(random) for _ in range(random.randint(1, 3))]
        text = row.write(calls)
        wanted = parsed(expected_parts(calls))
        assert parsed(read(speech.reader(TOOLS), [text])) == wanted, text
        assert parsed(read(speech.reader(TOOLS), cut(random, text, 1))) == wanted, text
        assert parsed(read(speech.reader(TOOLS), cut(random, text, 8))) == wanted, text
