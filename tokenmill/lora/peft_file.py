"""A PEFT adapter: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight                [rank, columns]
    base_model.model.<module>.lora_B.weight                [rows, rank]
    base_model.model.<module>.lora_magnitude_vector        [rows], DoRA's
    base_model.model.<module>.lora_embedding_A, ..._B      [rank, vocabulary], [hidden, rank]

The tensors in the file define what the adapter changes; every tensor is used, or the file is refused. Modules that the
config names and the model has must be in the file. The file is read at once instead of mapped, so that training may
overwrite it later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.lora.peft_config import PeftConfig
from tokenmill.lora.sizes import MAX_RANK
from tokenmill.lora.targets import EXPERTS, AdapterTarget, ExpertsTarget, Targets, peft_targets
from tokenmill.ops.low_rank import LowRank

BaseWeight = Callable[[str], torch.Tensor]
"""Takes our name of a matrix, without ".weight", and returns its values in float32"""

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.weight)?"
)
_SAVED_BASE = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight")
DORA_ROWS_AT_ONCE = 4096  # rows of the adapted matrix in memory at a time
SAVED_TOLERANCE = 0.05  # relative difference of a saved embedding that quantisation of the base model may cause


@dataclass
class Module:
    """The tensors of one module in the file."""

    name: str
    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    def get(self, place: str, part: str, num_dimensions: int) -> torch.Tensor:
        found = self.parts.get(part)
        if found is None:
            raise DamagedFile(f"{place}: {self.name} has no {part}")
        if found.dim() != num_dimensions or 0 in found.shape:
            raise DamagedFile(f"{place}: {part} of {self.name} has shape {list(found.shape)}")
        if not bool(found.isfinite().all()):
            raise DamagedFile(f"{place}: {part} of {self.name} has numbers that are not finite")
        return found


@dataclass(frozen=True)
class PeftReader:
    config: PeftConfig
    spec: ModelSpec
    base_weight: BaseWeight

    @property
    def place(self) -> str:
        return self.config.place

    def matrices(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRank]:
        modules, saved = _sorted(tensors, self.place)
        targets = peft_targets(self.spec)
        if self.config.is_for_transposed and not targets.has_transposed:
            raise UnsupportedModel(f"{self.place}: fan_in_fan_out is set, but no matrix of this model is transposed")
        found: dict[str, LowRank] = {}
        for module in modules.values():
            for name, matrix in self._matrices(module, targets):
                if name in found:
                    raise UnsupportedModel(f"{self.place}: {name} is adapted twice")
                found[name] = matrix
        self._require_all(modules, targets)
        for module_name, weight in saved.items():
            self._require_unchanged(module_name, weight, targets)
        if not found:
            raise DamagedFile(f"{self.place}: no adapter is in the file")
        return found

    def _matrices(self, module: Module, targets: Targets) -> Iterator[tuple[str, LowRank]]:
        if (found := targets.modules.get(module.name)) is not None:
            is_embedding = found[0].name == "embed"
            return iter([self._embedding(module, found[0])] if is_embedding else self._linear(module, found))
        experts = targets.experts.get(module.name.replace(".base_layer", ""))
        if experts is None:
            raise UnsupportedModel(
                f"{self.place}: the adapter changes {module.name}, which this model does not have as a matrix",
                hint="the adapter belongs to another model, or changes a part that is not implemented",
            )
        return self._experts(module, experts)

    def _linear(self, module: Module, targets: tuple[AdapterTarget, ...]) -> Iterator[tuple[str, LowRank]]:
        a, b = module.get(self.place, "lora_A", 2), module.get(self.place, "lora_B", 2)
        first = targets[0]
        self._require_sizes(module.name, a, b, first.rows, first.columns)
        scale = self._scale(module.name, a.shape[0])
        for target in targets:
            name = target.name if target.expert is None else f"{target.name}.{target.expert}"
            gain = None
            rows = target.own_rows(b)
            if self.config.is_dora:
                factors = self._dora_factors(module, target, name, a, rows, scale)
                gain, rows = factors - 1, rows.float() * factors.unsqueeze(1)
            yield name, LowRank(a, scaled(rows, scale), gain)

    def _dora_factors(
        self, module: Module, target: AdapterTarget, name: str, a: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> torch.Tensor:
        magnitude = module.get(self.place, "lora_magnitude_vector", 1)
        if len(magnitude) != target.rows:
            raise DamagedFile(
                f"{self.place}: lora_magnitude_vector of {module.name} has {len(magnitude)} numbers, "
                f"its matrix {target.rows} rows"
            )
        own = target.own_rows(magnitude.unsqueeze(1)).squeeze(1)
        return row_factors(self.base_weight(name), a, rows, scale, own)

    def _embedding(self, module: Module, target: AdapterTarget) -> tuple[str, LowRank]:
        a = module.get(self.place, "lora_embedding_A", 2)
        b = module.get(self.place, "lora_embedding_B", 2)
        if self.config.is_dora:
            raise UnsupportedModel(f"{self.place}: use_dora for the embedding {module.name} is not implemented")
        self._require_sizes(module.name, a, b, target.columns, target.rows)
        return target.name, LowRank(a, scaled(b, self._scale(module.name, a.shape[0])))

    def _experts(self, module: Module, experts: tuple[ExpertsTarget, ...]) -> Iterator[tuple[str, LowRank]]:
        if self.config.is_dora:
            raise UnsupportedModel(f"{self.place}: use_dora for experts ({module.name}) is not implemented")
        a, b = module.get(self.place, "lora_A", 2), module.get(self.place, "lora_B", 2)
        fitting = [one for one in experts if (one.columns, one.rows) == (a.shape[1], b.shape[0])]
        if not fitting:
            sizes = " or ".join(f"[{one.rows}, {one.columns}]" for one in experts)
            raise DamagedFile(
                f"{self.place}: {module.name} adds [{b.shape[0]}, {a.shape[1]}] to each expert, which has {sizes}"
            )
        target = fitting[0]
        count = target.num_experts
        if a.shape[0] != b.shape[1] or a.shape[0] % count:
            raise DamagedFile(f"{self.place}: {module.name} has {a.shape[0]} ranks for {count} experts")
        rank = a.shape[0] // count
        scale = self._scale(target.parameter, rank)
        each_a, each_b = a.view(count, rank, -1), b.view(len(b), rank, count)
        for part in target.parts:
            for expert in range(count):
                rows = part.own_rows(each_b[:, :, expert])
                yield f"{part.name}.{expert}", LowRank(each_a[expert], scaled(rows, scale))

    def _scale(self, module: str, rank: int) -> float:
        expected = self.config.rank_of(module)
        if rank != expected:
            raise DamagedFile(f"{self.place}: {module} has rank {rank}, the config says {expected}")
        if rank > MAX_RANK:
            raise UnsupportedModel(f"{self.place}: {module} has rank {rank}, the limit is {MAX_RANK}")
        return self.config.scale_of(module)

    def _require_sizes(self, module: str, a: torch.Tensor, b: torch.Tensor, rows: int, columns: int) -> None:
        if a.shape[1] != columns or b.shape[0] != rows or a.shape[0] != b.shape[1]:
            raise DamagedFile(
                f"{self.place}: {module} has factors {list(b.shape)} and {list(a.shape)}, the matrix is "
                f"[{rows}, {columns}]",
                hint="the adapter belongs to another model",
            )

    def _require_all(self, modules: Mapping[str, Module], targets: Targets) -> None:
        """Refuse a file that lacks modules that its config names: it is truncated, or belongs to another model."""
        prefixes = {name.partition("layers.")[0] for name in modules}
        missing = [
            name
            for name, found in targets.modules.items()
            if name.partition("layers.")[0] in prefixes and EXPERTS not in f"{found[0].name}."
            if name not in modules and self.config.targets(name)
        ]
        if missing:
            raise DamagedFile(f"{self.place}: target_modules names {missing[0]}, which the file does not have")

    def _require_unchanged(self, module: str, weight: torch.Tensor, targets: Targets) -> None:
        """Refuse a saved embedding or head that differs from the base model's: PEFT saves those that it adapts, but one
        that was trained itself is not supported."""
        found = targets.modules.get(module)
        if found is None or found[0].name not in ("embed", "head"):
            raise UnsupportedModel(f"{self.place}: the file has {module} as a whole, which is not implemented")
        name = "embed" if found[0].name == "head" and self.spec.tied_head else found[0].name
        base = self.base_weight(name)
        if base.shape != weight.shape:
            raise UnsupportedModel(
                f"{self.place}: {module} was saved with {len(weight)} rows, the model has {len(base)}; embeddings that "
                "were made larger are not implemented"
            )
        if float((base - weight.float()).abs().mean()) > SAVED_TOLERANCE * float(base.abs().mean()):
            raise UnsupportedModel(f"{self.place}: {module} was trained as a whole, which is not implemented")


def scaled(b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return b times the scale, in b's dtype if that is exact, else in float32."""
    found = b.float() * scale
    rounded = found.to(b.dtype)
    return rounded if bool((rounded.float() == found).all()) else found


