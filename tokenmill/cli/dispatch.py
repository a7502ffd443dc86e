"""From a verb and its arguments to an exit code: flags are parsed by cyclopts, what they get wrong becomes one line."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError
from cyclopts.config import Dict

from tokenmill.cli.amounts import whole_numbers_only
from tokenmill.cli.exit_codes import fail
from tokenmill.cli.settings import environment_settings, file_settings, is_setting
from tokenmill.errors import InvalidConfig, TokenmillError

CONFIGURED = ("run", "chat", "serve")
EVERYWHERE = "Every flag can also be set in a file (--config FILE.toml) or in the environment (TOKENMILL_PORT=8001).\n"


def dispatch(verb: str, module: str, arguments: list[str]) -> int:
    """Run a verb; wrong usage, and what it refuses or fails at by name, is one line on stderr and an exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    try:
        arguments, config_file = take_config_file(arguments)
        app = build_app(verb, module, config_file)
        return int(app([verb, *arguments]) or 0)
    except UnusedCliTokensError as problem:
        return fail(_left_over(verb, problem.unused_tokens or []), 2)
    except UnknownOptionError as problem:
        return fail(_not_here(verb, problem), 2)
    except CycloptsError as problem:
        return fail(str(problem), 2)
    except TokenmillError as problem:
        return fail(str(problem), problem.exit_code)


def take_config_file(arguments: list[str]) -> tuple[list[str], Path | None]:
    """`--config FILE` works with every verb, so it is taken out before the verb's own flags are looked at."""
    chosen, rest = os.environ.get("TOKENMILL_CONFIG"), []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            rest += [argument, *remaining]
        elif argument == "--config":
            chosen = next(remaining, None)
            if chosen is None:
                raise InvalidConfig("--config needs the path of a TOML file")
        elif argument.startswith("--config="):
            chosen = argument.removeprefix("--config=")
        else:
            rest.append(argument)
    return rest, Path(chosen).expanduser() if chosen else None


def build_app(verb: str, module: str, config_file: Path | None) -> App:
    sources = [_source(environment_settings(os.environ), "the environment")]
    if config_file is not None:
        sources.append(_source(file_settings(config_file), str(config_file)))
    app = App(
        name="tokenmill",
        config=[*sources, whole_numbers_only],
        default_parameter=Parameter(show_default=worth_showing),
        help_epilogue=EVERYWHERE if verb in CONFIGURED else None,
        version_flags=[],
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.command(import_module(module).command, name=verb)
    return app


def worth_showing(default: object) -> str | None:
    """A default as `--help` shows it; that nothing happens unless asked for goes without saying."""
    if isinstance(default, bool):
        return "on" if default else None
    return None if default in (None, "", ()) else str(default)


def _source(values: dict[str, Any], name: str) -> Dict:
    return Dict(values, source=name, allow_unknown=True, use_commands_as_keys=False)


def _left_over(verb: str, words: list[str]) -> str:
    shown = " ".join(words)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    quotes = " (a prompt of several words goes in quotes)" if verb == "run" else ""
    return f"{verb} has no use for {shown!r}{quotes}; see tokenmill {verb} --help"


def _not_here(verb: str, problem: UnknownOptionError) -> str:
    """What is not an option, or one that would do nothing here."""
    given = (problem.token.keyword or problem.token.value).partition("=")[0]
    option = given.removeprefix("--no-").removeprefix("--")
    return f"--{option} does nothing in {verb}: it is for other verbs" if is_setting(option) else str(problem)
