"""Weights by name, as the objects of the native module from which `NativeDecoder` is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tokenmill.arch.regions import Experts, Matrices
from tokenmill.arch.spec import MlpSpec, ModelSpec
from tokenmill.arch.streams import AltUp
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.packing import Dense, Packer, Weights, kind_of, pack_as
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.xielu import xielu_curve


class RankShard(Protocol):
    """One rank's part of a model, by name of the matrix."""

    @property
    def rank(self) -> int: ...

    def borders(self, name: str) -> list[int]:
        """Return the first row of each rank and the end of the last one's; empty: this rank has the whole product."""
        ...

    def input_borders(self, name: str) -> list[int]:
        """Return the same for the columns of a matrix's input, if it is cut over the ranks."""
        ...

    def experts(self, name: str) -> tuple[tuple[int, ...], ...] | None:
        """Return the ranks that have each expert as a whole; None: every rank has some rows of all experts."""
        ...

    def own_rows(self, name: str) -> tuple[int, int] | None:
        """Return the rows of a matrix that this rank has; None: all rows."""
        ...

    def whole_rows(self, names: Sequence[str]) -> int:
        """Return the number of rows of matrices over all ranks; 0 where this rank has all of them."""
        ...


class Site(NamedTuple):
    """A matrix that adapters may change, by its number in the native decoder."""

    number: int
    rows: int
    columns: int
    is_embedding: bool
    own_rows: tuple[int, int] | None = None  # this rank's rows, if the matrix is cut over ranks


