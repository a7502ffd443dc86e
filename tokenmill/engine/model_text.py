"""The text side of a model: what needs its tokenizer and chat template, but none of its weights."""

from __future__ import annotations

from tokenmill.engine.input_processor import InputProcessor
from tokenmill.types import ChatRequest


class ModelText:
    """Text ↔ token ids of one model."""

    def __init__(self, input_processor: InputProcessor) -> None:
        self._input_processor = input_processor

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of a text; `parse_special`: control tokens in it are those tokens, not their characters."""
        tokenizer = self._input_processor.tokenizer
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        """The token ids of a conversation in the model's chat template."""
        return self._input_processor.chat_ids(request)

    def chat_text(self, request: ChatRequest) -> str:
        """A conversation in the model's chat template."""
        return self._input_processor.chat_text(request)

    def detokenize(self, ids: list[int]) -> str:
        """The text of token ids, special ones included."""
        return self._input_processor.tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        """The bytes of each token on its own, with its leading space."""
        tokenizer = self._input_processor.tokenizer
        return [tokenizer.token_bytes(token_id) for token_id in ids]
