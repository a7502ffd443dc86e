"""Turns token ids into events for clients: text that never splits a character, stop strings, usage.

There is one `OutputProcessor` per request and one `ChoiceState` per sequence. The core handles no text, so stop strings
are found here; `pop_stopped` returns the sequences that the core should abort.

    tokens   ──► detokenise ──► hold back what may begin a stop string ──► Event
    decoded:  [ emitted | held back ]      a token's logprobs are sent with the event that completes its text

If the model thinks or may call tools, an `AnswerReader` splits the text into parts first; stop strings are then matched
in the visible text only, and logprobs are sent only for tokens of visible text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import msgspec

from tokenmill.engine.answer_reader import AnswerReader
from tokenmill.engine.results import EventFold, merge_parts, text_parts
from tokenmill.text.stops import Stops
from tokenmill.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tokenmill.types import (
    Event,
    Part,
    Request,
    SequenceOutput,
    SequenceProgress,
    TextPart,
    TokenInfo,
    TokenLogprobs,
    Usage,
)

MakeReader = Callable[[IncrementalDetokenizer], AnswerReader]


@dataclass
class ChoiceState:
    """The state of one sequence's text: what was decoded, what was sent, whether it has ended."""

    detokenizer: IncrementalDetokenizer | None
    stops: Stops | None  # None: the request has none
    reader: AnswerReader | None = None
    token_ids: list[int] = field(default_factory=list)
    num_sent: int = 0  # tokens sent in events
    num_decoded: int = 0  # characters decoded
    num_emitted: int = 0  # characters sent in events
    unsent_infos: deque[tuple[int, TokenInfo]] = field(default_factory=deque)  # (end of the token's text, token)
    cumulative_logprob: float = 0.0
    has_logprobs: bool = False
    last: SequenceOutput | None = None  # the newest output: it has the totals of draft tokens and mirostat's state
    is_finished: bool = False

    @property
    def num_drafted(self) -> int:
        return 0 if self.last is None else self.last.num_drafted

    @property
    def num_accepted(self) -> int:
        return 0 if self.last is None else self.last.num_accepted

    def progress(self) -> SequenceProgress:
        """Return what another engine needs to continue the sequence."""
        return SequenceProgress(
            token_ids=self.token_ids,
            mirostat_mu=None if self.last is None else self.last.mirostat_mu,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            is_finished=self.is_finished,
        )


