"""Find the tokens that spell a text, for parameters that users give as text and the engine needs as token ids.

DRY's sequence breakers (llama.cpp's rules): a breaker occurs where one token contains it, or where a token ends with
a prefix of it and the tokens of the rest follow. The rest is tokenised as if it stood alone.

    breaker "\\n\\n"      tokens that contain it: "\\n\\n", "}\\n\\n" ...      "...\\n" followed by "\\n"

Stop strings of beams: every token that contains one, is part of one, ends with a prefix of one or begins with a suffix
of one, with its bytes. No stop string can span any other token.

Think sections: whether a prompt ends inside one.

A search looks at every token of the vocabulary, so results are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from tokenmill.text.tokenizer import Tokenizer

MAX_CACHED_TEXTS = 64
MAX_TAIL_TOKENS = 20

BreakerTokens = tuple[list[int], list[list[int]]]  # tokens that contain a breaker; sequences of tokens that spell one


class TokenSearch:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._words = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._breaker: Callable[[str], BreakerTokens] = lru_cache(MAX_CACHED_TEXTS)(self._find_breaker)
        self._pieces: Callable[[str], dict[int, bytes]] = lru_cache(MAX_CACHED_TEXTS)(self._find_pieces)

    def breakers(self, texts: Iterable[str]) -> BreakerTokens:
        single: set[int] = set()
        longer: list[list[int]] = []
        for text in dict.fromkeys(texts):
            containing, tokenized = self._breaker(text)
            single |= set(containing)
            longer += [sequence for sequence in tokenized if sequence not in longer]
        return sorted(single), longer

    def stop_pieces(self, stops: Iterable[str], *, skip_special_tokens: bool) -> dict[int, bytes]:
        """Return the bytes of each token that can be part of a stop; b"" for tokens that the text leaves out."""
        pieces = {token_id: piece for stop in stops for token_id, piece in self._pieces(stop).items()}
        hidden = self._tokenizer.special_ids if skip_special_tokens else ()
        return pieces | {token_id: b"" for token_id in hidden if token_id < len(self._words)}

    def _find_breaker(self, text: str) -> BreakerTokens:
        breaker = text.encode("utf-8", "replace")
        prefixes = tuple(text[:length].encode("utf-8", "replace") for length in range(1, len(text)))
        single: list[int] = []
        longer: list[list[int]] = []
        for token_id, word in enumerate(self._words):
            if breaker in word:
                single.append(token_id)
            elif prefixes and word.endswith(prefixes):
                longer += [[token_id, *self._tail(breaker[len(p) :])] for p in prefixes if word.endswith(p)]
        return single, longer

    def _tail(self, rest: bytes) -> list[int]:
        text = rest.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)[:MAX_TAIL_TOKENS]

    def _find_pieces(self, stop: str) -> dict[int, bytes]:
        encoded = stop.encode("utf-8", "replace")
        prefixes = tuple(encoded[:length] for length in range(1, len(encoded)))
        suffixes = tuple(encoded[length:] for length in range(1, len(encoded)))
        return {
            token_id: word
            for token_id, word in enumerate(self._words)
            if word and (encoded in word or word in encoded or word.endswith(prefixes) or word.startswith(suffixes))
        }


_NUM_SEARCHED_TOKENS = 4096  # at the prompt's end: an open section begins near it


def is_open_at_end(tokenizer: Tokenizer, prompt_ids: Sequence[int], start: str, end: str) -> bool:
    """Return whether the prompt ends inside a section that it opened.

    The text decides, not the ids: one token may contain a marker and what follows it.
    """
    text = tokenizer.decode(prompt_ids[-_NUM_SEARCHED_TOKENS:], skip_special_tokens=False)
    return text.rfind(start) > text.rfind(end)
