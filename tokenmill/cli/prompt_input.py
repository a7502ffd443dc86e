r'''Reads what the user says, one turn at a time.

    a line                    is a turn
    a line that ends with \   goes on in the next line
    """ ... """               a block of lines is one turn

On a terminal, lines can be edited and recalled (readline; the history is kept in the store's directory, readable by its
owner only), and Ctrl-C at the prompt drops the turn being typed. From a pipe, lines are read as they are.
'''

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TextIO

from tokenmill.store.layout import store_root

BLOCK = '"""'
MAX_HISTORY_LINES = 1000


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
