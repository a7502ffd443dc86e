"""Read an adapter: a PEFT folder or a GGUF file. Only safe formats are read, and sizes are checked before use."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tokenmill.arch.read import read_json
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import DamagedFile, ModelError, UnsupportedModel
from tokenmill.lora.adapter import Adapter
from tokenmill.lora.gguf_adapter import gguf_matrices
from tokenmill.lora.peft_config import read_peft_config
from tokenmill.lora.peft_file import BaseWeight, PeftReader
from tokenmill.ops.low_rank import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_ADAPTER_BYTES = 16 << 30
DIGEST_BYTES = 16
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def read_adapter(path: Path, spec: ModelSpec, base_weight: BaseWeight) -> Adapter:
    """Read the adapter at `path` for a model of this spec; `base_weight` returns the model's matrices, for DoRA."""
    if path.is_dir():
        return _read_peft(path, spec, base_weight)
    if not path.exists():
        raise ModelError(f"{path} does not exist", hint="name a PEFT folder or a GGUF file")
    if path.suffix != ".gguf":
        raise UnsupportedModel(f"{path}: not an adapter", hint="name a PEFT folder or a GGUF file")
    data = _bytes(path)
    return _adapter(lambda: gguf_matrices(path, spec), data)


def _read_peft(folder: Path, spec: ModelSpec, base_weight: BaseWeight) -> Adapter:
    weights = folder / WEIGHTS
    if not weights.is_file():
        if (folder / "adapter_model.bin").exists():
            raise UnsupportedModel(
                f"{folder}: adapter_model.bin is a pickle, which is never read", hint="use safetensors"
            )
        raise ModelError(f"{folder} has no {WEIGHTS}", hint="name a PEFT folder or a GGUF file")
    values = read_json(folder / CONFIG)
    config = read_peft_config(values, str(folder / CONFIG))
    data = _bytes(weights)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise DamagedFile(f"{weights}: {str(error)[:200]}", hint="the file is damaged or cut short") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(f"{weights}: tensor {name!r} has dtype {tensor.dtype}, which is not supported")
    reader = PeftReader(config, spec, base_weight)
    return _adapter(lambda: reader.matrices(tensors), data, (folder / CONFIG).read_bytes())


def _adapter(read: Callable[[], dict[str, LowRank]], *contents: bytes) -> Adapter:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return Adapter(digest.hexdigest(), read())


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_ADAPTER_BYTES:
            raise UnsupportedModel(f"{path}: {size:,} bytes, the limit for an adapter is {MAX_ADAPTER_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
