"""One response, from its body to a generation job, and to the row that is stored.

    body ─► look up what it refers to ─► parse ─► GenerationJob ─► (streamed or whole) ─► store, unless `store: false`

A response is stored before its client sees that it is complete, so a request that continues it finds it. If the chat
template renders the earlier turns unchanged, a continuation extends the token ids of the earlier prompt and answer,
which are in the prefix cache. (Templates that drop the reasoning of earlier turns change them.)
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from tokenmill.engine.input_processor import ClientRequest, text_digest
from tokenmill.engine.text_workers import TextWorkers, text_size
from tokenmill.errors import ContextLengthExceeded, Overloaded, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.body import BodyFields
from tokenmill.server.gate import ServedEngine
from tokenmill.server.generation import GenerationFacts, GenerationJob
from tokenmill.server.openai.responses.events import ResponseRendering, ResponseWriter
from tokenmill.server.openai.responses.parse import (
    ResponseCall,
    ResponseReferences,
    StoredHistory,
    parse_conversation,
    parse_references,
    parse_response,
)
from tokenmill.server.request_ids import new_id
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
        """Drop the oldest turns of a conversation that does not fit, if the client set `truncation: auto`."""
        if not self.call.truncates or not isinstance(request, ChatRequest):
            return None
        self.was_shortened = True
        return drop_oldest(request, error)

    async def prefix(self, facts: GenerationFacts) -> TokenPrefix | None:
        """Return the token ids of prompt and answer, for a response that continues this one."""
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
        except (
            Overloaded
        ):  # the server is stopping or the model was unloaded: a continuation is tokenised from its text
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
    """Makes the jobs of responses, and stores their results."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self.thought_keys = ThoughtKeys()
        self.store = ResponseStore(context.config, context.state.instance)

    async def make(
        self, body: dict[str, Any], owner: str, response_id: str | None = None, created_s: float | None = None
    ) -> ResponseJob:
        """Look up what a body refers to, parse it, and return its job."""
        model = await self._model(body)
        references = parse_references(BodyFields(body))
        history = await self._history(references, owner, model)
        config = self._context.settings_of(self._context.keys.get(owner))
        signer = self.thought_keys.signer(owner)
        parse = partial(parse_response, body, model.info, config, signer, references, history)
        call = await self._context.workers.run(_size(body, history), parse, long=LONG_BODY)
        writer = ResponseWriter(response_id or new_id("resp_"), created_s or time.time(), call, signer)
        return ResponseJob(owner, body, call, model.engine, ResponseRendering(writer), self._context.workers)

    def generation_job(self, job: ResponseJob) -> GenerationJob:
        """Return the generation job of a response."""
        references = job.call.references
        is_stored = references.is_stored or references.conversation is not None
        return GenerationJob(
            job.engine,
            [job.call.request],
            job.rendering,
            references.is_stream,
            prompt_param="input",
            shorten=job.shorten,
            finish=partial(self._store_result, job) if is_stored else None,
        )

    async def _store_result(self, job: ResponseJob, facts: GenerationFacts) -> None:
        try:
            await self.save(job, job.row(await job.prefix(facts)))
        except TokenmillError as error:
            if job.writer.response["status"] != "failed":
                raise
            log.warning("a failed response could not be stored: %s", error)  # its client gets the failure itself

    async def save(self, job: ResponseJob, row: ResponseRow) -> None:
        references = job.call.references
        if references.is_stored:
            await self._context.state.database.write(lambda connection: self.store.save(connection, row))
        elif references.conversation is not None and row.response["status"] == "completed":
            items = [*row.input, *row.response["output"]]
            name = references.conversation
            await self._context.state.database.write(
                lambda connection: self.store.append(connection, name, job.owner, items)
            )

    async def count(self, body: dict[str, Any], owner: str) -> int:
        """Return the number of prompt tokens of a body."""
        model = await self._model(body)
        references = parse_references(BodyFields(body))
        history = await self._history(references, owner, model)
        signer = self.thought_keys.signer(owner)
        parse = partial(parse_conversation, body, model.info, self._context.config, signer, history)
        chat = await self._context.workers.run(_size(body, history), parse, long=LONG_BODY)
        engine = model.engine
        return await self._context.workers.run(text_size(chat), lambda: len(engine.tokenize_chat(chat)))

    async def _model(self, body: dict[str, Any]) -> FoundModel:
        def find() -> FoundModel:
            model = self._context.registry.find(BodyFields(body).text("model"))
            _ = model.info  # raises NotRead: the parser needs it
            return model

        return await self._context.when_read(find)

    async def _history(self, references: ResponseReferences, owner: str, model: FoundModel) -> StoredHistory:
        if not references.needs_lookup:
            return StoredHistory()
        history = await self._context.state.database.read(
            lambda connection: self._look_up(connection, references, owner)
        )
        is_same_model = history.prefix is not None and history.prefix.model == model.info.fingerprint
        return history if is_same_model else StoredHistory(history.items, history.referenced)

    def _look_up(self, connection: sqlite3.Connection, references: ResponseReferences, owner: str) -> StoredHistory:
        referenced = self.store.referenced(connection, references.item_ids, owner)
        if references.parent is not None:
            chain = self.store.chain(connection, references.parent, owner)
            return StoredHistory(chain.items, referenced, chain.prefix)
        if references.conversation is not None:
            return StoredHistory(self.store.conversation_items(connection, references.conversation, owner), referenced)
        return StoredHistory((), referenced)


def _size(body: dict[str, Any], history: StoredHistory) -> int:
    """Estimate the parsing time of a body as a size in bytes. A body with tools or items always counts as long."""
    value = body.get("input")
    is_plain_text = isinstance(value, str) and not body.get("tools") and not history.items
    return len(value or "") + len(str(body.get("instructions") or "")) if is_plain_text else LONG_BODY + 1


# ── truncation ─────────────────────────────────────────────────────────────────────────────────────────


def drop_oldest(request: ChatRequest, error: ContextLengthExceeded) -> ChatRequest | None:
    """Drop about as many of the oldest turns as exceed the context; return None if no turn can be dropped.

    The leading system messages and the newest turn stay. A call and its outputs are dropped together.
    """
    head, turns = _turns(request.messages)
    if len(turns) < 2:
        return None
    sizes = [sum(len(message.content or "") + 16 for message in turn) for turn in turns]
    total = sum(sizes) + sum(len(message.content or "") for message in head)
    excess = 1.0 - error.limit / error.num_tokens if error.limit and error.num_tokens else 0.0
    num_dropped, dropped_size = 0, 0
    while num_dropped < len(turns) - 1 and (num_dropped == 0 or dropped_size < excess * total):
        dropped_size += sizes[num_dropped]
        num_dropped += 1
    kept = [message for turn in turns[num_dropped:] for message in turn]
    return msgspec.structs.replace(request, messages=[*head, *kept], extends=None)


def _turns(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Split messages into leading system messages and turns: a user's message, or an assistant's message with the
    outputs of its calls."""
    num_head = next((number for number, one in enumerate(messages) if one.role != "system"), len(messages))
    turns: list[list[Message]] = []
    for message in messages[num_head:]:
        if message.role == "tool" and turns:
            turns[-1].append(message)
        else:
            turns.append([message])
    return messages[:num_head], turns
