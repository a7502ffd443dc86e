"""From a request to its state: the sequences it needs, how their results are output, and whether it can ever run."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.errors import InvalidRequest
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.outputs import PooledOutput, StreamedOutputs
from tokenmill.scheduler.request import OutputMode, RequestState, Sequence, SequenceGroup
from tokenmill.types import Request, RowInit


def build_request_state(
    request: Request, number: int, cache: KVCache, num_rows: int, continues: Callable[[RowInit], bool]
) -> RequestState:
    state = RequestState(request, number)
    state.output_mode = _output_mode(state)
    sequences = [Sequence(state, index, cache.chain(request.cache_salt)) for index in range(state.num_sequences)]
    # Beams and grammars choose on the host what comes next.
    chooses_on_host = state.output_mode.holds_back or request.params.guided is not None
    state.continues = state.draws_tokens and not chooses_on_host and continues(sequences[0].row_init())
    if request.params.beam:
        SequenceGroup(state, sequences[:1], [], num_rows=len(sequences))  # beams branch off the first one
        return state
    SequenceGroup(state, sequences[:1], sequences[1:num_rows], num_rows=min(len(sequences), num_rows))
    for sequence in sequences[num_rows:]:  # more samples than rows: the others run as rows come free
        SequenceGroup(state, [sequence], [], num_rows=1)
    return state


def _output_mode(state: RequestState) -> OutputMode:
    if state.request.pooling is not None:
        return PooledOutput(state)
    return BeamSearch(state) if state.request.params.beam else StreamedOutputs(state)


def check_feasible(request: Request, cache: KVCache, num_rows: int, chunk: int) -> None:
    """Refuse a request that could not run even with the machine for itself."""
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt", hint="send at least one token")
    width = request.params.beam.width if request.params.beam else 1
    if width > num_rows:
        raise InvalidRequest(
            f"beam width {width} exceeds the {num_rows} sequences that run at once",
            param="beam.width",
            hint="ask for fewer beams or raise max_running",
        )
    needed = blocks_needed(request, cache, chunk)
    if needed > cache.num_usable:
        raise InvalidRequest(
            f"the request needs up to {needed} KV blocks of {cache.block_size} tokens, the pool has {cache.num_usable}",
            param="max_tokens",
            hint="shorten the prompt, lower max_tokens, or give the cache more memory",
        )


def blocks_needed(request: Request, cache: KVCache, chunk: int) -> int:
    """The most blocks that must be held at once: beams together, samples one after another if need be.

    The last token drawn is never computed.   prompt + max_tokens - 1 positions, or the context where it shifts
    """
    prompt_len = len(request.prompt_token_ids)
    longest = prompt_len + max(0, request.max_tokens - 1)
    alone = cache.blocks_for(min(longest, request.shift.context) if request.shift else longest, chunk)
    if request.params.beam is None:
        return alone
    num_full_groups = sum(window is None for window in cache.windows)
    shared = num_full_groups * ((prompt_len - 1) // cache.block_size)
    return shared + request.params.beam.width * (alone - shared)
