"""Read the `ModelSpec` of a path: a .gguf file, a directory with config.json, or a bare config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.arch.gguf_config import spec_from_gguf
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import DamagedFile, ModelError, UnsupportedModel

MAX_JSON_BYTES = 64 << 20


def read_spec(path: Path | str) -> ModelSpec:
    path = Path(path)
    if path.is_dir():
        return _read_directory(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.suffix == ".json":
        return _read_config(path)
    return spec_from_gguf(read_gguf_model(path))


def _read_directory(directory: Path) -> ModelSpec:
    config = directory / "config.json"
    if not config.is_file():
        return _read_lone_gguf(directory)
    generation = directory / "generation_config.json"
    return _read_config(config, read_json(generation) if generation.is_file() else None)


def _read_config(config: Path, generation: dict[str, Any] | None = None) -> ModelSpec:
    quantization = quantization_config(config)
    found = read_json(config)
    return spec_from_hf(
        {**found, "quantization_config": quantization} if quantization else found, generation=generation
    )


def quantization_config(config: Path) -> dict[str, Any]:
    """Return the quantization_config of a config.json, or of ModelOpt's hf_quant_config.json in the same directory;
    empty if the matrices are not quantised."""
    root = read_json(config)
    text = root.get("text_config")
    found = root.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    modelopt = config.with_name(config.name.removesuffix("config.json") + "hf_quant_config.json")
    if not found and modelopt.is_file():
        found = read_json(modelopt).get("quantization")
        if not isinstance(found, dict):
            raise UnsupportedModel(f'{modelopt} has no object "quantization"')
    if not isinstance(found, dict):
        return {}
    experts = root.get("expert_dtype")  # DeepSeek V4 has it outside the quantization_config
    return found if experts is None else {**found, "expert_dtype": experts}


def _read_lone_gguf(directory: Path) -> ModelSpec:
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1 or (files and "-00001-of-" in files[0].name):
        return spec_from_gguf(read_gguf_model(files[0]))
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{directory} contains several GGUF files: {names}", hint="name one of them")
    raise ModelError(f"{directory} has no config.json", hint="name a model directory or a .gguf file")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DamagedFile(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: contains a {type(value).__name__}, expected an object")
    return value
