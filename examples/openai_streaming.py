"""Stream a conversation of two turns from a running server, with the openai client (`pip install openai`).

tokenmill serve &
python examples/openai_streaming.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import sys
from typing import Any

import openai


def main(url: str) -> None:
    messages: list[Any] = []
    with openai.OpenAI(base_url=url, api_key="unused") as client:
        model = client.models.list().data[0].id
        for question in ("What is the capital of France?", "And of Italy?"):
            messages.append({"role": "user", "content": question})
            stream = client.chat.completions.create(
                model=model, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
            )
            answer = ""
            for chunk in stream:
                if chunk.choices:
                    piece = chunk.choices[0].delta.content or ""
                    answer += piece
                    print(piece, end="", flush=True)
                elif chunk.usage:
                    print(f"  ({chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out)")
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
