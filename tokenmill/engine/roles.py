"""Roles of cores for disaggregated prefill: prefill, decode, or both.

    any        computes prompts and answers
    prefill    computes prompts only; other cores fetch its KV blocks
    decode     computes answers; long prompts are computed by another core, so that they do not delay its streams

A request for a decoding core is first sent to a prefilling core as a request for no tokens; then it is sent to the
decoding core with the first core's address, and the decoding core fetches the prompt's blocks by their hashes. Blocks
that can't be fetched are computed, and if no core of one role is left, the other cores do its work.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from tokenmill.errors import InvalidConfig
from tokenmill.params import SamplingParams
from tokenmill.types import Request

Role = Literal["any", "prefill", "decode"]

MIN_PREFILL_TOKENS = 64  # tokens to compute: shorter prompts are computed by the decoding core itself


def read_roles(text: str, num_replicas: int) -> list[Role]:
    """Parse the comma-separated roles of the replicas; raise InvalidConfig if they are invalid."""
    roles = [name.strip() for name in text.split(",")]
    for name in roles:
        if name not in get_args(Role):
            raise InvalidConfig(f"invalid role {name!r}: use any, prefill or decode", param="roles")
    if len(roles) != num_replicas:
        raise InvalidConfig(f"got {len(roles)} roles for {num_replicas} replicas", param="roles")
    if "prefill" in roles and not {"any", "decode"} & set(roles):
        raise InvalidConfig(
            "replicas with the role prefill can't generate answers", param="roles", hint="add one that decodes"
        )
    if "decode" in roles and not {"any", "prefill"} & set(roles):
        problem = "replicas with the role decode need another one to compute prompts"
        raise InvalidConfig(problem, param="roles", hint="add one that prefills")
    return [name for role in roles for name in get_args(Role) if name == role]


def prefill_request(request: Request, request_id: str) -> Request:
    """Return a request that only computes the prompt of another request."""
    return msgspec.structs.replace(request, request_id=request_id, params=SamplingParams(), max_tokens=0, progress=[])


def prepared_request(request: Request, request_id: str, block_size: int, fetch_from: str) -> Request:
    """Return a request that computes all full blocks of another request's prompt and output so far. It has one token
    more, because a request must have a token to compute."""
    tokens = [*request.prompt_token_ids, *(token for one in request.progress for token in one.token_ids)]
    num_tokens = (len(tokens) - 1) // block_size * block_size + 1
    blocks = msgspec.structs.replace(request, prompt_token_ids=tokens[:num_tokens], fetch_from=fetch_from)
    return prefill_request(blocks, request_id)


def may_be_prefilled(request: Request) -> bool:
    """Tell whether a prompt may be computed on another core: not if a result for each of its positions is requested."""
    return request.pooling is None and request.params.prompt_logprobs is None
