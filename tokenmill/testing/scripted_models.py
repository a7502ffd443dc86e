"""Models without weights, for tests of everything around a model. They run in microseconds.

`ScriptedModel` computes logits as a function of position and token. `ContextModel` writes each token and its position
into the KV cache, reads the whole visible context back through the block tables, raises if a position is not where it
should be, and makes its logits depend on all of it: a block that is lost, wrongly shared or freed too early changes the
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch, Mode

NextLogits = Callable[[int, int], torch.Tensor]
"""(position, token there) → logits [vocab] of the next token"""


def count_upwards(vocab_size: int) -> NextLogits:
    """Return a rule by which the next token is the last one plus one."""
    return lambda _position, token: torch.eye(vocab_size)[(token + 1) % vocab_size] * 10.0


def follow(tokens: list[int], vocab_size: int) -> NextLogits:
    """Return a rule by which the token at position p is tokens[p], starting again after the last one."""
    return lambda position, _token: torch.eye(vocab_size)[tokens[(position + 1) % len(tokens)]] * 10.0


class ScriptedModel:
    best_logits = direct = adapter_slots = None

    def __init__(
        self,
        vocab_size: int,
        next_logits: NextLogits | None = None,
        nan_token: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        """`nan_token`: a row whose last input token is this one gets NaN logits. `step_s`: the duration of a step."""
        self.vocab_size = vocab_size
        self.layout = _layout((None,))
        self._next_logits = next_logits or count_upwards(vocab_size)
        self._nan_token = nan_token
        self._step_s = step_s

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Return [L, 2]: position and token."""
        if self._step_s:
            time.sleep(self._step_s)
        return torch.stack((batch.positions, batch.token_ids), dim=1)[batch.logit_rows].double()

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        rows = [self._row_logits(int(position), int(token)) for position, token in hidden.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _row_logits(self, position: int, token: int) -> torch.Tensor:
        if token == self._nan_token:
            return torch.full((self.vocab_size,), float("nan"))
        return self._next_logits(position, token).float()


class ContextModel:
    best_logits = direct = adapter_slots = None

    def __init__(
        self, vocab_size: int, windows: tuple[int | None, ...] = (None,), nan_token: int | None = None
    ) -> None:
        """One KV group per window. `nan_token`: rows that can see it in their context get NaN logits."""
        self.vocab_size = vocab_size
        self.layout = _layout(windows)
        self._nan_token = nan_token

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Return [L, 2]: a hash of the tokens that each token sees, and whether they include the NaN token."""
        self._write(batch, storage)
        owners = torch.bucketize(batch.logit_rows, batch.query_starts[1:].long(), right=True)
        states = [
            self._hash_context(batch, storage, int(row), int(batch.positions[token]))
            for row, token in zip(owners, batch.logit_rows, strict=True)
        ]
        return torch.tensor(states, dtype=torch.float64).view(-1, 2)

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        rows = [self._row_logits(int(state), bool(is_nan)) for state, is_nan in hidden.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _write(self, batch: ForwardBatch, storage: KVStorage) -> None:
        cache = storage.layer(0)  # every group has one layer, and all share the same storage
        for group in batch.groups:
            cache.keys.view(-1)[group.slots] = batch.token_ids.to(cache.keys.dtype)
            cache.values.view(-1)[group.slots] = batch.positions.to(cache.values.dtype)

    def _hash_context(self, batch: ForwardBatch, storage: KVStorage, row: int, position: int) -> tuple[int, bool]:
        state, has_nan = 7, False
        cache = storage.layer(0)
        for group, window in zip(batch.groups, self.layout.windows, strict=True):
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(oldest, position + 1)
            slots = group.block_tables[row].long()[seen // batch.block_size] * batch.block_size
            slots += seen % batch.block_size
            if cache.values.view(-1)[slots].long().tolist() != seen.tolist():
                raise AssertionError(f"row {row} does not find its own positions {oldest} to {position} in the cache")
            tokens = cache.keys.view(-1)[slots].long().tolist()
            has_nan = has_nan or self._nan_token in tokens
            for token in tokens:
                state = (state * 31 + token + 1) % 1_000_003
        return state, has_nan

    def _row_logits(self, state: int, is_nan: bool) -> torch.Tensor:
        if is_nan:
            return torch.full((self.vocab_size,), float("nan"))
        ids = torch.arange(self.vocab_size)
        return ((ids + 1) * (state + 1) * 7919 % 10_007).float() / 1000.0


def _layout(windows: tuple[int | None, ...]) -> KVLayout:
    fields = CacheField("keys", (1, 1), "float64"), CacheField("values", (1, 1), "float64")
    return KVLayout(tuple(CacheGroup(fields, window, (layer,)) for layer, window in enumerate(windows)))
