"""Execution of a command: collect settings, parse flags, print errors as one line, return the exit code.

    flags  >  environment  >  file  >  defaults

    [model]                          TOKENMILL_MAX_CONTEXT=4096      --max-context 4096
    max_context = 4096

A section of the TOML file is a config dataclass, a key is one of its fields. Values are converted by the same code as
flags. One file can serve all commands: each reads the keys that it has flags for. Unknown names are refused with a
suggestion.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError
from cyclopts.config import Dict

from tokenmill.cli.exit_codes import fail
from tokenmill.cli.flags import flag_name, whole_numbers_only
from tokenmill.cli.help_screen import requested_help, short_help
from tokenmill.cli.verbs import VERBS
from tokenmill.config import CacheConfig, ModelConfig, OpsConfig, ParallelConfig, SchedulerConfig
from tokenmill.config.cluster import read_tables, settings_tables
from tokenmill.config.other_names import ON, OTHER_NAMES, SHORT, OtherName, by_other_name, our_value
from tokenmill.config.sampling import SamplingConfig
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig, TokenmillError

# Module and function of a command, if not `command` in the module of the command's name.
ENTRY_POINTS = {
    "pull": ("store_verbs", "pull_models"),
    "list": ("store_verbs", "list_models"),
    "rm": ("store_verbs", "remove_models"),
    "ps": ("server_verbs", "list_running"),
    "stop": ("server_verbs", "stop_models"),
    "scale": ("fleet_verbs", "scale_replicas"),
    "drain": ("fleet_verbs", "drain_replica"),
    "roll": ("fleet_verbs", "roll_replicas"),
}
CONFIGURED = ("run", "chat", "serve", "batch", "up")
SETTINGS_EPILOGUE = (
    "Every flag can also be set in a file (--config FILE.toml) or in the environment (TOKENMILL_PORT=8001).\n"
)


def dispatch(verb: str, arguments: list[str]) -> int:
    """Run a command. Wrong usage and known failures become one line on stderr and an exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # replace characters that the terminal's encoding lacks
    try:
        arguments, config_file = take_config_file(arguments)
        cluster_file = Path(arguments[0]) if verb == "up" and arguments and not arguments[0].startswith("-") else None
        app = build_app(verb, config_file, uses_server=_uses_server(arguments), cluster_file=cluster_file)
        if (request := requested_help(verb, arguments, subcommands_of(app, verb))) is not None:
            return _show_help(app, *request)
        arguments = with_our_names(arguments, flags_of(app, verb))
        return int(app([verb, *arguments]) or 0)
    except UnusedCliTokensError as problem:
        return fail(_unused_arguments(verb, problem.unused_tokens or []), 2)
    except UnknownOptionError as problem:
        return fail(_unknown_option(verb, problem, flags_of(app, verb)), 2)
    except CycloptsError as problem:
        return fail(str(problem), 2)
    except TokenmillError as problem:
        return fail(str(problem), problem.exit_code)


def _show_help(app: App, command: str, is_all: bool) -> int:
    """Print the help screen with the common flags, or with all flags."""
    words = command.split()
    epilogue = "\nFiles (--config FILE.toml) and variables (TOKENMILL_SEED=7) can set them too."
    one = app[words[0]]
    one = one[words[1]] if len(words) > 1 else one
    screen = None if is_all else short_help(command, one, epilogue if words[0] in CONFIGURED else "")
    if screen is None:
        return int(app([*words, "--help"]) or 0)
    print(screen)
    return 0


