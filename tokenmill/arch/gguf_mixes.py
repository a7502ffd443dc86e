"""Sizes of GGUF files of mixed types before there is one: the types that llama.cpp's quantiser gives to tensors.

    Q4_K_M    most matrices Q4_K; values and the down projection Q6_K in the first and last eighth of the layers and in
              every third one between; the head Q6_K, and so the embedding where it is the head too
    others    one type for all matrices

A row that is no multiple of a type's block is stored in the next larger type with a smaller block; norms, biases and
routers are float32. Fused projections (Phi 3) count as their parts do. Types of other mixes are not known here.
"""

from __future__ import annotations

from tokenmill.arch.cost import WeightParts
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.spec import ModelSpec, TensorSpec
from tokenmill.arch.tensors import tensors_of

SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
VOCABULARY_BYTES = 40  # of a token: its text, its kind, its merge
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K")}  # most matrices, those that matter more


def mixed_parts(spec: ModelSpec, mix: str, *, repeats_head: bool = False) -> WeightParts:
    """Bytes of a model's weights in a file of this mix. `repeats_head`: the file has a head of its own although the
    model's is its embedding."""
    usual, better = MIXES.get(mix, (mix, mix))
    sizes = {"embedding": 0, "experts": 0, "rest": 0, "tables": 0}
    for name, tensor in tensors_of(spec).items():
        is_head = name == "head.weight" or (name == "embed.weight" and spec.tied_head and not repeats_head)
        is_better = is_head or _is_better(name, spec.num_layers)
        sizes[_part(name)] += stored_bytes(tensor, better if is_better else usual)
    if repeats_head and spec.tied_head:
        sizes["rest"] += stored_bytes(TensorSpec("", (spec.vocab_size, spec.hidden_size), "linear"), better)
    return WeightParts(**sizes)


def file_bytes(parts: WeightParts, vocab_size: int) -> int:
    """Bytes of the file, its vocabulary included."""
    return parts.total + vocab_size * VOCABULARY_BYTES


def stored_bytes(tensor: TensorSpec, kind: str) -> int:
    num_values = 1
    for size in tensor.shape:
        num_values *= size
    if tensor.kind == "vector" or tensor.name.endswith("router.weight"):
        return 4 * num_values
    chosen = GGML_TYPE_BY_NAME[kind]
    if tensor.shape[-1] % chosen.block_size and kind in SMALLER_BLOCKS:
        chosen = GGML_TYPE_BY_NAME[SMALLER_BLOCKS[kind]]
    return num_values // chosen.block_size * chosen.block_bytes


def _is_better(name: str, num_layers: int) -> bool:
    """Return whether llama.cpp spends more bits on this matrix."""
    kind = name.rsplit(".", 2)[-2]
    if kind not in ("v", "down") or not name.startswith("layers."):
        return False
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _part(name: str) -> str:
    if name.startswith("layer_inputs.embed"):
        return "tables"
    return "embedding" if name == "embed.weight" else "experts" if ".experts." in name else "rest"
