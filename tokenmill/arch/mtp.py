"""Heads that predict one more token (multi-token prediction): DeepSeek V3, GLM-4.5 and later, Qwen3-Next and Qwen3.5.

    state of token t (normed) ── norm ──┐
                                        join ── one layer of the model ── norm ── the model's head ──► token t + 2
    embedding of token t + 1 ── norm ───┘

A head is a model of one layer whose tokens enter joined with states of the model that it belongs to; embedding and head
matrix are that model's. It is read only where it is asked for: as a proposer of draft tokens (`--speculate mtp`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tokenmill.arch.families import BY_NAME
from tokenmill.arch.family import GGUF_NEXTN, Family, MtpNames
from tokenmill.arch.spec import Gqa, LayerSpec, Mla, ModelSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import UnsupportedModel

MOST_STATES = 512  # of a prompt's tokens, that are kept for a head until it takes them


def mtp_head(spec: ModelSpec) -> ModelSpec:
    """The head of a model as a model of its own; refused by name where its family's heads are not implemented."""
    family = BY_NAME.get(spec.family)
    if family is None or family.mtp is None:
        raise UnsupportedModel(f"{spec.family}: heads that predict further tokens (MTP) are not implemented")
    return replace(spec, layers=(_layer(spec),), layer_numbers=(), num_extra_layers=0, joins_states=True)


def has_mtp_head(spec: ModelSpec) -> bool:
    """Tell whether the heads of such models are implemented; a checkpoint may still lack them."""
    family = BY_NAME.get(spec.family)
    return family is not None and family.mtp is not None


def first_extra_layer(spec: ModelSpec) -> int:
    """The checkpoint's number of the layer behind the last one."""
    return 1 + max(max(pair) for pair in spec.layer_numbers) if spec.layer_numbers else spec.num_layers


def _layer(spec: ModelSpec) -> LayerSpec:
    """The last layer of the model that attends: what heads of these families are made of."""
    attending = [layer for layer in spec.layers if isinstance(layer.mixer, Gqa | Mla)]
    indexed = [layer for layer in attending if isinstance(layer.mixer, Mla) and layer.mixer.indexer is not None]
    return (indexed or attending)[-1]


def mtp_names(family: Family, *, is_gguf: bool) -> MtpNames:
    """Where a checkpoint of a family that has a head has it."""
    assert family.mtp is not None, "see `mtp_head`"
    return GGUF_NEXTN if is_gguf else family.mtp


def mtp_parameters(spec: ModelSpec) -> int:
    """Numbers that a model's head has beside embedding and head matrix, which it shares."""
    shared = ("embed.weight", "head.weight", "head.bias")
    sizes = (tensor.shape for name, tensor in tensors_of(mtp_head(spec)).items() if name not in shared)
    return sum(map(prod, sizes))
