"""Log-probabilities of the model's own distribution: of the logits as they came, before any parameter (vLLM's
raw_logprobs).

Tokens are ordered by logit, and equals by id, lowest first; `rank` and `top_ids` both follow that order, so they agree
with each other, with greedy decoding, and with themselves in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.sampling.fixed_point import aligned_rows
from tokenmill.sampling.topk import best
from tokenmill.types import TokenLogprobs

_SLICE_ELEMENTS = 1 << 22  # a slice of logits worked on at once: 16 MB of float32
_RANK_LOOK = 64


def token_logprobs(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [S, vocab] its token's logprob and rank, and the nums[i] most likely alternatives."""
    rows_at_once = max(1, _SLICE_ELEMENTS // logits.shape[-1])
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), rows_at_once):
        part = slice(start, start + rows_at_once)
        found += _slice_logprobs(logits[part], token_ids[part], nums[part])
    return found


def prompt_logprobs(logits: Tensor, target_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
    """For logits [T, vocab] at T positions and the tokens that really follow them."""
    return token_logprobs(logits, target_ids, [num] * len(target_ids))


def _slice_logprobs(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    vocab = logits.shape[-1]
    logits = aligned_rows(logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)  # [S, 1]
    ranks = _ranks(logits, chosen).tolist()
    values = logprobs.gather(1, chosen).squeeze(1).tolist()
    top = _top_ids(logits, min(max(nums), vocab))
    top_ids, top_values = top.tolist(), logprobs.gather(1, top).tolist()
    return [
        TokenLogprobs(token, value, rank, ids[:num], alternatives[:num])
        for token, value, rank, ids, alternatives, num in zip(
            token_ids, values, ranks, top_ids, top_values, nums, strict=True
        )
    ]


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """1 + how many tokens come before the chosen one: int64 [S]."""
    own = logits.gather(1, chosen)
    top, _ = best(logits, min(_RANK_LOOK, logits.shape[-1]))
    ranks = 1 + (top > own).sum(dim=-1)
    # counted among the best few only, which says it all if the token is one of them and has no equal
    unsure = (((top == own).sum(dim=-1) > 1) | (own <= top[:, -1:]).squeeze(1)).nonzero().squeeze(1)
    if unsure.numel():
        ranks[unsure] = _counted_ranks(logits[unsure], chosen[unsure], own[unsure])
    return ranks


def _counted_ranks(logits: Tensor, chosen: Tensor, own: Tensor) -> Tensor:
    is_lower_id = torch.arange(logits.shape[-1], device=logits.device) < chosen
    return 1 + ((logits > own) | ((logits == own) & is_lower_id)).sum(dim=-1)


def _top_ids(logits: Tensor, num: int) -> Tensor:
    """Ids of the `num` best tokens, best first: int64 [S, num]."""
    if num == 0:
        return torch.zeros(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    # one more than asked: an equal just behind the last one matters too
    values, ids = best(logits, min(num + 1, logits.shape[-1]))
    ids = ids[:, :num].contiguous()
    tied = (values[:, 1:] == values[:, :-1]).any(dim=-1).nonzero().squeeze(1)
    if tied.numel():
        ids[tied] = _top_ids_of_equals(logits[tied], num)
    return ids


def _top_ids_of_equals(logits: Tensor, num: int) -> Tensor:
    """topk leaves equals in any order. So that they have one, the float's bits, turned into a whole number that sorts
    alike, become the high half of a key and the id, reversed, the low half.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: minus zero becomes zero
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = ordered * 2**32 + (2**32 - 1 - ids)
    return 2**32 - 1 - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
