"""Output modes of samples and embeddings: each token is output as soon as it is sampled, with the index of its sample;
an embedding is output as a vector. (`best_of` is handled as `n` here; the output processor ranks the samples.)"""

from __future__ import annotations

from tokenmill.scheduler.request import Ending, RequestState, Sequence, ending_after
from tokenmill.types import RowResult, SequenceOutput, TokenLogprobs

DEVICE_TIME_STRIDE = 16  # tokens between two reports of a request's device time, because each report costs time


def whole_output(state: RequestState, index: int, best: Sequence, ending: Ending) -> SequenceOutput:
    """Return a whole sequence as one output; `index`: its rank among the beams."""
    return SequenceOutput(
        request_id=state.request.request_id,
        index=index,
        token_ids=best.outputs,
        logprobs=best.logprobs if state.request.params.logprobs is not None else None,
        prompt_logprobs=finished_prompt_logprobs(state) if index == 0 else None,
        cumulative_logprob=best.logprob_sum,
        finish_reason=ending.reason,
        stop_token_id=ending.stop_token_id,
        num_cached_tokens=state.num_cached_tokens,
        queue_s=state.queue_s or 0.0,
        device_s=state.device_s,
    )


def failure(state: RequestState, index: int, error: str, error_code: str | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=state.request.request_id,
        index=index,
        finish_reason="error",
        error=error,
        error_code=error_code,
        num_cached_tokens=state.num_cached_tokens,
        queue_s=state.queue_s or 0.0,
        device_s=state.device_s,
    )


def finished_prompt_logprobs(state: RequestState) -> list[TokenLogprobs] | None:
    return state.prompt_logprobs if state.request.params.prompt_logprobs is not None else None


def append_sampled(
    sequence: Sequence, result: RowResult
) -> tuple[list[int], list[TokenLogprobs] | None, Ending | None]:
    """Append sampled tokens until the sequence ends; return the appended tokens, their logprobs (None if not requested)
    and the ending."""
    state = sequence.state
    appended: list[int] = []
    ending: Ending | None = None
    for token_id in result.token_ids:
        sequence.append(token_id)
        appended.append(token_id)
        if ending := ending_after(state.request, state.stop_token_ids, token_id, sequence.num_outputs):
            break
    if ending is None and sequence.num_outputs >= state.request.max_tokens:  # max_tokens=0
        ending = Ending("length")
    logprobs = None if result.logprobs is None else result.logprobs[: len(appended)]
    if logprobs is not None:
        sequence.logprob_sum += sum(logprob.logprob for logprob in logprobs)
    sequence.mirostat_mu = result.mirostat_mu
    sequence.is_finished = ending is not None
    return appended, logprobs, ending


class StreamedOutputs:
    """The output mode of samples: every token is output as soon as it is sampled."""

    holds_back = False

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self.num_logprobs = state.request.params.logprobs

    def process(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        state = self._state
        token_ids, logprobs, ending = append_sampled(sequence, result)
        is_first = not sequence.has_emitted
        sequence.has_emitted = True
        return [
            SequenceOutput(
                request_id=state.request.request_id,
                index=sequence.index,
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=finished_prompt_logprobs(state) if is_first and sequence.index == 0 else None,
                cumulative_logprob=sequence.logprob_sum if ending and self.num_logprobs is not None else None,
                finish_reason=ending.reason if ending else None,
                stop_token_id=ending.stop_token_id if ending else None,
                num_cached_tokens=state.num_cached_tokens,
                queue_s=(state.queue_s or 0.0) if is_first else 0.0,
                device_s=state.device_s
                if is_first or ending or sequence.num_outputs % DEVICE_TIME_STRIDE == 0
                else 0.0,
                num_drafted=sequence.num_drafted,
                num_accepted=sequence.num_accepted,
                mirostat_mu=sequence.mirostat_mu,
            )
        ]


class PooledOutput:
    """The output mode of an embedding: one vector when the prompt is computed."""

    holds_back = False
    num_logprobs: int | None = None

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def process(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        state = self._state
        sequence.is_finished = True
        if result.embedding is None:
            return [failure(state, sequence.index, "the runner returned no embedding")]
        return [
            SequenceOutput(
                request_id=state.request.request_id,
                embedding=result.embedding,
                finish_reason="stop",
                num_cached_tokens=state.num_cached_tokens,
                queue_s=state.queue_s or 0.0,
                device_s=state.device_s,
            )
        ]
