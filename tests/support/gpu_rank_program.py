"""A program of its own that answers prompts with several ranks on GPUs: `python -m tests.support.gpu_rank_program`.

Its process must not have opened the GPU before CUDA MPS is there, which the tests' own may have. Reads what to do as
JSON from standard input; its last line has the tokens and logprobs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenmill import LLM, SamplingParams


def params_of(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "max_tokens": 30, "ignore_eos": True, **given})


def main() -> None:
    asked = json.load(sys.stdin)
    llm = LLM(asked["model"], device="cuda", fast_start=True, **asked["settings"])
    found = llm.generate(asked["prompts"], [params_of(one) for one in asked["params"]], progress=False)
    errors = [one.error for one in found if one.error]
    tokens = [one.outputs[0].token_ids for one in found]
    logprobs = [[step.logprob for step in one.outputs[0].logprobs or []] for one in found]
    print(json.dumps({"errors": list(map(str, errors)), "tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
