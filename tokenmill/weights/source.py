"""Access to a checkpoint's weights under our tensor names; each tensor is assembled on access by its family's rules.

All conversions move whole rows, so they work on quantised rows without dequantizing them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from tokenmill.arch.families import BY_NAME
from tokenmill.arch.family import Family, MtpNames
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.mtp import first_extra_layer, mtp_head, mtp_names
from tokenmill.arch.read import quantization_config
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import GGUF_FACTS, Rules, TensorSource, sources_of
from tokenmill.arch.text_parts import WRAPPED_PREFIXES, text_tensors
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.ops.raw import Ordered, RawTensor
from tokenmill.weights.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.locate import locate
from tokenmill.weights.mapped_pages import fetch
from tokenmill.weights.quantized_checkpoint import QuantizedCheckpoint
from tokenmill.weights.scaled_blocks import alike

_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers in old checkpoints that the engine computes itself


class WeightSource(Protocol):
    def names(self) -> list[str]: ...

    def get(self, name: str) -> RawTensor: ...

    def check(self) -> None: ...


def open_weights(path: Path | str, spec: ModelSpec) -> WeightSource:
    """Open the weights at `path` for a model of this spec. Fast: values are read only when `get` is called."""
    location, family = locate(path), _family(spec)
    if location.format == "gguf":
        gguf = GGUFCheckpoint(read_gguf_model(location.files[0]))
        rules = family.gguf_traits.rules_for(gguf.shapes)
        return CheckpointWeights(gguf, sources_of(spec, rules), (*GGUF_FACTS, *_extra_layers(spec, rules)))
    checkpoint = _safetensors(location.files)
    prefix = _prefix(spec, checkpoint)
    rules = _hf_rules(family, checkpoint, prefix)
    tied = ("lm_head.weight", "language_model.lm_head.weight") if spec.tied_head else ()
    ignored = (*family.ignored_prefixes, *tied, *_extra_layers(spec, rules))
    parts = text_tensors(prefix) if spec.text_part_of else ()
    sources = {name: _as_stored(one, checkpoint) for name, one in sources_of(spec, rules).items()}
    return CheckpointWeights(checkpoint, sources, ignored, family.ignored_suffixes, parts)


def _as_stored(source: TensorSource, checkpoint: Checkpoint) -> TensorSource:
    """Return the source of matrices that are usually transposed; transformers 5 writes some as they are."""
    *others, rows, columns = source.shape if source.transposed else (0, 0)
    plain = (*others, columns, rows)
    if not source.transposed or plain == source.shape or checkpoint.shapes.get(source.names[0]) != plain:
        return source
    return replace(source, transposed=False, shape=plain)


def open_mtp_head(path: Path | str, spec: ModelSpec) -> CheckpointWeights:
    """Open the weights of a model's multi-token-prediction head (`arch/mtp.py`)."""
    head, location, family = mtp_head(spec), locate(path), _family(spec)
    is_gguf = location.format == "gguf"
    names = mtp_names(family, is_gguf=is_gguf)
    checkpoint: Checkpoint
    if is_gguf:
        checkpoint = GGUFCheckpoint(read_gguf_model(location.files[0]))
        rules = names.head_rules(family.gguf_traits.rules_for(checkpoint.shapes))
    else:
        checkpoint = _safetensors(location.files)
        rules = _hf_rules(family, checkpoint, _prefix(spec, checkpoint), names)
    number = first_extra_layer(spec) if names.number is None else names.number
    sources = sources_of(replace(head, layer_numbers=((number, number),)), rules)
    weights = CheckpointWeights(checkpoint, sources)
    if not any(theirs in checkpoint.shapes for theirs in sources["join.weight"].names):
        raise UnsupportedModel(f"{path}: the files have no multi-token-prediction (MTP) head")
    weights.check(allows_others=True)
    return weights


def _extra_layers(spec: ModelSpec, rules: Rules) -> tuple[str, ...]:
    """Return the name prefixes of the MTP layers after the last layer."""
    prefix = rules["layers.{i}.mlp_norm.weight"].pattern.partition("{i}")[0] if spec.num_extra_layers else ""
    first = first_extra_layer(spec)
    return tuple(f"{prefix}{first + number}." for number in range(spec.num_extra_layers))


