"""`tokenmill run`: one answer to stdout, streamed.

tokenmill run "What is the capital of France?"
tokenmill run qwen3:0.6b "Write a haiku"
echo "Summarise this" | tokenmill run
cat notes.txt | tokenmill run "Summarise this:"
tokenmill run "Three facts about Paris" --schema facts.json
"""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tokenmill.cli import chat, flags, session
from tokenmill.cli.exit_codes import INTERRUPTED
from tokenmill.cli.remote import RemoteModel
from tokenmill.errors import InvalidRequest
from tokenmill.params import MAX_GUIDED_BYTES, Guided, SamplingParams
from tokenmill.store import Store, find_created, is_model_name

MAX_STDIN_BYTES = 16 << 20


def command(
    model: str | None = None,
    prompt: str | None = None,
    /,
    *,
    url: str | None = None,
    system: str | None = None,
    schema: Path | None = None,
    raw: Annotated[bool, Parameter(negative="")] = False,
    stats: Annotated[bool, Parameter(negative="")] = False,
    context_shift: bool | None = None,
    sampling: flags.SamplingFlags = flags.SAMPLING,
    engine: flags.ChatEngineFlags = flags.ENGINE,
) -> int:
    """Answer one prompt and stream the answer to stdout. Text from a pipe is the prompt, or is appended to it. On a
    terminal without a prompt this starts `tokenmill chat`.

    Parameters
    ----------
    model
        Short name, GGUF file, model directory or Hugging Face id. A single argument that is neither is the PROMPT.
    prompt
        The prompt.
    url
        Use a running server, such as http://127.0.0.1:8000. MODEL is then a name of that server.
    system
        System message.
    schema
        File with a JSON schema that the answer must follow.
    raw
        Continue the text without a chat template.
    stats
        Print the number of tokens and the speed on stderr.
    context_shift
        Let the answer continue past the context by dropping the oldest tokens. Off by default, on in `tokenmill chat`.
    """
    model, prompt = tell_apart(model, prompt) if url is None or prompt is not None else (None, model)
    if url is not None:
        flags.refuse_engine_flags(engine)
    text = _with_stdin(prompt)
    if raw and system:
        raise InvalidRequest("--system needs the chat template, which --raw disables")
    if not text and not raw and schema is None and sys.stdin.isatty() and sys.stdout.isatty():
        return chat.command(
            model, url=url, system=system, context_shift=context_shift, sampling=sampling, engine=engine
        )
    if not text:
        raise InvalidRequest("there is no prompt", hint='tokenmill run "your question", or pipe text in')
    chosen = msgspec.structs.replace(sampling.params(), context_shift=context_shift)
    params = with_schema(schema, chosen)  # wrong values are refused before a model is loaded
    llm = RemoteModel(url, model) if url else session.open_model(engine.config(model))
    asked_at = time.monotonic()
    try:
        events = llm.stream(text, params) if raw else llm.stream_chat(conversation(system, text), params)
        answer = session.write_answer(events, asked_at=asked_at)
    finally:
        llm.close()
    if answer.ending and sys.stderr.isatty():
        print(answer.ending, file=sys.stderr)
    if stats:
        print(answer.stats(), file=sys.stderr)
    return INTERRUPTED if answer.was_stopped else 0


def tell_apart(model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """Return model and prompt: a single argument is the model if it looks like one, otherwise the prompt."""
    if model is not None and prompt is None and not is_model_name(model) and find_created(model, Store()) is None:
        return None, model
    return model, prompt


def with_schema(schema: Path | None, params: SamplingParams) -> SamplingParams:
    if schema is None:
        return params
    try:
        text = schema.read_text(encoding="utf-8") if schema.stat().st_size <= MAX_GUIDED_BYTES else ""
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{schema} can't be read: {problem}", param="schema") from problem
    if not text.strip():
        raise InvalidRequest(f"{schema} is empty, or longer than {MAX_GUIDED_BYTES >> 10} KiB", param="schema")
    return msgspec.structs.replace(params, guided=Guided("json_schema", text))


def conversation(system: str | None, text: str) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _with_stdin(prompt: str | None) -> str:
    piped = _piped_text() if prompt is None or _has_piped_input() else ""
    return "\n\n".join(part for part in (prompt, piped.strip("\n")) if part)


def _has_piped_input() -> bool:
    """Return whether stdin is a file or a pipe, rather than closed or /dev/null as in a service."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _piped_text() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise InvalidRequest(f"the input from the pipe is larger than {MAX_STDIN_BYTES >> 20} MB")
    return data.decode("utf-8", errors="replace")
