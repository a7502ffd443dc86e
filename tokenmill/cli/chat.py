"""`tokenmill chat`: a conversation in the terminal (`prompt_input.py` says how turns are typed).

A turn that begins with / is a command that changes the conversation or its settings; /help lists them. Ctrl-C during an
answer stops it and keeps its text; Ctrl-D or /exit leaves.
"""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import msgspec

from tokenmill.cli import flags, session
from tokenmill.cli.answer_screen import say
from tokenmill.cli.prompt_input import PromptInput
from tokenmill.cli.remote import RemoteModel
from tokenmill.config.sampling import SamplingConfig
from tokenmill.errors import InvalidRequest, TokenmillError

HELP = '''\
/clear            clear the conversation
/undo             remove the last turn and its answer
/retry            answer the last turn again
/system TEXT      set the system message; without TEXT, show it
/set              list the sampling parameters
/set NAME VALUE   change one, for example /set temperature 0.2
/read FILE        prepend a text file to the next turn
/image FILE       attach an image (not supported yet: no model with vision runs)
/save FILE        save the conversation as JSON
/load FILE        load a saved conversation
/model NAME       continue with another model
/stats            tokens and speed of the last answer, and how full the context is
/help             this list
/exit             leave (also Ctrl-D)

Alt-Enter, or \\ at the end of a line, starts a new line; """ starts and ends a block of lines. Pasted \
text is a single turn. Ctrl-R searches earlier turns. Ctrl-C stops an answer.'''
COMMANDS = tuple(dict.fromkeys(line.split()[0][1:] for line in HELP.splitlines() if line.startswith("/")))
MAX_FILE_BYTES = 4 << 20


# ── the conversation ─────────────────────────────────────────────────────────────────────────────────


def command(
    model: flags.ModelName = None,
    /,
    *,
    url: str | None = None,
    system: str | None = None,
    context_shift: bool | None = None,
    sampling: flags.SamplingFlags = flags.SAMPLING,
    engine: flags.ChatEngineFlags = flags.ENGINE,
) -> int:
    """Chat with a model in the terminal. /help lists the commands of the chat.

    Parameters
    ----------
    url
        Use a running server, such as http://127.0.0.1:8000. MODEL is then a name of that server.
    system
        System message.
    context_shift
        Let the conversation continue past the context by dropping the oldest turns. On by default; with --url the
        default is the server's setting.
    """
    sampling.params()  # wrong values are refused before a model is loaded
    if url is not None:
        flags.refuse_engine_flags(engine)

    def open_model(name: str | None) -> tuple[session.ChatModel, str]:
        if url is not None:
            remote = RemoteModel(url, name)
            return remote, f"{remote.name} at {url}"
        config = engine.config(name)
        return session.open_model(config), config.model.model

    shifts = True if context_shift is None and url is None else context_shift
    with Conversation(open_model, model, sampling, system, shifts) as conversation:
        turns = PromptInput(sys.stdin)
        if turns.is_terminal:
            say(f"{conversation.name}; /help for help, /exit to leave")
        conversation.hold(turns)
    return 0


OpenModel = Callable[[str | None], tuple[session.ChatModel, str]]


