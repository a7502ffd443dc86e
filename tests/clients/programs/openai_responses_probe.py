"""OpenAI's SDK over Responses: whole, streamed and typed answers, a tool loop by stored responses, the background."""

import os
import time

import openai
from pydantic import BaseModel

MODEL = os.environ["SERVER_MODEL"]


class ResponsesCity(BaseModel):
    name: str
    population: int


def main() -> None:
    client = openai.OpenAI(base_url=f"{os.environ['SERVER_URL']}/v1", api_key="unused", max_retries=0)
    hello = "Hello there! I am a script."
    assert client.responses.create(model=MODEL, input="Hi").output_text == hello
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == hello
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    typed = client.responses.parse(model=MODEL, input="Which city?", text_format=ResponsesCity)
    assert typed.output_parsed == ResponsesCity(name="Paris", population=2_100_000)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "parameters": schema, "strict": False}]
    with client.responses.stream(model=MODEL, input="What is the weather in Paris?", tools=tools) as stream:
        called = stream.until_done().get_final_response()
    call = next(item for item in called.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    answer = client.responses.create(model=MODEL, input=[output], previous_response_id=called.id, tools=tools)
    assert answer.output_text.startswith("It is 18 degrees")
    later = client.responses.create(model=MODEL, input="Hi", background=True)
    while client.responses.retrieve(later.id).status in ("queued", "in_progress"):
        time.sleep(0.02)
    events = list(client.responses.retrieve(later.id, stream=True, starting_after=1))
    assert events[0].sequence_number == 2 and events[-1].response.output_text == hello
    client.responses.delete(later.id)
    print(openai.__version__)


main()
