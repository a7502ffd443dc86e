"""A row of the runner that follows a grammar: its matcher, and forced tokens that the matcher has not taken yet.

Where text is forced, its tokens are too, up to one that the request objects to: there it may be spelled otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmill.guided.matcher import Matcher
from tokenmill.guided.objections import Objection, no_objection


class RowGrammar:
    def __init__(self, matcher: Matcher, outputs: list[int], objects: Objection = no_objection) -> None:
        self.matcher = matcher
        self.matcher.advance(outputs)
        self._objects = objects
        self._num_outputs = len(outputs)
        self.forced = self._forced(0)

    @property
    def choices(self) -> list[int]:
        """The tokens that may come next where text is forced; none: whatever the matcher says."""
        return self._choices(self.forced)

    def take(self, token_id: int) -> None:
        self.matcher.advance([token_id])
        self._num_outputs += 1
        self.forced = self.forced[1:] or self._forced(0)

    def jump(self) -> list[int]:
        """Takes all that is forced."""
        taken: list[int] = []
        while self.forced and self.matcher.advance(self.forced):
            taken += self.forced
            self._num_outputs += len(self.forced)
            self.forced = self._forced(0)
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
        """Stands behind each draft in turn, while they are allowed, and says the choices there; then returns."""
        forced, taken = self.forced, 0
        try:
            for draft in drafts[: self.num_allowed(drafts)]:
                if not self.matcher.advance([draft]):
                    break
                taken += 1
                forced = forced[1:] or self._forced(taken)
                yield self._choices(forced)
        finally:
            self.matcher.rollback(taken)

    def _forced(self, num_drafts: int) -> list[int]:
        """What must come next, up to where the request objects; the matcher stands behind so many drafts."""
        tokens = self.matcher.forced()
        for place, token_id in enumerate(tokens):
            if self.matcher.is_end(token_id):
                break
            if self._objects(token_id, self._num_outputs + num_drafts + place):
                return tokens[:place]
        return tokens

    def _choices(self, forced: list[int]) -> list[int]:
        if forced or self._objects is no_objection:
            return forced[:1]
        return self.matcher.spellings()
