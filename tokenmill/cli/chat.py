r'''`tokenmill chat`: a conversation in the terminal.

    a line                    is a turn
    a line that ends with \   goes on in the next line
    """ ... """               a block of lines is one turn
    /command                  changes the conversation or its settings; /help lists them

On a terminal, lines can be edited and recalled (readline; the history is kept in the store's directory, readable by its
owner only), and Ctrl-C at the prompt drops the turn being typed. From a pipe, lines are read as they are. Ctrl-C during
an answer stops it and keeps what was written; Ctrl-D or /exit leaves.
'''

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO, get_origin, get_type_hints

import msgspec

from tokenmill.cli import flags, session
from tokenmill.config.sampling import SamplingConfig
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.store.layout import store_root

BLOCK = '"""'
MAX_HISTORY_LINES = 1000


# ── reading turns ────────────────────────────────────────────────────────────────────────────────────


class PromptInput:
    def __init__(self, source: TextIO) -> None:
        self._source = source
        self.is_terminal = source.isatty()
        self._readline: ModuleType | None = None

    def __enter__(self) -> PromptInput:
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # some Pythons are built without it
                import readline

                self._readline = readline
                readline.set_history_length(MAX_HISTORY_LINES)
                with contextlib.suppress(OSError):
                    readline.read_history_file(_history_file())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._readline is not None:
            with contextlib.suppress(OSError):
                _history_file().parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(_history_file(), os.O_CREAT | os.O_WRONLY, 0o600))
                self._readline.write_history_file(_history_file())

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                turn = self._turn()
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if turn is None:
                return
            yield turn

    def _turn(self) -> str | None:
        line = self._line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("... ") or "")
        return "\n".join(lines)

    def _block(self, line: str) -> str:
        lines: list[str] = []
        following: str | None = line
        while following is not None and not following.rstrip().endswith(BLOCK):
            lines.append(following)
            following = self._line("... ")
        if following is not None:
            lines.append(following.rstrip().removesuffix(BLOCK))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self.is_terminal:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        line = self._source.readline()
        return line.rstrip("\r\n") if line else None


def _history_file() -> Path:
    return store_root() / "chat_history"


HELP = '''\
/clear            forget the conversation
/system TEXT      how the model should behave; without TEXT, show it
/set              show how answers are drawn
/set NAME VALUE   change it, for example /set temperature 0.2
/help             this list
/exit             leave (also Ctrl-D)

A line that ends with \\ goes on in the next one; """ opens a block of lines and """ closes it.
Ctrl-C stops an answer.'''


# ── the conversation ─────────────────────────────────────────────────────────────────────────────────


def command(
    model: flags.ModelName = None,
    /,
    *,
    system: str | None = None,
    sampling: flags.SamplingFlags = flags.SAMPLING,
    engine: flags.EngineFlags = flags.ENGINE,
) -> int:
    """Talk with a model in the terminal. /help lists what can be done there.

    Parameters
    ----------
    system
        How the model should behave, in words.
    """
    sampling.params()  # wrong values are refused before a model is loaded
    config = engine.config(model)
    llm = session.open_model(config)
    try:
        with PromptInput(sys.stdin) as turns:
            if turns.is_terminal:
                print(f"{config.model.model}; /help for help, /exit to leave")
            Conversation(llm, sampling, system).hold(turns)
    finally:
        llm.close()
    return 0


class Conversation:
    """A conversation so far, and the sampling settings of the next answer."""

    def __init__(self, llm: session.ChatModel, sampling: SamplingConfig, system: str | None) -> None:
        self.llm, self.sampling, self.system = llm, sampling, system
        self.messages: list[dict[str, Any]] = []

    def hold(self, turns: PromptInput) -> None:
        for text in turns:
            if not text.strip():
                continue
            try:
                if not text.startswith("/"):
                    self.answer(text)
                elif not self.run_command(text):
                    return
            except TokenmillError as problem:  # too long, wrong value: the conversation goes on
                print(f"! {' '.join(str(problem).split())}", file=sys.stderr)

    def answer(self, text: str) -> None:
        """Answer one turn. A turn that failed, or was stopped before any text came, is not kept."""
        asked = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        answer = session.write_answer(self.llm.stream_chat([*first, *asked], self.sampling.params()))
        if answer.was_stopped:
            print("(stopped)", file=sys.stderr)
            if not answer.text:
                return
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def run_command(self, line: str) -> bool:
        """Run a /command; False when it is the one that leaves."""
        name, _, rest = line[1:].strip().partition(" ")
        match name:
            case "exit" | "quit" | "bye":
                return False
            case "help" | "?":
                print(HELP)
            case "clear":
                self.messages = []
                print("(the conversation is forgotten)")
            case "system":
                self._set_system(rest.strip())
            case "set":
                self._set(rest.split(maxsplit=1))
            case _:
                commands = ("clear", "system", "set", "help", "exit")
                near = difflib.get_close_matches(name, commands, n=1, cutoff=0.4)
                raise InvalidRequest(f"there is no /{name}; {f'did you mean /{near[0]}?' if near else 'see /help'}")
        return True

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


def with_setting(sampling: SamplingConfig, name: str, value: str) -> SamplingConfig:
    """The settings with one changed, converted and checked as a flag would be."""
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
