"""Matrices quantised by GPTQ and AWQ: integers with a scale and a zero point for each group of columns.

A matrix [out, in] is stored transposed, with as many values per int32 as fit (eight of 4 bits):

    GPTQ   qweight [in / 8, out], eight inputs per word     qzeros [groups, out / 8], stored minus one (not in v2)
    AWQ    qweight [in, out / 8], eight outputs per word in the order 0 2 4 6 1 3 5 7      qzeros in the same order
    both   scales [groups, out]        value = scale * (q - zero)

GPTQ has 2, 3, 4 or 8 bits (32 values of 3 bits take 3 words), AWQ 4 or 8 (four values in the order 0 2 1 3). If the
columns of a group are not neighbours (GPTQ's act order, `g_idx`), the result has dequantized values, and also blocks
with the columns sorted by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.errors import DamagedFile
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.scaled_blocks import Groups, in_blocks, integer_blocks
from tokenmill.weights.stored_matrix import StoredMatrix, refuse_parts

AWQ_ORDERS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
WORD_BITS = 32


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    stems = [name.removesuffix(".qweight") for name in checkpoint.shapes if name.endswith(".qweight")]
    if stems and not config:
        raise DamagedFile(
            f"{checkpoint.place} contains GPTQ or AWQ tensors, but its config.json has no quantization_config",
            hint="use the config.json that belongs to these files",
        )
    is_awq = config.get("quant_method") == "awq" or str(config.get("packing_format")).endswith("awq")
    zeros_are_low = not is_awq and config.get("checkpoint_format") != "gptq_v2"
    layout = _Layout(checkpoint, int(config.get("bits") or config.get("w_bit") or 4), is_awq, zeros_are_low)
    return {f"{stem}.weight": layout.matrix(stem) for stem in stems}


@dataclass(frozen=True)
class _Layout:
    checkpoint: SafetensorsCheckpoint
    bits: int
    is_awq: bool
    zeros_are_low: bool

    def matrix(self, stem: str) -> StoredMatrix:
        parts = tuple(stem + part for part in _PARTS if stem + part in self.checkpoint.shapes)
        return StoredMatrix(parts, self._shape(stem), lambda name: integer_blocks(name, self._groups(stem)))

    def _shape(self, stem: str) -> tuple[int, int]:
        """Return [out, in] after checking that the shapes of all parts match."""
        shapes = [self.checkpoint.shapes.get(stem + part, ()) for part in _PARTS[:3]]
        if any(len(shape) != 2 for shape in shapes):
            raise DamagedFile(f"{self.checkpoint.place}: {stem!r} lacks one of {', '.join(_PARTS[:3])}")
        (first, second), zeros, (num_groups, num_out) = shapes
        if self.is_awq:
            num_in, packed_out = first, second * WORD_BITS // self.bits
        else:
            num_in, packed_out = first * WORD_BITS // self.bits, second
        packed_zeros = (num_groups, num_out * self.bits // WORD_BITS)
        if packed_out != num_out or zeros != packed_zeros or num_in % max(1, num_groups):
            refuse_parts(self.checkpoint.place, stem, qweight=shapes[0], qzeros=zeros, scales=shapes[2])
        return num_out, num_in

    def _groups(self, stem: str) -> Groups:
        _, num_in = self._shape(stem)
        words = self.checkpoint.tensor(f"{stem}.qweight")
        if self.is_awq:
            codes = self._reordered(unpacked(words, self.bits)).t()
        else:
            codes = unpacked(words.t().contiguous(), self.bits)
        zeros = unpacked(self.checkpoint.tensor(f"{stem}.qzeros"), self.bits)
        zeros = self._reordered(zeros) if self.is_awq else zeros
        # Stored minus one, a zero point of 0 has become the highest code.
        low = (zeros.int() + 1) % (1 << self.bits) if self.zeros_are_low else zeros
        scales = self.checkpoint.tensor(f"{stem}.scales").t()
        owners = self._owners(stem, num_in, scales.shape[1])
        return Groups(codes.contiguous(), self.bits, low.t().contiguous(), scales.contiguous(), owners)

    def _reordered(self, values: torch.Tensor) -> torch.Tensor:
        order = inverse(AWQ_ORDERS[self.bits])
        return in_blocks(values, len(order))[..., order].flatten(-2)

    def _owners(self, stem: str, num_in: int, num_groups: int) -> torch.Tensor | None:
        if f"{stem}.g_idx" not in self.checkpoint.shapes:
            return None
        owners = self.checkpoint.tensor(f"{stem}.g_idx").long()
        if owners.shape != (num_in,) or int(owners.min()) < 0 or int(owners.max()) >= num_groups:
            raise DamagedFile(
                f"{self.checkpoint.place}: {stem}.g_idx does not assign {num_in} columns to {num_groups} groups"
            )
        return owners


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [..., n] to uint8 [..., 32n / bits]: values without gaps, lowest bits first."""
    words = words if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)
    pieces = words.contiguous().view(torch.uint8)  # [..., 4n]
    if bits == 8:
        return pieces
    if bits in (2, 4):
        return torch.stack([(pieces >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)], dim=-1).flatten(-2)
    shifts = torch.arange(8, dtype=torch.uint8)
    single = ((pieces.unsqueeze(-1) >> shifts) & 1).flatten(-2)  # one bit per byte
    values = in_blocks(single[..., : single.shape[-1] // bits * bits], bits)
    return (values << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def inverse(order: Sequence[int]) -> list[int]:
    return [order.index(index) for index in range(len(order))]
