"""Turns a client's request into an engine request: chat template, token ids, resolved limits, checks.

An invalid request is refused here, before it is queued, with an error that names the parameter. An `InputProcessor` may
be used from several threads at the same time (see `text_workers.py`).

`Shifting` decides whether a request may continue past the end of the context by dropping old tokens; the shift itself
is in `scheduler/request.py`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

import msgspec

from tokenmill.engine.tool_use import (
    SpeechFinder,
    answer_start,
    chat_template,
    check_tools,
    history,
    settle_grammar,
    settle_thinking,
    shown_tools,
    thinking_budget,
    with_described_tools,
)
from tokenmill.errors import ContextLengthExceeded, InvalidRequest, ModelError, UnknownModel
from tokenmill.params import DRY_BREAKERS, MAX_STOP_STRINGS, SamplingParams
from tokenmill.params.checks import require_unicode
from tokenmill.text.effort import EffortVariables, find_effort_variables
from tokenmill.text.fim import FimTokens, find_fim_tokens
from tokenmill.text.stops import stop_patterns
from tokenmill.text.template import (
    PLAIN,
    PLAIN_TURN,
    RESERVED_VARIABLES,
    ChatTemplate,
    LiteralContents,
    MarkedText,
    encode_literally,
    messages_for_template,
    tools_for_template,
    unmarked,
    up_to_last,
)
from tokenmill.text.token_search import TokenSearch, is_open_at_end
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import (
    ChatRequest,
    ContextShift,
    EmbedRequest,
    Pooling,
    PromptRequest,
    Reasoning,
    Request,
    TokenizedParams,
    TokenPrefix,
)

log = logging.getLogger(__name__)

ClientRequest = ChatRequest | PromptRequest | EmbedRequest

MAX_SHIFTED_PROMPT = 1 << 16  # tokens; those that the shift drops are not computed
MAX_CHARACTERS_PER_TOKEN = 64  # more text than this per token of context is assumed not to fit


@dataclass(frozen=True)
class PreparedRequest:
    """A client's request and the engine request made from it."""

    client_request: ClientRequest
    request: Request