def take_config_file(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Remove `--config FILE` from the arguments and return the file; it works with every command."""
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


def build_app(
    verb: str, config_file: Path | None, *, uses_server: bool = False, cluster_file: Path | None = None
) -> App:
    found = [(environment_settings(os.environ), "the environment")]
    if config_file is not None:
        found.append((file_settings(config_file), str(config_file)))
    if cluster_file is not None:
        found.append((cluster_settings(cluster_file), str(cluster_file)))
    sources = [_source(_without_engine(values) if uses_server else values, name) for values, name in found]
    app = App(
        name="tokenmill",
        config=[*sources, whole_numbers_only],
        default_parameter=Parameter(show_default=worth_showing),
        help_epilogue=SETTINGS_EPILOGUE if verb in CONFIGURED else None,
        version_flags=[],
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    add_verb(app, verb)
    return app


def add_verb(app: App, verb: str) -> None:
    module, function = ENTRY_POINTS.get(verb, (verb, "command"))
    app.command(getattr(import_module(f"tokenmill.cli.{module}"), function), name=verb)


def whole_app() -> App:
    """Return a parser of all commands, for shell completion."""
    app = App(name="tokenmill", version_flags=["--version"])
    for verb in VERBS:
        add_verb(app, verb)
    return app


def _uses_server(arguments: Sequence[str]) -> bool:
    return any(argument == "--url" or argument.startswith("--url=") for argument in arguments)


def _without_engine(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those of the engine, which do not apply to a server that runs elsewhere."""
    of_engine = {flag_name(section, name) for section in ENGINE_SECTIONS for name in _names(section)}
    return {flag: value for flag, value in values.items() if flag not in of_engine}


def worth_showing(default: object) -> str | None:
    """Return a default value as `--help` shows it; None for values that it does not show, such as a switch that is
    off."""
    if isinstance(default, bool):
        return "on" if default else None
    return None if default in (None, "", ()) else str(default)


def _source(values: dict[str, Any], name: str) -> Dict:
    return Dict(values, source=name, allow_unknown=True, use_commands_as_keys=False)


def _unused_arguments(verb: str, words: list[str]) -> str:
    shown = " ".join(words)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    quotes = " (quote a prompt of several words)" if verb == "run" else ""
    return f"unexpected argument of {verb}: {shown!r}{quotes}; see tokenmill {verb} --help"


def subcommands_of(app: App, verb: str) -> list[str]:
    return [name for name in app[verb] if not name.startswith("-")]


def flags_of(app: App, verb: str) -> list[str]:
    """Return the options of a command, with their dashes."""
    command = app[verb]
    if command.default_command is None:
        return []  # its subcommands have them
    return [name for argument in command.assemble_argument_collection() for name in argument.names]


def with_our_names(arguments: list[str], known: Sequence[str]) -> list[str]:
    """Replace options of other engines by ours, each with a note on stderr."""
    translated: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        flag, equals, value = argument.partition("=")
        name = SHORT.get(flag) or flag.removeprefix("--").replace("-", "_")
        if argument == "--":
            return [*translated, argument, *rest]
        if not flag.startswith("-") or flag in known:
            translated.append(argument)
            if rest and not equals and flag.startswith("-"):
                translated += _translated_value(flag, name, rest)
            continue
        is_off = name.startswith("no_") and name.removeprefix("no_") in OTHER_NAMES
        name = name.removeprefix("no_") if is_off else name
        if name not in OTHER_NAMES:
            translated.append(f"--{name}{equals}{value}" if flag in SHORT else argument)
            continue
        if OTHER_NAMES[name].is_switch:
            has_value = not equals and bool(rest) and rest[0].lower() in ("on", "off", "auto", "true", "false")
            value = "false" if is_off else rest.popleft() if has_value else value or "true"
        elif not equals:
            if not rest:
                raise InvalidConfig(f"{flag} needs a value")
            value = rest.popleft()
        translated += _replaced(flag, by_other_name(name, value), OTHER_NAMES[name])
    return translated


def _translated_value(flag: str, name: str, rest: deque[str]) -> list[str]:
    """Return our value of an option if the next argument is another engine's value for it, otherwise nothing."""
    ours = our_value(name, rest[0])
    if ours == rest[0]:
        return []
    note(f"{flag} {rest.popleft()} means {flag} {ours} here")
    return [ours]


def _replaced(flag: str, found: tuple[str, Any] | None, other: OtherName) -> list[str]:
    if found is None:
        note(f"{flag} has no effect here: {other.instead or 'it is the default'}")
        return []
    name, value = found
    option = f"--{name.replace('_', '-')}"
    if other.is_switch:
        option = option if str(value).lower() in ON else option.replace("--", "--no-", 1)
    note(f"{flag} means {option} here")
    return [option] if other.is_switch else [option, str(value)]


def note(text: str) -> None:
    print(f"tokenmill: {text}", file=sys.stderr)


def _unknown_option(verb: str, problem: UnknownOptionError, known: Sequence[str]) -> str:
    """Return the error for an unknown option, or for one of other commands. Options that open a server to others are
    never suggested."""
    given = (problem.token.keyword or problem.token.value).partition("=")[0]
    option = given.removeprefix("--no-").removeprefix("--")
    if is_setting(option):
        return f"--{option} does not apply to {verb}: it is an option of other commands"
    suggestible = [flag for flag in known if flag.removeprefix("--no-").removeprefix("--") not in OPENING]
    elsewhere = {f"--{name.replace('_', '-')}": other for name, other in OTHER_NAMES.items()}
    near = difflib.get_close_matches(given, [*suggestible, *elsewhere], n=1, cutoff=0.75)
    if not near:
        return f"{verb} has no option {given}; see tokenmill {verb} --help"
    whose = f" ({elsewhere[near[0]].whose})" if near[0] in elsewhere else ""
    return f"{verb} has no option {given}; did you mean {near[0]}{whose}?"


OPENING = ("allow-open", "any-model-name", "api-key", "api-key-file", "cors-origin", "host", "manage-models",
           "public-metrics")  # fmt: skip
SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "ops": OpsConfig,
    "parallel": ParallelConfig,
    "sampling": SamplingConfig,
    "server": ServerConfig,
}
ENGINE_SECTIONS = ("model", "cache", "scheduler", "ops", "parallel")
PREFIX = "TOKENMILL_"
OTHER_VARIABLES = (
    "TOKENMILL_HOME", "TOKENMILL_CONFIG", "TOKENMILL_DEBUG", "TOKENMILL_CLUSTER_KEY", "TOKENMILL_RANK_KEY",
    "TOKENMILL_UNPROVEN_KERNELS",
)  # fmt: skip
TEST_PREFIXES = ("TOKENMILL_TEST_", "TOKENMILL_CLIENTS")  # variables of the test suite


