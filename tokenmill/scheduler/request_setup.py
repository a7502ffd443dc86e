"""Building the scheduler's state of a request: its sequences, their groups and its output mode.

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
    chooses_on_host = state.output_mode.holds_back  # beams: their next tokens are chosen on the host
    state.continues = state.draws_tokens and not chooses_on_host and continues(sequences[0].row_init())
    if request.params.beam:
        SequenceGroup(state, sequences[:1], [], num_rows=len(sequences))  # beams branch off the first one
        return state
    if any(earlier.token_ids or earlier.is_finished for earlier in request.progress):
        _resume(state, sequences)
        return state
    num_rows = max_request_rows(request, num_rows)
    SequenceGroup(state, sequences[:1], sequences[1:num_rows], num_rows=min(len(sequences), num_rows))
    for sequence in sequences[num_rows:]:  # more samples than rows: the others run when rows become free
        SequenceGroup(state, [sequence], [], num_rows=1)
    return state


def _resume(state: RequestState, sequences: list[Sequence]) -> None:
    """Continue samples that another engine has started: each in a separate group, like a preempted one."""
    for sequence, earlier in zip(sequences, state.request.progress, strict=True):
        if not earlier.is_finished:
            sequence.resume(earlier)
            SequenceGroup(state, [sequence], [], num_rows=1)
    state.queue_s = 0.0  # its wait and its cached tokens were reported with its first token


def max_request_rows(request: Request, num_rows: int) -> int:
    """Return how many sequences of a request can run at the same time, given its tenant's limit."""
    limit = request.tenant.max_sequences
    return num_rows if limit is None else min(limit, num_rows)


def _output_mode(state: RequestState) -> OutputMode:
    if state.request.pooling is not None:
        return PooledOutput(state)
    return BeamSearch(state) if state.request.params.beam else StreamedOutputs(state)


def check_feasible(request: Request, cache: KVCache, num_rows: int, chunk: int) -> None:
    """Refuse a request that could not run even if it were the only one."""
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt", hint="send at least one token")
    width = request.params.beam.width if request.params.beam else 1
    if width > (num_rows := max_request_rows(request, num_rows)):
        raise InvalidRequest(
            f"beam width {width} exceeds the {num_rows} sequences that can run at the same time",
            param="beam.width",
            hint="use fewer beams or raise max_running",
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
                hint="shorten the prompt, lower max_tokens, or enlarge the KV cache",
            )


def blocks_needed(request: Request, cache: KVCache, chunk: int, region: int = 0) -> int:
    """Return the most blocks of a region that a request must hold at the same time: beams run together, samples may run
    one after another.

    The last sampled token is never computed:   prompt + max_tokens - 1 positions, or the context if it shifts
    """
    prompt_len = len(request.prompt_token_ids)
    longest = prompt_len + max(0, request.max_tokens - 1)
    alone = cache.blocks_for(min(longest, request.shift.context) if request.shift else longest, chunk, region)
    if request.params.beam is None:
        return alone
    num_full_groups = sum(rule.keeps_all and rule.region == region for rule in cache.rules)
    shared = num_full_groups * ((prompt_len - 1) // cache.block_size)
    return shared + request.params.beam.width * (alone - shared)