@dataclass(frozen=True)
class Shifting:
    """The default context shift, for requests that don't set it."""

    is_on: bool
    keep: int

    def for_params(self, params: SamplingParams, context: int) -> ContextShift | None:
        """Return the context shift of a request; None if its answer ends with the context, as with beam search."""
        is_on = self.is_on and params.beam is None if params.context_shift is None else params.context_shift
        if not is_on:
            if params.context_keep is not None:
                raise InvalidRequest("context_keep needs context_shift to be on", param="context_keep")
            return None
        keep = min(self.keep, context // 2) if params.context_keep is None else params.context_keep
        if keep > context // 2:
            raise InvalidRequest(
                f"context_keep must be at most half of the context ({context // 2}), got {keep}", param="context_keep"
            )
        return ContextShift(context, keep, drop=max(1, (context - keep) // 2))


NO_SHIFTING = Shifting(is_on=False, keep=4)


class InputProcessor:
    """Turns client requests into engine requests for one model."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        shifting: Shifting = NO_SHIFTING,
        speeches: SpeechFinder | None = None,
        literal_content: bool = True,
    ) -> None:
        """`speeches`: finds the format in which the model writes reasoning and tool calls. `literal_content`: control
        tokens written out in a message are treated as text."""
        self.max_context = max_context
        self.adapters: Mapping[str, str] = {}  # digests of the loaded adapters, by name
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._shifting = shifting
        self._speeches = speeches or SpeechFinder(tokenizer)
        self._has_warned = False
        self._literal_content = literal_content
        try:
            _ = self._template  # compile it now rather than for the first conversation
        except ModelError as problem:
            log.warning("%s; conversations are refused, only plain prompts are accepted", problem)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise no_tokenizer()
        return self._tokenizer

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self._tokenizer is None else chat_template(self._tokenizer)

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables that the model's chat template reads, except those that are set for every conversation."""
        return frozenset() if self._template is None else frozenset(self._template.variables) - RESERVED_VARIABLES

    @cached_property
    def _effort(self) -> EffortVariables | None:
        return None if self._template is None else find_effort_variables(self._template)

    @cached_property
    def _words(self) -> TokenSearch:
        return TokenSearch(self.tokenizer, self._vocab_size)

    def process(self, client_request: ClientRequest) -> Request:
        """Render, tokenise and check a request."""
        require_unicode("request_id", client_request.request_id)
        require_unicode("cache_salt", client_request.cache_salt)
        if isinstance(client_request, EmbedRequest):
            return self._process_embedding(client_request)
        prompt_ids = self.prompt_ids(client_request)
        shift = self._shifting.for_params(client_request.params, self.max_context)
        param = "messages" if isinstance(client_request, ChatRequest) else "prompt"
        self._require_fit(prompt_ids, param, shift, has_answer=client_request.params.max_tokens != 0)
        params = (
            client_request.params
            if isinstance(client_request, PromptRequest)
            else self._chat_params(client_request, prompt_ids)
        )
        if (
            params.guided is not None
            and params.guided is client_request.params.guided
            and params.thinking_budget is not None
        ):
            problem = "thinking_budget can't be combined with a schema or grammar here, which allows no think section"
            raise InvalidRequest(problem, param="thinking_budget")
        params = self._settle(params)
        if params.guided is not None and client_request.tenant.id:
            guided = msgspec.structs.replace(params.guided, owner=client_request.tenant.id)
            params = msgspec.structs.replace(params, guided=guided)
        tokenized = self._tokenized(params, prompt_ids)
        return Request(
            request_id=client_request.request_id or uuid4().hex,
            prompt_token_ids=prompt_ids,
            params=params,
            eos_token_ids=self._end_ids(client_request),
            max_tokens=self._longest_answer(prompt_ids, params, shift),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            priority=client_request.priority,
            arrival_s=time.monotonic(),
            cache_salt=client_request.cache_salt,
            tenant=client_request.tenant,
            shift=shift,
            tokenized=tokenized,
            adapter=self._adapter(client_request.adapter),
        )

    def _adapter(self, name: str | None) -> str:
        """Return the digest of the adapter that a request names."""
        if name is None:
            return ""
        if name not in self.adapters:
            loaded = ", ".join(self.adapters) or "none"
            raise UnknownModel(f"the adapter {name[:200]!r} is not loaded", param="adapter", hint=f"loaded: {loaded}")
        return self.adapters[name]

    def _end_ids(self, client_request: ChatRequest | PromptRequest) -> list[int]:
        """Return all ids that end the answer; a fill-in-the-middle answer also ends where the model starts another
        file."""
        if isinstance(client_request, ChatRequest) or client_request.suffix is None:
            return self._eos_token_ids
        return list(dict.fromkeys((*self._eos_token_ids, *self._fim_tokens().stop_ids)))

    def prompt_ids(self, client_request: ChatRequest | PromptRequest) -> list[int]:
        if isinstance(client_request, ChatRequest):
            return self.chat_ids(client_request)
        if client_request.suffix is None:
            return self._ids_of(client_request.prompt, add_special_tokens=client_request.add_special_tokens)
        if not isinstance(client_request.prompt, str):
            self._require_known(client_request.prompt, "prompt")
        fim = self._fim_tokens()
        return fim.prompt_ids(
            client_request.prompt,
            client_request.suffix,
            client_request.files,
            with_bos=client_request.add_special_tokens,
        )

    def _fim_tokens(self) -> FimTokens:
        if self._fim is None:
            raise InvalidRequest(
                "this model can't fill in the middle: its tokenizer has no tokens for that",
                param="suffix",
                hint="use a model for code that has them, such as Qwen2.5-Coder",
            )
        return self._fim

    @cached_property
    def _fim(self) -> FimTokens | None:
        return find_fim_tokens(self.tokenizer)

    def chat_text(self, chat: ChatRequest) -> str:
        """Return the text of a conversation in the model's chat template."""
        return self._rendered(chat).text

    @cached_property
    def _literal(self) -> LiteralContents:
        return LiteralContents(self.tokenizer)

    def _rendered(self, chat: ChatRequest) -> MarkedText:
        if not chat.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if self._template is None:
            raise no_tokenizer()
        self._warn_of_plain_layout()
        check_tools(chat)
        speech, tools = self._speeches.of(chat.chat_template), shown_tools(chat)
        marks = ("", "")
        if self._literal_content:
            allowed = () if speech is None else tuple(speech.control.values())
            messages, marks = self._literal.mark(chat.messages, allowed)
            chat = msgspec.structs.replace(chat, messages=messages) if any(marks) else chat
        messages = history(chat, speech)
        if tools and (speech is None or speech.calls is None):
            raise InvalidRequest("this model can't call tools", param="tools", hint="see --tool-format")
        if tools and speech is not None and not speech.describes_tools:
            messages, tools = with_described_tools(messages, tools, speech), []
        template = self._template if chat.chat_template is None else self._given_template(chat.chat_template)
        text = template.render(
            messages_for_template(messages),
            tools=tools_for_template(tools),
            add_generation_prompt=chat.add_generation_prompt and not chat.continues_last,
            extra={**self._effort_variables(chat.reasoning), **chat.template_args},
        )
        text = up_to_last(text, chat.messages[-1]) if chat.continues_last else text
        return unmarked(text, marks)

    @property
    def _is_plain(self) -> bool:
        """True if conversations are formatted as plain text, because the model has no chat template."""
        return self._template is not None and self._template.source == PLAIN

    def _warn_of_plain_layout(self) -> None:
        if self.tokenizer.chat_template is None and not self._has_warned:
            self._has_warned = True
            layout = "plain text (User: … Assistant:)" if self._is_plain else "ChatML"
            log.warning(
                "this model has no chat template and may not be trained for conversations: they are formatted as %s; "
                "--chat-template FILE sets a template",
                layout,
            )

    def _given_template(self, source: str) -> ChatTemplate:
        """Compile the template of a request; if that fails, it is the client's error."""
        try:
            return ChatTemplate(source, self.tokenizer.special_tokens)
        except ModelError as problem:
            raise InvalidRequest(problem.message, param="template") from problem

    def _effort_variables(self, reasoning: Reasoning) -> dict[str, Any]:
        """Return the template variables that express the reasoning settings of a request."""
        if reasoning == Reasoning() or self._effort is None:
            return {}
        return self._effort.values(reasoning, thinking_budget(reasoning))

    def _chat_params(self, chat: ChatRequest, prompt_ids: list[int]) -> SamplingParams:
        """Return the parameters of a conversation, with a grammar for its tools and a thinking budget if needed."""
        speech = self._speeches.of(chat.chat_template)
        if chat.chat_template is None and self._is_plain and len(chat.params.stop) < MAX_STOP_STRINGS:
            stops = [*chat.params.stop, PLAIN_TURN]
            chat = msgspec.structs.replace(chat, params=msgspec.structs.replace(chat.params, stop=stops))
        if speech is None or not (speech.thinking or chat.tools):
            return chat.params
        start = answer_start(speech, self.tokenizer, prompt_ids)
        return settle_grammar(chat, settle_thinking(chat, chat.params, speech, start), speech, start)

    def chat_ids(self, chat: ChatRequest) -> list[int]:
        """Return the token ids of a conversation. If the template writes the BOS token, no second one is added."""
        rendered = self._rendered(chat)
        text = rendered.text
        # A server checks the length of the messages, without the template's text, reasoning and tool calls.
        require_plausible_length(len(text), longest_prompt(self.max_context), "messages")
        bos = self.tokenizer.special_tokens.get("bos_token")
        adds_bos = not (bos and text.startswith(bos))
        return self._extended(rendered, chat.extends) or self._encoded(rendered, add_special_tokens=adds_bos)

    def _encoded(self, rendered: MarkedText, *, add_special_tokens: bool) -> list[int]:
        if rendered.spans:
            return encode_literally(self.tokenizer, rendered, add_special_tokens=add_special_tokens)
        return self.tokenizer.encode(rendered.text, add_special_tokens=add_special_tokens)

    def _extended(self, rendered: MarkedText, known: TokenPrefix | None) -> list[int] | None:
        """Return the token ids of an earlier turn followed by those of the text after it. None if the text does not
        begin with that turn, or if no added token separates the two, so that one token could span both."""
        if known is None or text_digest(rendered.text[: known.num_characters]) != known.digest:
            return None
        ids, start = known.token_ids, known.num_characters
        last = self.tokenizer.token_text(ids[-1])
        if self.tokenizer.added_tokens.get(last) == ids[-1]:  # tokenise it again together with the text after it
            ids, start = ids[:-1], start - len(last)
        rest = MarkedText(
            rendered.text[start:], [(first - start, end - start) for first, end in rendered.spans if end > start]
        )
        if not rest.text.startswith(tuple(self.tokenizer.added_tokens)) or any(first < 1 for first, _ in rest.spans):
            return None
        return [*ids, *self._encoded(rest, add_special_tokens=False)]

    def _ids_of(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            ids = list(prompt)
            self._require_known(ids, "prompt")
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return ids

    def _settle(self, params: SamplingParams) -> SamplingParams:
        for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias"):
            self._require_known(list(getattr(params, name) or []), name)
        if (params.stop or params.stop_regex) and self._tokenizer is None:
            raise no_tokenizer()
        if params.stop_regex:
            stop_patterns(tuple(params.stop_regex))
        if params.best_of is not None:
            # All candidates run as choices with logprobs; the output processor keeps the best n of them.
            return msgspec.structs.replace(params, n=params.best_of, best_of=None, logprobs=params.logprobs or 0)
        return params

    def _tokenized(self, params: SamplingParams, prompt_ids: list[int]) -> TokenizedParams:
        """Return the token ids of the parameters that users write as text."""
        tokenized = TokenizedParams()
        if params.dry_multiplier > 0.0:
            breakers = DRY_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
            single, longer = self._words.breakers(breakers)
            tokenized = msgspec.structs.replace(tokenized, dry_break_ids=single, dry_breakers=longer)
        if params.beam and params.stop:
            pieces = self._words.stop_pieces(params.stop, skip_special_tokens=params.skip_special_tokens)
            tokenized = msgspec.structs.replace(tokenized, stop_pieces=pieces)
        if params.thinking_budget is not None:
            start, end = params.thinking_markers or self._template_markers()
            tokenized = msgspec.structs.replace(
                tokenized,
                think_start_ids=self._marker_ids(start),
                think_end_ids=self._marker_ids(end),
                starts_thinking=is_open_at_end(self.tokenizer, prompt_ids, start, end),
            )
        return tokenized

    def _marker_ids(self, marker: str) -> list[int]:
        ids = self.tokenizer.encode(marker, add_special_tokens=False)
        if not ids:
            problem = f"this model's tokenizer encodes {marker[:40]!r} to no tokens"
            raise InvalidRequest(problem, param="thinking_markers")
        return ids

    def _template_markers(self) -> tuple[str, str]:
        speech = self._speeches.of(None)
        if speech is None or speech.thinking is None or not speech.thinking.opener:
            raise InvalidRequest(
                "this model's chat template has no think sections",
                param="thinking_budget",
                hint="set thinking_markers to the texts that open and close one",
            )
        return speech.thinking.opener.strip(), speech.thinking.closer.strip()

    def _require_known(self, ids: list[int], param: str) -> None:
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"{param} holds {token_id!r}, which is not a token id of this model (0 to {self._vocab_size - 1})",
                    param=param,
                )

    def _require_fit(self, prompt_ids: list[int], param: str, shift: ContextShift | None, *, has_answer: bool) -> None:
        """Refuse a prompt that is too long. A prompt without an answer (scoring) may fill the whole context."""
        longest = longest_prompt(self.max_context)
        if shift is not None and len(prompt_ids) > longest:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt_ids)} tokens; with a shifting context at most {longest} are allowed",
                param=param,
                hint="leave out the oldest messages",
                num_tokens=len(prompt_ids),
                limit=longest,
            )
        if shift is None and len(prompt_ids) + has_answer > self.max_context:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt_ids)} tokens; with an answer it must fit in {self.max_context}",
                param=param,
                hint="shorten the prompt, or turn context_shift on",
                num_tokens=len(prompt_ids),
                limit=self.max_context - has_answer,
            )

    def _longest_answer(self, prompt_ids: list[int], params: SamplingParams, shift: ContextShift | None) -> int:
        """Return the most tokens an answer may have: up to the end of the context, or, if the context shifts,
        `max_tokens` (by default the length of a context)."""
        if shift is not None:
            return self.max_context if params.max_tokens is None else params.max_tokens
        room = self.max_context - len(prompt_ids)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _process_embedding(self, client_request: EmbedRequest) -> Request:
        prompt_ids = self._ids_of(client_request.prompt, add_special_tokens=True)
        if len(prompt_ids) > self.max_context:
            raise ContextLengthExceeded(
                f"the input has {len(prompt_ids)} tokens; at most {self.max_context} fit", param="input"
            )
        return Request(
            request_id=client_request.request_id or uuid4().hex,
            prompt_token_ids=prompt_ids,
            params=SamplingParams(max_tokens=0),
            max_tokens=0,
            seed=0,
            priority=client_request.priority,
            arrival_s=time.monotonic(),
            cache_salt=client_request.cache_salt,
            tenant=client_request.tenant,
            pooling=client_request.pooling or Pooling(),
            adapter=self._adapter(client_request.adapter),
        )


