"""Predicted sizes of mixed-type GGUF files: the types that llama.cpp's quantiser chooses for each tensor.

    Q4_K_M    most matrices Q4_K; the value and down projections Q6_K in the first and last eighth of the layers and in
              every third layer between; the head Q6_K, and the embedding too if it is tied to the head
    others    one type for all matrices

If a row is not a multiple of a type's block size, the next larger type with a smaller block is used; norms, biases and
routers are float32. Fused projections (Phi 3) count like their parts. The types of other mixes are not modelled.
"""

from __future__ import annotations

from tokenmill.arch.cost import WeightParts
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.spec import ModelSpec, TensorSpec
from tokenmill.arch.tensors import tensors_of

TYPE_WITH_SMALLER_BLOCK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
VOCABULARY_BYTES_PER_TOKEN = 40  # its text, type and merge
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K")}  # type of most matrices, type of the more sensitive ones


def mixed_parts(spec: ModelSpec, mix: str, *, repeats_head: bool = False) -> WeightParts:
    """Return the bytes of a model's weights in a file of this mix. `repeats_head`: the file stores a separate head
    although the model's head is tied to its embedding."""
    usual, better = MIXES.get(mix, (mix, mix))
    sizes = {"embedding": 0, "experts": 0, "rest": 0, "tables": 0}
    for name, tensor in tensors_of(spec).items():
        is_head = name == "head.weight" or (name == "embed.weight" and spec.tied_head and not repeats_head)
        is_better = is_head or _has_more_bits(name, spec.num_layers)
        sizes[_part(name)] += stored_bytes(tensor, better if is_better else usual)
    if repeats_head and spec.tied_head:
        sizes["rest"] += stored_bytes(TensorSpec("", (spec.vocab_size, spec.hidden_size), "linear"), better)
    return WeightParts(**sizes)


def file_bytes(parts: WeightParts, vocab_size: int) -> int:
    """Return the bytes of the file, its vocabulary included."""
    return parts.total + vocab_size * VOCABULARY_BYTES_PER_TOKEN


def stored_bytes(tensor: TensorSpec, kind: str) -> int:
    num_values = 1
    for size in tensor.shape:
        num_values *= size
    if tensor.kind == "vector" or tensor.name.endswith("router.weight"):
        return 4 * num_values
    chosen = GGML_TYPE_BY_NAME[kind]
    if tensor.shape[-1] % chosen.block_size and kind in TYPE_WITH_SMALLER_BLOCK:
        chosen = GGML_TYPE_BY_NAME[TYPE_WITH_SMALLER_BLOCK[kind]]
    return num_values // chosen.block_size * chosen.block_bytes


def _has_more_bits(name: str, num_layers: int) -> bool:
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
