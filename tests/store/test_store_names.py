"""What MODEL means, and that no name leads out of the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenmill.errors import InvalidConfig, InvalidRequest, UnknownModel
from tokenmill.store import (
    CatalogEntry,
    HubModel,
    LocalModel,
    Store,
    is_model_name,
    load_catalog,
    parse_name,
    resolve_model,
)
from tokenmill.store.layout import checked_file_name, directory_name


def test_short_names_resolve_with_and_without_tag() -> None:
    entry = parse_name("smollm2")
    assert isinstance(entry, CatalogEntry) and entry.name == "smollm2:135m"
    assert parse_name("QWEN2.5:1.5b").name == "qwen2.5:1.5b"  # type: ignore[union-attr]
    assert parse_name("mistral:instruct").name == "mistral:7b"  # type: ignore[union-attr]


def test_hub_ids() -> None:
    assert parse_name("Qwen/Qwen3-0.6B") == HubModel("Qwen/Qwen3-0.6B")
    assert parse_name("a/b:Q4_K_M") == HubModel("a/b", "Q4_K_M")
    assert parse_name("a/b:sub/x.gguf") == HubModel("a/b", "sub/x.gguf")
    for host in ("hf.co/", "huggingface.co/", "https://huggingface.co/"):
        assert parse_name(f"{host}a/b:Q4_K_M") == HubModel("a/b", "Q4_K_M")


def test_paths_win_over_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_name("owner/name") == LocalModel(Path("owner/name"))
    assert parse_name("m.gguf") == LocalModel(Path("m.gguf"))


def test_paths_that_lead_nowhere_are_no_accident(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no such file"):
        parse_name("~nobody-is-called-so/model.gguf")
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    with pytest.raises(InvalidConfig, match="not UTF-8"):
        resolve_model(str(folder))


def test_a_store_that_can_t_be_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", "~nobody-is-called-so")
    with pytest.raises(InvalidConfig, match="no home"):
        Store()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a disk that is mounted for reading
    with pytest.raises(InvalidConfig, match="can't be written"):
        Store(tmp_path).prepare()


def test_a_folder_does_not_hide_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_name("qwen3"), CatalogEntry)
    assert isinstance(parse_name("./qwen3"), LocalModel)


def test_unknown_names_suggest_the_near_miss() -> None:
    with pytest.raises(UnknownModel, match=r"did you mean smollm2:135m"):
        parse_name("smolm2:135m")
    with pytest.raises(UnknownModel, match="no such file"):
        parse_name("./nothing.gguf")


@pytest.mark.parametrize("text", ["What is the capital of France?", "hi", "", "hello world/there", "a/b/c/d:e", "\0"])
def test_prompts_are_not_model_names(text: str) -> None:
    assert not is_model_name(text)


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "..", ".", "", "/etc/passwd", "a/b:../../x", "a/b:..", "x" * 300, "-x/y", "a\0b"]
)
def test_names_stay_inside(name: str, tmp_path: Path) -> None:
    assert not isinstance(_parsed(name), HubModel | CatalogEntry)
    if name not in ("a\0b",):
        with pytest.raises(UnknownModel):
            directory_name(name)


def _parsed(name: str) -> object:
    try:
        return parse_name(name)
    except UnknownModel:
        return None


def test_every_directory_name_is_one_component(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in [*load_catalog(), "a/b", "a/b:c/d.gguf", "a\0b"]:
        assert store.model_dir(name).parent == tmp_path / "models"
        assert "\0" not in str(store.model_dir(name))


@pytest.mark.parametrize("digest", ["", "../" * 20, "A" * 64, "a" * 63, "a" * 63 + "/", "b179\n" + "a" * 59])
def test_digests_stay_inside(digest: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        Store(tmp_path).blob_path(digest)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "manifest.json", "", "x" * 300])
def test_file_names_stay_inside(name: str) -> None:
    with pytest.raises(InvalidRequest):
        checked_file_name(name)


def test_the_catalog_is_well_formed() -> None:
    catalog = load_catalog()
    assert len(catalog) >= 12
    for entry in catalog.values():
        assert ":" in entry.name and entry.repo.count("/") == 1 and entry.file.endswith(".gguf") and entry.license
        assert not entry.wheel or (entry.sha256 and entry.size_bytes)
    names = [name for entry in catalog.values() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names)) and all(":" in name and name == name.lower() for name in names)


def test_models_of_the_file_system_are_named_without_their_folders(tmp_path: Path) -> None:
    """Clients, logs and metrics see the name, and need not know where files lie."""
    folder, file = tmp_path / "private" / "Tiny-1B", tmp_path / "private" / "tiny-1b.Q4_K_M.gguf"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    file.write_bytes(b"GGUF")
    assert [resolve_model(str(path)).name for path in (folder, file)] == ["Tiny-1B", "tiny-1b.Q4_K_M"]
