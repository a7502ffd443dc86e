r'''Input of the turns of a conversation, typed or from a pipe.

    a line                    is a turn
    a line that ends with \   continues in the next line
    """ ... """               a block of lines is a turn

On a terminal pasted text is a single turn, Alt-Enter starts a new line, Ctrl-R searches the history (a file in the
store's directory, readable only by its owner), and Ctrl-C discards the turn being typed. On a dumb terminal and from a
pipe plain lines are read.
'''

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tokenmill.cli.answer_screen import has_colours
from tokenmill.store.layout import store_root

BLOCK = '"""'
MAX_HISTORY_BYTES = 1 << 20


class PromptInput:
    """Iterator over the turns until the end of the input."""

    def __init__(self, source: TextIO) -> None:
        self._source = source
        self.is_terminal = source.isatty()
        self._session: Any = line_editor() if self.is_terminal and os.environ.get("TERM") != "dumb" else None

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                turn = self._turn()
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                print("\n(Ctrl-D or /exit to leave)")
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
        """Return the next input, which may have several lines if it comes from the editor."""
        if self.is_terminal:
            try:
                return input(prompt) if self._session is None else str(self._session.prompt(styled(prompt)))
            except EOFError:
                if self._session is None:
                    print()
                return None
        line = self._source.readline()
        return line.rstrip("\r\n") if line else None


def line_editor() -> Any:
    """Return a `prompt_toolkit` session: Enter sends, Alt-Enter starts a new line, pasted text keeps its lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    file = history_file()
    history: History = InMemoryHistory() if file is None else FileHistory(str(file))
    return PromptSession(
        history=history,
        key_bindings=keys,
        multiline=True,
        prompt_continuation=lambda width, number, is_wrapped: "" if is_wrapped else styled("... "),
        enable_history_search=False,
        mouse_support=False,
        complete_while_typing=False,
    )


def styled(prompt: str) -> Any:
    return [("fg:ansibrightblack" if has_colours(sys.stdout) else "", prompt)]


def history_file() -> Path | None:
    """Return the history file, readable only by its owner; None if it can't be written. A large one is truncated."""
    file = store_root() / "chat_history.txt"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        file.chmod(0o600)
        if file.stat().st_size > MAX_HISTORY_BYTES:
            file.write_text("")
        return file
    return None
