"""Makes the scheduler's state of a request: the sequences it needs and how their results are output.

A request that could never run, even alone, is refused here; all others wait until there is room (`admission.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.errors import InvalidRequest
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.outputs import PooledOutput, StreamedOutputs
from tokenmill.scheduler.request import OutputMode, RequestState, Sequence, SequenceGroup
from tokenmill.scheduler.tenants import TenantAccount
from tokenmill.types import Request, RowInit


def build_request_state(
    request: Request,
    number: int,
    account: TenantAccount,
    cache: KVCache,
    num_rows: int,
    continues: Callable[[RowInit], bool],
) -> RequestState:
    state = RequestState(request, number, account)
    state.output_mode = _output_mode(state)
    chain = cache.chain(request.cache_salt, request.adapter)
    sequences = [Sequence(state, index, chain.fresh()) for index in range(state.num_sequences)]
    # Beams choose on the host what comes next.
    chooses_on_host = state.output_mode.holds_back
    state.continues = state.draws_tokens and not chooses_on_host and continues(sequences[0].row_init())
    if request.params.beam:
        SequenceGroup(state, sequences[:1], [], num_rows=len(sequences))  # beams branch off the first one
        return state
    if any(given.token_ids or given.is_finished for given in request.given):
        _resume(state, sequences)
        return state
    num_rows = most_rows(request, num_rows)
    SequenceGroup(state, sequences[:1], sequences[1:num_rows], num_rows=min(len(sequences), num_rows))
    for sequence in sequences[num_rows:]:  # more samples than rows: the others run as rows come free
        SequenceGroup(state, [sequence], [], num_rows=1)
    return state


def _resume(state: RequestState, sequences: list[Sequence]) -> None:
    """Go on with samples that another engine has begun: each on its own, as if it had been preempted there."""
    for sequence, given in zip(sequences, state.request.given, strict=True):
        if not given.is_finished:
            sequence.resume(given)
            SequenceGroup(state, [sequence], [], num_rows=1)
    state.queue_s = 0.0  # its wait and its cached tokens were reported with its first token


def most_rows(request: Request, num_rows: int) -> int:
    """Return how many sequences of a request can run at once: no more than its tenant may have."""
    most = request.tenant.max_sequences
    return num_rows if most is None else min(most, num_rows)


def _output_mode(state: RequestState) -> OutputMode:
    if state.request.pooling is not None:
        return PooledOutput(state)
    return BeamSearch(state) if state.request.params.beam else StreamedOutputs(state)


def check_feasible(request: Request, cache: KVCache, num_rows: int, chunk: int) -> None:
    """Refuse a request that could not run even with the machine for itself."""
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt", hint="send at least one token")
    width = request.params.beam.width if request.params.beam else 1
    if width > (num_rows := most_rows(request, num_rows)):
        raise InvalidRequest(
            f"beam width {width} exceeds the {num_rows} sequences that run at once",
            param="beam.width",
            hint="ask for fewer beams or raise max_running",
        )
    for region in cache.regions:
        needed, usable = blocks_needed(request, cache, chunk, region), cache.pool.usable[region]
        if needed > usable:
            size = f"of {cache.block_size} tokens"
            kinds = {"blocks": f"KV blocks {size}", "cells": f"blocks of cells {size}"}
            what = kinds.get(cache.region_name(region), "states of recurrent layers")
            raise InvalidRequest(
                f"the request needs up to {needed} {what}, the pool has {usable}",
                param="max_tokens",
                hint="shorten the prompt, lower max_tokens, or give the cache more memory",
            )


def blocks_needed(request: Request, cache: KVCache, chunk: int, region: int = 0) -> int:
    """Return the most blocks of a region that a request must hold at once: beams together, samples one after another if
    need be.

    The last token drawn is never computed.   prompt + max_tokens - 1 positions, or the context where it shifts
    """
    prompt_len = len(request.prompt_token_ids)
    longest = prompt_len + max(0, request.max_tokens - 1)
    alone = cache.blocks_for(min(longest, request.shift.context) if request.shift else longest, chunk, region)
    if request.params.beam is None:
        return alone
    num_full_groups = sum(rule.keeps_all and rule.region == region for rule in cache.rules)
    shared = num_full_groups * ((prompt_len - 1) // cache.block_size)
    return shared + request.params.beam.width * (alone - shared)
