"""Random tools, calls, texts and splits for tests of tool-call and reasoning formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from random import Random
from typing import Any

from tokenizers import AddedToken

from tokenmill.text.speech import SpeechReader
from tokenmill.text.speech.call_format import CallFormat
from tokenmill.text.speech.markers import ControlAlphabet
from tokenmill.text.tokenizer import IncrementalDetokenizer, Tokenizer, byte_tokenizer
from tokenmill.types import CallArguments, CallEnd, CallStart, Part, TextPart, ThoughtPart, Tool, ToolCall

WORDS = (
    "São",
    "x",
    "",
    "a b",
    "3",
    "true",
    "null",
    '"',
    "\\",
    "\n",
    "<",
    "</p>",
    "{",
    "}",
    "😀",
    "é\t",
    ",",
    "'",
    "[1]",
)
TOOLS = [
    Tool(
        name=name,
        description="d",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "ratio": {"type": "number"},
                "on": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object"},
                "none": {"type": "null"},
            },
        },
    )
    for name in ("get_weather", "get", "get_weather_2")
]


def random_text(random: Random, words: Iterable[str] = WORDS) -> str:
    return " ".join(random.choice(list(words)) for _ in range(random.randrange(6)))


def random_value(random: Random, kind: str, depth: int = 0) -> Any:
    match kind:
        case "city":
            return random_text(random)
        case "days":
            return random.choice((0, -3, 10**18, 7))
        case "ratio":
            return random.choice((0.5, -1.25, 1e300, 3))
        case "on":
            return random.random() < 0.5
        case "none":
            return None
        case "tags":
            return [random_text(random) for _ in range(random.randrange(3))]
    keys = random.sample(("city", "days", "on", "tags", "none", "where"), random.randrange(3) if depth < 2 else 0)
    return {f"k{key}": random_value(random, key, depth + 1) for key in keys}


def random_call(random: Random, row: CallFormat) -> ToolCall:
    tool = random.choice(TOOLS)
    assert tool.parameters is not None
    names = list(tool.parameters["properties"])
    if row.values == "nested":  # the format has no nulls, and distinguishes numbers from strings only by a schema
        names = [name for name in names if name not in ("none", "where")]
    arguments = {name: random_value(random, name) for name in random.sample(names, random.randrange(len(names)))}
    written = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"abcdef{random.randrange(100, 1000)}", name=tool.name, arguments=written)


def cut(random: Random, text: str, longest: int) -> list[str]:
    """Return the text in pieces of random lengths."""
    pieces, start = [], 0
    while start < len(text):
        end = start + random.randint(1, longest)
        pieces.append(text[start:end])
        start = end
    return pieces


def read(reader: SpeechReader, pieces: Iterable[str]) -> list[Part]:
    """Return all parts of an answer; check that every fragment of arguments leaves them a prefix of JSON."""
    return folded([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def folded(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind joined, and random ids replaced."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            joined[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ThoughtPart) and isinstance(last, ThoughtPart):
            joined[-1] = ThoughtPart(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(part.index, last.fragment + part.fragment)
        else:
            joined.append(CallStart(part.index, "", part.name) if isinstance(part, CallStart) else part)
    return joined


def expected_parts(calls: Iterable[ToolCall], before: str = "", after: str = "", thought: str = "") -> list[Part]:
    parts: list[Part] = [ThoughtPart(thought)] if thought else []
    parts += [TextPart(before)] if before else []
    for index, call in enumerate(calls):
        parts += [CallStart(index, "", call.name), CallArguments(index, call.arguments), CallEnd(index)]
    return parts + ([TextPart(after)] if after else [])


def parsed(parts: Iterable[Part]) -> list[Any]:
    """Return the parts with arguments as values, to compare formats that do not keep the spacing of JSON."""
    return [json.loads(part.fragment) if isinstance(part, CallArguments) else part for part in parts]


MARKER = re.compile(r"｜DSML｜|\]<\]minimax\[>\[|<[|｜](?!DSML)[^<>]*>|<[^<>｜]*[|｜]>|</?[a-z:_]+>|\[/?[A-Z_]+\]")


def marker_vocabulary(texts: Iterable[str], is_special: bool = True) -> Tokenizer:
    """Return a vocabulary of bytes that has each marker in these texts as one token."""
    plain = byte_tokenizer()
    markers = sorted({found for text in texts for found in MARKER.findall(text)})
    added = [AddedToken(marker, normalized=False, special=is_special) for marker in markers]
    plain.backend.add_special_tokens(added) if is_special else plain.backend.add_tokens(added)
    return Tokenizer(plain.backend, plain.spelling, plain.traits)


def texts_of(row: CallFormat) -> list[str]:
    """Return all fixed texts of a row."""
    quote = '<|"|>' if row.values == "gemma" else ""
    return [row.call, row.arg or "", row.header, row.join, *row.section, *row.also_opens, *row.ignored, quote]


def read_ids(reader: SpeechReader, tokenizer: Tokenizer, ids: Iterable[int]) -> list[Part]:
    """Return all parts of an answer given as token ids, as an engine reads it."""
    parts: list[Part] = []
    text = IncrementalDetokenizer(tokenizer, (0,), skip_special_tokens=False)
    for token_id in ids:
        if token_id in reader.control_ids:
            parts += reader.push(text.finish())
            parts += reader.push_control(token_id)
        else:
            parts += reader.push(text.push([token_id]))
    return folded(parts + reader.push(text.finish()) + reader.finish())


def mutated(random: Random, text: str, markers: list[str]) -> tuple[str, list[str]]:
    """Damage a text: cut, double or move pieces and insert markers, and words that must not be lost."""
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(text))
        end = min(len(text), start + random.randint(1, 12))
        match random.randrange(5):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:end] + text[start:]
            case 2:
                text = text[:start] + random.choice(WORDS) + text[start:]
            case 3:
                marker = random.choice(markers).partition("§")[0]
                text = text[:start] + marker + text[start:]
            case 4:
                text = text[:start] if start > len(text) // 2 else text
    words = [f"w{random.randrange(1000, 10000)}w" for _ in range(random.randint(1, 3))]
    for word in words:
        start = random.randrange(len(text) + 1)
        text = text[:start] + word + text[start:]
    return text, [word for word in words if word in text]


def controlled_text(text: str, texts: Iterable[str]) -> tuple[dict[str, int], str]:
    """Return the markers in these texts as control tokens, and the text with one character for each of them."""
    markers = sorted({found for one in texts for found in MARKER.findall(one)})
    control = {marker: token_id for token_id, marker in enumerate(markers)}
    return control, ControlAlphabet(control).encode(text)
