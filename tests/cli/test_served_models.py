"""Models of a server from the command line and from `[models.NAME]` tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.dispatch import file_settings
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.config.durations import seconds_of
from tokenmill.config.served_models import ServedModelConfig, served_models
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig

BASE = EngineConfig(ModelConfig(max_context=4096))


def models_of(names: list[str], tables: dict[str, Any] | None = None, **server: Any) -> list[ServedModelConfig]:
    return served_models(BASE, names, tables or {}, ServerConfig(**server))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("90", 90.0), ("-1", -1.0), ("1.5s", 1.5), ("250ms", 0.25), (7, 7.0), ("0", 0.0)]
    + [(text, None) for text in ("soon", "", "5 m", "m", "1d", "--1", None, True, [])],
)
def test_durations(text: object, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_one_model_stays_unless_it_is_told_otherwise() -> None:
    (one,) = models_of([])
    assert one.engine.model.model == ModelConfig().model and one.is_pinned and one.keep_alive_s is None
    (one,) = models_of(["a.gguf"], model_keep_alive="5m", alias=("gpt-4o", "claude-*"))
    assert (one.engine.model.model, one.is_pinned, one.keep_alive_s) == ("a.gguf", False, 300.0)
    assert one.aliases == ("gpt-4o", "claude-*") and one.engine.model.max_context == 4096
    (one,) = models_of([], {"helper": {"source": "a.gguf", "keep_alive": -1}})
    assert (one.name, one.is_pinned, one.keep_alive_s) == ("helper", False, None)


def test_tables_come_after_names_and_on_top_of_flags() -> None:
    tables = {
        "coder": {"source": "q.gguf", "aliases": ["gpt-*"], "keep_alive": "10m", "max_context": 512, "threads": 1},
        "a.gguf": {"pinned": True},
    }
    first, second, third = models_of(["a.gguf", "b.gguf"], tables, alias=("x",))
    assert (first.engine.model.model, first.name, first.is_pinned, first.aliases) == ("a.gguf", "a.gguf", True, ("x",))
    assert (second.engine.model.model, second.name, second.is_pinned) == ("b.gguf", None, False)
    assert third.engine.model.max_context == 512 and third.engine.ops.threads == 1
    assert (third.name, third.engine.model.served_name, third.aliases) == ("coder", "coder", ("gpt-*",))
    assert third.keep_alive_s == 600 and not third.is_pinned


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"sorce": "x"}, r"\[models.m\] there is no setting 'sorce'"),
        ({"pinned": "yes"}, "pinned must be true or false"),
        ({"aliases": "x"}, "aliases must be a list"),
        ({"keep_alive": "soon"}, "must be a duration"),
        ({"source": 7}, "source must be a model"),
        ({"served_name": "x"}, "has no key 'served_name'"),
        ({"max_context": "many"}, "max_context must be an integer"),
        ("x", "must be a table"),
    ],
)
def test_wrong_tables_are_refused_by_name(table: Any, text: str) -> None:
    with pytest.raises(InvalidConfig, match=text):
        models_of([], {"m": table})


def test_a_served_name_is_for_one_model() -> None:
    named = EngineConfig(ModelConfig(served_name="x"))
    with pytest.raises(InvalidConfig, match="served_name requires a server with one model"):
        served_models(named, ["a", "b"], {}, ServerConfig())


@pytest.mark.parametrize("text", ["[models]\nx = 1\n", "models = 3\n", "[models.m]\nsource = 2026-11-16\n"])
def test_a_settings_file_with_wrong_models(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match="models"):
        file_settings(file)
