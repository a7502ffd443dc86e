"""Descriptions of models for /api/tags, /api/show and /api/ps: names, sizes, architecture, capabilities.

All values come from the model itself: its spec, its files and, for a GGUF file, its metadata. `model_info` is never
null and always has the architecture, the context length and the embedding length, which clients read.
"""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.spec import Gqa
from tokenmill.config.durations import FOREVER_S
from tokenmill.engine.status import ModelInfo
from tokenmill.server.gate import EngineGate
from tokenmill.server.loader import ModelMemory
from tokenmill.server.model_admin import expires_in_s
from tokenmill.server.ollama.render import timestamp
from tokenmill.store.created import LATEST
from tokenmill.store.layout import Customization
from tokenmill.store.modelfile import as_modelfile

MAX_SHOWN_ITEMS = 5  # longer lists of a file's metadata are shown as empty
COLUMN_WIDTH = 30


def full_name(name: str) -> str:
    """Return a model's name with its tag, as Ollama lists models."""
    return name if ":" in name.rsplit("/", 1)[-1] else name + LATEST


def tag_card(info: ModelInfo) -> dict[str, Any]:
    """Describe a model for /api/tags."""
    return {
        "name": full_name(info.name),
        "model": full_name(info.name),
        "modified_at": timestamp(info.created * 1_000_000_000),
        "size": size_bytes(info),
        "digest": digest(info),
        "details": details(info),
    }


def running_card(gate: EngineGate, memory: ModelMemory | None, *, shows_usage: bool) -> dict[str, Any]:
    """Describe a loaded model for /api/ps: when it is unloaded, and its memory, if that was planned. `shows_usage`: if
    False, hide when the model is unloaded, which would reveal when it was last used."""
    info, left_s = gate.info, expires_in_s(gate) if shows_usage else None
    card = tag_card(info)
    del card["modified_at"]
    size = card["size"] = card["size"] if memory is None else memory.total_bytes
    return {
        **card,
        "expires_at": timestamp(time.time_ns() + int((FOREVER_S if left_s is None else left_s) * 1_000_000_000)),
        "size_vram": 0 if info.device.startswith("cpu") or not info.device else size,
        "context_length": info.max_context,
    }


def show_card(info: ModelInfo) -> dict[str, Any]:
    """Describe a model for /api/show."""
    custom = info.manifest.custom if info.manifest is not None and info.manifest.custom else Customization()
    parent = info.manifest.parent if info.manifest is not None else ""
    card = {
        "modelfile": as_modelfile(parent or info.name, custom),
        "parameters": parameters_text(custom),
        "template": info.chat_template,
        "details": details(info),
        "model_info": model_info(info),
        "capabilities": capabilities(info),
        "modified_at": timestamp(info.created * 1_000_000_000),
    }
    extra = {
        "license": custom.license,
        "system": custom.system,
        "messages": [{"role": role, "content": content} for role, content in custom.messages],
    }
    return {**card, **{name: value for name, value in extra.items() if value}}


def capabilities(info: ModelInfo) -> list[str]:
    optional = {"insert": info.can_fill_in, "tools": info.can_call_tools, "thinking": info.can_think}
    return ["completion", *(name for name, is_supported in optional.items() if is_supported)]


def parameters_text(custom: Customization) -> str:
    """Return the parameters as Ollama shows them: one per line, with aligned values."""
    lines = []
    for name, value in custom.parameters.items():
        for item in value if isinstance(value, list) else [value]:
            text = f'"{item}"' if isinstance(item, str) else str(item).lower() if isinstance(item, bool) else str(item)
            lines.append(f"{name:{COLUMN_WIDTH}} {text}")
    return "\n".join(lines)


def details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": info.manifest.parent if info.manifest is not None else "",
        "format": "gguf" if info.path is not None and info.path.suffix == ".gguf" else "safetensors",
        "family": info.spec.family,
        "families": [info.spec.family],
        "parameter_size": human_count(num_parameters(info.spec)),
        "quantization_level": quantization_level(info),
    }


def human_count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}" if letter == "B" else f"{number / size:.2f}{letter}"
    return str(number)


def quantization_level(info: ModelInfo) -> str:
    if info.path is None or info.path.suffix != ".gguf":
        return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(info.spec.dtype, info.spec.dtype)
    import gguf  # imports numpy, so only when needed

    kind = _metadata(info.path).get("general.file_type")
    names = {member.value: member.name.removeprefix("MOSTLY_").removeprefix("ALL_") for member in gguf.LlamaFileType}
    return names.get(kind, "unknown") if isinstance(kind, int) else "unknown"


def model_info(info: ModelInfo) -> dict[str, Any]:
    """Return properties of the model under GGUF's names: those of the spec, and the metadata of a GGUF file."""
    spec, metadata = info.spec, _metadata(info.path) if info.path is not None and info.path.suffix == ".gguf" else {}
    family = str(metadata.get("general.architecture", spec.family))
    facts: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": num_parameters(spec),
        f"{family}.context_length": spec.max_context,
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.block_count": spec.num_layers,
        f"{family}.vocab_size": spec.vocab_size,
    }
    mixer = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, Gqa)), None)
    if mixer is not None:
        facts[f"{family}.attention.head_count"] = mixer.num_heads
        facts[f"{family}.attention.head_count_kv"] = mixer.num_kv_heads
        facts[f"{family}.attention.key_length"] = mixer.head_dim
    return {**facts, **{name: _short(value) for name, value in metadata.items() if name not in HIDDEN}}


HIDDEN = ("general.name", "tokenizer.chat_template")


def _short(value: Any) -> Any:
    """Replace long lists (vocabularies) by empty ones, as Ollama does without `verbose`."""
    return [] if isinstance(value, list) and len(value) > MAX_SHOWN_ITEMS else value


@lru_cache(maxsize=8)
def _metadata(path: Path) -> dict[str, Any]:
    return read_gguf_model(path).metadata


def size_bytes(info: ModelInfo) -> int:
    if info.path is None:
        return 0
    if info.path.is_file():
        return info.path.stat().st_size
    return sum(file.stat().st_size for file in info.path.glob("*.safetensors"))


def digest(info: ModelInfo) -> str:
    """Return a digest of the model's identity: its name, its manifest, and the paths, sizes and times of its files."""
    facts: list[Any] = [info.name, repr(info.manifest)]
    if info.path is not None:
        files = [info.path] if info.path.is_file() else sorted(info.path.glob("*.safetensors"))
        facts += [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
