"""`tokenmill batch`: answer every row of a file; if it is killed, running it again resumes.

tokenmill batch rows.jsonl answers.jsonl
tokenmill batch rows.jsonl answers.jsonl --template "Translate into French: {text}"
tokenmill batch requests.jsonl answers.jsonl --model qwen3:0.6b

A row is a request of OpenAI's Batch API (custom_id, url, body), which is processed as the server would, or any JSON
object with a field `prompt` or `messages`, or with fields that a template uses.
"""

from __future__ import annotations

import asyncio
import string
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import orjson
from cyclopts import Parameter

from tokenmill.cli import flags, session
from tokenmill.cli.batch_files import AnswerFile, is_request, num_lines, require_same_row
from tokenmill.cli.exit_codes import INTERRUPTED
from tokenmill.cli.run import conversation, with_schema
from tokenmill.engine.argument_checks import messages_from
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.offline import Report, progress_over
from tokenmill.engine.results import EventFold, reasoning_of
from tokenmill.engine.startup.core_prestart import take_core
from tokenmill.errors import EngineDead, InvalidConfig, InvalidRequest, Overloaded, TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.store import Customization
from tokenmill.types import ChatRequest, Event, PromptRequest, Usage

GIVE_UP_S = 60.0  # maximum wait for the restart of an engine that died
SHOWN_FAILURES = 3


def command(
    source: Path,
    target: Path,
    /,
    *,
    prompt_field: str = "prompt",
    template: str | None = None,
    system: str | None = None,
    schema: Path | None = None,
    raw: Annotated[bool, Parameter(negative="")] = False,
    retry_failed: Annotated[bool, Parameter(negative="")] = False,
    any_model_name: Annotated[bool, Parameter(negative="")] = False,
    sampling: flags.SamplingFlags = flags.SAMPLING,
    engine: flags.EngineFlags = flags.ENGINE,
) -> int:
    """Answer every row of a JSONL file and write the answers to another. After an interruption, run it again to resume.

    Parameters
    ----------
    source
        Rows, one JSON object per line: requests of OpenAI's Batch API, or objects with a prompt, messages or fields.
    target
        Answers, one JSON object per line with the number of its row, in order of completion.
    prompt_field
        Name of the field with the prompt.
    template
        Template of the prompt, with fields of the row: "Summarise: {text}". {{ and }} are literal braces.
    system
        System message for rows without messages.
    schema
        File with a JSON schema that every answer must follow.
    raw
        Continue prompts without a chat template.
    retry_failed
        Retry rows whose answer was an error.
    any_model_name
        Accept requests with any model name.
    """
    asker = RowAsker(prompt_field, template, system, with_schema(schema, sampling.params()), raw)
    if not source.is_file():
        raise InvalidConfig(f"{source} is not a file", param="source")
    flags.require_folder(target, "target")
    if target.exists() and target.samefile(source):
        raise InvalidConfig("the answers can't be written to the file of rows", param="target")
    answers = AnswerFile(target, retry_failed=retry_failed)
    try:
        config = engine.config(None)
        found = session.fetch(config.model.model)
        asker.custom = found.custom
        job = OfflineBatch(source, answers, asker, any_model_name)
        with asyncio.Runner() as runner:
            try:
                runner.run(job.run(config))
            except KeyboardInterrupt:
                say(f"interrupted: {job.summary()}; run the same command to resume")
                return INTERRUPTED
    finally:
        answers.close()
    for line in job.first_failures:
        say(line)
    say(job.summary())
    return 0


def say(line: str) -> None:
    print(f"tokenmill: {line}", file=sys.stderr, flush=True)


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────