def _sorted(tensors: Mapping[str, torch.Tensor], place: str) -> tuple[dict[str, Module], dict[str, torch.Tensor]]:
    """Sort tensors into those of adapted modules, and matrices of the base model that were saved with them."""
    modules: dict[str, Module] = {}
    saved: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if match := _KEY.fullmatch(name):
            modules.setdefault(match["module"], Module(match["module"])).parts[match["part"]] = tensor
        elif match := _SAVED_BASE.fullmatch(name):
            saved[match["module"]] = tensor
        else:
            raise UnsupportedModel(f"{place}: tensor {name!r} is not implemented")
    return modules, saved


def row_factors(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, magnitude: torch.Tensor
) -> torch.Tensor:
    """Return m / |W + scale * b a| per row, float32 [rows]; weight [rows, columns], magnitude m [rows].

    DoRA: the rows of an adapted matrix have the direction of W + scale * b a, and their lengths are a trained vector m:

        y = m / |W + scale * b a| * ((W + scale * b a) x)          lengths and m per row

    The factor does not depend on x: it is computed once, from the base model's weights.
    """
    lengths = [
        torch.linalg.vector_norm(
            weight[first : first + DORA_ROWS_AT_ONCE].float()
            + scale * (b[first : first + DORA_ROWS_AT_ONCE].float() @ a.float()),
            dim=1,
        )
        for first in range(0, weight.shape[0], DORA_ROWS_AT_ONCE)
    ]
    return magnitude.float() / torch.cat(lengths)
