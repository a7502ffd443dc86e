"""Settings from a TOML file and from the environment, checked by name before any flag is parsed.

    flags  >  environment  >  file  >  defaults

    [model]                          TOKENMILL_MAX_CONTEXT=4096      --max-context 4096
    max_context = 4096

A section is a config dataclass, a key is one of its fields. Values are converted by the same code as flags. One file
serves all verbs: a verb takes the keys it has flags for. A name that is nobody's field is refused, with the nearest.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from tokenmill.cli.flags import flag_name
from tokenmill.config import CacheConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.config.sampling import SamplingConfig
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "ops": OpsConfig,
    "sampling": SamplingConfig,
    "server": ServerConfig,
}
PREFIX = "TOKENMILL_"
MAX_FILE_BYTES = 1 << 20


def file_settings(path: Path) -> dict[str, Any]:
    """Flag name → value from a TOML file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidConfig(f"{path} is too large for a settings file")
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InvalidConfig(f"{path} can't be read: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InvalidConfig(f"{path} is not valid TOML: {problem}") from problem
    found: dict[str, Any] = {}
    for section, table in tables.items():
        found |= _section(path, section, table)
    return found


def environment_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Flag name → value from TOKENMILL_… variables; several values are separated by commas, none is empty."""
    known = {_variable(flag_name(section, name)): (section, name) for section in SECTIONS for name in _names(section)}
    found: dict[str, Any] = {}
    for variable, value in environment.items():
        if variable in known:
            section, name = known[variable]
            values = [part for part in value.split(",") if part] if name in _several(section) else value
            found |= {flag_name(section, name): values} if values != [] else {}
        elif variable.startswith(PREFIX):
            _refuse_near_miss(variable, list(known))
    return found


def is_setting(flag: str) -> bool:
    """Return whether some verb has this flag, given without its dashes."""
    return any(flag == flag_name(section, name) for section in SECTIONS for name in _names(section))


def _section(path: Path, section: str, table: Any) -> dict[str, Any]:
    if section not in SECTIONS:
        raise InvalidConfig(f"{path}: there is no section [{section}]{_did_you_mean(section, list(SECTIONS))}")
    if not isinstance(table, dict):
        raise InvalidConfig(f"{path}: {section} must be a section: write [{section}] and its keys below")
    names = _names(section)
    for key, value in table.items():
        if key not in names:
            raise InvalidConfig(f"{path}: [{section}] has no key {key!r}{_did_you_mean(key, names)}", param=key)
        if isinstance(value, dict) or (isinstance(value, list) and key not in _several(section)):
            raise InvalidConfig(f"{path}: [{section}] {key} takes one value", param=key)
    return {flag_name(section, key): value for key, value in table.items()}


def _refuse_near_miss(variable: str, known: list[str]) -> None:
    """Other programs may own TOKENMILL_ variables too; one that nearly names a setting is a mistake."""
    near = difflib.get_close_matches(variable, known, n=1, cutoff=0.9)
    if near:
        raise InvalidConfig(f"the environment variable {variable} is no setting; did you mean {near[0]}?")


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"


def _names(section: str) -> list[str]:
    return [field.name for field in fields(SECTIONS[section])]


def _several(section: str) -> set[str]:
    """Fields that take several values."""
    hints = get_type_hints(SECTIONS[section])
    return {name for name, hint in hints.items() if get_origin(hint) in (tuple, list)}


def _variable(flag: str) -> str:
    return PREFIX + flag.replace("-", "_").upper()
