"""Modify logits between the model and the sampler with a custom function, which here forbids the letter "e".

python examples/logits_processor.py
"""

from __future__ import annotations

import torch

from tokenmill import LLM, SamplingParams


def main() -> None:
    llm = LLM("smollm2:135m", max_context=512)
    tokenizer = llm.frontend.tokenizer
    banned = torch.tensor(["e" in tokenizer.token_text(token_id).lower() for token_id in range(tokenizer.vocab_size)])

    def without_e(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(banned, float("-inf"))

    params = SamplingParams(temperature=0, max_tokens=24, logits_processors=[without_e])
    text = llm.generate("My favourite animal is", params, progress=False)[0].outputs[0].text
    print(text)
    print("letter e:", text.count("e"))
    llm.close()


if __name__ == "__main__":
    main()