# ── settings from a file and the environment ─────────────────────────────────────────────────────────


def file_settings(path: Path) -> dict[str, Any]:
    """Return flag name → value from a TOML file."""
    return settings_of(path, read_tables(path))


def cluster_settings(path: Path) -> dict[str, Any]:
    """Return flag name → value from a cluster's file, whose other tables are left out."""
    return settings_of(path, settings_tables(read_tables(path)))


def settings_of(path: Path, tables: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (models := tables.pop("models", None)) is not None:
        found["model-tables"] = _model_tables(path, models)
    for section, table in tables.items():
        found |= _section(path, section, table)
    return found


def _model_tables(path: Path, tables: Any) -> str:
    """Return the `[models.NAME]` tables as JSON for `serve`; they define models and have no flags."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidConfig(f"{path}: models must be tables: write [models.NAME] and its keys below")
    try:
        return json.dumps(tables)
    except TypeError as problem:  # a date
        raise InvalidConfig(f"{path}: [models] {problem}") from None


def environment_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return flag name → value from TOKENMILL_… variables; lists are separated by commas."""
    known = {_variable(flag_name(section, name)): (section, name) for section in SECTIONS for name in _names(section)}
    found: dict[str, Any] = {}
    for variable, value in environment.items():
        if variable in known:
            section, name = known[variable]
            values = [part for part in value.split(",") if part] if name in _several(section) else value
            found |= {flag_name(section, name): values} if values != [] else {}
        elif variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and not variable.startswith(TEST_PREFIXES):
            _refuse_unknown(variable, list(known))
    return found


def is_setting(flag: str) -> bool:
    """Return whether any command has this flag, given without its dashes."""
    return any(flag == flag_name(section, name) for section in SECTIONS for name in _names(section))


def _section(path: Path, section: str, table: Any) -> dict[str, Any]:
    if section not in SECTIONS:
        raise InvalidConfig(f"{path}: there is no section [{section}]{_did_you_mean(section, [*SECTIONS, 'models'])}")
    if not isinstance(table, dict):
        raise InvalidConfig(f"{path}: {section} must be a section: write [{section}] and its keys below")
    names = _names(section)
    for key, value in table.items():
        if key not in names:
            raise InvalidConfig(f"{path}: [{section}] has no key {key!r}{_did_you_mean(key, names)}", param=key)
        if isinstance(value, dict) or (isinstance(value, list) and key not in _several(section)):
            raise InvalidConfig(f"{path}: [{section}] {key} takes one value", param=key)
    return {flag_name(section, key): value for key, value in table.items()}


def _refuse_unknown(variable: str, known: list[str]) -> None:
    """Refuse a variable that is not a setting; otherwise a misspelt one would be ignored silently."""
    name = variable.removeprefix(PREFIX).lower()
    ours = OTHER_NAMES[name].ours if name in OTHER_NAMES else ""
    near = [_variable(ours)] if ours else difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]}?" if near else "; unset it"
    raise InvalidConfig(f"the environment variable {variable} is not a setting{hint}")


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"


def _names(section: str) -> list[str]:
    return [field.name for field in fields(SECTIONS[section])]


def _several(section: str) -> set[str]:
    """Return the names of fields that take several values."""
    hints = get_type_hints(SECTIONS[section])
    return {name for name, hint in hints.items() if get_origin(hint) in (tuple, list)}


def _variable(flag: str) -> str:
    return PREFIX + flag.replace("-", "_").upper()
