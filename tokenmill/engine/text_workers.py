"""Threads for text work that would hold up the event loop: parsing, chat templates, tokenising.

A front process streams to many clients from one event loop. Tokenising 2 MB takes more than a second, a chat of
thousands of messages takes a template a tenth of one. Such work goes to a thread; short work, nearly all of it, is done
at once, since a thread would only add latency.

A thread alone does not help while it holds the interpreter lock (GIL). The tokenizers library holds it in `encode` and
releases it in `encode_batch` (see `text/tokenizer.py`); templates are Python, which gives it up at every switch
interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenmill.errors import Overloaded
from tokenmill.types import ChatRequest, EmbedRequest, PromptRequest, Reasoning

Result = TypeVar("Result")

LONG_CHARACTERS = 4096  # tokenising fewer takes about a millisecond
CHARACTERS_PER_MESSAGE = 64  # what a message costs a parser and a template beside its text
MAX_CHARACTERS = 64 << 20  # in all threads and before them
NUM_THREADS = 4  # so that a prompt of megabytes does not make all others wait for it


class TextWorkers:
    """Runs work at once if it is short and in one of a few threads if it is long."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._num_characters = 0  # of the work that is in threads or waits for one

    async def run(self, num_characters: int, work: Callable[[], Result], *, long: int | None = None) -> Result:
        """Do work on so many characters; in a thread if they are more than `long`, by default what is long to tokenise.

        Cancelling it drops work that has not begun, and the result of work that has.
        """
        if num_characters <= (LONG_CHARACTERS if long is None else long):
            return work()
        if self._num_characters and self._num_characters + num_characters > MAX_CHARACTERS:
            raise Overloaded("too many long prompts are being read at the same time", retry_after_s=2.0)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_characters += num_characters
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_characters -= num_characters

    def close(self) -> None:
        """End the threads once their present work is done."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def text_size(asked: ChatRequest | PromptRequest | EmbedRequest) -> int:
    """About how many characters of text work a request is; more than is short for what takes long to measure."""
    if not isinstance(asked, ChatRequest):
        return len(asked.prompt)  # checking a token id costs no more than tokenising a character
    size = sum(len(m.content or "") + len(m.reasoning or "") + CHARACTERS_PER_MESSAGE for m in asked.messages)
    has_objects = asked.tools or asked.template_args or any(message.tool_calls for message in asked.messages)
    has_objects = has_objects or asked.reasoning != Reasoning()  # the first of them asks the template what it knows
    return size + LONG_CHARACTERS if has_objects else size