class RowAsker:
    """Builds requests from rows with a prompt or messages."""

    def __init__(
        self, prompt_field: str, template: str | None, system: str | None, params: SamplingParams, raw: bool
    ) -> None:
        if raw and system:
            raise InvalidConfig("--system needs the chat template, which --raw disables", param="system")
        self.custom: Customization | None = None
        self._field = prompt_field
        self._pieces = None if template is None else template_pieces(template)
        self._system = system
        self._params = params
        self._raw = raw

    def ask(self, row: Mapping[str, Any]) -> ChatRequest | PromptRequest:
        """Return the request of a row; raise InvalidRequest for a missing field."""
        if self._pieces is None and "messages" in row and self._field not in row:
            if self._raw:
                raise InvalidRequest("messages need the chat template, which --raw disables", param="messages")
            return self._chat(row["messages"])
        text = self._prompt(row)
        if self._raw:
            return PromptRequest(prompt=text, params=self._params)
        return self._chat(conversation(self._system, text))

    def _chat(self, messages: Any) -> ChatRequest:
        asked = ChatRequest(messages=messages_from(messages), params=self._params)
        return asked if self.custom is None else session.with_custom(asked, self.custom)

    def _prompt(self, row: Mapping[str, Any]) -> str:
        if self._pieces is not None:
            return "".join(text + ("" if name is None else as_text(row, name)) for text, name in self._pieces)
        prompt = row.get(self._field)
        if not isinstance(prompt, str):
            hint = "--prompt-field sets another field, --template combines several"
            raise InvalidRequest(f"the row has no text in the field {self._field!r}", param=self._field, hint=hint)
        return prompt


