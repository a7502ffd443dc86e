"""A separate program that answers prompts with several ranks on GPUs: `python -m tests.support.gpu_rank_program`.

It is separate since a process must not open the GPU before CUDA MPS runs, and the tests' process may have. It reads its
task as JSON from standard input; its last line of output has the tokens and logprobs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tokenmill import LLM, AsyncEngine, SamplingParams
from tokenmill.config.by_name import engine_config
from tokenmill.types import PromptRequest


def params_of(settings: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "max_tokens": 30, "ignore_eos": True, **settings})


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_processes() -> list[int]:
    """Return the ranks of this program's core, except the first, which is the core itself."""
    found = [pid for core in children_of(os.getpid()) for pid in children_of(core)]
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().startswith("rank-")]


async def stream_through_rank_kill(task: dict[str, Any]) -> list[list[int]]:
    """Stream answers, and kill a rank once the first answer has some tokens."""
    engine = await AsyncEngine.start(engine_config(task["model"], {"device": "cuda", **task["settings"]}))

    async def stream(number: int) -> list[int]:
        request = PromptRequest(prompt=task["prompts"][number], params=params_of(task["params"][number]))
        tokens: list[int] = []
        async for event in engine.submit(request):
            tokens += event.token_ids
            if number == 0 and len(tokens) >= task["kill_after"] and not killed:
                killed.extend(rank_processes())
                os.kill(killed[0], signal.SIGKILL)
        return tokens

    killed: list[int] = []
    try:
        tokens = await asyncio.gather(*(stream(number) for number in range(len(task["prompts"]))))
        assert killed and killed != rank_processes(), "other ranks have taken over"
        return tokens
    finally:
        await engine.close()


def main() -> None:
    task = json.load(sys.stdin)
    if "kill_after" in task:
        print(json.dumps({"errors": [], "tokens": asyncio.run(stream_through_rank_kill(task))}))
        return
    llm = LLM(task["model"], device="cuda", fast_start=True, **task["settings"])
    params = [params_of(one) for one in task["params"]]
    found = llm.generate(task["prompts"], params, adapter=task.get("adapter"), progress=False)
    errors = [one.error for one in found if one.error]
    tokens = [one.outputs[0].token_ids for one in found]
    logprobs = [[step.logprob for step in one.outputs[0].logprobs or []] for one in found]
    print(json.dumps({"errors": list(map(str, errors)), "tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
