"""DRY's sequence breakers, written as text, as the tokens that may spell them (llama.cpp's rules).

A breaker occurs where one token holds it, or where a token ends with its beginning and the tokens of its rest follow:

    breaker "\\n\\n"      tokens that hold it: "\\n\\n", "}\\n\\n" ...      "...\\n" followed by "\\n"

The rest is cut as the tokenizer cuts it when it stands alone. Every token of the vocabulary is looked at once per
breaker, so what was found is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tokenmill.text.tokenizer import Tokenizer

MAX_KEPT = 64
MAX_TAIL_TOKENS = 20

Found = tuple[list[int], list[list[int]]]  # tokens that hold a breaker; sequences that spell it together


class BreakerIndex:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._words = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._kept: OrderedDict[str, Found] = OrderedDict()

    def token_sequences(self, breakers: Iterable[str]) -> Found:
        single: set[int] = set()
        longer: list[list[int]] = []
        for breaker in dict.fromkeys(breakers):
            held, spelled = self._found(breaker)
            single |= set(held)
            longer += [sequence for sequence in spelled if sequence not in longer]
        return sorted(single), longer

    def _found(self, breaker: str) -> Found:
        if breaker not in self._kept:
            self._kept[breaker] = self._search(breaker)
        self._kept.move_to_end(breaker)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[breaker]

    def _search(self, breaker: str) -> Found:
        wanted = breaker.encode("utf-8", "replace")
        beginnings = tuple(breaker[:length].encode("utf-8", "replace") for length in range(1, len(breaker)))
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
