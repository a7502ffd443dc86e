"""Answer a JSON Lines file of prompts; the output file has one line for each input line, in the same order.

    python examples/offline_batch.py prompts.jsonl answers.jsonl

An input line is {"prompt": "…"}; any other fields are copied to the output line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenmill import LLM, SamplingParams


def main(source: Path, target: Path) -> None:
    tasks = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    llm = LLM("smollm2:135m", max_context=2048)
    conversations = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
    answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32))
    with target.open("w", encoding="utf-8") as out:
        for task, answer in zip(tasks, answers, strict=True):
            best = answer.outputs[0]
            out.write(json.dumps({**task, "answer": best.text, "finish_reason": best.finish_reason}) + "\n")
    llm.close()
    print(f"{len(tasks)} answers in {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
