"""A head that predicts one more token (`arch/mtp.py`) as a model: what a runner feeds are tokens, and beside each the
state that the model before it had one token earlier.

    head.states = [T, H]          of the tokens that are fed next, in their order
    head.forward(batch, storage)  joins them with the tokens' embeddings; head.left: what it returned, to go on with

The layer, norm and product with the head matrix are those of the backend; joining is done with torch's ops.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.arch.mtp import MOST_STATES
from tokenmill.arch.spec import ModelSpec
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import BestLogits, StagedModel, WeightReader
from tokenmill.ops.batch import ForwardBatch, Mode
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize


class MtpHead:
    direct = None
    adapter_slots = None

    def __init__(self, spec: ModelSpec, source: WeightReader, layer: StagedModel) -> None:
        """`layer`: a model of the head's layer and final norm, with the model's own head matrix."""
        self.spec = spec
        self._layer = layer
        self._table = source.get("embed.weight")  # rows are read from the file's pages: nothing is kept of it
        matrix = source.get("join.weight")
        is_short = matrix.quant is not None or matrix.data.dtype in (torch.bfloat16, torch.float16)
        self._matrix = dequantize(matrix, torch.bfloat16 if is_short else torch.float32)
        self._norms = [dequantize(source.get(f"join_{part}_norm.weight")) for part in ("embed", "state")]
        self.states = torch.empty(0, spec.hidden_size)
        self.left = self.states

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        self.left = self._layer.forward(batch, storage, self.joined(batch.token_ids, self.states))
        return self.left

    def joined(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[T], [T, H] → [T, H]"""
        embedded = _rows(self._table, token_ids) * self.spec.embedding_scale
        parts = zip((embedded, states.float()), self._norms, strict=True)
        normed = [torch.nn.functional.rms_norm(part, norm.shape, norm, self.spec.norm_eps) for part, norm in parts]
        both = torch.cat(normed, dim=-1).to(self._matrix.dtype)
        return torch.nn.functional.linear(both, self._matrix).float()

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        return self._layer.logits(hidden, mode)

    @property
    def best_logits(self) -> BestLogits | None:
        return self._layer.best_logits


def _rows(table: RawTensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix as the file has it, in float32."""
    return dequantize(replace(table, shape=(len(numbers), table.shape[1]), data=table.data[numbers], ordered=None))


class KeptStates:
    """The states of a model's latest tokens, of each row of its runner, until its head has taken them.

    row 3   first                end
            |  [n, H]             |          states of the sequence's tokens first … end - 1

    Of a prompt at most `MOST_STATES` are kept: a head attends to what it has seen, and drafts need not be right.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(self, row: int, first: int, states: torch.Tensor) -> None:
        """Keep the states of a row's tokens from `first` on, and drop those of tokens that were fed there before."""
        begin, held = self._rows.get(row, (first, states[:0]))
        if not begin <= first <= begin + len(held):
            begin, held = first, states[:0]
        joined = torch.cat([held[: first - begin], states])
        surplus = max(0, len(joined) - MOST_STATES)
        self._rows[row] = begin + surplus, joined[surplus:]

    def first(self, row: int) -> int | None:
        """The first token of a row whose state is kept; None: there is none."""
        found = self._rows.get(row)
        return None if found is None else found[0]

    def of(self, row: int, first: int, end: int) -> torch.Tensor | None:
        """The states of a row's tokens from `first` to before `end`; None where some are not kept."""
        begin, held = self._rows.get(row, (0, torch.empty(0, 0)))
        return held[first - begin : end - begin] if begin <= first and end <= begin + len(held) else None

    def forget_before(self, row: int, first: int) -> None:
        begin, held = self._rows[row]
        if first > begin:
            self._rows[row] = first, held[first - begin :].clone()

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)
