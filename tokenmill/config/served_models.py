"""The models of one server: those on the command line, and the `[models.NAME]` tables of a settings file.

    [models.coder]
    source = "qwen-coder.gguf"                    # as on the command line; by default the table's name
    aliases = ["gpt-4o-mini", "claude-sonnet-*"]  # other names, with wildcards
    keep_alive = "10m"                            # how long it stays in memory while idle
    pinned = true                                 # never unloaded to make room for other models
    max_context = 8192                            # any setting of [model], [cache], [scheduler] and [ops]

Flags and the file's other sections apply to all models; the settings of a model's table override them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.config.by_name import engine_config
from tokenmill.config.durations import keep_alive_of, seconds_of
from tokenmill.config.engine import EngineConfig, ModelConfig
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig

MAX_ALIASES = 64
MAX_NAME = 200


@dataclass(frozen=True)
class ServedModelConfig:
    """One model of a server."""

    engine: EngineConfig
    name: str | None = None  # name for clients; None: known once its files are read
    aliases: tuple[str, ...] = ()
    keep_alive_s: float | None = None  # time in memory while idle; None: until memory is needed
    is_pinned: bool = False


def served_models(
    base: EngineConfig, names: Sequence[str], tables: Mapping[str, Any], server: ServerConfig
) -> list[ServedModelConfig]:
    """Return all models of a server: those on the command line, then those of tables. Without either: the model of
    `base`."""
    is_named_elsewhere = base.model.model != ModelConfig().model  # --model
    named = list(names) or ([base.model.model] if is_named_elsewhere or not tables else [])
    models = [
        _from_table(base, name, tables[name], server) if name in tables else _named(base, name, server)
        for name in named
    ]
    models += [_from_table(base, name, table, server) for name, table in tables.items() if name not in named]
    if len(models) > 1 and base.model.served_name is not None:
        raise InvalidConfig(
            "served_name requires a server with one model", param="served_name", hint="use [models.NAME]"
        )
    first = replace(models[0], aliases=(*models[0].aliases, *server.alias))
    if len(models) == 1 and "keep_alive" not in tables.get(named[0] if named else next(iter(tables)), {}):
        first = replace(first, is_pinned=first.is_pinned or server.model_keep_alive is None)
    return [first, *models[1:]]


def _named(base: EngineConfig, name: str, server: ServerConfig) -> ServedModelConfig:
    return ServedModelConfig(engine_config(base, {"model": name}), keep_alive_s=_keep_alive(server.model_keep_alive))


def _from_table(base: EngineConfig, name: str, table: Any, server: ServerConfig) -> ServedModelConfig:
    where = f"[models.{name}]"
    if not isinstance(table, dict):
        raise InvalidConfig(f"models.{name} must be a table: write {where} and its keys below", param="models")
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidConfig(f"{name[:60]!r} is not a valid model name", param="models")
    settings = dict(table)
    source, pinned = settings.pop("source", name), settings.pop("pinned", False)
    aliases, keep_alive = settings.pop("aliases", []), settings.pop("keep_alive", server.model_keep_alive)
    if not isinstance(source, str) or not source:
        raise InvalidConfig(f"{where} source must be a model, got {source!r}", param="source")
    if not isinstance(pinned, bool):
        raise InvalidConfig(f"{where} pinned must be true or false, got {pinned!r}", param="pinned")
    for own in ("model", "served_name"):
        if own in settings:
            raise InvalidConfig(f"{where} has no key {own!r}: the table's name is the model's name", param=own)
    try:
        engine = engine_config(base, {**settings, "model": source, "served_name": name})
    except InvalidConfig as problem:
        raise InvalidConfig(f"{where} {problem.message}", param=problem.param, hint=problem.hint) from None
    return ServedModelConfig(engine, name, _aliases(where, aliases), _keep_alive(keep_alive, where), pinned)


def _aliases(where: str, given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, list) and len(given) <= MAX_ALIASES
    if not is_list or not all(isinstance(one, str) and 0 < len(one) <= MAX_NAME for one in given):
        raise InvalidConfig(f"{where} aliases must be a list of at most {MAX_ALIASES} names", param="aliases")
    return tuple(given)


def _keep_alive(given: Any, where: str = "model_keep_alive") -> float | None:
    """Return the seconds of a keep-alive; None: until memory is needed."""
    if given is None:
        return None
    seconds = seconds_of(given)
    if seconds is None:
        raise InvalidConfig(f"{where} must be a duration such as 10m, got {given!r}", param="keep_alive")
    return keep_alive_of(seconds)
