"""Latent attention of whole long prompts in the expanded form: keys and values of each head are computed from the
entries, and torch's attention attends to them.

In the absorbed form (`latent.py`) a pair of query and key costs 2 * rank + rope multiplications per head, in the
expanded form nope + rope + value: 3.4 times fewer in DeepSeek's models, and cuDNN has kernels for it. Computing keys
and values pays from about a thousand tokens on. Heads are processed in groups, to limit the memory for their keys and
values.
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
    """Return whether torch's attention supports the expanded form of these inputs; it has no kernels for float32."""
    return inputs.queries.dtype != torch.float32


def expanded_prompt(inputs: LatentInputs, absorbed: torch.Tensor, tokens: slice, out: torch.Tensor) -> None:
    """Write the values of a prompt's `tokens` to their rows of `out` [T, heads * value_dim]. The entries are already in
    the cache; of `absorbed` [T, heads, rank + rope] only the rotated parts of the queries are read."""
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
    """Attend, [heads, L, D] each; values may be narrower, which only cuDNN supports: for others they are
    zero-padded."""
    value_dim = values.shape[2]
    params = SDPAParams(queries[None], keys[None], values[None], None, 0.0, True, False)
    if not can_use_cudnn_attention(params):
        values = functional.pad(values, (0, queries.shape[2] - value_dim))
    with sdpa_kernel(BACKENDS, set_priority=True):
        found = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale
        )
    return found[0, ..., :value_dim]
