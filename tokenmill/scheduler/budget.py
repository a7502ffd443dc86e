"""The tokens of one step: first one for every running sequence, what is left for chunks and newcomers.

    total:  [ one each for the running sequences not asked yet | free for whoever asks now ]

So a long prompt gets the surplus and never the token that a decoding sequence needs.
"""

from __future__ import annotations


class TokenBudget:
    def __init__(self, total: int, num_running: int) -> None:
        self.left = total
        self._promised = num_running

    def grant(self, wanted: int) -> int:
        """To a running sequence, in exchange for its promise."""
        self.unreserve(1)
        return self.spend(wanted)

    def spend(self, wanted: int) -> int:
        """To anyone: what nobody has a promise for."""
        granted = max(0, min(wanted, self.left - self._promised))
        self.left -= granted
        return granted

    @property
    def spare(self) -> int:
        """What could be spent now."""
        return max(0, self.left - self._promised)

    def unreserve(self, num_promises: int) -> None:
        self._promised = max(0, self._promised - num_promises)
