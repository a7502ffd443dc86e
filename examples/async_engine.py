"""Concurrent requests in an asyncio program, batched by the engine. Closing a stream early aborts its request.

python examples/async_engine.py
"""

from __future__ import annotations

import asyncio

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.types import ChatRequest, Message

QUESTIONS = ["What is the capital of France?", "What is the capital of Italy?"]


def request(question: str, max_tokens: int) -> ChatRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return ChatRequest(messages=[Message(role="user", content=question)], params=params)


async def answer(engine: AsyncEngine, question: str) -> str:
    return "".join([event.text async for event in engine.submit(request(question, 24))])


async def first_words(engine: AsyncEngine, question: str, num_events: int) -> str:
    """Read only the first events of a long answer. Closing the stream stops its computation."""
    words = ""
    stream = engine.submit(request(question, 500))
    async for event in stream:
        words += event.text
        num_events -= 1
        if num_events == 0:
            break
    await stream.aclose()
    return words


async def main() -> None:
    engine = await AsyncEngine.start("smollm2:135m", max_context=2048)
    try:
        for question, text in zip(
            QUESTIONS, await asyncio.gather(*[answer(engine, q) for q in QUESTIONS]), strict=True
        ):
            print(f"{question} {text}")
        print("begins with:", await first_words(engine, "Write a long story about a fox.", 5))
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
