"""Prompts of a given length for benchmarks, without the server's tokenizer.

Words below are one token each in every common vocabulary, so a prompt of n of them is n tokens within a few percent;
the server's own count is what the report uses. A workload is an endless, seeded stream of sessions; a session is one
ask, or several turns of one conversation, each continuing with what the server answered.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.bench.dialects import Message, RequestSpec
from tokenmill.bench.traffic import HASH_BLOCK_TOKENS, Lengths, TraceRow
from tokenmill.errors import InvalidConfig

COMMON_WORDS = (
    "the of and to in is was for that with as his on be at by this had not are but from or have an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into "
    "than them can only other new some could time these two may then do first any my now such like our over man me "
    "even most made after also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come since against go "
    "came right used take three"
)  # fmt: skip
WORDS = COMMON_WORDS.split()
MAX_FILE_BYTES = 64 << 20
SHORT_PROMPT, SHORT_ANSWER = Lengths(128, 128), Lengths(64, 64)


@dataclass(frozen=True)
class Session:
    """Turns of one conversation; most have one."""

    turns: tuple[RequestSpec, ...]

    def next_ask(self, number: int, said: Sequence[tuple[str, str]]) -> RequestSpec:
        """Turn `number` after what was `said` before: pairs of question and answer."""
        ask = self.turns[number]
        history: list[Message] = []
        for question, answer in said:
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer or "…"}]
        return replace(ask, messages=(*history, *ask.messages)) if history else ask


@dataclass(frozen=True)
class Workload:
    kind: str = "random"  # random, text, lengths, shared-prefix, multi-turn, schema
    input_len: Lengths = SHORT_PROMPT
    output_len: Lengths = SHORT_ANSWER
    prefix_len: int = 256
    num_prefixes: int = 4
    turns: int = 4
    file: Path | None = None
    schema: dict[str, Any] | None = None
    max_input: int | None = None
    max_output: int | None = None
    seed: int = 0

    def sessions(self) -> Iterator[Session]:
        if self.kind not in MAKERS:
            raise InvalidConfig(f"no workload is called {self.kind!r}; known are {', '.join(MAKERS)}", param="workload")
        drawing = random.Random(f"workload/{self.seed}")
        return MAKERS[self.kind](self, drawing)


def random_text(drawing: random.Random, num_words: int) -> str:
    return " ".join(drawing.choices(WORDS, k=max(1, num_words)))


def plain(text: str, input_len: int, output_len: int, schema: dict[str, Any] | None = None) -> Session:
    return Session((RequestSpec(({"role": "user", "content": text},), output_len, input_len, schema=schema),))


def _random(w: Workload, drawing: random.Random) -> Iterator[Session]:
    while True:
        length = w.input_len.draw(drawing)
        yield plain(random_text(drawing, length), length, w.output_len.draw(drawing))


def _text(w: Workload, drawing: random.Random) -> Iterator[Session]:
    """Runs of lines from a file, from a random line on; about four letters a token."""
    lines = _read_file(w).splitlines()
    while True:
        length = w.input_len.draw(drawing)
        start = drawing.randrange(len(lines))
        taken: list[str] = []
        for line in itertools.islice(itertools.cycle(lines), start, None):
            taken.append(line)
            if sum(map(len, taken)) >= 4 * length:
                break
        yield plain("\n".join(taken)[: 4 * length], length, w.output_len.draw(drawing))


def _lengths(w: Workload, drawing: random.Random) -> Iterator[Session]:
    """Lengths of real chats from a csv with the columns prompt_tokens and output_tokens."""
    try:
        pairs = [(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(_read_file(w).splitlines())]
    except (KeyError, ValueError, TypeError) as problem:
        raise InvalidConfig(f"{w.file}: no columns prompt_tokens and output_tokens: {problem}", param="file") from None
    if not pairs:
        raise InvalidConfig(f"{w.file} has no line behind its titles", param="file")
    while True:
        prompt, output = drawing.choice(pairs)
        prompt, output = min(prompt, w.max_input or prompt), min(output, w.max_output or output)
        yield plain(random_text(drawing, prompt), prompt, max(1, output))


def _shared_prefix(w: Workload, drawing: random.Random) -> Iterator[Session]:
    prefixes = [random_text(random.Random(f"prefix/{w.seed}/{n}"), w.prefix_len) for n in range(w.num_prefixes)]
    while True:
        length = w.input_len.draw(drawing)
        text = drawing.choice(prefixes) + " " + random_text(drawing, length)
        yield plain(text, w.prefix_len + length, w.output_len.draw(drawing))


def _multi_turn(w: Workload, drawing: random.Random) -> Iterator[Session]:
    while True:
        turns = []
        for _ in range(w.turns):
            length = w.input_len.draw(drawing)
            turns.append(plain(random_text(drawing, length), length, w.output_len.draw(drawing)).turns[0])
        yield Session(tuple(turns))


def _schema(w: Workload, drawing: random.Random) -> Iterator[Session]:
    schema = w.schema or {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    while True:
        length = w.input_len.draw(drawing)
        yield plain(random_text(drawing, length), length, w.output_len.draw(drawing), schema)


MAKERS = {
    "random": _random,
    "text": _text,
    "lengths": _lengths,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "schema": _schema,
}


def trace_session(row: TraceRow, number: int, seed: int, length_scale: float = 1.0) -> Session:
    """The recorded request, or one as long; blocks with the same hash id hold the same words."""
    if row.messages:
        return Session((RequestSpec(row.messages, row.output_len, row.input_len),))
    drawing = random.Random(f"trace/{seed}/{number}")
    if not row.hash_ids:
        return plain(random_text(drawing, row.input_len), row.input_len, row.output_len)
    block = max(1, round(HASH_BLOCK_TOKENS * length_scale))
    blocks = [random_text(random.Random(f"block/{hash_id}"), block).split() for hash_id in row.hash_ids]
    words = list(itertools.chain.from_iterable(blocks))[: row.input_len]
    return plain(" ".join(words), row.input_len, row.output_len)


def _read_file(w: Workload) -> str:
    if w.file is None:
        raise InvalidConfig(f"the workload {w.kind} needs --file", param="file")
    if w.file.stat().st_size > MAX_FILE_BYTES:
        raise InvalidConfig(f"{w.file} is larger than {MAX_FILE_BYTES >> 20} MiB", param="file")
    try:
        text = w.file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InvalidConfig(f"{w.file} is no text: {problem}", param="file") from None
    if not text.strip():
        raise InvalidConfig(f"{w.file} is empty", param="file")
    return text
