"""Reading a GGUF file's tokenizer metadata strictly: a value of the wrong kind or length is refused by its key.

The caller has read the file; here the metadata is a plain mapping. Arrays may be lists or numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenmill.errors import ModelError, UnsupportedModel

PREFIX = "tokenizer.ggml."
MAX_TOKEN_LENGTH = 1024  # real ones have up to 256; finding the merges of one takes time with its square


class TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def damaged(problem: str) -> ModelError:
    return ModelError(f"the GGUF vocabulary can't be used: {problem}", hint="fetch or convert the file again")


@dataclass(frozen=True)
class VocabFields:
    """Typed access to `tokenizer.ggml.*`; `default` answers for an absent key."""

    metadata: Mapping[str, Any]

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, str):
            raise damaged(f"{PREFIX}{key} is {_seen(value)}, expected a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise damaged(f"{PREFIX}{key} is {_seen(value)}, expected true or false")
        return value

    def token_id(self, key: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return default if default is not None and default < num_tokens else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
            raise damaged(f"{PREFIX}{key} is {_seen(value)}, expected an id below {num_tokens}")
        return value

    def array(self, key: str) -> list[Any] | None:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return None
        items = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(items, list | tuple):
            raise damaged(f"{PREFIX}{key} is {_seen(value)}, expected an array")
        return list(items)

    def strings(self, key: str) -> list[str]:
        items = self.array(key)
        if items is None:
            raise damaged(f"{PREFIX}{key} is missing")
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise damaged(f"{PREFIX}{key}[{index}] is {_seen(item)}, expected a string")
        return items

    def numbers(self, key: str, length: int) -> list[float] | None:
        items = self.array(key)
        if items is None:
            return None
        if len(items) != length:
            raise damaged(f"{PREFIX}{key} has {len(items)} entries for {length} tokens")
        if not all(isinstance(item, int | float) and item == item for item in items):
            raise damaged(f"{PREFIX}{key} holds something that is not a number")
        return items


@dataclass(frozen=True)
class VocabTokens:
    """The tokens by id: what each is called, its score, and its type."""

    texts: list[str]
    scores: list[float] | None
    types: list[TokenType]
    ids: dict[str, int]

    def ids_of(self, *types: TokenType) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]


def read_tokens(fields: VocabFields) -> VocabTokens:
    texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(fields.strings("tokens"))]
    if not texts:
        raise damaged(f"{PREFIX}tokens is empty")
    if (longest := max(map(len, texts))) > MAX_TOKEN_LENGTH:
        raise damaged(f"{PREFIX}tokens holds one of {longest} characters, more than {MAX_TOKEN_LENGTH}")
    ids = {text: index for index, text in enumerate(texts)}
    if len(ids) != len(texts):
        double = next(text for index, text in enumerate(texts) if ids[text] != index)
        raise damaged(f"{PREFIX}tokens holds {double!r} twice")
    return VocabTokens(texts, fields.numbers("scores", len(texts)), _types(fields, len(texts)), ids)


def _types(fields: VocabFields, length: int) -> list[TokenType]:
    numbers = fields.numbers("token_type", length)
    if numbers is None:
        return [TokenType.NORMAL] * length
    known: dict[float, TokenType] = {float(kind): kind for kind in TokenType}
    return [known.get(number, TokenType.UNDEFINED) for number in numbers]


def refuse_model(name: str, known: list[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the GGUF vocabulary is of kind {name!r}, which is not implemented", hint=f"implemented: {', '.join(known)}"
    )


def _seen(value: object) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
