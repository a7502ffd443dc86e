"""Reasoning effort as a variable of a model's chat template.

Every family has its own variables: switches (`enable_thinking`), levels (`reasoning_effort`: low, medium, high; others
have max, or no_think), a number (`thinking_budget`). The template's source shows which of them it reads; rendering it
with each level shows which levels it accepts, because some templates raise an error for others. A requested level that
the template lacks is replaced by the nearest one it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.template import ChatTemplate
from tokenmill.types import Effort, Reasoning

LEVELS: tuple[Effort, ...] = tuple(level for level in get_args(Effort) if level != "none")
OFF_WORDS = ("none", "no_think", "minimal", "low")  # words of families for no thinking, or the least
COMMON_LEVELS = ("low", "medium", "high")  # the levels that models know whose template prints any word
SWITCHES = ("enable_thinking", "thinking")
LEVEL_VARIABLES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
MODES = {"thinking_mode": (("enabled", "thinking"), ("disabled", "chat"))}  # variable → words for on, words for off
BUDGETS = ("thinking_budget",)
KEEP_HISTORY = {  # variable → the value that makes a template include the reasoning of earlier turns
    "preserve_thinking": True,
    "keep_past_thinking": True,
    "keep_reasoning": True,
    "clear_thinking": False,
    "drop_thinking": False,
    "truncate_history_thinking": False,
}
_PROBE = "zzprobe"
_QUESTION = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class EffortVariables:
    """The reasoning variables of one template, and its word for each level."""

    switches: tuple[str, ...] = ()
    levels: Mapping[str, Mapping[Effort, str]] = field(default_factory=dict)  # by variable; "none" is off
    modes: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by variable: the words for on and off
    budgets: tuple[str, ...] = ()
    keeps: Mapping[str, bool] = field(default_factory=dict)

    def values(self, reasoning: Reasoning, budget: int | None) -> dict[str, Any]:
        """Return the template variables for these settings; a setting that is not given keeps the template's
        default."""
        values: dict[str, Any] = dict(self.keeps) if reasoning.keep_history else {}
        is_on = reasoning.is_on if reasoning.is_on is not None else _implied_is_on(reasoning)
        if is_on is None:
            return values
        values |= dict.fromkeys(self.switches, is_on)
        values |= {name: on if is_on else off for name, (on, off) in self.modes.items()}
        level = "none" if not is_on else None if reasoning.effort == "none" else reasoning.effort
        if level is not None:
            values |= {name: words[level] for name, words in self.levels.items() if level in words}
        if budget is not None or not is_on:
            values |= dict.fromkeys(self.budgets, budget if is_on else 0)
        return values


def _implied_is_on(reasoning: Reasoning) -> bool | None:
    """Return whether the effort and budget imply that thinking is on; None where neither is given."""
    if reasoning.effort is None and reasoning.budget is None:
        return None
    return reasoning.effort != "none"


def find_effort_variables(template: ChatTemplate) -> EffortVariables:
    free = template.variables
    words = {name: _level_words(template, name) for name in LEVEL_VARIABLES if name in free}
    modes = {name: _mode_words(template.source, *on_off) for name, on_off in MODES.items() if name in free}
    return EffortVariables(
        switches=tuple(name for name in SWITCHES if name in free),
        levels={name: by_level for name, by_level in words.items() if by_level},
        modes={name: pair for name, pair in modes.items() if pair is not None},
        budgets=tuple(name for name in BUDGETS if name in free),
        keeps={name: value for name, value in KEEP_HISTORY.items() if name in free},
    )


def _mode_words(source: str, on: Iterable[str], off: Iterable[str]) -> tuple[str, str] | None:
    def quoted(words: Iterable[str]) -> str | None:
        return next((word for word in words if f'"{word}"' in source or f"'{word}'" in source), None)

    found_on, found_off = quoted(on), quoted(off)
    return (found_on, found_off) if found_on and found_off else None


def _level_words(template: ChatTemplate, variable: str) -> dict[Effort, str]:
    """Return the template's word for each level of one variable."""
    switches = {name: True for name in SWITCHES if name in template.variables}
    default = _render(template, switches)
    texts = {word: _render(template, {**switches, variable: word}) for word in (*LEVELS, *OFF_WORDS, _PROBE)}
    prints_any_word = _PROBE in (texts[_PROBE] or "")
    known = [level for level in LEVELS if texts[level] is not None and (level in COMMON_LEVELS or not prints_any_word)]
    words: dict[Effort, str] = {level: _nearest(level, known) for level in LEVELS if known}
    is_strict = texts[_PROBE] is None  # then a word that it accepts has a meaning, even if it is the default
    off = [word for word in OFF_WORDS if texts[word] is not None and (is_strict or texts[word] != default)]
    off = [word for word in off if word in known or not prints_any_word]
    return {"none": off[0], **words} if off else words


def _nearest(level: Effort, known: list[Effort]) -> str:
    """Return the nearest known level; of two equally near, the higher."""
    index = LEVELS.index(level)
    return min(known, key=lambda one: (abs(LEVELS.index(one) - index), -LEVELS.index(one)))


def _render(template: ChatTemplate, variables: Mapping[str, Any]) -> str | None:
    try:
        return template.render(_QUESTION, extra=variables)
    except (InvalidRequest, ModelError):
        return None
