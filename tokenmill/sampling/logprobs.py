"""Log-probabilities of the model's own distribution, before any sampling parameter (vLLM's raw_logprobs).

Tokens are ordered by logit, and equal logits by id, lowest first; `rank` and `top_ids` both follow that order, so they
agree with each other and with greedy decoding, and do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.sampling.fixed_point import aligned_rows, topk
from tokenmill.types import TokenLogprobs

_SLICE_ELEMENTS = 1 << 22  # logits processed at once: 16 MB of float32
_RANK_SEARCHED = 64


def token_logprobs(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    """Return logprob and rank of each row's token, and its nums[i] most likely alternatives; logits are [S, vocab]."""
    rows_at_once = max(1, _SLICE_ELEMENTS // logits.shape[-1])
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), rows_at_once):
        part = slice(start, start + rows_at_once)
        found += _slice_logprobs(logits[part], token_ids[part], nums[part])
    return found


def prompt_logprobs(logits: Tensor, target_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
    """Return the logprobs of prompt tokens: logits [T, vocab] at T positions, and the tokens that follow them."""
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
    """Return 1 + the number of tokens ordered before the chosen one, int64 [S]."""
    own = logits.gather(1, chosen)
    top, _ = topk(logits, min(_RANK_SEARCHED, logits.shape[-1]))
    ranks = 1 + (top > own).sum(dim=-1)
    # counted among the best few only, which is exact if the token is one of them and no other has the same logit
    inexact = (((top == own).sum(dim=-1) > 1) | (own <= top[:, -1:]).squeeze(1)).nonzero().squeeze(1)
    if inexact.numel():
        ranks[inexact] = _counted_ranks(logits[inexact], chosen[inexact], own[inexact])
    return ranks


def _counted_ranks(logits: Tensor, chosen: Tensor, own: Tensor) -> Tensor:
    is_lower_id = torch.arange(logits.shape[-1], device=logits.device) < chosen
    return 1 + ((logits > own) | ((logits == own) & is_lower_id)).sum(dim=-1)


def _top_ids(logits: Tensor, num: int) -> Tensor:
    """Return the ids of the `num` best tokens, best first: int64 [S, num]."""
    if num == 0:
        return torch.zeros(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    # one more than requested, to detect a tie of the last one with the next token
    values, ids = topk(logits, min(num + 1, logits.shape[-1]))
    ids = ids[:, :num].contiguous()
    tied = (values[:, 1:] == values[:, :-1]).any(dim=-1).nonzero().squeeze(1)
    if tied.numel():
        ids[tied] = _top_ids_with_ties(logits[tied], num)
    return ids


def _top_ids_with_ties(logits: Tensor, num: int) -> Tensor:
    """Return the ids of the `num` best tokens with ties broken by id, which topk does not do.

    The high half of a sort key is the float's bits as an integer of the same order; the low half is the reversed id.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: minus zero becomes zero
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = ordered * 2**32 + (2**32 - 1 - ids)
    return 2**32 - 1 - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
