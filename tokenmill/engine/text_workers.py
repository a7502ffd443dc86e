"""Threads for text work that would block the event loop: parsing, chat templates, tokenising.

A front process streams to many clients from one event loop. Tokenising 2 MB takes more than a second; rendering a chat
of thousands of messages takes 100 ms. Such work runs in a thread; short work, nearly all of it, runs in place, since a
thread would only add latency.

A thread does not help while it holds the interpreter lock (GIL). The tokenizers library holds it in `encode` and
releases it in `encode_batch` (see `text/tokenizer.py`); templates are Python code, which releases it at every switch
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
CHARACTERS_PER_MESSAGE = 64  # the cost of parsing and rendering a message in addition to its text
MAX_CHARACTERS = 64 << 20  # of all work running in threads or waiting for one
NUM_THREADS = 4  # so that one prompt of megabytes does not delay all others


class TextWorkers:
    """Runs short work in place and long work in one of a few threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._num_characters = 0  # of the work running in threads or waiting for one

    async def run(self, num_characters: int, work: Callable[[], Result], *, long: int | None = None) -> Result:
        """Run work on a text of `num_characters`; in a thread if that is more than `long` (default LONG_CHARACTERS).

        Cancelling it drops work that has not started, and the result of work that has.
        """
        if num_characters <= (LONG_CHARACTERS if long is None else long):
            return work()
        if self._num_characters and self._num_characters + num_characters > MAX_CHARACTERS:
            raise Overloaded("too many long prompts are being tokenised at the same time", retry_after_s=2.0)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_characters += num_characters
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_characters -= num_characters

    def close(self) -> None:
        """End the threads once their current work is done."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def text_size(request: ChatRequest | PromptRequest | EmbedRequest) -> int:
    """Return the approximate size of a request's text work in characters. Requests with tools or other objects, whose
    size is slow to measure, count as long."""
    if not isinstance(request, ChatRequest):
        return len(request.prompt)  # checking a token id costs no more than tokenising a character
    size = sum(len(m.content or "") + len(m.reasoning or "") + CHARACTERS_PER_MESSAGE for m in request.messages)
    has_objects = request.tools or request.template_args or any(message.tool_calls for message in request.messages)
    has_objects = has_objects or request.reasoning != Reasoning()  # the first such request analyses the template
    return size + LONG_CHARACTERS if has_objects else size