class NativeWeights:
    """Loads and packs weights by name, as objects of the native module."""

    def __init__(
        self, weights: Weights, dense: Dense, packer: Packer, spec: ModelSpec, shard: RankShard | None = None
    ) -> None:
        self.weights, self.dense, self.packer, self.shard = weights, dense, packer, shard
        self.norm_spec, self.hidden_size = spec.norm, spec.hidden_size
        self.sites: dict[str, Site] = {}  # matrices that adapters may change, in the order of their numbers

    def vector(self, name: str) -> torch.Tensor:
        return self.dense(self.weights.get(name)).float().contiguous()

    def norm(self, name: str | None) -> Any:
        if name is None:
            return None
        bias = self.vector(f"{name}.bias") if self.norm_spec.has_bias else None
        weight = self.vector(f"{name}.weight") if self.norm_spec.has_weight else torch.ones(self.hidden_size)
        return native().Norm(weight, bias)

    def linear(self, name: str, has_bias: bool = False) -> Any:
        matrix = self.packer.matrix(f"{name}.weight")
        bias = self.vector(f"{name}.bias") if has_bias else None
        return native().Linear(matrix, bias, self._site(name, matrix), **self._cut(name))

    def _cut(self, name: str) -> dict[str, Any]:
        """Return this rank's part of a matrix, as arguments of a native Linear."""
        return {} if self.shard is None else {"borders": self.shard.borders(name), "rank": self.shard.rank}

    def input_borders(self, name: str) -> list[int]:
        return [] if self.shard is None else self.shard.input_borders(name)

    def over(self, matrix: Any, name: str, *, is_embedding: bool = False) -> Any:
        """Make a Linear of the embedding's matrix, as embedding or tied head, each with its own adapters."""
        site = self._site(name, matrix, is_embedding=is_embedding, cut_as="embed")
        return native().Linear(matrix, None, site, **self._cut("embed"))

    def table(self, name: str) -> Any:
        """Make a Linear that adapters can't change."""
        return native().Linear(self.packer.matrix(f"{name}.weight"), None, **self._cut(name))

    def _site(self, name: str, matrix: Any, *, is_embedding: bool = False, cut_as: str | None = None) -> int:
        """Register a matrix for adapters and return its number. `cut_as`: the name by which it is cut over ranks."""
        own = None if self.shard is None else self.shard.own_rows(cut_as or name)
        rows, columns = (matrix.cols, matrix.rows) if is_embedding else (matrix.rows, matrix.cols)
        if is_embedding and self.shard is not None:  # every rank has the update of every token's row
            columns = self.shard.whole_rows([cut_as or name]) or columns
        number = self.sites[name].number if name in self.sites else len(self.sites)
        self.sites[name] = Site(number, rows, columns, is_embedding, own)
        return number

    def plain(self, name: str) -> torch.Tensor:
        """Return the values of a matrix in the file's dtype, or as float16 if it is quantised."""
        raw = self.weights.get(name)
        return self.dense(raw).to(torch.float16) if raw.quant else raw.data

    def plain_linears(self, matrices: torch.Tensor) -> list[Any]:
        """Pack unquantised matrices [count, rows, columns], one Linear each."""
        raws = (RawTensor("", tuple(matrix.shape), matrix.contiguous()) for matrix in matrices)
        packed = (pack_as(kind_of(raw, "none"), raw, self.dense) for raw in raws)
        return [native().Linear(matrix, None) for matrix in packed]

    def plain_linear(self, name: str) -> Any:
        """Pack one matrix that is not quantised at load, and that adapters can't change."""
        (linear,) = self.plain_linears(self.plain(f"{name}.weight").unsqueeze(0))
        return linear

    def linears(self, matrices: Matrices) -> list[Any]:
        made = {name: self.linear(name, matrices.has_bias) for name in dict.fromkeys(matrices.names)}
        return [made[name] for name in matrices.names]  # a model whose values are its keys names one matrix twice

    def row_groups(self, name: str, count: int) -> list[Any]:
        """Pack the rows of a matrix in `count` groups, each with its own input."""
        return [native().Linear(matrix, None) for matrix in self.packer.row_groups(f"{name}.weight", count)]

    def entries(self, name: str) -> Any:
        return native().CompressedEntries(self.vector(f"{name}_bias"), self.vector(f"{name}_norm.weight"))

    def connection(self, name: str) -> Any:
        weight = self._float_linear(f"{name}.weight")
        return native().Connection(weight, self.vector(f"{name}_base"), self.vector(f"{name}_scale"))

    def altup(self, name: str, altup: AltUp) -> Any:
        return native().AltUp(
            router=self._float_linear(f"{name}.altup_router.weight"),
            router_norm=self.vector(f"{name}.altup_router_norm.weight"),
            predict=self.vector(f"{name}.altup_predict.weight"),
            correct=self.vector(f"{name}.altup_correct.weight"),
            scale=self.vector(f"{name}.altup_scale") if altup.has_output_scale else None,
            left=self.linear(f"{name}.branch_left"),
            right=self.linear(f"{name}.branch_right"),
            branch_norm=self.norm(f"{name}.branch_norm"),
        )

    def _float_linear(self, name: str) -> Any:
        """Pack a small matrix in float32."""
        (linear,) = self.plain_linears(self.vector(name).unsqueeze(0))
        return linear

    def mlp(self, gate_up: Matrices, down: Matrices, spec: MlpSpec, curve: Sequence[str] = ()) -> Any:
        *gate, up = self.linears(gate_up)
        first = gate[0] if gate else None
        numbers = list(xielu_curve([float(self.vector(name)) for name in curve])) if curve else None
        return native().Mlp(first, up, *self.linears(down), spec.activation, spec.sparsity_cutoff, numbers)

    def moe(self, region: Experts) -> Any:
        spec = region.spec
        owners = None if self.shard is None else self.shard.experts(region.ups)
        numbers: Sequence[int] = range(spec.num_experts)
        if owners is not None and self.shard is not None:
            numbers = [number for number, ranks in enumerate(owners) if self.shard.rank in ranks]
        gates = [None] * len(numbers) if region.gates is None else self._experts(region.gates, spec.expert)
        ups, downs = (self._experts(name, spec.expert) for name in (region.ups, region.downs))
        made = (native().Mlp(*parts, spec.expert.activation) for parts in zip(gates, ups, downs, strict=True))
        here = dict(zip(numbers, made, strict=True))
        experts = [here.get(number) for number in range(spec.num_experts)]
        (router,) = self.linears(region.router)
        latent = [self.linears(matrices)[0] for matrices in region.latent] if region.latent else [None, None]
        return native().Moe(
            router,
            experts,
            self._routing(region),
            shared=None if region.shared is None or spec.shared is None else self.mlp(*region.shared, spec.shared),
            shared_gate=self._optional(region.shared_gate and f"{region.shared_gate}.weight"),
            router_norm=self._router_norm(region),
            latent_in=latent[0],
            latent_out=latent[1],
            owners=owners or [],
        )

    def _experts(self, name: str, spec: MlpSpec) -> list[Any]:
        """Make one Linear per expert."""
        matrices = self.packer.experts(f"{name}.weight")
        biases = self.vector(f"{name}.bias").unbind() if spec.bias else [None] * len(matrices)
        return [
            native().Linear(matrix, bias, self._site(f"{name}.{expert}", matrix, cut_as=name), **self._cut(name))
            for expert, (matrix, bias) in enumerate(zip(matrices, biases, strict=True))
        ]

    def _routing(self, region: Experts) -> Any:
        routing = region.spec.routing
        return native().Routing(
            region.spec.num_active,
            score=routing.score,
            renormalize=routing.renormalize,
            epsilon=routing.epsilon,
            choice_bias=self._optional(region.choice_bias),
            num_groups=routing.num_groups,
            kept_groups=routing.kept_groups,
            judged_by=1 if routing.group_score == "best" else 2,
            scale=routing.scale,
            expert_scales=self._optional(region.expert_scales),
            weights_input=routing.weights_input,
            is_bias_on_logits=routing.is_bias_on_logits,
            jitter=routing.jitter,
            table=None if region.table is None else self.dense(self.weights.get(region.table)).int().contiguous(),
        )

    def _optional(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.vector(name).view(-1)

    def _router_norm(self, region: Experts) -> torch.Tensor | None:
        weight = self._optional(region.router_norm and f"{region.router_norm}.weight")
        return None if weight is None else weight * len(weight) ** -0.5