def template_pieces(template: str) -> list[tuple[str, str | None]]:
    """Split a template into pieces of text, each with the field that follows it."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as problem:
        hint = "{{ and }} are literal braces"
        raise InvalidConfig(f"--template is invalid: {problem}", param="template", hint=hint) from None
    for _, name, form, conversion in parsed:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise InvalidConfig(f"--template may only have names of fields in braces, not {{{name}}}", param="template")
    if not any(name for _, name, _, _ in parsed):
        raise InvalidConfig("--template has no field in braces", param="template", hint='"Summarise: {text}"')
    return [(text, name) for text, name, _, _ in parsed]


def as_text(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        raise InvalidRequest(f"the row has no field {name!r}", param=name)
    value = row[name]
    return value if isinstance(value, str) else orjson.dumps(value).decode()


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AnsweredRow:
    """One line of the file of answers."""

    data: bytes
    error: str | None = None
    num_tokens: int = 0


@dataclass
class OfflineBatch:
    """Runs all rows of a file through one engine, enough of them concurrently to keep it busy."""

    source: Path
    answers: AnswerFile
    asker: RowAsker
    any_model_name: bool
    first_failures: list[str] = field(default_factory=list)
    _num_answered: int = 0
    _num_failed: int = 0
    _total: int = 0

    async def run(self, config: Any) -> None:
        self._total = num_lines(self.source)
        engine = await AsyncEngine.start(config, child=take_core(fast_start=bool(config.ops.fast_start)))
        try:
            with progress_over(self._total, enabled=True, done_before=self.answers.num_done, write=say) as report:
                await self._answer_all(engine, report)
        finally:
            await engine.close()

    async def _answer_all(self, engine: AsyncEngine, report: Report | None) -> None:
        rows = RowAnswers(engine, self.asker, self.any_model_name)
        places = asyncio.Semaphore(2 * engine.core.max_running)

        async def answer(number: int, data: bytes) -> None:
            try:
                done = await rows.answer(number, data)
                self._keep(number, done)
                if report is not None:
                    report(done=self._num_answered, failed=self._num_failed, new_tokens=done.num_tokens)
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                async for number, data in self._open_rows():
                    await places.acquire()
                    group.create_task(answer(number, data))
        except* TokenmillError as failed:
            raise failed.exceptions[0] from None

    async def _open_rows(self) -> AsyncIterator[tuple[int, bytes]]:
        from tokenmill.server.batches.lines import raw_lines

        for number, data in raw_lines(self.source):
            seen = self.answers.print_of(number)
            if seen:
                require_same_row(number, parsed_or_none(data), seen, self.answers.path)
            else:
                yield number, data
            if number % 256 == 0:
                await asyncio.sleep(0)

    def _keep(self, number: int, done: AnsweredRow) -> None:
        self.answers.append(done.data)
        self._num_answered += 1
        if done.error is not None:
            self._num_failed += 1
            if len(self.first_failures) < SHOWN_FAILURES:
                self.first_failures.append(f"line {number}: {done.error}")

    def summary(self) -> str:
        before, path = self.answers.num_done, self.answers.path
        earlier = f" (and {before:,} by earlier runs)" if before else ""
        failures = f", {self._num_failed:,} of them with an error" if self._num_failed else ""
        return f"answered {self._num_answered:,} of {self._total:,} lines{failures}{earlier} into {path}"


def parsed_or_none(data: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


class RowAnswers:
    """Answers rows: requests of the Batch API as the server would, others as `tokenmill run` would."""

    def __init__(self, engine: AsyncEngine, asker: RowAsker, any_model_name: bool) -> None:
        from tokenmill.config.server import ServerConfig
        from tokenmill.observe.metrics import Metrics
        from tokenmill.server.app import create_app

        self._engine = engine
        self._asker = asker
        app = create_app(engine, ServerConfig(state=False, any_model_name=any_model_name), Metrics())
        self._context = app.state.context
        self._jobs = app.state.batch_jobs

    async def answer(self, number: int, data: bytes) -> AnsweredRow:
        """Return the answer of a row; for an invalid or failed row, an answer with an error."""
        from tokenmill.server.batches.lines import MAX_LINE_BYTES, LineError, parse_json_line

        row: dict[str, Any] | None = None
        try:
            if len(data) > MAX_LINE_BYTES:
                raise LineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
            row = parse_json_line(data)
            return await (self._answer_request(number, row) if is_request(row) else self._answer_row(number, row))
        except TokenmillError as error:
            if isinstance(error, EngineDead):
                raise
            return failed_row(number, row, error)

    async def _answer_request(self, number: int, row: dict[str, Any]) -> AnsweredRow:
        from tokenmill.server.batches.answers import answer_line
        from tokenmill.server.batches.lines import parse_line
        from tokenmill.server.openai.batches import answered_line

        if isinstance(row.get("body"), dict):
            row["body"].setdefault("model", self._engine.info.name)
        line = parse_line(number, orjson.dumps(row), list(self._jobs))
        answer = await answer_line(
            line, "", self._jobs[line.url], self._context, priority=0, engine_timeout_s=GIVE_UP_S
        )
        result = answered_line(line, answer)[:-1] + b',"line":' + str(number).encode() + b"}"
        problem = orjson.loads(answer.body)["error"]["message"] if answer.is_error else None
        num_tokens = 0 if answer.usage is None else answer.usage.completion_tokens
        return AnsweredRow(result, problem, num_tokens)

    async def _answer_row(self, number: int, row: dict[str, Any]) -> AnsweredRow:
        event = await self._generated(self._asker.ask(row))
        usage = event.usage or Usage(prompt_tokens=0, completion_tokens=0)
        answer: dict[str, Any] = {"line": number, "input": row, "output": event.text}
        if (thoughts := reasoning_of(event)) is not None:
            answer["reasoning"] = thoughts
        answer["finish_reason"] = event.finish_reason
        answer["usage"] = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        return AnsweredRow(orjson.dumps({**answer, "error": None}), num_tokens=usage.completion_tokens)

    async def _generated(self, asked: ChatRequest | PromptRequest) -> Event:
        """Return the whole answer. If the engine died, wait for its restart and try again."""
        waited_s = 0.0
        while True:
            try:
                prepared = await self._engine.prepare(asked)
                fold = EventFold()
                async for event in self._engine.submit(prepared):
                    fold.add(event)
                return fold.event
            except (Overloaded, EngineDead):
                if waited_s > GIVE_UP_S:
                    raise
                await asyncio.sleep(1.0)
                waited_s += 1.0


def failed_row(number: int, row: dict[str, Any] | None, error: TokenmillError) -> AnsweredRow:
    problem = {"code": error.code, "message": str(error), "param": error.param}
    if row is not None and is_request(row):
        answer = {"line": number, "custom_id": row.get("custom_id"), "response": None, "error": problem}
    else:
        answer = {"line": number, "input": row, "output": None, "error": problem}
    return AnsweredRow(orjson.dumps(answer), str(error))
