"""Write a model as a GGUF file for Tokenmill and llama.cpp, with any weights and any vocabulary.

Tensors are written one at a time, so the file may be larger than memory. The conversions of `arch/tensors.py` are
reversed: rows are fused and heads interleaved again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmill.arch.families import BY_NAME
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME, read_gguf
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import TensorSource, sources_of
from tokenmill.errors import ModelError, UnsupportedModel
from tokenmill.ops.raw import RawTensor
from tokenmill.text.gguf_tokenizer import TokenType
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.gguf_metadata import architecture_metadata
from tokenmill.weights.source import WeightSource, row_order

FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PADDING_SCORE = -1000.0
_SIZED_QUANTS = ("Q4_K", "Q5_K")  # their file types have a size suffix; M is the most common


def write_gguf(
    path: Path | str, spec: ModelSpec, weights: WeightSource, vocabulary: Mapping[str, Any], quant: str = ""
) -> None:
    """Write a file. `vocabulary`: metadata under `tokenizer.`, as in `read_gguf(...).metadata`; `quant`: the format of
    most tensors."""
    import gguf  # only here: serving never writes

    family = BY_NAME[spec.family]
    metadata, factors = architecture_metadata(spec, family)
    writer = gguf.GGUFWriter(Path(path), family.gguf_traits.arch)
    writer.add_name(spec.name or spec.family)
    if quant:  # OpenVINO does not load a file without it
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quant}_M" if quant in _SIZED_QUANTS else f"MOSTLY_{quant}"])
    for key, value in metadata.items():
        _add(writer, f"{family.gguf_traits.arch}.{key}", value)
    for key, value in padded_vocabulary(vocabulary, spec.vocab_size).items():
        _add(writer, key, value)
    sources = _fused_sources(sources_of(spec, family.gguf_traits.rules))
    for name, numbers in factors.items():
        writer.add_tensor_info(name, (len(numbers),), np.dtype(np.float32), 4 * len(numbers))
    for name, parts in sources.items():
        _announce(writer, name, _joined(name, parts, weights))
    _write(writer, [np.array(numbers, np.float32) for numbers in factors.values()], _arrays(sources, weights))


def write_random_gguf(path: Path | str, spec: ModelSpec, quant: str, vocab_from: Path | str, seed: int = 0) -> None:
    """Write a file with random weights, for speed comparisons in which every engine loads the same bytes."""
    write_gguf(path, spec, dummy_weights(spec, seed, quant=quant), vocabulary_of(vocab_from), quant)


def vocabulary_of(path: Path | str) -> dict[str, Any]:
    """Read the tokenizer's metadata of another GGUF file."""
    return {key: value for key, value in read_gguf(path).metadata.items() if key.startswith("tokenizer.")}


def padded_vocabulary(vocabulary: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the vocabulary with unused tokens added up to the model's size."""
    tokens = vocabulary.get("tokenizer.ggml.tokens", [])
    missing = vocab_size - len(tokens)
    if missing < 0:
        raise ModelError(f"the vocabulary has {len(tokens)} tokens, the model only {vocab_size}")
    padding = {
        "tokenizer.ggml.tokens": [f"[PAD{len(tokens) + index}]" for index in range(missing)],
        "tokenizer.ggml.token_type": [int(TokenType.UNUSED)] * missing,
        "tokenizer.ggml.scores": [_PADDING_SCORE] * missing,
    }
    return {key: value + padding[key] if key in padding else value for key, value in vocabulary.items()}


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


# ── tensors ────────────────────────────────────────────────────────────────────────────────────────────


def _fused_sources(sources: Mapping[str, TensorSource]) -> dict[str, list[tuple[str, TensorSource]]]:
    """Map each GGUF tensor name to those of our tensors that it consists of, in row order."""
    theirs: dict[str, list[tuple[str, TensorSource]]] = {}
    for ours, source in sources.items():
        theirs.setdefault(source.names[0], []).append((ours, source))
    for parts in theirs.values():
        parts.sort(key=lambda part: part[1].rows or (0, 0))
    return theirs


def _joined(name: str, parts: list[tuple[str, TensorSource]], weights: WeightSource) -> RawTensor:
    raws = [_interleaved(weights.get(ours), source) for ours, source in parts]
    if len(raws) == 1:
        return replace(raws[0], name=name)
    if len({(raw.quant, raw.data.dtype) for raw in raws}) != 1:
        raise UnsupportedModel(f"tensor {name!r} would be fused from parts of different types")
    return RawTensor(name, parts[0][1].shape, torch.cat([raw.data for raw in raws], dim=-2), raws[0].quant)


def _interleaved(raw: RawTensor, source: TensorSource) -> RawTensor:
    if not source.interleaved_heads:
        return raw
    axis = max(0, len(raw.shape) - 2)
    order = row_order(raw.shape[axis], source.interleaved_heads, source.rotary_dim, source.rotary_start)
    return replace(raw, data=raw.data.index_select(axis, order.argsort()), ordered=None)


def _type_name(raw: RawTensor) -> str:
    if raw.quant is None and raw.data.dtype not in FLOAT_TYPES:
        raise UnsupportedModel(f"tensor {raw.name!r}: {raw.data.dtype} cannot be written as GGUF")
    return raw.quant or FLOAT_TYPES[raw.data.dtype]


def _announce(writer: Any, name: str, raw: RawTensor) -> None:
    import gguf

    kind = _type_name(raw)
    num_bytes = torch.Size(raw.shape[:-1]).numel() * GGML_TYPE_BY_NAME[kind].row_bytes(raw.shape[-1])
    # A dtype other than uint8 tells the writer that the shape counts values.
    writer.add_tensor_info(name, raw.shape, np.dtype(np.float32), num_bytes, gguf.GGMLQuantizationType[kind])


def _arrays(
    sources: Mapping[str, list[tuple[str, TensorSource]]], weights: WeightSource
) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    for name, parts in sources.items():
        yield _joined(name, parts, weights).data.contiguous().view(torch.uint8).numpy()


def _write(writer: Any, first: list[Any], rest: Iterator[Any]) -> None:
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for numbers in first:
            writer.write_tensor_data(numbers)
        for numbers in rest:
            writer.write_tensor_data(numbers)
    finally:
        writer.close()
