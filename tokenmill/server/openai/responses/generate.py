"""One response from its body to a job for the engine, and to the row that is kept of it.

    body ─► what it refers to is looked up ─► parsed ─► GenerationJob ─► (streamed or whole) ─► kept, if it is stored

A response is stored before its client is told that it is complete, so a request that continues it finds it. What
continues a stored response extends the token ids of that one's prompt and answer, as far as the chat template writes
the earlier turns as they were: the prefix cache has just these ids. (Templates that drop what was thought in earlier
turns don't.)
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from tokenmill.engine.input_processor import ClientRequest, text_digest
from tokenmill.engine.request_ids import new_id
from tokenmill.engine.text_workers import TextWorkers, text_size
from tokenmill.errors import ContextLengthExceeded, Overloaded, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.body import BodyFields
from tokenmill.server.gate import ServedEngine
from tokenmill.server.generation import GenerationFacts, GenerationJob
from tokenmill.server.openai.responses.events import ResponseRendering, ResponseWriter
from tokenmill.server.openai.responses.parse import (
    KeptHistory,
    ResponseCall,
    ResponseReferences,
    parse_conversation,
    parse_references,
    parse_response,
)
from tokenmill.server.routing import LONG_BODY, RouteContext
from tokenmill.server.signatures import ThoughtKeys
from tokenmill.server.state.responses import ResponseRow, ResponseStore
from tokenmill.server.variants import FoundModel
from tokenmill.types import ChatRequest, Message, TokenPrefix

log = get_log("server")


@dataclass
class ResponseJob:
    """The state of one response while it is generated."""

    owner: str
    body: dict[str, Any]
    call: ResponseCall
    engine: ServedEngine
    rendering: ResponseRendering
    workers: TextWorkers
    was_shortened: bool = field(default=False, init=False)

    @property
    def writer(self) -> ResponseWriter:
        return self.rendering.writer

    @property
    def model(self) -> str:
        return str(self.call.repeated["model"])

    def shorten(self, request: ClientRequest, error: ContextLengthExceeded) -> ClientRequest | None:
        """Leave out the oldest of a conversation that does not fit, if the client wants that."""
        if not self.call.truncates or not isinstance(request, ChatRequest):
            return None
        self.was_shortened = True
        return without_oldest(request, error)

    async def prefix(self, facts: GenerationFacts) -> TokenPrefix | None:
        """The token ids for a prompt that continues this response."""
        if self.was_shortened or self.writer.response["status"] not in ("completed", "incomplete"):
            return None
        request, engine, answer = self.call.request, self.engine, self.rendering.output_ids

        def measure() -> TokenPrefix:
            text = engine.chat_text(request) + engine.detokenize(answer)
            return TokenPrefix(
                token_ids=[*facts.prompt_token_ids, *answer],
                num_characters=len(text),
                digest=text_digest(text),
                model=engine.info.fingerprint,
            )

        try:
            return await self.workers.run(text_size(request), measure)
        except Overloaded:  # the server ends, or the model left meanwhile: what comes next is rendered anew
            return None

    def row(self, prefix: TokenPrefix | None = None) -> ResponseRow:
        references = self.call.references
        return ResponseRow(
            self.owner,
            self.writer.response,
            self.call.input,
            references.parent,
            references.conversation,
            prefix=prefix,
        )


class ResponseGenerator:
    """Makes responses, and keeps them."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self.thought_keys = ThoughtKeys()
        self.store = ResponseStore(context.config, context.state.instance)

    async def make(
        self, body: dict[str, Any], owner: str, response_id: str | None = None, created_s: float | None = None
    ) -> ResponseJob:
        """Check a body and all that it refers to."""
        model = await self._model(body)
        references = parse_references(BodyFields(body))
        history = await self._history(references, owner, model)
        config = self._context.settings_of(self._context.keys.get(owner))
        signer = self.thought_keys.signer(owner)
        parse = partial(parse_response, body, model.info, config, signer, references, history)
        call = await self._context.workers.run(_size(body, history), parse, long=LONG_BODY)
        writer = ResponseWriter(response_id or new_id("resp_"), created_s or time.time(), call, signer)
        return ResponseJob(owner, body, call, model.engine, ResponseRendering(writer), self._context.workers)

    def job(self, made: ResponseJob) -> GenerationJob:
        """Return a response as a generation job whose client waits for it."""
        references = made.call.references
        keeps = references.is_stored or references.conversation is not None
        return GenerationJob(
            made.engine,
            [made.call.request],
            made.rendering,
            references.is_stream,
            prompt_param="input",
            shorten=made.shorten,
            finish=partial(self._keep, made) if keeps else None,
        )

    async def _keep(self, made: ResponseJob, facts: GenerationFacts) -> None:
        try:
            await self.save(made, made.row(await made.prefix(facts)))
        except TokenmillError as error:
            if made.writer.response["status"] != "failed":
                raise
            log.warning("a response that failed is not kept: %s", error)  # its client is being told of the failure

    async def save(self, made: ResponseJob, row: ResponseRow) -> None:
        references = made.call.references
        if references.is_stored:
            await self._context.state.database.write(lambda connection: self.store.save(connection, row))
        elif references.conversation is not None and row.response["status"] == "completed":
            items = [*row.input, *row.response["output"]]
            name = references.conversation
            await self._context.state.database.write(
                lambda connection: self.store.append(connection, name, made.owner, items)
            )

    async def count(self, body: dict[str, Any], owner: str) -> int:
        """The tokens of the prompt that a body makes."""
        model = await self._model(body)
        references = parse_references(BodyFields(body))
        history = await self._history(references, owner, model)
        signer = self.thought_keys.signer(owner)
        parse = partial(parse_conversation, body, model.info, self._context.config, signer, history)
        asked = await self._context.workers.run(_size(body, history), parse, long=LONG_BODY)
        engine = model.engine
        return await self._context.workers.run(text_size(asked), lambda: len(engine.tokenize_chat(asked)))

    async def _model(self, body: dict[str, Any]) -> FoundModel:
        def find() -> FoundModel:
            model = self._context.registry.find(BodyFields(body).text("model"))
            _ = model.info  # the parser asks for it
            return model

        return await self._context.when_read(find)

    async def _history(self, references: ResponseReferences, owner: str, model: FoundModel) -> KeptHistory:
        if not references.needs_lookup:
            return KeptHistory()
        history = await self._context.state.database.read(
            lambda connection: self._look_up(connection, references, owner)
        )
        is_same_model = history.prefix is not None and history.prefix.model == model.info.fingerprint
        return history if is_same_model else KeptHistory(history.items, history.referenced)

    def _look_up(self, connection: sqlite3.Connection, references: ResponseReferences, owner: str) -> KeptHistory:
        referenced = self.store.referenced(connection, references.item_ids, owner)
        if references.parent is not None:
            chain = self.store.chain(connection, references.parent, owner)
            return KeptHistory(chain.items, referenced, chain.prefix)
        if references.conversation is not None:
            return KeptHistory(self.store.conversation_items(connection, references.conversation, owner), referenced)
        return KeptHistory((), referenced)


