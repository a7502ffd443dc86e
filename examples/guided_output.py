"""Constrain answers to a JSON schema, a regular expression or a list of choices.

python examples/guided_output.py
"""

from __future__ import annotations

import json

from tokenmill import LLM, Guided, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}


def main() -> None:
    llm = LLM("smollm2:135m", max_context=2048)

    def ask(question: str, guided: Guided) -> str:
        params = SamplingParams(temperature=0, max_tokens=64, guided=guided)
        return llm.chat([{"role": "user", "content": question}], params, progress=False)[0].outputs[0].text

    animal = json.loads(ask("Describe a dog as JSON.", Guided.schema(SCHEMA)))
    print("schema:", sorted(animal))
    print("choice:", ask("What is the capital of France?", Guided.choice(["Paris", "Rome"])))
    print("regex:", ask("Give me a date.", Guided("regex", r"20[0-9]{2}-[01][0-9]-[0-3][0-9]")))
    llm.close()


if __name__ == "__main__":
    main()
