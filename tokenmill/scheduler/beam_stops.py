"""Where a beam meets a stop string. Beams rank whole hypotheses, so the core must know when one ends.

Text is the front's: it sends along the bytes of those tokens that a stop string may be spelled with, and any other
token parts what stands before it from what follows. The front still cuts the text and names the stop.
"""

from __future__ import annotations

from tokenmill.types import Request


class BeamStops:
    def __init__(self, request: Request) -> None:
        self._stops = [stop.encode("utf-8", "replace") for stop in request.params.stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pieces = request.tokenized.stop_pieces
        self._min_tokens = request.params.min_tokens

    def is_met(self, outputs: list[int], token_id: int) -> bool:
        """The token, after these outputs, completes a stop string that begins behind the first `min_tokens`."""
        if not self._stops or token_id not in self._pieces or len(outputs) < self._min_tokens:
            return False
        text = self._pieces[token_id]
        wanted = len(text) + self._longest - 1
        for token in reversed(outputs[self._min_tokens :]):
            if len(text) >= wanted or token not in self._pieces:
                break
            text = self._pieces[token] + text
        return any(stop in text for stop in self._stops)