def text_digest(text: str) -> bytes:
    """Return the digest by which a `TokenPrefix` identifies its text."""
    return hashlib.sha256(text.encode()).digest()


def no_tokenizer() -> InvalidRequest:
    return InvalidRequest(
        "this model has no tokenizer, so it accepts only token ids", hint="send the prompt as a list of token ids"
    )


# ── lengths ──────────────────────────────────────────────────────────────────────────────────────────


def longest_prompt(context: int) -> int:
    """Return the longest prompt allowed with a shifting context: bounded because tokenising it takes time."""
    return max(context, MAX_SHIFTED_PROMPT)


def prompt_limit(params: SamplingParams, max_context: int, *, shifts_context: bool) -> int:
    """Return the most tokens that a prompt with these parameters may have; `shifts_context`: the default of
    `context_shift`."""
    shifts = shifts_context if params.context_shift is None else params.context_shift
    return longest_prompt(max_context) if shifts and params.beam is None else max_context


def require_plausible_length(num_characters: int, longest: int, param: str) -> None:
    """Refuse text that is certainly too long before tokenising it, which takes seconds for megabytes."""
    if num_characters > longest * MAX_CHARACTERS_PER_TOKEN:
        raise ContextLengthExceeded(
            f"a prompt of {num_characters} characters does not fit in {longest} tokens",
            param=param,
            hint="shorten the prompt",
            num_tokens=-(-num_characters // MAX_CHARACTERS_PER_TOKEN),  # at least
            limit=longest,
        )
