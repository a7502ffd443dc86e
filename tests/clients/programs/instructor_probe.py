"""instructor: a typed answer by a forced tool call, by a JSON schema, as a partial stream; OpenAI and Anthropic."""

import os

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
ASKED = [{"role": "user", "content": "Which city?"}]


class InstructorCity(BaseModel):
    name: str
    population: int


PARIS = {"name": "Paris", "population": 2_100_000}
plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(model=MODEL, messages=ASKED, response_model=InstructorCity, max_retries=0)
    assert found.model_dump() == PARIS
    print(f"openai: {mode.name}")
client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
*_, last = client.chat.completions.create_partial(
    model=MODEL, messages=ASKED, response_model=InstructorCity, max_retries=0
)
assert (last.name, last.population) == ("Paris", 2_100_000)
print("openai: partial stream")
other = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0)
client = instructor.from_anthropic(other, mode=instructor.Mode.ANTHROPIC_TOOLS)
found = client.messages.create(
    model=MODEL, messages=ASKED, response_model=InstructorCity, max_tokens=200, max_retries=0
)
assert found.model_dump() == PARIS
print("anthropic: TOOLS")