class OutputProcessor:
    """Makes the events of one request from the core's outputs."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        *,
        keep_best: int | None,
        wants_logprobs: bool,
        make_reader: MakeReader | None = None,
    ) -> None:
        """`keep_best`: return only this many sequences, the most likely ones, once all have ended (best_of).
        `make_reader`: for answers with reasoning or tool calls; without it an answer is plain text."""
        self.request_id = request.request_id
        self._request = request
        self._tokenizer = tokenizer
        self._keep_best = keep_best
        self._wants_logprobs = wants_logprobs
        self._make_reader = make_reader
        self._num_cached_tokens = 0
        self._queue_s = 0.0
        self.device_s = 0.0  # device time spent on the request, as last reported
        self._is_first = True  # the next event is the request's first
        self._stopped: list[int] = []
        self._choices = [self._new_choice() for _ in range(request.params.n)]
        self._num_open = len(self._choices)
        self._candidates: dict[int, EventFold] = {}  # of best_of, by sequence

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def resumed_request(self) -> Request:
        """Return the request with which another core can continue. Beam search starts from the beginning, because none
        of its tokens were output. Prompt logprobs are sent once, with the first token of the first sequence."""
        request, params = self._request, self._request.params
        if request.pooling is not None or params.beam is not None or self.num_completion_tokens == 0:
            return request
        outputs = [choice.progress() for choice in self._choices]
        if outputs[0].token_ids and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(request, params=params, progress=outputs)

    def process(self, output: SequenceOutput) -> list[Event]:
        """Return the events that an output completes; none while a character or a stop string is incomplete."""
        choice = self._choices[output.index]
        if choice.is_finished:  # outputs computed before the core received the abort after a stop string
            return []
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._queue_s = self._queue_s or output.queue_s
        self.device_s = output.device_s or self.device_s
        choice.last = output
        event = self._advance(choice, output)
        if event is None:
            return []
        if self._keep_best is None:
            return [event]
        self._candidates.setdefault(output.index, EventFold()).add(event)
        return self._best_choices() if self.is_finished else []

    def pop_stopped(self) -> list[int]:
        """Return the sequences that a stop string has ended since the last call and that the core still computes."""
        stopped, self._stopped = self._stopped, []
        return stopped

    # ── one sequence ───────────────────────────────────────────────────────────────────────────────────

    def _new_choice(self) -> ChoiceState:
        params = self._request.params
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                prompt_ids=self._request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
        reader = self._make_reader(detokenizer) if self._make_reader and detokenizer else None
        has_stops = bool(params.stop or params.stop_regex)
        stops = Stops(params.stop, params.stop_regex, include_stop=params.include_stop) if has_stops else None
        return ChoiceState(detokenizer, stops, reader)

    def _advance(self, choice: ChoiceState, output: SequenceOutput) -> Event | None:
        if choice.reader is not None:
            return self._advance_parts(choice, choice.reader, output)
        if choice.stops is not None or output.logprobs is not None:
            text, matched = self._decode_one_by_one(choice, output)
        else:
            text, matched = self._decode_together(choice, output), None
        if matched is not None and output.finish_reason is None:
            self._stopped.append(output.index)
        if matched is None and output.finish_reason is not None:
            rest, matched = self._flush(choice)
            text += rest
        finish = "stop" if matched is not None else output.finish_reason
        if finish is not None:
            choice.is_finished = True
            self._num_open -= 1
        choice.num_emitted += len(text)
        return self._event(choice, output, text, finish, matched)

    def _advance_parts(self, choice: ChoiceState, reader: AnswerReader, output: SequenceOutput) -> Event | None:
        parts, matched = self._read_tokens(choice, reader, output)
        if matched is not None and output.finish_reason is None:
            self._stopped.append(output.index)
        if matched is None and output.finish_reason is not None:
            rest, _ = self._shown(choice, reader.finish())
            parts += rest
            if choice.stops is not None:
                parts += text_parts(choice.stops.flush())
                matched = choice.stops.matched
        finish = "stop" if matched is not None else output.finish_reason
        if finish is not None:
            choice.is_finished = True
            self._num_open -= 1
        finish = "tool_calls" if finish == "stop" and reader.has_called else finish
        choice.unsent_infos.extend(reader.pop_infos())
        text = "".join([part.text for part in parts if isinstance(part, TextPart)])
        choice.num_emitted += len(text)
        is_plain = all(isinstance(part, TextPart) for part in parts)
        return self._event(choice, output, text, finish, matched, None if is_plain else merge_parts(parts))

    def _read_tokens(
        self, choice: ChoiceState, reader: AnswerReader, output: SequenceOutput
    ) -> tuple[list[Part], str | None]:
        parts: list[Part] = []
        for position, token_id in enumerate(output.token_ids):
            is_stop_id = token_id == output.stop_token_id and position == len(output.token_ids) - 1
            choice.token_ids.append(token_id)
            info = self._noted_info(choice, _nth(output.logprobs, position))
            shown, matched = self._shown(choice, reader.push(token_id, info, is_stop_id=is_stop_id))
            parts += shown
            if matched is not None:
                return parts, matched
        return parts, None

    def _noted_info(self, choice: ChoiceState, logprobs: TokenLogprobs | None) -> TokenInfo | None:
        if logprobs is None:
            return None
        choice.cumulative_logprob += logprobs.logprob
        choice.has_logprobs = True
        return self._info(logprobs) if self._wants_logprobs else None

    def _shown(self, choice: ChoiceState, parts: list[Part]) -> tuple[list[Part], str | None]:
        """Return the parts up to a stop string in their text. Text that was held back is emitted before a part that is
        not text."""
        if choice.stops is None:
            return parts, None
        shown: list[Part] = []
        is_early = len(choice.token_ids) <= self._request.params.min_tokens
        for part in parts:
            if not isinstance(part, TextPart):
                shown += [*text_parts(choice.stops.flush()), part]
                continue
            emitted, matched = (choice.stops.flush() + part.text, None) if is_early else choice.stops.push(part.text)
            shown += text_parts(emitted)
            if matched is not None:
                return shown, matched
        return shown, None

    def _decode_together(self, choice: ChoiceState, output: SequenceOutput) -> str:
        """Decode all new tokens in one call: token boundaries matter only for stop strings and logprobs."""
        ids = output.token_ids
        choice.token_ids += ids
        if choice.detokenizer is None:
            return ""
        is_stop_id = output.stop_token_id is not None and ids[-1:] == [output.stop_token_id]
        return choice.detokenizer.push(ids[:-1] if is_stop_id else ids)

    def _decode_one_by_one(self, choice: ChoiceState, output: SequenceOutput) -> tuple[str, str | None]:
        text, matched = "", None
        for position, token_id in enumerate(output.token_ids):
            is_stop_id = token_id == output.stop_token_id and position == len(output.token_ids) - 1
            emitted, matched = self._decode_token(choice, token_id, _nth(output.logprobs, position), is_stop_id)
            text += emitted
            if matched is not None:
                break
        return text, matched

    def _decode_token(
        self, choice: ChoiceState, token_id: int, logprobs: TokenLogprobs | None, is_stop_id: bool
    ) -> tuple[str, str | None]:
        choice.token_ids.append(token_id)
        decoded = choice.detokenizer.push([token_id]) if choice.detokenizer and not is_stop_id else ""
        choice.num_decoded += len(decoded)
        info = self._noted_info(choice, logprobs)
        if info is not None and not is_stop_id:
            choice.unsent_infos.append((choice.num_decoded, info))
        if choice.stops is None:
            return decoded, None
        if len(choice.token_ids) <= self._request.params.min_tokens:
            return choice.stops.flush() + decoded, None  # too early to stop
        return choice.stops.push(decoded)

    def _flush(self, choice: ChoiceState) -> tuple[str, str | None]:
        """Return the text that was held back: an incomplete character, or the possible beginning of a stop string."""
        tail = choice.detokenizer.finish() if choice.detokenizer else ""
        if choice.stops is None:
            return tail, None
        emitted, _ = choice.stops.push(tail)
        return emitted + choice.stops.flush(), choice.stops.matched

    def _event(
        self,
        choice: ChoiceState,
        output: SequenceOutput,
        text: str,
        finish: str | None,
        matched: str | None,
        parts: list[Part] | None = None,
    ) -> Event | None:
        # Without a tokenizer there is no text to wait for: every token is sent immediately.
        is_awaited = not text and not parts and choice.detokenizer is not None
        if is_awaited and finish is None and output.prompt_logprobs is None:
            return None
        ids, choice.num_sent = choice.token_ids[choice.num_sent :], len(choice.token_ids)
        if not self._is_first and finish is None and not self._wants_logprobs and output.prompt_logprobs is None:
            return Event(  # by far the most frequent case
                request_id=self.request_id, index=output.index, text=text, parts=parts, token_ids=ids
            )
        is_first, self._is_first = self._is_first, False
        return Event(
            request_id=self.request_id,
            index=output.index,
            text=text,
            parts=parts,
            token_ids=ids,
            logprobs=self._released_infos(choice, matched) if self._wants_logprobs else None,
            prompt_logprobs=self._prompt_infos(output),
            finish_reason=finish,  # type: ignore[arg-type]  # one of the literals, by construction
            stop_reason=matched if matched is not None else output.stop_token_id,
            cumulative_logprob=self._cumulative(choice, output),
            usage=self._usage() if finish or is_first else None,
            embedding=output.embedding,
            queue_s=(self._queue_s or None) if is_first else None,
        )

    def _released_infos(self, choice: ChoiceState, matched: str | None) -> list[TokenInfo]:
        """Return the tokens whose text was sent; at the end of the answer, all tokens before a stop string."""
        infos = []
        while choice.unsent_infos:
            end, info = choice.unsent_infos[0]
            cut_away = choice.is_finished and matched is not None and end > choice.num_emitted
            if cut_away or (not choice.is_finished and end > choice.num_emitted):
                break
            infos.append(info)
            choice.unsent_infos.popleft()
        return infos

    # ── the whole request ──────────────────────────────────────────────────────────────────────────────

    def _best_choices(self) -> list[Event]:
        assert self._keep_best is not None
        ranked = sorted(self._candidates, key=lambda index: -self._choices[index].cumulative_logprob)
        best = [self._candidates[index].event for index in ranked[: self._keep_best]]
        usage = self._usage()
        return [msgspec.structs.replace(event, index=rank, usage=usage) for rank, event in enumerate(best)]

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self.num_completion_tokens,
            cached_tokens=self._num_cached_tokens,
            drafted_tokens=sum(choice.num_drafted for choice in self._choices),
            accepted_tokens=sum(choice.num_accepted for choice in self._choices),
            reasoning_tokens=sum(choice.reader.num_reasoning_tokens for choice in self._choices if choice.reader),
            device_s=self.device_s,
        )

    def _cumulative(self, choice: ChoiceState, output: SequenceOutput) -> float | None:
        return choice.cumulative_logprob if choice.has_logprobs else output.cumulative_logprob

    def _prompt_infos(self, output: SequenceOutput) -> PromptInfos | None:
        return None if output.prompt_logprobs is None else PromptInfos(output.prompt_logprobs, self._info)

    def _info(self, logprobs: TokenLogprobs) -> TokenInfo:
        text, raw = self._token_text(logprobs.token_id)
        top = [
            (token_id, *self._token_text(token_id), logprob)
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ]
        return TokenInfo(logprobs.token_id, text, raw, logprobs.logprob, logprobs.rank, top)

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return "", b""
        return self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)


class PromptInfos(Sequence[TokenInfo | None]):
    """The prompt logprobs with their tokens' text, decoded on first access.

    A prompt of 8,192 tokens with 20 alternatives each takes a fifth of a second. A server accesses them in the thread
    that writes the reply, not on the event loop, where decoding would delay all streams.
    """

    def __init__(self, logprobs: list[TokenLogprobs], info_of: Callable[[TokenLogprobs], TokenInfo]) -> None:
        self._logprobs = logprobs
        self._info_of = info_of

    @cached_property
    def _infos(self) -> list[TokenInfo | None]:
        return [None, *map(self._info_of, self._logprobs)]

    def __len__(self) -> int:
        return 1 + len(self._logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenInfo | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenInfo | None]: ...
    def __getitem__(self, index: int | slice) -> TokenInfo | list[TokenInfo | None] | None:
        return self._infos[index]


def _nth(logprobs: list[TokenLogprobs] | None, position: int) -> TokenLogprobs | None:
    return logprobs[position] if logprobs is not None else None
