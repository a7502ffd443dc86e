"""The `--adapter` setting: NAME=PATH, or a path whose last part is the name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenmill.errors import InvalidConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


def named_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Return the path of each adapter by its name."""
    found: dict[str, Path] = {}
    for one in given:
        name, is_named, path = one.partition("=")
        if not is_named:
            name, path = Path(one).expanduser().resolve().name.removesuffix(".gguf"), one
        require_adapter_name(name)
        if name in found:
            raise InvalidConfig(f"two adapters have the name {name!r}", param="adapter")
        found[name] = Path(path).expanduser()
    return found


def adapter_settings(adapters: Mapping[str, str | Path]) -> tuple[str, ...]:
    """Return the `adapter` setting for a mapping of names to paths."""
    return tuple(f"{name}={path}" for name, path in adapters.items())


def require_adapter_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"{name[:80]!r} is not a valid adapter name",
            param="adapter",
            hint="use letters, digits, dots, dashes, underscores and slashes",
        )