class Conversation:
    """A conversation, its model, and the sampling parameters of the next answer."""

    def __init__(
        self,
        open_model: OpenModel,
        model: str | None,
        sampling: SamplingConfig,
        system: str | None,
        context_shift: bool | None,
    ) -> None:
        self._open_model = open_model
        self.llm, self.name = open_model(model)
        self.sampling, self.system = sampling, system
        self._context_shift = context_shift
        self.messages: list[dict[str, Any]] = []
        self._read = ""  # text of files to prepend to the next turn
        self._last: session.Answer | None = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *reason: object) -> None:
        self.llm.close()

    def hold(self, turns: PromptInput) -> None:
        for text in turns:
            if not text.strip():
                continue
            try:
                if not text.startswith("/"):
                    self.answer(self._read + text)
                    self._read = ""
                elif not self.run_command(text):
                    return
            except TokenmillError as problem:  # too long, wrong value: the conversation continues
                say(f"! {' '.join(str(problem).split())}", sys.stderr)

    def answer(self, text: str) -> None:
        """Answer one turn. A turn that failed, or was stopped before any text came, is not kept."""
        asked = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        params = msgspec.structs.replace(self.sampling.params(), context_shift=self._context_shift)
        asked_at = time.monotonic()
        answer = session.write_answer(self.llm.stream_chat([*first, *asked], params), asked_at=asked_at)
        self._last = answer
        if answer.ending:
            print(answer.ending, file=sys.stderr)
        if answer.text or not answer.was_stopped:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def run_command(self, line: str) -> bool:
        """Run a /command; return False for the one that leaves."""
        name, _, rest = line[1:].strip().partition(" ")
        match name:
            case "exit" | "quit" | "bye":
                return False
            case "help" | "?":
                say(HELP)
            case "clear":
                self.messages = []
                print("(the conversation is cleared)")
            case "undo":
                self._forget_turn()
                print(f"({len(self.messages) // 2} turns remain)")
            case "retry":
                self.answer(self._forget_turn())
            case "system":
                self._set_system(rest.strip())
            case "set":
                self._set(rest.split(maxsplit=1))
            case "read":
                self._read_file(rest.strip())
            case "save":
                self._save(rest.strip())
            case "load":
                self._load(rest.strip())
            case "model":
                self._change_model(rest.strip())
            case "stats":
                say(f"({self._stats()})")
            case "image":
                raise InvalidRequest("images are not supported: no model with vision runs yet")
            case _:
                near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
                raise InvalidRequest(f"unknown command /{name}; {f'did you mean /{near[0]}?' if near else 'see /help'}")
        return True

    def _stats(self) -> str:
        """Return tokens and speed of the last answer, and how much of the context is used."""
        if self._last is None:
            return "there is no answer yet"
        usage, most = self._last.usage, self.llm.max_context
        if usage is None or most is None:
            return self._last.stats()
        used = usage.prompt_tokens + usage.completion_tokens
        return f"{self._last.stats()}; context {used:,} of {most:,} tokens, {used / most:.0%} full".replace("%", " %")

    def _forget_turn(self) -> str:
        """Remove the last turn and its answer; return its text."""
        if not self.messages:
            raise InvalidRequest("there is no turn yet")
        asked = str(self.messages[-2]["content"])
        self.messages = self.messages[:-2]
        return asked

    def _read_file(self, name: str) -> None:
        text = _text_of(name)
        self._read += f"{Path(name).name}:\n\n{text.rstrip()}\n\n"
        print(f"({len(text):,} characters of {name} will precede the next turn)")

    def _save(self, name: str) -> None:
        path = Path(_required(name)).expanduser()
        saved = {"model": self.name, "system": self.system, "messages": self.messages}
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(saved)))
        except OSError as problem:
            raise InvalidRequest(f"{path} can't be written: {problem.strerror}") from problem
        print(f"({len(self.messages) // 2} turns in {path})")

    def _load(self, name: str) -> None:
        try:
            found = msgspec.json.decode(_text_of(name), type=SavedConversation)
        except msgspec.DecodeError as problem:
            raise InvalidRequest(f"{name} is not a saved conversation: {problem}") from problem
        self.messages = [msgspec.to_builtins(message) for message in found.messages]
        self.system = found.system
        print(f"({len(self.messages) // 2} turns)")

    def _change_model(self, name: str) -> None:
        """Continue the conversation with another model, or with the old one if the other can't be opened."""
        if not name:
            print(f"({self.name})")
            return
        other = self._open_model(name)
        self.llm.close()
        self.llm, self.name = other
        print(f"({self.name})")

    def _set_system(self, text: str) -> None:
        self.system = text or self.system
        print(f"(system: {self.system or 'none'})")

    def _set(self, words: list[str]) -> None:
        if len(words) == 2:
            self.sampling = with_setting(self.sampling, words[0], words[1])
        shown = [field.name for field in fields(SamplingConfig) if not words or field.name == _field(words[0])]
        if len(words) == 1 and not shown:
            with_setting(self.sampling, words[0], "")
        for name in shown:
            print(f"({name} = {getattr(self.sampling, name)})")


class SavedTurn(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str


class SavedConversation(msgspec.Struct):
    """A conversation in a file."""

    messages: list[SavedTurn]
    system: str | None = None


def _required(name: str) -> str:
    if not name:
        raise InvalidRequest("the name of a file is missing")
    return name


def _text_of(name: str) -> str:
    path = Path(_required(name)).expanduser()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{path} can't be read as text: {problem}") from problem


def with_setting(sampling: SamplingConfig, name: str, value: str) -> SamplingConfig:
    """Return the settings with one changed; its value is converted and checked like a flag's."""
    hints, field = get_type_hints(SamplingConfig), _field(name)
    if field not in hints:
        near = difflib.get_close_matches(field, hints, n=1, cutoff=0.5)
        raise InvalidRequest(f"there is no setting {name}" + (f"; did you mean {near[0]}?" if near else "; see /set"))
    is_list = get_origin(hints[field]) is tuple
    try:
        converted = msgspec.convert((value,) if is_list else value, hints[field], strict=False)
    except msgspec.ValidationError as problem:
        raise InvalidRequest(f"{field} can't be {value!r}", param=field) from problem
    changed = replace(sampling, **{field: converted})
    changed.params()
    return changed


def _field(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()