def _size(body: dict[str, Any], history: KeptHistory) -> int:
    """About how long a body takes to be parsed, in bytes; exact where it is a plain question."""
    given = body.get("input")
    is_short = isinstance(given, str) and not body.get("tools") and not history.items
    return len(given or "") + len(str(body.get("instructions") or "")) if is_short else LONG_BODY + 1


# ── truncation ─────────────────────────────────────────────────────────────────────────────────────────


def without_oldest(request: ChatRequest, error: ContextLengthExceeded) -> ChatRequest | None:
    """Return the conversation without about as much of its beginning as exceeds the context; None: nothing can be left
    out.

    Instructions stay, and so does the newest turn. A call and its outputs go together.
    """
    head, turns = _turns(request.messages)
    if len(turns) < 2:
        return None
    sizes = [sum(len(message.content or "") + 16 for message in turn) for turn in turns]
    total = sum(sizes) + sum(len(message.content or "") for message in head)
    excess = 1.0 - error.limit / error.num_tokens if error.limit and error.num_tokens else 0.0
    num_left_out, left_out = 0, 0
    while num_left_out < len(turns) - 1 and (num_left_out == 0 or left_out < excess * total):
        left_out += sizes[num_left_out]
        num_left_out += 1
    kept = [message for turn in turns[num_left_out:] for message in turn]
    return msgspec.structs.replace(request, messages=[*head, *kept], extends=None)


def _turns(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Leading system messages, and turns: a user's message, or an assistant's with the outputs of its calls."""
    num_head = next((number for number, one in enumerate(messages) if one.role != "system"), len(messages))
    turns: list[list[Message]] = []
    for message in messages[num_head:]:
        if message.role == "tool" and turns:
            turns[-1].append(message)
        else:
            turns.append([message])
    return messages[:num_head], turns
