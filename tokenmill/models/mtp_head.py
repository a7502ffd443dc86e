"""A multi-token prediction (MTP) head (`arch/mtp.py`) as a model, whose inputs are tokens and hidden states.

    head.states = [T, H]          for each token of the next step, the target model's hidden state one token earlier
    head.forward(batch, storage)  joins them with the tokens' embeddings; the result is kept as `head.outputs`

The layer, the norm and the output projection run on the backend; the join of both inputs uses torch's ops.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.arch.mtp import MAX_KEPT_STATES
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
        """`layer`: the head's layer and final norm as a model that shares the target model's output projection."""
        self.spec = spec
        self._layer = layer
        self._table = source.get("embed.weight")  # memory-mapped: rows are read from the file when needed
        matrix = source.get("join.weight")
        is_short = matrix.quant is not None or matrix.data.dtype in (torch.bfloat16, torch.float16)
        self._matrix = dequantize(matrix, torch.bfloat16 if is_short else torch.float32)
        self._norms = [dequantize(source.get(f"join_{part}_norm.weight")) for part in ("embed", "state")]
        self.states = torch.empty(0, spec.hidden_size)
        self.outputs = self.states

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        self.outputs = self._layer.forward(batch, storage, self.join(batch.token_ids, self.states))
        return self.outputs

    def join(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Project each token's normed embedding and normed state to one vector: [T], [T, H] → [T, H]."""
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
    """Read and dequantise rows of a checkpoint's matrix, float32."""
    return dequantize(replace(table, shape=(len(numbers), table.shape[1]), data=table.data[numbers], ordered=None))


class KeptStates:
    """Hidden states of the target model's latest tokens, per runner row, kept until the MTP head has consumed them.

    row 3   first                end
            |  [n, H]             |          states of the sequence's tokens first … end - 1

    At most `MAX_KEPT_STATES` per row are kept. The head then does not see the start of a long prompt, which costs
    acceptance only: drafts are verified anyway.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(self, row: int, first: int, states: torch.Tensor) -> None:
        """Store the states of a row's tokens from `first` on, replacing those of rejected tokens at the same places."""
        begin, held = self._rows.get(row, (first, states[:0]))
        if not begin <= first <= begin + len(held):
            begin, held = first, states[:0]
        joined = torch.cat([held[: first - begin], states])
        surplus = max(0, len(joined) - MAX_KEPT_STATES)
        self._rows[row] = begin + surplus, joined[surplus:]

    def first(self, row: int) -> int | None:
        """Return the index of the first token whose state is kept; None if no state is."""
        found = self._rows.get(row)
        return None if found is None else found[0]

    def of(self, row: int, first: int, end: int) -> torch.Tensor | None:
        """Return the states of a row's tokens [first, end); None if some of them are not kept."""
        begin, held = self._rows.get(row, (0, torch.empty(0, 0)))
        return held[first - begin : end - begin] if begin <= first and end <= begin + len(held) else None

    def forget_before(self, row: int, first: int) -> None:
        begin, held = self._rows[row]
        if first > begin:
            self._rows[row] = first, held[first - begin :].clone()

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)
