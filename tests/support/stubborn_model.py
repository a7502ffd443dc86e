"""A model that avoids tool calls, and the mask that forces them: it samples random tokens that the grammar allows.

It generates its own text as long as the grammar allows that, then random tokens. Now and then it tries to end the
current string or tag, which random text would never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher

from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.text.tokenizer import Tokenizer

REFUSAL = "I am sorry, but I will not call any tool."


def constrained_answer(
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    lark: str,
    endings: Sequence[str],
    random: Random,
    max_tokens: int = 3000,
) -> list[int]:
    """Return the tokens that the stubborn model generates under a grammar; fail if it does not end."""
    matcher = LLMatcher(vocabulary.ll, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    mask = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
    wanted: list[int] = tokenizer.encode(REFUSAL, add_special_tokens=False)
    taken: list[int] = []
    while not matcher.is_stopped():
        assert len(taken) < max_tokens, tokenizer.decode(taken, skip_special_tokens=False)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if wanted and not mask[wanted[0] // 32] >> (wanted[0] % 32) & 1:
            wanted = []
        if not wanted and random.random() < 0.3:
            wanted = tokenizer.encode(random.choice(list(endings)), add_special_tokens=False)
            continue
        allowed = [] if wanted else _allowed(mask)
        if any(end in allowed for end in vocabulary.eos_token_ids) and random.random() < 0.5:
            break
        token = wanted.pop(0) if wanted else random.choice(allowed)
        if token in vocabulary.eos_token_ids:
            break
        assert matcher.consume_token(token), matcher.get_error()
        taken.append(token)
    assert matcher.is_accepting() or matcher.is_stopped()
    return taken


def _allowed(mask: np.ndarray[Any, Any]) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def random_schema(random: Random) -> dict[str, Any]:
    """Return parameters of a tool with the JSON Schema keywords that tools use."""
    names = random.sample(
        ("city", "days", "days_2", "unit", "tags", "where", "on", "note", "code"), random.randint(0, 6)
    )
    properties = {name: random_property(random) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if names:
        schema["required"] = random.sample(names, random.randint(0, len(names)))
    if any("$ref" in str(one) for one in properties.values()):
        schema["$defs"] = {"level": {"enum": ["low", "high"]}, "count": {"type": "integer", "minimum": 0}}
    return schema


def random_property(random: Random, depth: int = 0) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "enum": ["celsius", "fahrenheit", "a b", 'say "x"']},
        {"type": "string", "minLength": 2, "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "number"},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        {"$ref": "#/$defs/level"},
        {"$ref": "#/$defs/count"},
        {"const": 7},
        {"enum": ["x", 3, None]},
    ]
    if depth < 2 and random.random() < 0.35:
        inner = random_property(random, depth + 1)
        nested = {"a": inner, "b": {"type": "boolean"}}
        return random.choice(
            (
                {"type": "array", "items": inner, "minItems": 1, "maxItems": 3},
                {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
                {"type": "object", "properties": nested, "required": ["a"], "additionalProperties": False},
            )
        )
    return random.choice(simple)