def _safetensors(files: tuple[Path, ...]) -> Checkpoint:
    checkpoint = SafetensorsCheckpoint(files)
    found = QuantizedCheckpoint(checkpoint, _quantization_config(files[0].parent))
    return found if found.matrices else checkpoint


def _quantization_config(folder: Path) -> Mapping[str, Any]:
    config = folder / "config.json"
    return quantization_config(config) if config.is_file() else {}


def _family(spec: ModelSpec) -> Family:
    if spec.family not in BY_NAME:
        raise UnsupportedModel(f"no weight names are known for the family {spec.family!r}")
    return BY_NAME[spec.family]


def _prefix(spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """Return the prefix that this checkpoint has before "layers."; in multimodal checkpoints it is longer."""
    embedding = _family(spec).hf_rules["embed.weight"].pattern.removeprefix("model.")
    found = (prefix for prefix in hf_prefixes(spec) if prefix + embedding in checkpoint.shapes)
    return next(found, "model.")


def hf_prefixes(spec: ModelSpec) -> tuple[str, ...]:
    """Return the prefixes that a checkpoint of the model may have before "layers.", most likely first."""
    return WRAPPED_PREFIXES if spec.text_part_of else _family(spec).hf_prefixes


def _hf_rules(family: Family, checkpoint: Checkpoint, prefix: str, head: MtpNames | None = None) -> Rules:
    """Return the rules with this prefix. `head`: return the rules of the MTP head instead."""
    shapes = checkpoint.shapes
    rules: Rules = {**family.hf_rules, **_variant(family, prefix, shapes)}
    rules = prefixed_rules(rules if head is None else head.head_rules(rules), prefix)
    if isinstance(checkpoint, QuantizedCheckpoint) and checkpoint.has_rows_of_outputs:
        return {ours: replace(rule, transposed=False) for ours, rule in rules.items()}
    return rules


def prefixed_rules(rules: Rules, prefix: str) -> Rules:
    """Return the rules for a checkpoint with `prefix` instead of "model."."""
    return {ours: replace(rule, pattern=_prefixed(rule.pattern, prefix)) for ours, rule in rules.items()}


def _variant(family: Family, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Rules:
    """Return the family's alternative names if the checkpoint has a tensor with one of them."""
    usual, other = (
        {_prefixed(rule.pattern, prefix) for rule in rules.values()} for rules in (family.hf_rules, family.hf_variant)
    )
    known = [re.escape(pattern).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+") for pattern in other - usual]
    if not known:
        return {}
    names = re.compile("|".join(known))
    return family.hf_variant if any(names.fullmatch(name) for name in shapes) else {}


def _prefixed(pattern: str, prefix: str) -> str:
    if pattern.startswith("model."):
        return prefix + pattern.removeprefix("model.")
    return "language_model." + pattern if prefix.startswith("language_model.") else pattern  # such as lm_head


@dataclass(frozen=True)
class CheckpointWeights:
    checkpoint: Checkpoint
    sources: Mapping[str, TensorSource]
    ignored: tuple[str, ...] = ()  # name prefixes of tensors that the model does not use
    ignored_suffixes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # name prefixes of the only tensors that it may use; empty: any

    def names(self) -> list[str]:
        return list(self.sources)

    @property
    def recipe(self) -> str:
        """Return a text that identifies how our tensors are assembled, for cache keys."""
        return repr(sorted(self.sources.items()))

    def get(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        experts: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> RawTensor:
        """Return a tensor, or only these rows, experts and columns of it. Selected columns are dequantized, because
        blocks run along columns."""
        source = self.sources[name]
        if experts and len(source.names) > 1:  # the checkpoint has one tensor per expert
            source, experts = replace(source, names=tuple(source.names[expert] for expert in experts)), None
        parts = [self._part(theirs, source, rows, experts, columns) for theirs in source.names]
        if source.times is not None:
            return self._product(name, parts[0], *source.times)
        if source.values is not None:
            return self._by_heads(name, parts[0], *source.values)
        if len(self.sources[name].names) == 1:
            return replace(parts[0], name=name)
        parts = alike(parts)
        data = torch.stack([part.data for part in parts])
        return replace(parts[0], name=name, shape=(len(parts), *parts[0].shape), data=data, ordered=None)

    def _part(
        self,
        theirs: str,
        source: TensorSource,
        rows: tuple[int, int] | None = None,
        experts: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> RawTensor:
        found = self.checkpoint.shapes.get(theirs)
        if found != source.shape:
            problem = "is missing" if found is None else f"has shape {list(found)}, expected {list(source.shape)}"
            raise DamagedFile(f"{self.checkpoint.place}: tensor {theirs!r} {problem}")
        raw = self.checkpoint.load(theirs)
        if source.num_joined:
            raw = _separated(raw, source.num_joined)
        if experts is not None:
            raw = some_experts(raw, experts)
        if columns is not None and raw.quant is not None:
            raw = RawTensor(raw.name, raw.shape, dequantize(raw))
        return transformed(raw, source, rows, columns, fetched=self.checkpoint.reads_parts)

    def _product(self, name: str, left: RawTensor, theirs: str, shape: tuple[int, int]) -> RawTensor:
        """Multiply two consecutive matrices into one."""
        right = self._part(theirs, TensorSource((theirs,), shape))
        return RawTensor(name, (left.shape[0], shape[1]), dequantize(left) @ dequantize(right))

    def _by_heads(self, name: str, keys: RawTensor, theirs: str, shape: tuple[int, ...]) -> RawTensor:
        """Join each head's keys, which are stored transposed, and its values into one matrix."""
        values = dequantize(self._part(theirs, TensorSource((theirs,), shape)))
        heads = torch.cat((dequantize(keys).transpose(1, 2), values), dim=1)
        return RawTensor(name, (heads.shape[0] * heads.shape[1], heads.shape[2]), heads.flatten(0, 1))

    def check(self, *, allows_others: bool = False) -> None:
        """Raise one error that names every missing, misshapen and unexpected tensor. `allows_others`: unexpected
        tensors are not an error."""
        shapes = self.checkpoint.shapes
        expected = {theirs: source.shape for source in self.sources.values() for theirs in source.names}
        expected |= dict(source.times for source in self.sources.values() if source.times is not None)
        expected |= dict(source.values for source in self.sources.values() if source.values is not None)
        missing = [name for name in expected if name not in shapes]
        wrong = [
            f"{name} {list(shapes[name])} (expected {list(shape)})"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ]
        unexpected = [
            name for name in shapes if not allows_others and name not in expected and not self._is_ignored(name)
        ]
        problems = {"missing": missing, "misshapen": wrong, "unexpected": unexpected}
        if any(problems.values()):
            listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
            raise DamagedFile(
                f"{self.checkpoint.place}: the tensors do not match the model's configuration: {listed}",
                hint="the files belong to another model or are incomplete",
            )

    def _is_ignored(self, name: str) -> bool:
        if self.parts and not name.startswith(self.parts):
            return True
        return name.startswith(self.ignored) or name.endswith((*_COMPUTED_SUFFIXES, *self.ignored_suffixes))


def some_experts(raw: RawTensor, own: Sequence[int]) -> RawTensor:
    """Return some experts of a tensor [experts, ...]; a contiguous range is a view."""
    first, count = own[0] if own else 0, len(own)
    is_span = list(own) == list(range(first, first + count))
    data = raw.data.narrow(0, first, count) if is_span else raw.data[list(own)]
    return replace(raw, shape=(count, *raw.shape[1:]), data=data, ordered=None)


def _separated(raw: RawTensor, count: int) -> RawTensor:
    """Return a view of a matrix [count * rows, columns] as `count` matrices [count, rows, columns]."""
    rows = raw.shape[0] // count
    return replace(
        raw,
        shape=(count, rows, *raw.shape[1:]),
        data=raw.data.view(count, rows, *raw.data.shape[1:]),
        ordered=None,
    )


def transformed(
    raw: RawTensor,
    source: TensorSource,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    *,
    fetched: bool = False,
) -> RawTensor:
    """Convert a checkpoint tensor to ours, or only some of its rows or columns, without touching the others.

    `fetched`: read the used part of the mapped file ahead, in large pieces.
    """
    data, shape = raw.data, raw.shape
    if source.stack_index is not None:
        data, shape = data[source.stack_index], shape[1:]
    for at in reversed(source.unit_axes):
        data, shape = data.squeeze(at), (*shape[:at], *shape[at + 1 :])
    axis = len(shape) - 1 if source.is_vector or len(shape) == 1 else len(shape) - 2  # of rows
    if (
        raw.quant
        and len(shape) == 1
        and (source.rows or source.woven or source.interleaved_heads or source.swapped_heads)
    ):
        raise UnsupportedModel(f"tensor {raw.name!r}: a quantised vector cannot be split or reordered")
    if source.transposed:
        if raw.quant:
            raise UnsupportedModel(f"tensor {raw.name!r}: quantised rows cannot be transposed")
        data, shape = data.transpose(-1, -2), (*shape[:-2], shape[-1], shape[-2])
    if source.rows is not None:
        start, end = source.rows
        groups = data.reshape(*data.shape[:axis], source.row_groups, -1, *data.shape[axis + 1 :])
        data = groups.narrow(axis + 1, start, end - start).flatten(axis, axis + 1)
        shape = (*shape[:axis], data.shape[axis], *shape[axis + 1 :])
    if source.woven is not None:
        index, count, size = source.woven
        rest = data.shape[axis + 1 :]
        data = data.reshape(*shape[:axis], -1, count, size, *rest).select(axis + 1, index).flatten(axis, axis + 1)
        shape = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])
    order = None
    if source.interleaved_heads:
        order = row_order(shape[axis], source.interleaved_heads, source.rotary_dim, source.rotary_start)
        order = order if rows is None else order[slice(*rows)]
    elif source.swapped_heads:
        order = torch.arange(shape[axis]).view(source.swapped_heads, 2, -1).flip(1).reshape(-1)
        order = order if rows is None else order[slice(*rows)]
    elif rows is not None:
        data = data.narrow(axis, rows[0], rows[1] - rows[0])
    if columns is not None:
        data = data.narrow(-1, columns[0], columns[1] - columns[0])
        shape = (*shape[:-1], columns[1] - columns[0])
    if fetched and data.dim():
        first = 0 if order is None else int(order.min())
        last = data.shape[axis] - 1 if order is None else int(order.max())
        fetch(data.narrow(axis, first, last + 1 - first))
    if order is not None:
        data = data.index_select(axis, order)
    if rows is not None:
        shape = (*shape[:axis], rows[1] - rows[0], *shape[axis + 1 :])
    if source.is_flattened:
        data, shape = data.flatten(), (data.numel(),)
    if source.minus_exp:
        data = (-data.float()).log()
    if source.add:
        data = _added(raw, data, source.add)
    if source.factor != 1.0:
        data = _multiplied(raw, data, source.factor)
    ordered = None if columns is not None else _transformed_blocks(raw, source, rows)
    return replace(raw, shape=shape, data=data, ordered=ordered)


def _transformed_blocks(raw: RawTensor, source: TensorSource, rows: tuple[int, int] | None) -> Ordered | None:
    """Convert the blocks in act order in the same way; None if the conversion does more than move rows."""
    changes_values = source.transposed or source.is_flattened or source.minus_exp or source.add or source.factor != 1.0
    if raw.ordered is None or changes_values:
        return None
    return replace(raw.ordered, blocks=transformed(raw.ordered.blocks, source, rows))


def _added(raw: RawTensor, data: torch.Tensor, amount: float) -> torch.Tensor:
    if raw.quant:
        raise UnsupportedModel(f"tensor {raw.name!r}: quantised norms are not supported")
    return data.float() + amount  # float32: 1 + w loses bits in bfloat16


def _multiplied(raw: RawTensor, data: torch.Tensor, factor: float) -> torch.Tensor:
    if raw.quant:
        raise UnsupportedModel(f"tensor {raw.name!r}: quantised matrices can't be multiplied by the config's factors")
    return data.float() * factor


def row_order(num_rows: int, num_heads: int, rotary_dim: int, start: int = 0) -> torch.Tensor:
    """Return, for each of our rows, the index of the checkpoint's row.

    theirs, per head:  a0 b0 a1 b1 a2 b2 ... | rest        (a, b): the pair that is rotated together
    ours,   per head:  a0 a1 a2 ... b0 b1 b2 ... | rest

    `start`: number of rows in each head before the rotated ones.
    """
    head_dim = num_rows // num_heads
    rotated = start + torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)
    head = torch.cat([torch.arange(start), rotated, torch.arange(start + rotary_dim, head_dim)])
    return (torch.arange(num_heads).unsqueeze(1) * head_dim + head).reshape(-1)
