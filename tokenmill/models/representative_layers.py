"""A model in short: one layer of each kind, for whoever wants to know what steps launch, or how much memory they take,
and not what comes out.

Layers are of one kind where nothing but numbers tells them apart: neither their specs nor the shapes and forms of their
weights. What a layer meets depends on the one before it too (whether anything is left to be added to the residual
stream), and the first and the last one have tasks of their own. So every pair of neighbouring kinds is there once:

    local  local  local  global  local  local  local  global  local  local         a model
    local                                      local  global  local  local         in short
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any

import torch

from tokenmill.models.attention import Attention
from tokenmill.models.decoder import Decoder
from tokenmill.models.layer import Layer
from tokenmill.models.mlp import Mlp
from tokenmill.models.moe import Moe
from tokenmill.models.protocol import Model

PARTS = (Layer, Attention, Mlp, Moe)
NOT_OF_A_KIND = ("ops", "layer", "group")  # the same in all layers, or where a layer's keys and values lie


def representative_layers(model: Model) -> Model:
    """Its layers have the same weights and write into the same places. Models of other makes are taken whole."""
    if not isinstance(model, Decoder):
        return model
    shorter = copy(model)
    shorter.layers = one_of_each(model.layers)
    return shorter


def one_of_each(layers: Sequence[Layer]) -> list[Layer]:
    """Of equal pairs the last one, so that the model's last layer is there."""
    kinds = [kind_of(layer) for layer in layers]
    seconds = {pair: number for number, pair in enumerate(pairwise(kinds), start=1)}
    taken = {0, *(number - 1 for number in seconds.values()), *seconds.values()}
    return [layers[number] for number in sorted(taken)]


def kind_of(part: Any) -> Hashable:
    """Of a layer, a part of it, or a weight: the same for two that differ in numbers only"""
    if isinstance(part, torch.Tensor):
        return part.dtype, part.shape, part.stride(), part.data_ptr() % 16
    if isinstance(part, (tuple, list)):
        return tuple(map(kind_of, part))
    if isinstance(part, PARTS) or is_dataclass(part):
        found = vars(part).items()
        return type(part), *((name, kind_of(value)) for name, value in found if name not in NOT_OF_A_KIND)
    kind: Hashable = part
    return kind
