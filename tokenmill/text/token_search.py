"""Search for the tokens that spell a text, for parameters that are text to users and token ids to the engine.

DRY's sequence breakers (llama.cpp's rules): a breaker occurs where one token contains it, or where a token ends with
its beginning and the tokens of its rest follow. The rest is cut as the tokenizer cuts it when it stands alone.

    breaker "\\n\\n"      tokens that contain it: "\\n\\n", "}\\n\\n" ...      "...\\n" followed by "\\n"

Stop strings of beams: every token that contains one, is part of one, ends with the beginning of one or begins with its
end, with its bytes; any other token separates what stands before it from what follows.

Think sections: whether a prompt ends inside one.

Every token is looked at once per text, so results are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from tokenmill.text.tokenizer import Tokenizer

MAX_KEPT = 64
MAX_TAIL_TOKENS = 20

Found = tuple[list[int], list[list[int]]]  # tokens that hold a breaker; sequences that spell it together


class TokenSearch:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._words = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._breaker: Callable[[str], Found] = lru_cache(MAX_KEPT)(self._find_breaker)
        self._pieces: Callable[[str], dict[int, bytes]] = lru_cache(MAX_KEPT)(self._find_pieces)

    def breakers(self, texts: Iterable[str]) -> Found:
        single: set[int] = set()
        longer: list[list[int]] = []
        for text in dict.fromkeys(texts):
            held, tokenized = self._breaker(text)
            single |= set(held)
            longer += [sequence for sequence in tokenized if sequence not in longer]
        return sorted(single), longer

    def stop_pieces(self, stops: Iterable[str], *, skip_special_tokens: bool) -> dict[int, bytes]:
        """Return the bytes of each token; none for tokens that are not shown."""
        pieces = {token_id: piece for stop in stops for token_id, piece in self._pieces(stop).items()}
        hidden = self._tokenizer.special_ids if skip_special_tokens else ()
        return pieces | {token_id: b"" for token_id in hidden if token_id < len(self._words)}

    def _find_breaker(self, text: str) -> Found:
        wanted = text.encode("utf-8", "replace")
        beginnings = tuple(text[:length].encode("utf-8", "replace") for length in range(1, len(text)))
        single: list[int] = []
        longer: list[list[int]] = []
        for token_id, word in enumerate(self._words):
            if wanted in word:
                single.append(token_id)
            elif beginnings and word.endswith(beginnings):
                longer += [[token_id, *self._tail(wanted[len(b) :])] for b in beginnings if word.endswith(b)]
        return single, longer

    def _tail(self, rest: bytes) -> list[int]:
        text = rest.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)[:MAX_TAIL_TOKENS]

    def _find_pieces(self, stop: str) -> dict[int, bytes]:
        wanted = stop.encode("utf-8", "replace")
        beginnings = tuple(wanted[:length] for length in range(1, len(wanted)))
        ends = tuple(wanted[length:] for length in range(1, len(wanted)))
        return {
            token_id: word
            for token_id, word in enumerate(self._words)
            if word and (wanted in word or word in wanted or word.endswith(beginnings) or word.startswith(ends))
        }


_LOOK_TOKENS = 4096  # of a prompt's end: an open section begins near it


def is_open_at_end(tokenizer: Tokenizer, prompt_ids: Sequence[int], start: str, end: str) -> bool:
    """Tell whether the prompt ends inside a section that it opened. Decided by the text: a token may join a marker and
    what follows it."""
    text = tokenizer.decode(prompt_ids[-_LOOK_TOKENS:], skip_special_tokens=False)
    return text.rfind(start) > text.rfind(end)
