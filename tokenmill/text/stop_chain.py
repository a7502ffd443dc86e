"""Everything that may end a text, one behind the other: stop strings first, then stop regexes on what they let pass."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.text.stop_regex import StopRegexes, stop_patterns
from tokenmill.text.stops import StopStrings


class Stops:
    def __init__(self, strings: Sequence[str], regexes: Sequence[str], include_stop: bool = False) -> None:
        self._strings = StopStrings(strings, include_stop)
        self._regexes = StopRegexes(stop_patterns(tuple(regexes)), include_stop) if regexes else None

    @property
    def matched(self) -> str | None:
        """The stop string or the pattern that was met; of both, what stands first in the text."""
        return (self._regexes.matched if self._regexes else None) or self._strings.matched

    def push(self, text: str) -> tuple[str, str | None]:
        """What of the text may be sent now, and what was met, if anything. After a match all is dropped."""
        if self.matched is not None:
            return "", self.matched
        sent, matched = self._strings.push(text)
        if self._regexes is None:
            return sent, matched
        sent, found = self._regexes.push(sent)
        if matched is not None and found is None:  # the text ends here: nothing can complete a pattern any more
            sent += self._regexes.flush()
        return sent, self.matched

    def flush(self) -> str:
        """The text is over: what was held back, unless a stop was met in it."""
        rest = self._strings.flush()
        if self._regexes is None:
            return rest
        sent, _ = self._regexes.push(rest)
        return sent + self._regexes.flush()
