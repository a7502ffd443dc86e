"""Roles of several cores: prefill, decode, or both.

    any        computes prompts and answers
    prefill    computes prompts alone; what it has computed is taken by others, block by block
    decode     computes answers; a long prompt comes to it computed, so that no prompt holds up its streams

A prompt for a decoding core is first given to a prefilling one, as a request for no tokens; then the request goes to
the decoding core with that one's address, and the blocks are pulled by name. There is nothing else to it: what can't be
pulled is computed, and where no core of a kind is left, the others do its work.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from tokenmill.errors import InvalidConfig
from tokenmill.params import SamplingParams
from tokenmill.types import Request

Role = Literal["any", "prefill", "decode"]

LEAST_PREFILLED = 64  # tokens to compute: below that a decoding core does so itself


def read_roles(given: str, num_replicas: int) -> list[Role]:
    """The role of each replica, from names with commas between; InvalidConfig says what is wrong with them."""
    roles = [name.strip() for name in given.split(",")]
    for name in roles:
        if name not in get_args(Role):
            raise InvalidConfig(f"no replica can have the role {name!r}: any, prefill or decode", param="roles")
    if len(roles) != num_replicas:
        raise InvalidConfig(f"{len(roles)} roles were given for {num_replicas} replicas", param="roles")
    if "prefill" in roles and not {"any", "decode"} & set(roles):
        raise InvalidConfig(
            "replicas that only compute prompts can't answer requests", param="roles", hint="add one that decodes"
        )
    if "decode" in roles and not {"any", "prefill"} & set(roles):
        raise InvalidConfig("replicas for answers alone get no prompts", param="roles", hint="add one that prefills")
    return [name for role in roles for name in get_args(Role) if name == role]


def prefill_request(request: Request, request_id: str) -> Request:
    """A request for the prompt of another one, and nothing else."""
    return msgspec.structs.replace(request, request_id=request_id, params=SamplingParams(), max_tokens=0, given=[])


def prepared_request(request: Request, request_id: str, block_size: int, fetch_from: str) -> Request:
    """Make a request for all full blocks of another one's tokens, given ones included, and one token more: a request
    must have one to compute."""
    tokens = [*request.prompt_token_ids, *(token for given in request.given for token in given.token_ids)]
    num_tokens = (len(tokens) - 1) // block_size * block_size + 1
    blocks = msgspec.structs.replace(request, prompt_token_ids=tokens[:num_tokens], fetch_from=fetch_from)
    return prefill_request(blocks, request_id)


def may_be_prefilled(request: Request) -> bool:
    """Tell whether a prompt may be computed elsewhere: not where something is wanted of its every position."""
    return request.pooling is None and request.params.prompt_logprobs is None
