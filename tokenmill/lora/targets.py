"""Maps the modules of an adapter file to our matrices and their rows.

An adapter's module has the name of the checkpoint's tensor, so the rules that map a model's weights (`arch/tensors.py`)
apply to its adapters too. A module may hold several of our matrices (Phi-3's qkv_proj): they share `a`, and each takes
its rows of `b`. Recent transformers store a layer's experts as two 3-dimensional parameters, whatever the checkpoint
does: gate and up, and down. An adapter of such a parameter has factors of each expert:

    a [experts * rank, columns]                 ordered by expert
    b [rows, rank * experts]                    ordered by rank, then by expert
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tokenmill.arch.families import BY_NAME
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import Rules, TensorSource, sources_of, tensors_of
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.source import hf_prefixes, prefixed_rules, transformed

EXPERTS = ".experts."
Found = TypeVar("Found")


@dataclass(frozen=True)
class AdapterTarget:
    """One of our matrices (or one per expert) as a part of an adapter's module."""

    name: str  # ours, without ".weight"
    source: TensorSource
    rows: int  # of the module, which include ours
    columns: int
    expert: int | None = None

    def own_rows(self, b: torch.Tensor) -> torch.Tensor:
        """Return the rows of `b` [rows of the module, rank] that belong to our matrix, in our order."""
        source = replace(self.source, transposed=False, unit_axes=())
        return transformed(RawTensor(self.name, tuple(b.shape), b), source).data.contiguous()


@dataclass(frozen=True)
class ExpertsTarget:
    """A parameter that stacks matrices of all experts of a layer: gate and up, or down."""

    parameter: str  # its whole name
    parts: tuple[AdapterTarget, ...]
    num_experts: int

    @property
    def rows(self) -> int:
        return self.parts[0].rows

    @property
    def columns(self) -> int:
        return self.parts[0].columns


@dataclass(frozen=True)
class Targets:
    """The matrices of a model that an adapter may change, by their names in the adapter's file."""

    modules: Mapping[str, tuple[AdapterTarget, ...]]
    experts: Mapping[str, tuple[ExpertsTarget, ...]]  # by the module that has them

    @property
    def has_transposed(self) -> bool:
        return any(target.source.transposed for parts in self.modules.values() for target in parts)


def peft_targets(spec: ModelSpec) -> Targets:
    """Return the targets by names of transformers' modules, with all prefixes of the family's checkpoints."""
    family = BY_NAME[spec.family]
    modules: dict[str, tuple[AdapterTarget, ...]] = {}
    experts: dict[str, tuple[ExpertsTarget, ...]] = {}
    for prefix in hf_prefixes(spec):
        for rules in (family.hf_rules, {**family.hf_rules, **family.hf_variant}):
            found = targets_by(spec, prefixed_rules(rules, prefix))
            modules |= found.modules
            experts |= found.experts
    return Targets(_with_new_names(modules), _with_new_names(experts))


def _with_new_names(found: Mapping[str, Found]) -> dict[str, Found]:
    """Add the names that newer versions of transformers use for modules with another name in checkpoints."""
    return {**found, **{name.replace(".block_sparse_moe.", ".mlp."): one for name, one in found.items()}}


def gguf_targets(spec: ModelSpec) -> Targets:
    return targets_by(spec, BY_NAME[spec.family].gguf_traits.rules)


def targets_by(spec: ModelSpec, rules: Rules) -> Targets:
    shapes = {tensor.name: tensor.shape for tensor in tensors_of(spec).values()}
    modules: dict[str, list[AdapterTarget]] = {}
    experts: dict[tuple[str, str], list[AdapterTarget]] = {}
    for name, source in _matrices(spec, rules).items():
        if EXPERTS not in name:
            rows, columns = reversed(source.shape) if source.transposed else source.shape
            modules.setdefault(_module(source.names[0]), []).append(AdapterTarget(name, source, rows, columns))
            continue
        rows, columns = source.shape[-2:]
        for number, theirs in enumerate(source.names):  # one tensor per expert, or one for all
            expert = number if len(source.names) > 1 else None
            modules.setdefault(_module(theirs), []).append(AdapterTarget(name, source, rows, columns, expert))
        is_gated = f"{name.rpartition('.')[0]}.gate.weight" in shapes
        parameter, target = _stacked(name, shapes[f"{name}.weight"], source, is_gated=is_gated)
        module = source.names[0].partition(EXPERTS)[0] + EXPERTS.removesuffix(".")
        experts.setdefault((module, parameter), []).append(target)
    by_module: dict[str, list[ExpertsTarget]] = {}
    for (module, parameter), parts in experts.items():
        count = shapes[f"{parts[0].name}.weight"][0]
        by_module.setdefault(module, []).append(ExpertsTarget(f"{module}.{parameter}", tuple(parts), count))
    return Targets(
        {module: tuple(found) for module, found in modules.items()},
        {module: tuple(found) for module, found in by_module.items()},
    )


def _matrices(spec: ModelSpec, rules: Rules) -> dict[str, TensorSource]:
    """Return the sources of all our matrices, named without ".weight"; including a tied head."""
    kinds = tensors_of(spec)
    sources = {
        name.removesuffix(".weight"): source
        for name, source in sources_of(spec, rules).items()
        if kinds[name].kind in ("linear", "embedding") and name != "positions.weight"
    }
    if spec.tied_head and "head.weight" in rules:
        sources["head"] = TensorSource((rules["head.weight"].pattern,), (spec.vocab_size, spec.hidden_size))
    return sources


def _module(theirs: str) -> str:
    return theirs.removesuffix(".weight")


def _stacked(name: str, shape: tuple[int, ...], source: TensorSource, *, is_gated: bool) -> tuple[str, AdapterTarget]:
    """Return transformers' parameter for a tensor of all experts [experts, rows, columns], and the part that is
    ours."""
    _, rows, columns = shape
    own = name.rpartition(".")[2]
    parameter = f"{own}_proj" if own == "down" or not is_gated else "gate_up_proj"
    if source.rows is not None or source.woven is not None:  # the checkpoint has that parameter itself
        whole = source.shape[-1 if source.transposed else -2]
        return parameter, AdapterTarget(name, source, whole, columns)
    if parameter != "gate_up_proj":
        return parameter, AdapterTarget(name, TensorSource(source.names, (rows, columns)), rows, columns)
    start = 0 if own == "gate" else rows
    half = TensorSource(source.names, (2 * rows, columns), rows=(start, start + rows))
    return parameter, AdapterTarget(name, half, 2 * rows, columns)
