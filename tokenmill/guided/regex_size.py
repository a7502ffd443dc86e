"""How large a regex becomes when its counted repeats are written out: `((a{100}){100}){100}` is a million characters.

A grammar engine expands such a regex while tokens are drawn, so the size is checked before.
"""

from __future__ import annotations

import re

MAX_EXPANDED = 50_000
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")


def expanded_size(pattern: str) -> int:
    """An upper estimate; stops counting once it is certainly too large."""
    sizes, last = [0], 0  # of the groups that are open; of what a repeat would apply to
    place = 0
    while place < len(pattern):
        char, step = pattern[place], 1
        count = _COUNT.match(pattern, place) if char == "{" else None
        if char == "(":
            sizes.append(0)
            last = 0
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif char in "*+?":  # what a count behind it repeats is what it repeats itself
            sizes[-1] += 1
        elif count is not None:
            times = min(MAX_EXPANDED, int((count.group(3) or count.group(1))[:9]))
            sizes[-1] += last * max(0, times - 1)
            last, step = last * times, count.end() - place
        else:
            step = _atom_length(pattern, place)
            last = 1
            sizes[-1] += 1
        if sizes[-1] > MAX_EXPANDED:
            return sizes[-1]
        place += step
    return sum(sizes)


def _atom_length(pattern: str, place: int) -> int:
    if pattern[place] == "\\":
        return 2
    if pattern[place] != "[":
        return 1
    first = place + (2 if pattern.startswith("[^", place) else 1)  # a bracket that stands first closes nothing
    end = first
    while end < len(pattern) and (pattern[end] != "]" or end == first):
        end += 2 if pattern[end] == "\\" else 1
    return end - place + 1
