"""The load generator against servers of other makers, in their own wire formats."""

from __future__ import annotations

from itertools import islice

import pytest
from wire_servers import SERVERS, WORDS, wire_server

from tokenmill.bench.dialects import DIALECTS, Ask
from tokenmill.bench.lengths import Lengths
from tokenmill.bench.load import ClosedLoop, Target, run_load
from tokenmill.bench.result import without_key
from tokenmill.bench.workloads import Workload
from tokenmill.errors import InvalidConfig

SCHEMA = {"type": "object"}
ASK = Ask(({"role": "user", "content": "Hi"},), 8, schema=SCHEMA)


@pytest.mark.parametrize("maker", SERVERS)
def test_other_makers_streams_are_read(maker: str) -> None:
    dialect, path, script = SERVERS[maker]
    sessions = islice(Workload(input_len=Lengths(4, 4), output_len=Lengths(8, 8)).sessions(), 6)
    with wire_server(path, script) as url:
        run = run_load(Target(url, "some-model", dialect, "secret"), ClosedLoop(2, sessions), keep_texts=True)
    for record in run.records:
        assert record.error is None, (record.error, record.detail)
        assert record.texts == list(WORDS) and len(record.times_s) == len(WORDS)
        assert (record.input_tokens, record.output_tokens) == (25, 3)
        assert record.finish_reason in ("stop", "length", "end_turn")


def test_a_schema_is_asked_for_in_each_dialect_s_words_or_refused() -> None:
    assert DIALECTS["ollama"].body(ASK, "m")["format"] == SCHEMA
    assert DIALECTS["tgi"].body(ASK, "m")["parameters"]["grammar"] == {"type": "json", "value": SCHEMA}
    assert DIALECTS["openai-chat"].body(ASK, "m")["response_format"]["json_schema"]["schema"] == SCHEMA
    with pytest.raises(InvalidConfig, match="schema"):
        DIALECTS["anthropic"].body(ASK, "m")


def test_a_kept_command_has_no_key_in_it() -> None:
    asked = ["bench", "serve", "--api-key", "k1", "--rate", "2", "--api-key=k2"]
    assert without_key(asked) == ["bench", "serve", "--api-key", "…", "--rate", "2", "--api-key=…"]
