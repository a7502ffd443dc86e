"""Multi-token-prediction (MTP) heads: DeepSeek V3, GLM-4.5 and later, Qwen3-Next and Qwen3.5.

    state of token t (normed) ── norm ──┐
                                        join ── one layer of the model ── norm ── the model's head ──► token t + 2
    embedding of token t + 1 ── norm ───┘

An MTP head is a model of one layer; its input joins token embeddings with hidden states of the main model, whose
embedding and head matrix it shares. It is loaded only as a proposer of draft tokens (`--speculate mtp`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tokenmill.arch.families import BY_NAME
from tokenmill.arch.family import GGUF_NEXTN, Family, MtpNames
from tokenmill.arch.spec import Gqa, LayerSpec, Mla, ModelSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import UnsupportedModel

MAX_KEPT_STATES = 512  # hidden states of a prompt's last tokens that are kept until the head processes them


def mtp_head(spec: ModelSpec) -> ModelSpec:
    """Return the MTP head of a model as a model of its own; refuse families whose heads are not implemented."""
    family = BY_NAME.get(spec.family)
    if family is None or family.mtp is None:
        raise UnsupportedModel(f"{spec.family}: multi-token-prediction (MTP) heads are not implemented")
    return replace(spec, layers=(_layer(spec),), layer_numbers=(), num_extra_layers=0, joins_states=True)


def has_mtp_head(spec: ModelSpec) -> bool:
    """Return whether MTP heads of this family are implemented; a checkpoint may still lack them."""
    family = BY_NAME.get(spec.family)
    return family is not None and family.mtp is not None


def first_extra_layer(spec: ModelSpec) -> int:
    """Return the checkpoint's number of the first layer after the model's last."""
    return 1 + max(max(pair) for pair in spec.layer_numbers) if spec.layer_numbers else spec.num_layers


def _layer(spec: ModelSpec) -> LayerSpec:
    """Return the model's last attention layer, which has the structure of the head's layer in these families."""
    attending = [layer for layer in spec.layers if isinstance(layer.mixer, Gqa | Mla)]
    indexed = [layer for layer in attending if isinstance(layer.mixer, Mla) and layer.mixer.indexer is not None]
    return (indexed or attending)[-1]


def mtp_names(family: Family, *, is_gguf: bool) -> MtpNames:
    """Return the tensor names of a family's MTP head in a checkpoint."""
    assert family.mtp is not None, "see `mtp_head`"
    return GGUF_NEXTN if is_gguf else family.mtp


def mtp_parameters(spec: ModelSpec) -> int:
    """Return the number of an MTP head's own parameters, without the shared embedding and head matrix."""
    shared = ("embed.weight", "head.weight", "head.bias")
    sizes = (tensor.shape for name, tensor in tensors_of(mtp_head(spec)).items() if name not in shared)
    return sum(map(prod, sizes))
