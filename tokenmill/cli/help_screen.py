"""`--help` on one screen: what a command does and its common flags. `--help-all` lists all flags.

A flag is one line: its name, its default, the first sentence of its help. The common flags are a table here; a command
that is not in the table has few enough flags to list them all.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from cyclopts import App

SAMPLING = ("--temperature", "--max-tokens", "--seed", "--stop")
ENGINE = ("--max-context", "--quantization", "--device", "--threads")
ARRIVAL = ("--concurrency", "--rate", "--num-requests", "--duration-s", "--trace")
WORK = ("--workload", "--input-len", "--output-len")
COMMON_FLAGS: dict[str, tuple[str, ...]] = {
    "run": ("--url", "--system", "--schema", "--raw", "--stats", *SAMPLING, *ENGINE),
    "chat": ("--url", "--system", *SAMPLING, "--context-shift", *ENGINE),
    "serve": ("--host", "--port", "--api-key", "--served-name", "--alias", "--adapter", "--max-running", *ENGINE,
              "--log-level"),
    "batch": ("--prompt-field", "--template", "--system", "--schema", "--raw", "--retry-failed", *SAMPLING, "--model",
              *ENGINE),
    "plan": ("--device", "--tp", "--input-len", "--output-len", "--slo", "--weight-dtype", "--kv-dtype", "--compare",
             "--fit", "--which", "--devices", "--html", "--json", "--verbose"),
    "bench serve": ("--url", "--model", *ARRIVAL, *WORK, "--goodput", "--output", "--html", "--json"),
    "bench search": ("--url", "--model", "--slo", "--over", "--start", "--most", *WORK, "--resume", "--html", "--json"),
    "bench offline": (*WORK[1:], "--concurrency", "--rounds", *ENGINE, "--json"),
    "bench latency": ("--batch-sizes", "--input-lens", "--output-len", "--rounds", *ENGINE, "--json"),
    "bench startup": ("--rounds", *ENGINE, "--json"),
}  # fmt: skip
MIN_WIDTH, MAX_WIDTH = 60, 110


def requested_help(verb: str, arguments: list[str], subcommands: Collection[str] = ()) -> tuple[str, bool] | None:
    """Return the command whose help is requested, and whether with all flags; None if none is."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if not {"--help", "-h", "--help-all"} & set(before):
        return None
    command = f"{verb} {before[0]}" if before[0] in subcommands else verb
    return command, "--help-all" in before


def short_help(command: str, app: App, epilogue: str) -> str | None:
    """Return the help screen of a command; None for a command that is not in the table."""
    common = COMMON_FLAGS.get(command)
    if common is None:
        return None
    width = min(max(shutil.get_terminal_size((80, 24)).columns, MIN_WIDTH), MAX_WIDTH)
    arguments = [one for one in app.assemble_argument_collection(parse_docstring=True) if one.parse and one.show]
    positional = [one for one in arguments if not one.names[0].startswith("-")]
    flags = {one.names[0]: one for one in arguments if one.names[0].startswith("-")}
    shown = [(flag, f"{flag} {_value(flags[flag])}".rstrip()) for flag in common]
    column = max(len(name) for _, name in shown) + 4
    lines = [
        f"Usage: tokenmill {command} {' '.join(f'[{one.names[0]}]' for one in positional)} [FLAGS]".replace("  ", " ")
    ]
    lines += ["", *textwrap.wrap(_sentence(app.help or ""), width), ""]
    lines += [_line(one.names[0], _help(one), column, width) for one in positional]
    lines += [_line(name, _help(flags[flag]), column, width) for flag, name in shown]
    rest = len(flags) - len(common)
    return "\n".join([*lines, "", f"--help-all lists {rest} more flags.{epilogue}"])


def _line(name: str, text: str, column: int, width: int) -> str:
    return f"  {name:{column - 2}}{_cut(text, width - column)}"


def _cut(text: str, width: int) -> str:
    """Shorten a sentence to a width, if possible at the end of a clause."""
    if len(text) <= width:
        return text
    for mark in ("; ", ": "):
        end = text.rfind(mark, 0, width)
        if end > 12 and text[:end].count("`") % 2 == 0:
            return text[:end]
    return textwrap.shorten(text, width, placeholder=" …")


def _help(argument: Any) -> str:
    default = argument.field_info.default
    is_shown = default not in (None, "", (), False, True, argument.field_info.empty)
    return (f"[{_shown(default)}] " if is_shown else "") + _sentence(argument.parameter.help or "").rstrip(".")


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    whole = " ".join(text.split("\n\n")[0].split())
    end = whole.find(". ")
    return whole if end < 0 else whole[: end + 1]


def _value(argument: Any) -> str:
    """Return the placeholder of a flag's value: nothing for a switch, its choices if they are short, otherwise its
    type."""
    hint = argument.hint
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    if bool in kinds:
        return ""
    words = [word for word in get_args(hint) if isinstance(word, str)]
    if words and sum(map(len, words)) <= 12:
        return "|".join(words)
    return "N" if int in kinds else "X" if float in kinds else "FILE" if Path in kinds else "TEXT"
