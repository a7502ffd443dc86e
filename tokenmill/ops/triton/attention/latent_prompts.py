"""Latent attention of whole long prompts, in its expanded form: each head's keys and values are made of the entries,
and torch's attention looks at them.

In the absorbed form (`latent.py`) a pair of query and key costs 2 * rank + rope products a head, in the expanded one
nope + rope + value: 3.4 times fewer in DeepSeek's models, and it is what cuDNN has kernels for. Making keys and values
pays from about a thousand tokens on. Heads are taken some at a time, so that their keys and values need no more memory
than other things that are expanded for a step.
"""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from tokenmill.arch.packed_formats import EXPANDED_BYTES
from tokenmill.ops.interface import LatentInputs
from tokenmill.ops.triton.attention.prefill import BACKENDS


def can_be_expanded(inputs: LatentInputs) -> bool:
    """Return whether torch's attention computes prompts in the expanded form; float32 has no such kernels."""
    return inputs.queries.dtype != torch.float32


def expanded_prompt(inputs: LatentInputs, absorbed: torch.Tensor, tokens: slice, out: torch.Tensor) -> None:
    """Values of a prompt whose tokens are `tokens` into their rows of `out` [T, heads * value_dim]. Its entries are in
    the cache; of `absorbed` [T, heads, rank + rope] only the rotated parts of queries are read."""
    (num_heads, rank, nope), value_dim = inputs.absorb.shape, inputs.expand.shape[1]
    queries = inputs.queries[tokens].unflatten(1, (num_heads, -1))
    turned, kept = absorbed[tokens, :, rank:], inputs.latents.flatten(0, 1)[inputs.slots[tokens]].to(queries.dtype)
    latent, key = kept[:, :rank], kept[:, rank:]
    length, width = len(queries), queries.shape[2]
    own = out[tokens].unflatten(1, (num_heads, value_dim))
    each = max(1, EXPANDED_BYTES // (length * (2 * width + value_dim) * queries.element_size()))
    for first in range(0, num_heads, each):
        heads = slice(first, min(first + each, num_heads))
        keys = queries.new_empty(heads.stop - first, length, width)
        keys[..., :nope] = latent @ inputs.absorb[heads]
        keys[..., nope:] = key
        values = functional.linear(latent, inputs.expand[heads].flatten(0, 1)).unflatten(1, (-1, value_dim))
        asked = torch.cat((queries[:, heads, :nope], turned[:, heads]), dim=2)
        found = _attended(asked.transpose(0, 1), keys, values.transpose(0, 1), inputs.scale)
        own[:, heads] = found.transpose(0, 1)


def _attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, L, D] each; values may be narrower, which cuDNN takes as it is and others only with zeros behind"""
    value_dim = values.shape[2]
    params = SDPAParams(queries[None], keys[None], values[None], None, 0.0, True, False)
    if not can_use_cudnn_attention(params):
        values = functional.pad(values, (0, queries.shape[2] - value_dim))
    with sdpa_kernel(BACKENDS, set_priority=True):
        found = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale
        )
    return found[0, ..., :value_dim]
