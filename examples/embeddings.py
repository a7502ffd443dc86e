"""Find the sentence most similar to another one by the cosine of their embeddings, which have length one.

python examples/embeddings.py
"""

from __future__ import annotations

from tokenmill import LLM
from tokenmill.types import Pooling

SENTENCES = ["The cat sleeps on the sofa.", "Stock prices fell sharply today.", "It will rain in the mountains."]


def main() -> None:
    llm = LLM("smollm2:135m", max_context=512)
    *vectors, query = llm.embed([*SENTENCES, "The cat sleeps on the bed."], pooling=Pooling("mean"))
    scores = [sum(a * b for a, b in zip(vector.embedding, query.embedding, strict=True)) for vector in vectors]
    for score, sentence in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
        print(f"{score:.3f}  {sentence}")
    llm.close()


if __name__ == "__main__":
    main()
