"""A row of the runner that follows a grammar: its matcher, and forced tokens that the matcher has not taken yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmill.guided.matcher import Matcher


class RowGrammar:
    def __init__(self, matcher: Matcher, outputs: list[int]) -> None:
        self.matcher = matcher
        self.matcher.advance(outputs)
        self.forced = matcher.forced()

    def take(self, token_id: int) -> None:
        self.matcher.advance([token_id])
        self.forced = self.forced[1:] or self.matcher.forced()

    def jump(self) -> list[int]:
        """Takes all that is forced."""
        taken: list[int] = []
        while self.forced and self.matcher.advance(self.forced):
            taken += self.forced
            self.forced = self.matcher.forced()
        return taken

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of these, in order, may come next; where something is forced, nothing else may."""
        if self.matcher.error is not None:
            return 0
        for place, (token_id, forced) in enumerate(zip(drafts, self.forced, strict=False)):
            if token_id != forced:
                return place
        return self.matcher.num_allowed(drafts)

    def walk(self, drafts: Sequence[int]) -> Iterator[list[int]]:
        """Stands behind each draft in turn, while they are allowed, and says what is forced there; then returns."""
        forced, taken = self.forced, 0
        try:
            for draft in drafts[: self.num_allowed(drafts)]:
                if not self.matcher.advance([draft]):
                    break
                taken += 1
                forced = forced[1:] or self.matcher.forced()
                yield forced
        finally:
            self.matcher.rollback(taken)
